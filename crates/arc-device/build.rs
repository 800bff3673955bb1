//! Compiles every `src/**/*.cu` to a cubin and writes down what came out: names, registers, stack frames, command lines.
//!
//! nvcc comes from `ARC_NVCC`, `CUDA_HOME`, `PATH`, or `target/cuda` (filled by `tests/fetch_cuda.sh`), in this order.
//! Without one the crate builds all the same, its table of images is empty, and opening a CUDA device says what is
//! missing. `ARC_CUDA_ARCHS` selects architectures, `90a` by default; several are separated by commas.
//! With `ARC_CUDA_TRACE` set, kernels leave the times at which they begin (`trace_begin` of pdl.cuh). With
//! `ARC_CUDA_SANITIZE` set, they wait and arrive as compute-sanitizer can follow them (barrier.cuh).

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, thread};

/// Exact arithmetic: nothing contracts, denormals live, quotients and roots are IEEE.
const FLAGS: [&str; 8] = [
    "-std=c++17",
    "-O3",
    "-fmad=false",
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-lineinfo",
    "-Werror=all-warnings",
];

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let src = Path::new(&env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("src");
    let workspace = src.ancestors().nth(3).expect("crates/arc-device/src lies in the workspace").to_owned();
    let mut sources = Vec::new();
    find_sources(&src, &mut sources);
    sources.sort();
    for name in ["ARC_NVCC", "CUDA_HOME", "ARC_CUDA_ARCHS", "ARC_CUDA_TRACE", "ARC_CUDA_SANITIZE", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    println!("cargo::rerun-if-changed=build.rs");
    let archs = env::var("ARC_CUDA_ARCHS").unwrap_or_else(|_| "90a".to_owned());
    let archs: Vec<&str> = archs.split(',').map(str::trim).filter(|arch| !arch.is_empty()).collect();
    let Some(nvcc) = find_nvcc(&workspace) else {
        println!(
            "cargo::warning=no nvcc found: building without CUDA kernels (set CUDA_HOME, or run tests/fetch_cuda.sh)"
        );
        write_tables(&out, &[]);
        return;
    };
    let jobs: Vec<Job> =
        sources.iter().flat_map(|source| archs.iter().map(|arch| Job::new(&src, source, arch, &out))).collect();
    let images = compile_all(&nvcc, &src, jobs);
    write_tables(&out, &images);
}

/// One source for one architecture.
struct Job {
    source: PathBuf,
    /// Path below `src` with its separators replaced, unique among sources.
    name: String,
    arch: String,
    ptx: PathBuf,
    cubin: PathBuf,
}

impl Job {
    fn new(src: &Path, source: &Path, arch: &str, out: &Path) -> Job {
        let below = source.strip_prefix(src).expect("it was found there").with_extension("");
        let name = below.to_string_lossy().replace(['/', '\\'], "-");
        let file = |ext: &str| out.join(format!("{name}.sm_{arch}.{ext}"));
        let (ptx, cubin) = (file("ptx"), file("cubin"));
        Job { source: source.to_owned(), name, arch: arch.to_owned(), ptx, cubin }
    }
}

/// What became of a [`Job`].
struct Image {
    name: String,
    arch: String,
    ptx: PathBuf,
    cubin: PathBuf,
    kernels: Vec<String>,
    /// What the assembler said of registers, stack frames and spills.
    assembler: String,
    commands: [String; 2],
}

fn find_sources(dir: &Path, sources: &mut Vec<PathBuf>) {
    println!("cargo::rerun-if-changed={}", dir.display());
    let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("cannot list {}: {error}", dir.display()));
    for entry in entries {
        let path = entry.expect("an entry of a listed folder").path();
        match path.extension().and_then(|ext| ext.to_str()) {
            _ if path.is_dir() => find_sources(&path, sources),
            Some("cu") => sources.push(path),
            _ => {}
        }
    }
}

