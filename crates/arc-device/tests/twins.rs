//! `math.cuh` and `rng.cuh` give the bits of `math.rs` and `rng.rs`: compiled for the host, where each device intrinsic
//! is one IEEE operation. What a GPU makes of them is the GPU lane's to see.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use arc_device::{math, rng};

type Function = (&'static str, fn(f32) -> f32);

const FUNCTIONS: [Function; 9] = [
    ("exp", math::exp),
    ("ln", math::ln),
    ("ln_1p", math::ln_1p),
    ("softplus", math::softplus),
    ("sigmoid", math::sigmoid),
    ("silu", math::silu),
    ("tanh", math::tanh),
    ("gelu_tanh", math::gelu_tanh),
    ("rsqrt", math::rsqrt),
];

#[test]
fn the_cuda_twins_give_the_same_bits() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/twins.cpp");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("twins");
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".into());
    let compiled = Command::new(&compiler)
        .args(["-O2", "-ffp-contract=off", "-std=c++17", "-o"])
        .args([&program, &source])
        .status();
    let status =
        compiled.unwrap_or_else(|e| panic!("no C++ compiler, which tests/run installs ({compiler}: {e}); set CXX"));
    assert!(status.success(), "{compiler} does not compile {}", source.display());

    let inputs: Vec<u32> = (0..=u32::MAX).step_by(4_093).chain([0x7f80_0000, 0xff80_0000, 0x7fc0_0000]).collect();
    let mut child = Command::new(&program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("it was built");
    let mut stdin = child.stdin.take().expect("it is piped");
    let bytes: Vec<u8> = inputs.iter().flat_map(|x| x.to_le_bytes()).collect();
    let writer = std::thread::spawn(move || stdin.write_all(&bytes).expect("the program reads everything"));
    let output = child.wait_with_output().expect("the program ends").stdout;
    writer.join().expect("the writer does not panic");

    let n = inputs.len();
    assert_eq!(output.len(), n * (4 * FUNCTIONS.len() + 8));
    let (words, draws) = output.split_at(n * 4 * FUNCTIONS.len());
    let mut results = words.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
    for (name, function) in FUNCTIONS {
        for &x in &inputs {
            let ours = function(f32::from_bits(x)).to_bits();
            assert_eq!(results.next(), Some(ours), "{name} of {x:#010x}");
        }
    }
    for (&x, draw) in inputs.iter().zip(draws.as_chunks::<8>().0) {
        let seed = u64::from(x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        assert_eq!(u64::from_le_bytes(*draw), rng::draw_word(seed, x, x >> 7), "draw of {x:#x}");
    }
}
