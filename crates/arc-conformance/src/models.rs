//! Whole models on both devices: the engine that serves, with requests of token ids.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use arc_device::cpu::Cpu;
use arc_device::cuda::{Cuda, CudaOptions};
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{BLOCK_TOKENS, Limits};
use arc_engine::engine::{self, EngineConfig, EngineHandle, SampleOn, Switches};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::{Model, ModelConfig};
use arc_engine::request::{Event, FinishReason, Request, TokenEvent};
use arc_engine::runner::Runner;
use arc_engine::scheduler::buckets::Buckets;

use crate::inputs::Rng;
use crate::suite::{Suite, Verdict};

/// Two candidates that lie this close, in logits, are a near-tie: see `tests/greedy.rs` of the engine.
const NEAR_TIE: f32 = 0.5;
/// Longest sequence here.
const CONTEXT: usize = 512;

/// Every case over every model.
pub fn cases(suite: &mut Suite, models: &[PathBuf]) {
    for path in models {
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        suite.case(&format!("model/{name}/greedy"), |suite| greedy(suite, path));
        suite.case(&format!("model/{name}/invariance"), |suite| invariance(suite, path));
        suite.case(&format!("model/{name}/flat"), |suite| flat(suite, path));
    }
}

/// An engine over a model.
struct Rig {
    engine: EngineHandle,
    vocab: u32,
}

/// Which device, and how.
#[derive(Clone, Copy)]
enum On {
    Cpu,
    Gpu { ordinal: usize, capture: bool },
}

fn limits(slots: usize, rows: usize) -> Limits {
    let blocks = slots * CONTEXT.div_ceil(BLOCK_TOKENS);
    Limits { slots, rows, heads: rows.min(256), context: CONTEXT, blocks, ring: 32 }
}

impl Rig {
    fn new(on: On, path: &Path, limits: Limits, switches: Switches) -> Result<Rig, String> {
        let file = ModelFile::open(path).map_err(|error| error.to_string())?;
        let config = ModelConfig::read(&file).map_err(|error| error.to_string())?;
        let vocab = config.shape().vocab as u32;
        let buckets = match on {
            On::Cpu => Buckets::Exact,
            On::Gpu { .. } => Buckets::recorded(limits.rows as u32),
        };
        let set_up = EngineConfig { buckets, switches, ..EngineConfig::default() };
        let started = match on {
            On::Cpu => {
                let threads = std::thread::available_parallelism().map_or(2, usize::from).min(8);
                engine::spawn(set_up, limits, vocab, move || {
                    let mut dev = Cpu::new(threads, limits);
                    let model = Model::load(&mut dev, &file, &config, &limits)?;
                    Ok::<_, LoadError>(Runner::new(dev, model))
                })
            }
            On::Gpu { ordinal, capture } => engine::spawn(set_up, limits, vocab, move || {
                let mut dev = Cuda::new(CudaOptions { ordinal, capture }, limits)?;
                let model = Model::load(&mut dev, &file, &config, &limits)?;
                Ok::<_, LoadError>(Runner::new(dev, model))
            }),
        };
        Ok(Rig { engine: started.map_err(|error| error.to_string())?, vocab })
    }

    fn start(&self, request: Request) -> Result<Receiver<Event>, String> {
        let (sink, events) = channel();
        self.engine.submit(request, Box::new(sink)).map_err(|error| error.to_string())?;
        Ok(events)
    }

    /// Tokens of requests that run together. Errors: one that does not end by its length.
    fn ask(&self, requests: Vec<Request>) -> Result<Vec<Vec<TokenEvent>>, String> {
        let started: Vec<_> = requests.into_iter().map(|request| self.start(request)).collect::<Result<_, _>>()?;
        started.into_iter().map(|events| wait(&events)).collect()
    }
}

