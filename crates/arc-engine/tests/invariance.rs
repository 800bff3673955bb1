//! A request's tokens and logprobs, to the last bit, do not depend on chunks, neighbours, arrival, threads or
//! instructions.
//!
//! Three requests that draw in different ways run alone, each in an engine of its own. Then they run in every other
//! way, and their 20 first logprobs at every position of prompt and output must have the same bits.

mod common;
mod cpu;

use std::path::Path;

use arc_device::ops::sample::{DryConfig, SamplerConfig};
use arc_device::simd::{Isa, force_isa};
use arc_device::step::Limits;
use arc_engine::engine::EngineConfig;
use arc_engine::request::Request;
use cpu::{Answer, Bits, Output, Rig};

/// Tokens that each request generates.
const N_NEW: u32 = 20;
/// Longest of all sequences here.
const CONTEXT: usize = 224;

/// A stream of numbers for prompts and parameters.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u32) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % u64::from(n)) as u32
    }

    fn prompt(&mut self, len: u32, vocab: u32) -> Vec<u32> {
        (0..len).map(|_| self.below(vocab)).collect()
    }
}

/// The requests under test: greedy with a scored prompt, drawn with filters, drawn with every processor.
fn subjects(prompt: &[u32], seed: u64) -> Vec<Request> {
    let dry = DryConfig { multiplier: 0.8, base: 1.75, allowed_length: 1, window: u32::MAX, breakers: vec![5] };
    let filters = SamplerConfig { top_k: 40, top_p: 0.95, min_p: 0.01, seed, ..SamplerConfig::default() };
    let processors = SamplerConfig {
        presence: 0.4,
        frequency: 0.3,
        repetition: 1.1,
        min_tokens: 10,
        bias: vec![(7, 2.0), (9, -3.0)],
        dry: Some(dry),
        seed: seed + 1,
        ..SamplerConfig::default()
    };
    let request = |sampling, from: usize| Request {
        max_tokens: Some(N_NEW),
        logprobs: Some(20),
        ..Request::new(prompt[from..].to_vec(), sampling)
    };
    let greedy = SamplerConfig { temperature: 0.0, ..SamplerConfig::default() };
    vec![
        Request { prompt_logprobs: Some(20), ..request(greedy, 0) },
        request(filters, 1),
        Request { stop_ids: vec![3], ignore_stop: true, ..request(processors, 2) },
    ]
}

/// A request that has nothing to do with the subjects.
fn stranger(numbers: &mut Numbers, vocab: u32) -> Request {
    let sampling = SamplerConfig {
        temperature: [0.0, 0.7, 1.0, 1.5][numbers.below(4) as usize],
        top_k: [0, 1, 50][numbers.below(3) as usize],
        top_p: [1.0, 0.9, 0.5][numbers.below(3) as usize],
        presence: [0.0, 0.6][numbers.below(2) as usize],
        seed: u64::from(numbers.below(1000)),
        ..SamplerConfig::default()
    };
    let len = 1 + numbers.below(60);
    Request {
        max_tokens: Some(15 + numbers.below(25)),
        logprobs: (numbers.below(2) == 0).then_some(5),
        prompt_logprobs: (numbers.below(4) == 0).then_some(1),
        ..Request::new(numbers.prompt(len, vocab), sampling)
    }
}

/// What an engine is made with, for a case. [`Setup::new`] is the one that all are compared with.
struct Setup<'a> {
    model: &'a Path,
    isa: Isa,
    threads: usize,
    limits: Limits,
    config: EngineConfig,
}

impl<'a> Setup<'a> {
    fn new(model: &'a Path) -> Setup<'a> {
        let isa = *Isa::available().last().expect("the scalar set is always there");
        Setup { model, isa, threads: 2, limits: cpu::limits(36, CONTEXT, 256), config: EngineConfig::default() }
    }

    /// An engine that runs no more than `rows` rows in a step.
    fn rows(self, rows: usize) -> Setup<'a> {
        Setup { limits: Limits { rows, heads: rows.min(128), ..self.limits }, ..self }
    }

    fn run<T>(&self, run: impl FnOnce(&Rig) -> T) -> T {
        let _forced = force_isa(self.isa);
        run(&Rig::with(self.model, self.threads, self.limits, self.config.clone()))
    }

    /// One after the other.
    fn alone(&self, requests: Vec<Request>) -> Vec<Bits> {
        self.run(|rig| requests.into_iter().flat_map(|request| bits(rig.ask([request]))).collect())
    }

    /// All together with `n` strangers, a third of which decode by the time that the others arrive. Also returns how many
    /// sequences shared a step.
    fn among(&self, n: usize, subjects: Vec<Request>, seed: u64) -> (Vec<Bits>, u32) {
        self.run(|rig| {
            let mut numbers = Numbers(seed);
            let mut stranger = || stranger(&mut numbers, rig.vocab);
            let mut strangers: Vec<_> = (1..n.div_ceil(3)).map(|_| rig.start(stranger())).collect();
            // While this one holds the engine up, everybody else arrives.
            let (last_early, go) = rig.start_held(stranger());
            strangers.push(last_early);
            let mut answers = Vec::new();
            for request in subjects {
                strangers.extend((strangers.len()..n).take(n / 5).map(|_| rig.start(stranger())));
                answers.push(rig.start(request));
            }
            strangers.extend((strangers.len()..n).map(|_| rig.start(stranger())));
            drop(go);
            let outputs = answers.into_iter().map(Answer::wait).collect();
            strangers.into_iter().for_each(|answer| drop(answer.wait().complete()));
            let crowd = rig.engine.last_steps(usize::MAX).iter().map(|step| step.seqs).max().unwrap_or(0);
            (bits(outputs), crowd)
        })
    }
}

