//! What a loaded model takes: its file, its KV cache, and no more than 64 MiB beside them; and generating takes nothing
//! more, however long.
//!
//! One test in this file: it reads the resident memory of its own process.

mod common;
mod cpu;

use arc_device::ops::sample::SamplerConfig;
use arc_device::step::BLOCK_TOKENS;
use arc_engine::load::ModelFile;
use arc_engine::model::ModelConfig;
use arc_engine::request::Request;
use cpu::{Output, Rig};

const MIB: f64 = (1 << 20) as f64;
const SLOTS: usize = 16;

/// A line of `/proc/self/status`, in MiB.
fn status(field: &str) -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("this test runs on Linux");
    let line = status.lines().find(|line| line.starts_with(field)).expect("the kernel says it");
    line.split_whitespace().nth(1).expect("a number").parse::<f64>().expect("a number") / 1024.0
}

/// A sequence in every slot; returns how many tokens they generated.
fn round(rig: &Rig, prompt_len: u32, n_new: u32) -> usize {
    let request = |i: u32| {
        let prompt = (0..prompt_len).map(|t| (i * 7919 + t * 31) % rig.vocab).collect();
        let sampling = SamplerConfig { seed: u64::from(i), top_p: 0.9, presence: 0.2, ..SamplerConfig::default() };
        let logprobs = i.is_multiple_of(4).then_some(5);
        Request { max_tokens: Some(n_new), logprobs, ..Request::new(prompt, sampling) }
    };
    let outputs = rig.ask((0..SLOTS as u32).map(request));
    outputs.into_iter().map(|output| Output::complete(output).tokens.len()).sum()
}

#[test]
fn a_loaded_model_takes_its_file_its_cache_and_64_mib() {
    let path = common::real_model(cpu::SMOLLM2);
    let limits = cpu::limits(SLOTS, 96, 512);
    let (file, kv) = {
        let file = ModelFile::open(&path).expect("the model opens");
        let config = ModelConfig::read(&file).expect("the model has a configuration");
        let kv = limits.blocks * BLOCK_TOKENS * config.kv_bytes_per_token();
        (file.weights().expect("a file").file_bytes() as f64 / MIB, kv as f64 / MIB)
    };
    let empty = status("VmRSS:");
    let rig = Rig::new(&path, 2, limits);
    let (loaded, peak) = (status("VmRSS:"), status("VmHWM:"));
    println!("file {file:.1} MiB, KV {kv:.1}; process {empty:.1}, loaded {loaded:.1}, at most {peak:.1} meanwhile");
    // The source's pages are given back as they are copied, so loading needs no room for both.
    assert!(peak <= file + kv + 64.0, "{peak:.1} MiB while loading");

    // Every block of the cache, the largest steps, and as many rows through the head as there may be; then a round like
    // those below, since samplers touch their scratch as far as a distribution's tail makes them.
    round(&rig, 90, 6);
    round(&rig, 10, 86);
    let scored: Vec<u32> = (0..96).map(|t| t * 401 % rig.vocab).collect();
    rig.ask((0..4).map(|_| cpu::score(&scored, 20)));
    let warm = status("VmRSS:");
    println!("in use {warm:.1} MiB, {:.1} beside file and KV", warm - file - kv);
    assert!(warm <= file + kv + 64.0, "{warm:.1} MiB in use");
    // What is measured is not nothing.
    assert!(warm >= file + kv, "{warm:.1} MiB cannot hold weights and KV");

    let mut tokens = 0;
    while tokens < 2600 {
        tokens += round(&rig, 10, 86);
    }
    let after = status("VmRSS:");
    println!("{after:.1} MiB after {tokens} more tokens");
    assert!(after <= warm + 1.5, "{:.1} MiB more after {tokens} tokens", after - warm);
}