fn wait(events: &Receiver<Event>) -> Result<Vec<TokenEvent>, String> {
    let mut tokens = Vec::new();
    loop {
        match events.recv_timeout(Duration::from_secs(60)).map_err(|error| format!("no event: {error}"))? {
            Event::Prompt(_) => {}
            Event::Token(token) => tokens.push(token),
            Event::Finished(finished) if finished.reason == FinishReason::Length => return Ok(tokens),
            Event::Finished(finished) => return Err(format!("{finished:?}")),
        }
    }
}

fn prompt(rng: &mut Rng, len: usize, vocab: u32) -> Vec<u32> {
    (0..len).map(|_| rng.below(vocab as usize) as u32).collect()
}

fn request(prompt: Vec<u32>, n: u32, sampling: SamplerConfig, top: u32) -> Request {
    Request { max_tokens: Some(n), logprobs: Some(top), ignore_stop: true, ..Request::new(prompt, sampling) }
}

/// Twenty prompts, 128 tokens: equal on both devices, or parted at a near-tie of both, which is shown.
fn greedy(suite: &Suite, path: &Path) -> Verdict {
    let cpu = Rig::new(On::Cpu, path, limits(20, 128), Switches::default())?;
    let gpu =
        Rig::new(On::Gpu { ordinal: suite.ordinal(), capture: true }, path, limits(20, 128), Switches::default())?;
    let requests = || {
        let mut rng = Rng(17);
        let greedy = SamplerConfig { temperature: 0.0, ..SamplerConfig::default() };
        (0..20).map(|i| request(prompt(&mut rng, 4 + 9 * i, cpu.vocab), 128, greedy.clone(), 5)).collect::<Vec<_>>()
    };
    let (want, got) = (cpu.ask(requests())?, gpu.ask(requests())?);
    let (mut equal, mut ties) = (0, Vec::new());
    for (i, (want, got)) in want.iter().zip(&got).enumerate() {
        let Some(step) = want.iter().zip(got).position(|(a, b)| a.id != b.id) else {
            equal += 1;
            continue;
        };
        let (a, b) = (&want[step], &got[step]);
        let gap = |token: &TokenEvent, other: u32| {
            let of = |id| token.top.iter().find(|(at, _)| *at == id).map_or(f32::NEG_INFINITY, |&(_, logprob)| logprob);
            of(token.id) - of(other)
        };
        let gaps = (gap(a, b.id), gap(b, a.id));
        let text = format!("prompt {i} step {step}: {} / {} gaps {:.4} / {:.4}", a.id, b.id, gaps.0, gaps.1);
        if !(gaps.0 <= NEAR_TIE && gaps.1 <= NEAR_TIE) {
            return Err(text);
        }
        ties.push(text);
    }
    let largest = (want.iter().zip(&got))
        .flat_map(|(want, got)| want.iter().zip(got).take_while(|(a, b)| a.id == b.id))
        .map(|(a, b)| (a.logprob.unwrap_or(0.0) - b.logprob.unwrap_or(0.0)).abs())
        .fold(0.0, f32::max);
    Ok(format!("{equal} of 20 equal, largest logprob difference {largest:.2e}, near-ties: {ties:?}"))
}