fn bits(outputs: Vec<Output>) -> Vec<Bits> {
    outputs.into_iter().map(|output| output.complete().bits()).collect()
}

/// Compares a case, and says where it first differs. Returns how many logprobs were equal.
fn compare(case: &str, got: &[Bits], want: &[Bits]) -> usize {
    assert_eq!(got.len(), want.len(), "{case}");
    let mut n = 0;
    for (idx, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.len(), want.len(), "{case}, request {idx}");
        let differ = got.iter().zip(want).position(|(got, want)| got != want);
        assert_eq!(
            differ,
            None,
            "{case}, request {idx}: {:?} and {:?}",
            got[differ.unwrap_or(0)],
            want[differ.unwrap_or(0)]
        );
        n += want.iter().map(|(_, logprob, top)| usize::from(logprob.is_some()) + top.len()).sum::<usize>();
    }
    n
}

/// How many logprobs the subjects get for a prompt of `len` tokens: one and 20 alternatives a position.
fn logprobs_of(len: usize) -> usize {
    21 * (len - 1 + 3 * N_NEW as usize)
}

/// Nine other ways to run the same requests, all with the best instructions of the machine.
fn other_ways(model: &Path, subjects: impl Fn() -> Vec<Request>, want: &[Bits], chunks: &[usize]) -> usize {
    let mut n = 0;
    for &rows in chunks {
        let setup = Setup { threads: 1 + rows % 3, ..Setup::new(model).rows(rows) };
        n += compare(&format!("chunks of {rows}"), &setup.alone(subjects()), want);
    }
    // Prompts run in steps as large as they come, so that all are in the same steps in the end.
    let large = EngineConfig { mixed_step_ms: 1e9, ..EngineConfig::default() };
    for threads in [1, 2] {
        let setup = Setup { threads, config: large.clone(), ..Setup::new(model) };
        let (got, crowd) = setup.among(31, subjects(), threads as u64);
        assert!(crowd >= 32, "{crowd} sequences shared a step at most");
        n += compare(&format!("31 strangers, {threads} threads"), &got, want);
    }
    let small = EngineConfig { mixed_step_ms: 0.01, ..EngineConfig::default() };
    for (threads, config) in [(2, small), (3, EngineConfig::default())] {
        let setup = Setup { threads, config, ..Setup::new(model) };
        n += compare(&format!("mixed steps, {threads} threads"), &setup.among(12, subjects(), 40).0, want);
    }
    n
}

/// A different seed, and a prompt with one other token, must show: the comparison can fail.
fn controls(model: &Path, prompt: &[u32], want: &[Bits]) {
    let setup = Setup::new(model);
    let ids = |bits: &Bits| bits.iter().map(|entry| entry.0).collect::<Vec<_>>();
    let reseeded = setup.alone(subjects(prompt, 77));
    assert_eq!(reseeded[0], want[0], "a greedy request has no use for a seed");
    assert_ne!(ids(&reseeded[1]), ids(&want[1]));
    assert_ne!(ids(&reseeded[2]), ids(&want[2]));
    let mut other = prompt.to_vec();
    other[4] ^= 1;
    let changed = setup.alone(subjects(&other, 11));
    for (changed, want) in changed.iter().zip(want) {
        let differ = changed.iter().zip(want).filter(|(a, b)| a.1 != b.1).count();
        assert!(differ >= N_NEW as usize - 1, "one other token far back shows in every logprob, in {differ} here");
    }
}

#[test]
fn tiny_models() {
    let mut n = 0;
    for name in ["llama", "llama-untied", "qwen2", "qwen3", "gemma3"] {
        let model = cpu::tiny(name);
        let prompt = Numbers(3).prompt(140, 300);
        let want = Setup::new(&model).alone(subjects(&prompt, 11));
        n += other_ways(&model, || subjects(&prompt, 11), &want, &[1, 3, 16, 129, 256]);
        for &isa in Isa::available() {
            for threads in [1, 2, 3] {
                let setup = Setup { isa, threads, ..Setup::new(&model) };
                n += compare(&format!("{name}, {isa:?}"), &setup.alone(subjects(&prompt, 11)), &want);
                n += compare(&format!("{name}, {isa:?}, mixed"), &setup.among(7, subjects(&prompt, 11), 5).0, &want);
            }
        }
        controls(&model, &prompt, &want);
    }
    println!("{n} logprobs compared, with {:?}", Isa::available());
    assert_eq!(n, 5 * (9 + 6 * Isa::available().len()) * logprobs_of(140));
}

#[test]
fn smollm2() {
    let model = common::real_model(cpu::SMOLLM2);
    // The beginning of the text of the perplexity golden.
    let golden: serde_json::Value = serde_json::from_str(&cpu::golden("ppl_smollm2.json")).expect("JSON");
    let ids = golden["tokens"].as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32);
    let prompt: Vec<u32> = ids.take(140).collect();
    let want = Setup::new(&model).alone(subjects(&prompt, 11));
    let mut n = other_ways(&model, || subjects(&prompt, 11), &want, &[1, 3, 16, 129, 256]);
    controls(&model, &prompt, &want);
    // The lesser instructions are slow: a short prompt.
    let short = &prompt[..12];
    let want = Setup::new(&model).alone(subjects(short, 11));
    for &isa in Isa::available() {
        let setup = Setup { isa, threads: 3, ..Setup::new(&model) };
        n += compare(&format!("{isa:?}"), &setup.alone(subjects(short, 11)), &want);
    }
    println!("{n} logprobs compared, with {:?}", Isa::available());
    assert_eq!(n, 9 * logprobs_of(140) + Isa::available().len() * logprobs_of(12));
}