fn find_nvcc(workspace: &Path) -> Option<PathBuf> {
    let from_env = env::var_os("ARC_NVCC").map(PathBuf::from);
    let from_home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let from_path = env::var_os("PATH")
        .into_iter()
        .flat_map(|path| env::split_paths(&path).map(|dir| dir.join("nvcc")).collect::<Vec<_>>());
    let fetched = workspace.join("target/cuda/nvidia/cu13/bin/nvcc");
    from_env.into_iter().chain(from_home).chain(from_path).chain([fetched]).find(|nvcc| nvcc.is_file())
}

fn compile_all(nvcc: &Path, src: &Path, jobs: Vec<Job>) -> Vec<Image> {
    let workers = env::var("NUM_JOBS").ok().and_then(|n| n.parse().ok()).unwrap_or(2);
    let queue = Mutex::new(jobs.into_iter().collect::<VecDeque<_>>());
    let images = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(job) = queue.lock().expect("no worker panics with it").pop_front() else { return };
                    let image = compile(nvcc, src, job);
                    images.lock().expect("no worker panics with it").push(image);
                }
            });
        }
    });
    let mut images = images.into_inner().expect("the workers are done");
    images.sort_by(|a, b| (&a.name, &a.arch).cmp(&(&b.name, &b.arch)));
    images
}

/// Whether a variable of the build is set to something, which may be the file that a run writes to.
fn is_on(name: &str) -> bool {
    env::var(name).is_ok_and(|value| !matches!(value.as_str(), "" | "0" | "off"))
}

/// Source to PTX, PTX to machine code: two steps, so that tests can read the PTX of what runs.
fn compile(nvcc: &Path, src: &Path, job: Job) -> Image {
    let mut to_ptx = Command::new(nvcc);
    to_ptx.args(FLAGS).arg("-I").arg(src).arg(format!("-arch=compute_{}", job.arch));
    for (name, define) in [("ARC_CUDA_TRACE", "-DARC_TRACE"), ("ARC_CUDA_SANITIZE", "-DARC_SANITIZE")] {
        if is_on(name) {
            to_ptx.arg(define);
        }
    }
    to_ptx.arg("-ptx").arg(&job.source).arg("-o").arg(&job.ptx);
    run(&mut to_ptx);
    let mut to_cubin = Command::new(nvcc.with_file_name("ptxas"));
    to_cubin.arg("-v").arg("-lineinfo").arg(format!("-arch=sm_{}", job.arch)).arg(&job.ptx).arg("-o").arg(&job.cubin);
    let assembler = run(&mut to_cubin);
    let ptx = fs::read_to_string(&job.ptx).expect("nvcc wrote it");
    let kernels = ptx
        .lines()
        .filter_map(|line| line.split_once(".entry ").map(|(_, rest)| rest))
        .map(|rest| rest.split(['(', ' ']).next().expect("split gives one").to_owned())
        .collect();
    let commands = [format!("{to_ptx:?}"), format!("{to_cubin:?}")];
    Image { name: job.name, arch: job.arch, ptx: job.ptx, cubin: job.cubin, kernels, assembler, commands }
}

fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?} failed:\n{}{said}", String::from_utf8_lossy(&output.stdout));
    said
}

/// `images.rs`, read by `cuda/images.rs`.
fn write_tables(out: &Path, images: &[Image]) {
    let mut kernels: Vec<&str> = images.iter().flat_map(|image| image.kernels.iter().map(String::as_str)).collect();
    kernels.sort_unstable();
    kernels.dedup();
    let mut text = String::from("/// Every image of this build.\npub static IMAGES: &[Image] = &[\n");
    for image in images {
        let Image { name, arch, ptx, cubin, assembler, commands, .. } = image;
        text += &format!(
            "    Image {{ name: {name:?}, arch: {arch:?}, cubin: include_bytes!({cubin:?}), ptx_path: {ptx:?}, \
             assembler: {assembler:?}, commands: {commands:?} }},\n"
        );
    }
    text += &format!("];\n/// Names of all kernels, sorted.\npub const KERNELS: &[&str] = &{kernels:?};\n");
    fs::write(out.join("images.rs"), text).expect("OUT_DIR can be written");
}
