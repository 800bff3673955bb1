//! What can be said of the CUDA side without a GPU.

use super::images::{IMAGES, Image, KERNELS};
use super::{Cuda, CudaOptions};
use crate::error::DeviceError;
use crate::step::Limits;

/// What was compiled. There is nothing to say of nothing.
fn images() -> &'static [Image] {
    assert!(
        !IMAGES.is_empty() && !KERNELS.is_empty(),
        "built without nvcc: tests/run fetches it, or tests/fetch_cuda.sh"
    );
    IMAGES
}

/// Every `kernel!("name")` of the sources.
fn launched() -> Vec<String> {
    fn walk(dir: &std::path::Path, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(dir).expect("the source is there").flatten() {
            let path = entry.path();
            if path.is_dir() {
                walk(&path, names);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                let text = std::fs::read_to_string(&path).expect("source is text");
                let calls = text.split("kernel!(\"").skip(1);
                names.extend(calls.filter_map(|rest| rest.split_once("\")")).map(|(name, _)| name.to_owned()));
            }
        }
    }
    let mut names = Vec::new();
    walk(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut names);
    names
}

#[test]
fn every_kernel_that_was_compiled_is_launched_somewhere() {
    let launched = launched();
    images();
    for name in KERNELS {
        assert!(launched.iter().any(|used| used == name), "{name} is embedded and never launched");
    }
}

#[test]
fn images_are_compiled_for_exact_arithmetic() {
    for image in images() {
        assert!(image.commands[0].contains("\"-fmad=false\""), "{}: {}", image.name, image.commands[0]);
        assert!(!image.commands[0].contains("fast_math"), "{}: {}", image.name, image.commands[0]);
        let ptx = std::fs::read_to_string(image.ptx_path).expect("the build left the PTX");
        assert!(ptx.contains(".entry"), "{} has no kernel", image.name);
        for line in ptx.lines().map(str::trim) {
            let inexact = line.contains(".ftz") || line.contains(".approx") || line.contains("fma.rn.ftz");
            assert!(!inexact, "{}: {line}", image.name);
        }
    }
}

/// What `ARC_CUDA_TRACE` and `ARC_CUDA_SANITIZE` make of the sources that know of them.
#[test]
fn traced_and_sanitized_kernels_compile() {
    let sources = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = 0;
    for image in images() {
        let source = sources.join(image.name.replace('-', "/")).with_extension("cu");
        let text = std::fs::read_to_string(source).expect("source is text");
        if !["Marks", "kSanitized", "arrives("].iter().any(|word| text.contains(word)) {
            continue;
        }
        seen += 1;
        let ptx = std::env::temp_dir().join(format!("arc-{}-{}.ptx", std::process::id(), image.name));
        let other = image.commands[0].replace(image.ptx_path, &ptx.to_string_lossy());
        let compiler = std::process::Command::new("sh")
            .args(["-c", &format!("{other} -DARC_TRACE -DARC_SANITIZE")])
            .output()
            .expect("there is a shell");
        assert!(compiler.status.success(), "{}: {}", image.name, String::from_utf8_lossy(&compiler.stderr));
        std::fs::remove_file(&ptx).expect("the compiler wrote it");
    }
    assert!(seen >= 2, "{seen} sources know of them");
}

/// A kernel may start while the one before it still runs: one that does not wait reads what is not there yet.
#[test]
fn every_kernel_waits_for_the_one_before_it() {
    let mut seen = 0;
    for image in images() {
        let ptx = std::fs::read_to_string(image.ptx_path).expect("the build left the PTX");
        for kernel in ptx.split(".visible .entry ").skip(1) {
            let name = kernel.split('(').next().unwrap_or_default();
            assert!(kernel.contains("griddepcontrol.wait"), "{name} does not wait");
            seen += 1;
        }
    }
    assert!(seen >= KERNELS.len(), "{seen} of {}", KERNELS.len());
}

#[test]
fn no_kernel_keeps_a_stack_frame_or_spills() {
    let mut seen = 0;
    for image in images() {
        let mut kernel = "";
        for line in image.assembler.lines() {
            if let Some((_, name)) = line.split_once("Function properties for ") {
                kernel = name;
            }
            if line.contains("bytes stack frame") {
                seen += 1;
                let clean = line.trim().starts_with("0 bytes stack frame, 0 bytes spill");
                assert!(clean, "{} {kernel}: {line}", image.name);
            }
        }
    }
    assert!(seen >= KERNELS.len(), "the assembler told of {seen} of {} kernels", KERNELS.len());
}

#[test]
fn a_machine_without_a_gpu_is_told_what_is_missing() {
    let limits = Limits { slots: 1, rows: 1, heads: 1, context: 32, blocks: 1, ring: 2 };
    match Cuda::new(CudaOptions::default(), limits) {
        Ok(_) => {}
        Err(DeviceError::Unavailable { device: "cuda", why }) => assert!(!why.is_empty()),
        Err(error) => panic!("{error}"),
    }
}