/// A sampled request gives the same tokens and the same bits of logprobs in every company, chunking and mode.
fn invariance(suite: &Suite, path: &Path) -> Verdict {
    let gpu = |capture, rows, switches| {
        Rig::new(On::Gpu { ordinal: suite.ordinal(), capture }, path, limits(256, rows), switches)
    };
    let subject = |vocab: u32| {
        let sampling = SamplerConfig { seed: 99, ..SamplerConfig::default() };
        request(prompt(&mut Rng(5), 131, vocab), 40, sampling, 3)
    };
    let bits = |tokens: &[TokenEvent]| {
        let of = |token: &TokenEvent| (token.id, token.logprob.map(f32::to_bits), token.top.clone());
        tokens.iter().map(of).collect::<Vec<_>>()
    };
    let base = gpu(true, 512, Switches::default())?;
    let want = bits(&base.ask(vec![subject(base.vocab)])?[0]);
    let check = |what: &str, got: &[TokenEvent]| {
        let got = bits(got);
        match want.iter().zip(&got).position(|(a, b)| a != b) {
            None => Ok(()),
            Some(at) => Err(format!("{what}: token {at} of {}: {:?} alone, {:?}", want.len(), want[at], got[at])),
        }
    };
    for batch in [7, 64, 256] {
        let mut rng = Rng(batch as u64);
        let mut requests: Vec<Request> = (1..batch)
            .map(|i| {
                let sampling = SamplerConfig {
                    temperature: [0.0, 0.8, 1.0][i % 3],
                    top_k: [0, 40][i % 2],
                    top_p: [1.0, 0.9][i / 2 % 2],
                    seed: i as u64,
                    ..SamplerConfig::default()
                };
                let len = 1 + rng.below(60);
                request(prompt(&mut rng, len, base.vocab), 20 + (i % 40) as u32, sampling, 0)
            })
            .collect();
        requests.insert(batch / 2, subject(base.vocab));
        check(&format!("among {batch}"), &base.ask(requests)?[batch / 2])?;
    }
    drop(base);
    let on = Switches::default();
    for (what, capture, rows, switches) in [
        ("chunks of 16 rows", true, 16, on),
        ("chunks of 129 rows", true, 129, on),
        ("eager", false, 512, on),
        ("device_loop off", true, 512, Switches { device_loop: false, ..on }),
        ("sample_on host", true, 512, Switches { sample_on: SampleOn::Host, ..on }),
    ] {
        let rig = gpu(capture, rows, switches)?;
        check(what, &rig.ask(vec![subject(rig.vocab)])?[0])?;
    }
    Ok("alone, among 7, 64 and 256, in chunks of 16, 129 and 131, eager, one step at a time, drawn by the host"
        .to_owned())
}

/// A decode step costs one graph launch and nothing else, and the device's memory does not move.
fn flat(suite: &Suite, path: &Path) -> Verdict {
    let gpu = On::Gpu { ordinal: suite.ordinal(), capture: true };
    let rig = Rig::new(gpu, path, limits(4, 128), Switches::default())?;
    let watch = suite.gpu(crate::suite::limits(1, 32)).map_err(|error| error.to_string())?;
    let ask = || {
        let sampling = SamplerConfig { seed: 3, ..SamplerConfig::default() };
        let request = Request { logprobs: None, ..request(vec![1, 2, 3], 480, sampling, 0) };
        rig.ask(vec![request])
    };
    ask()?;
    let (before, _) = watch.device_memory();
    let mut tokens = 0;
    while tokens < 4096 {
        tokens += ask()?[0].len();
        let (now, _) = watch.device_memory();
        if now != before {
            return Err(format!("{before} bytes free before, {now} after {tokens} tokens"));
        }
    }
    let steps = rig.engine.last_steps(64);
    let mut decode = steps.iter().filter(|step| step.rows == 1 && step.tokens == 1 && step.h2d_copies == 0);
    let plain = |s: &&arc_engine::stats::StepRecord| {
        (s.launches, s.graph_launches, s.allocs, s.frees, s.syncs, s.d2h_copies) == (0, 1, 0, 0, 0, 0)
    };
    let n = decode.clone().count();
    match decode.find(|step| !plain(step)) {
        Some(step) => Err(format!("a decode step cost more than a graph launch: {step:?}")),
        None if n < 32 => Err(format!("{n} of the last {} steps were decode steps without a copy", steps.len())),
        None => {
            let mean = |of: &dyn Fn(&arc_engine::stats::StepRecord) -> f64| {
                steps.iter().map(of).sum::<f64>() / steps.len() as f64
            };
            let (fwd, sample, gap) = (mean(&|s| s.fwd_us), mean(&|s| s.sample_us), mean(&|s| s.gap_us));
            Ok(format!("{tokens} tokens; a step: fwd {fwd:.1} us, sample {sample:.1} us, gap {gap:.1} us"))
        }
    }
}
