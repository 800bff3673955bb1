//! Whole models on both devices: the engine that serves, with requests of token ids.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use arc_device::cpu::Cpu;
use arc_device::cuda::{Cuda, CudaOptions};
use arc_device::error::Result as DeviceResult;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{BLOCK_TOKENS, CtxClass, Limits, Part, Row, StepDelta, StepKey, row_flags};
use arc_device::{Alloc, Buffers, DeviceLoop, Landing};
use arc_engine::drafter::Drafter;
use arc_engine::engine::{self, EngineConfig, EngineHandle, SampleOn, Speculate, Switches};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::deepseek_v4::Numerics;
use arc_engine::model::{Model, ModelConfig};
use arc_engine::request::{Event, FinishReason, Request, TokenEvent};
use arc_engine::runner::Runner;
use arc_engine::scheduler::buckets::Buckets;

use crate::inputs::Rng;
use crate::suite::{Suite, Verdict};
use crate::{golden, row_faults};

/// Two candidates that lie this close, in logits, are a near-tie: see `tests/greedy.rs` of the engine.
const NEAR_TIE: f32 = 0.5;
/// Longest sequence here.
const CONTEXT: usize = 512;
/// Tokens of a sequence that is drafted for.
const N_DRAFTED: u32 = 44;

/// Every case over every model.
pub fn cases(suite: &mut Suite, models: &[PathBuf]) {
    for path in models {
        let name = path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
        suite.case(&format!("model/{name}/invariance"), |suite| invariance(suite, path));
        suite.case(&format!("model/{name}/flat"), |suite| flat(suite, path));
        suite.case(&format!("model/{name}/replay"), |suite| replay(suite, path));
        suite.case(&format!("model/{name}/memory"), |suite| memory(suite, path));
        suite.case(&format!("model/{name}/twice"), |suite| twice(suite, path));
        suite.case(&format!("model/{name}/kept"), |suite| {
            kept(On::Gpu { ordinal: suite.ordinal(), capture: true }, path)
        });
        suite.case(&format!("model/{name}/scripted_drafts"), |suite| scripted_drafts(suite, path));
        suite.case(&format!("model/{name}/kv_bytes"), |suite| kv_bytes(suite, path));
        golden::cases(suite, &name, path);
        let Ok(file) = ModelFile::open(path) else { continue };
        if let Ok(ModelConfig::DeepseekV4(_)) = ModelConfig::read(&file) {
            suite.case(&format!("model/{name}/devices"), |suite| golden::devices(suite, path));
            suite.case(&format!("model/{name}/greedy"), |suite| greedy_reference(suite, path));
            for numerics in [Numerics::Reference, Numerics::Serving] {
                let name = format!("model/{name}/brief/{}", numerics.name());
                suite.case(&name, |suite| brief(suite, path, numerics));
            }
        } else {
            suite.case(&format!("model/{name}/greedy"), |suite| greedy(suite, path));
        }
        if row_faults::can_be_poisoned(&file) {
            suite.case(&format!("model/{name}/row_faults"), |suite| row_faults::rows(suite, path));
        }
        if path.is_file() {
            suite.case(&format!("model/{name}/serve_trap"), |suite| row_faults::server(suite, path));
        }
        if has_draft_block(&file) {
            for numerics in [Numerics::Reference, Numerics::Serving] {
                let name = format!("model/{name}/own_drafts/{}", numerics.name());
                suite.case(&name, |suite| own_drafts(suite, path, numerics));
            }
        }
    }
}

fn has_draft_block(file: &ModelFile) -> bool {
    ModelConfig::read(file).is_ok_and(|mut config| config.load_draft_block(file))
}

/// An engine over a model.
pub struct Rig {
    /// Its handle.
    pub engine: EngineHandle,
    /// Ids of the model.
    pub vocab: u32,
}

/// Which device, and how.
#[derive(Clone, Copy)]
pub enum On {
    /// The replica.
    Cpu,
    /// What is tested.
    Gpu {
        /// Which, in the driver's count.
        ordinal: usize,
        /// Whether it records steps.
        capture: bool,
    },
    /// The same, every step of which runs twice.
    GpuTwice {
        /// Which.
        ordinal: usize,
    },
}

impl On {
    /// Of the CPU.
    pub fn threads() -> usize {
        std::thread::available_parallelism().map_or(2, usize::from).min(16)
    }

    /// Of the GPU, if it is one.
    pub fn options(self) -> Option<CudaOptions> {
        let (ordinal, capture, verify) = match self {
            On::Cpu => return None,
            On::Gpu { ordinal, capture } => (ordinal, capture, false),
            On::GpuTwice { ordinal } => (ordinal, true, true),
        };
        Some(CudaOptions { ordinal, capture, verify, late: false, ..CudaOptions::default() })
    }
}

/// Ids of a model.
pub fn vocab(path: &Path) -> Result<u32, String> {
    let read = || ModelConfig::read(&ModelFile::open(path)?);
    read().map(|config| config.shape().vocab as u32).map_err(|error| error.to_string())
}

/// Room for `slots` sequences of the longest kind.
pub fn limits(slots: usize, rows: usize) -> Limits {
    let blocks = slots * CONTEXT.div_ceil(BLOCK_TOKENS);
    Limits { slots, rows, heads: rows.min(256), context: CONTEXT, blocks, ring: 32 }
}

/// Who drafts, and how much.
enum Drafts {
    Off,
    /// So many by a script: see [`Cuda::propose`].
    Script(u32, Vec<u32>),
    /// So many by the model's own block.
    OwnBlock(u32),
}

/// Drafts that a test knows beforehand.
struct Script {
    tokens: <Cuda as Buffers>::Buf<u32>,
}

impl Drafter<Cuda> for Script {
    fn draft(&mut self, _model: &mut Model<Cuda>, dev: &mut Cuda, key: StepKey) -> DeviceResult<()> {
        dev.propose(&self.tokens, N_DRAFTED as usize, key.drafts)
    }
}

impl Rig {
    fn new(on: On, path: &Path, limits: Limits, switches: Switches) -> Result<Rig, String> {
        Rig::with(on, path, limits, switches, Drafts::Off, Numerics::Serving)
    }

    fn with(
        on: On,
        path: &Path,
        limits: Limits,
        switches: Switches,
        drafts: Drafts,
        numerics: Numerics,
    ) -> Result<Rig, String> {
        let file = ModelFile::open(path).map_err(|error| error.to_string())?;
        let mut config = ModelConfig::read(&file).map_err(|error| error.to_string())?;
        if let ModelConfig::DeepseekV4(v4) = &mut config {
            v4.set_numerics(numerics);
        }
        if matches!(drafts, Drafts::OwnBlock(_)) && !config.load_draft_block(&file) {
            return Err("there is no draft block".to_owned());
        }
        let vocab = config.shape().vocab as u32;
        let buckets = match on {
            On::Cpu => Buckets::Exact,
            On::Gpu { .. } | On::GpuTwice { .. } => Buckets::recorded(limits.rows as u32),
        };
        let (speculate, numbers) = match drafts {
            Drafts::Off => (Speculate::Off, Vec::new()),
            Drafts::Script(n, _) | Drafts::OwnBlock(n) => (Speculate::Fixed(n), vec![n]),
        };
        let keys = buckets.keys(&limits, &numbers);
        let set_up = EngineConfig { buckets, switches, speculate, ..EngineConfig::default() };
        let started = match on.options() {
            None => engine::spawn(set_up, limits, vocab, move || {
                let mut dev = Cpu::new(On::threads(), limits);
                let model = Model::load(&mut dev, &file, &config, &limits)?;
                Ok::<_, LoadError>(Runner::new(dev, model))
            }),
            Some(options) => engine::spawn(set_up, limits, vocab, move || {
                let mut dev = Cuda::new(options, limits)?;
                let script = match drafts {
                    Drafts::Script(_, tokens) => Some(dev.ids("script", &tokens)?),
                    _ => None,
                };
                let model = Model::load(&mut dev, &file, &config, &limits)?;
                let mut runner = match script {
                    Some(tokens) => Runner::with_drafter(dev, model, Box::new(Script { tokens })),
                    None => Runner::new(dev, model),
                };
                if options.capture {
                    runner.warm_up(&keys)?;
                }
                Ok::<_, LoadError>(runner)
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
        match events.recv_timeout(Duration::from_secs(300)).map_err(|error| format!("no event: {error}"))? {
            Event::Prompt(_) | Event::Cached(_) => {}
            Event::Token(token) => tokens.push(token),
            Event::Finished(finished) if finished.reason == FinishReason::Length => return Ok(tokens),
            Event::Finished(finished) => return Err(format!("{finished:?}")),
        }
    }
}

/// Random ids.
pub fn prompt(rng: &mut Rng, len: usize, vocab: u32) -> Vec<u32> {
    (0..len).map(|_| rng.below(vocab as usize) as u32).collect()
}

fn request(prompt: Vec<u32>, n: u32, sampling: SamplerConfig, top: u32) -> Request {
    Request { max_tokens: Some(n), logprobs: Some(top), ignore_stop: true, ..Request::new(prompt, sampling) }
}

/// Twenty prompts, 128 tokens.
fn greedy(suite: &Suite, path: &Path) -> Verdict {
    let mut rng = Rng(17);
    both(suite, path, limits(20, 128), true, Numerics::Serving, |vocab| {
        (0..20).map(|i| (prompt(&mut rng, 4 + 9 * i, vocab), 128)).collect()
    })
}

/// A prompt of 400 tokens and 64 behind it, in float32: there, random weights are no more chaotic than others, and logprobs of
/// both devices as close as the fixture's README asks.
fn greedy_reference(suite: &Suite, path: &Path) -> Verdict {
    both(suite, path, limits(1, 256), true, Numerics::Reference, |vocab| vec![(prompt(&mut Rng(19), 400, vocab), 64)])
}

/// As few steps as have many rows, few, and one, and enough for every kind of layer to keep a token: for tools under which a launch
/// takes long, so that none is recorded.
fn brief(suite: &Suite, path: &Path, numerics: Numerics) -> Verdict {
    both(suite, path, limits(1, 64), false, numerics, |vocab| vec![(prompt(&mut Rng(20), 133, vocab), 5)])
}

/// Both devices count the same bytes of their KV cache, over a prompt and the tokens behind it, and with drafts where there is a
/// block that makes some.
fn kv_bytes(suite: &Suite, path: &Path) -> Verdict {
    let (mut text, greedy) = (String::new(), || SamplerConfig { temperature: 0.0, ..SamplerConfig::default() });
    let block = ModelFile::open(path).is_ok_and(|file| has_draft_block(&file));
    for drafted in [false, true].into_iter().take(1 + usize::from(block)) {
        let count = |on| -> Result<_, String> {
            let drafts = if drafted { Drafts::OwnBlock(3) } else { Drafts::Off };
            // How far ahead steps are enqueued has a say in how many drafts are wanted.
            let switches = Switches { device_loop: !drafted, ..Switches::default() };
            let rig = Rig::with(on, path, limits(1, 64), switches, drafts, Numerics::Reference)?;
            let asked = request(prompt(&mut Rng(23), 200, rig.vocab), 40, greedy(), 0);
            let tokens = ids(&rig.ask(vec![Request { logprobs: None, ..asked }])?[0]);
            let mut stats = rig.engine.stats();
            // Steps that were under way when the last token came read nothing.
            while stats.running > 0 || stats.steps != rig.engine.stats().steps {
                std::thread::sleep(Duration::from_millis(5));
                stats = rig.engine.stats();
            }
            Ok((tokens, stats.drafted, stats.kv_bytes))
        };
        let (want, got) = (count(On::Cpu)?, count(On::Gpu { ordinal: suite.ordinal(), capture: true })?);
        if (&want.0, want.1) != (&got.0, got.1) || drafted != (want.1 > 0) {
            return Err(format!("tokens or drafts differ: {want:?}, {got:?}"));
        }
        if want.2 != got.2 || want.2 == 0 {
            return Err(format!("{} bytes wanted, {}", want.2, got.2));
        }
        text += &format!("{} drafts, {} bytes; ", got.1, got.2);
    }
    Ok(text)
}

/// Prompts with so many greedy tokens behind each: equal on both devices, or parted at a near-tie of both, which is shown.
fn both(
    suite: &Suite,
    path: &Path,
    limits: Limits,
    capture: bool,
    numerics: Numerics,
    prompts: impl FnOnce(u32) -> Vec<(Vec<u32>, u32)>,
) -> Verdict {
    // Codes of activations that round the other way move logits; floats do not.
    let (near, most) = if numerics == Numerics::Reference { (1e-3, 1e-4) } else { (NEAR_TIE, f32::INFINITY) };
    let rig = |on| Rig::with(on, path, limits, Switches::default(), Drafts::Off, numerics);
    let (cpu, gpu) = (rig(On::Cpu)?, rig(On::Gpu { ordinal: suite.ordinal(), capture })?);
    let greedy = SamplerConfig { temperature: 0.0, ..SamplerConfig::default() };
    let prompts = prompts(cpu.vocab);
    let requests = || prompts.iter().map(|(prompt, n)| request(prompt.clone(), *n, greedy.clone(), 5)).collect();
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
        if !(gaps.0 <= near && gaps.1 <= near) {
            return Err(text);
        }
        ties.push(text);
    }
    let largest = (want.iter().zip(&got))
        .flat_map(|(want, got)| want.iter().zip(got).take_while(|(a, b)| a.id == b.id))
        .map(|(a, b)| (a.logprob.unwrap_or(0.0) - b.logprob.unwrap_or(0.0)).abs())
        .fold(0.0, f32::max);
    let text =
        format!("{equal} of {} equal, largest logprob difference {largest:.2e}, near-ties: {ties:?}", want.len());
    if largest <= most { Ok(text) } else { Err(text) }
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
    let mut decode = steps.iter().filter(|step| step.rows == 1 && step.tokens == 1 && step.counted.h2d_copies == 0);
    let plain = |s: &&arc_engine::stats::StepRecord| {
        let c = s.counted;
        (c.launches, c.graph_launches, c.allocs, c.frees, c.syncs, c.d2h_copies) == (0, 1, 0, 0, 0, 0)
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

/// A model's file and configuration, the steps that a GPU records of it, and that GPU.
fn to_record(
    suite: &Suite,
    path: &Path,
    limits: Limits,
) -> Result<(ModelFile, ModelConfig, Vec<StepKey>, Cuda), LoadError> {
    let file = ModelFile::open(path)?;
    let mut config = ModelConfig::read(&file)?;
    let drafts: &[u32] = if config.load_draft_block(&file) { &[1, 2, 3, 4] } else { &[] };
    let keys = Buckets::recorded(limits.rows as u32).keys(&limits, drafts);
    let options = CudaOptions { ordinal: suite.ordinal(), late: false, ..CudaOptions::default() };
    Ok((file, config, keys, Cuda::new(options, limits)?))
}

/// Every recorded step is the eager one, bit for bit; and one that warm-up missed is refused.
fn replay(suite: &Suite, path: &Path) -> Verdict {
    let limits = limits(16, 128);
    let run = || -> Result<Verdict, LoadError> {
        let (file, config, keys, mut dev) = to_record(suite, path, limits)?;
        let model = Model::load(&mut dev, &file, &config, &limits)?;
        let mut runner = Runner::new(dev, model);
        let began = Instant::now();
        runner.warm_up(&keys)?;
        let recorded = began.elapsed();
        runner.verify_replay(&keys, &limits, config.shape().vocab as u32)?;
        let all = began.elapsed() - recorded;
        let missed = StepKey::new(5, 5, CtxClass::Short, Part::Whole);
        let rows = vec![Row { flags: row_flags::PADDING, ..Row::default() }; 5];
        runner.stage(&StepDelta { rows: Some(rows), ..StepDelta::default() })?;
        if runner.enqueue(missed).is_ok() {
            return Ok(Err(format!("{missed} was recorded late")));
        }
        Ok(Ok(format!("{} keys recorded in {:.2?}, compared in {:.2?}", keys.len(), recorded, all)))
    };
    run().map_err(|error| error.to_string())?
}

/// The memory table is what the driver says that loading took, but for the rest of the last page of each large buffer. Recorded steps
/// are the driver's own, and take nothing of the table.
fn memory(suite: &Suite, path: &Path) -> Verdict {
    /// Of the driver; smaller buffers share one.
    const PAGE: u64 = 2 << 20;
    let limits = limits(16, 128);
    let run = || -> Result<Verdict, LoadError> {
        let (file, config, keys, mut dev) = to_record(suite, path, limits)?;
        let (free, own) = (dev.device_memory().0, dev.memory().total_bytes());
        let model = Model::load(&mut dev, &file, &config, &limits)?;
        let loaded = dev.device_memory().0;
        let large: u64 =
            dev.memory().lines().iter().filter(|line| line.bytes / line.count > PAGE / 2).map(|line| line.count).sum();
        let table = dev.memory().total_bytes();
        let mut runner = Runner::new(dev, model);
        runner.warm_up(&keys)?;
        let dev = runner.device();
        let (said, took, recorded) = (table - own, free - loaded, loaded - dev.device_memory().0);
        let steps = keys.len();
        let text = format!("a table of {said} bytes took {took}, {steps} recorded steps {recorded}");
        let right = took + PAGE >= said && took <= said + PAGE * (large + 2) && dev.memory().total_bytes() == table;
        Ok(if right { Ok(text) } else { Err(format!("{text}; {large} large buffers")) })
    };
    run().map_err(|error| error.to_string())?
}

/// Served steps that run twice leave the same each time, and the tokens are those of steps that run once.
fn twice(suite: &Suite, path: &Path) -> Verdict {
    let ordinal = suite.ordinal();
    let drafts = || {
        if ModelFile::open(path).is_ok_and(|file| has_draft_block(&file)) { Drafts::OwnBlock(3) } else { Drafts::Off }
    };
    let ask = |on, sample_on| {
        let switches = Switches { sample_on, ..Switches::default() };
        let rig = Rig::with(on, path, limits(16, 64), switches, drafts(), Numerics::Serving)?;
        let tokens = rig.ask(drafted_requests(rig.vocab))?;
        Ok::<_, String>((tokens.iter().map(|tokens| ids(tokens)).collect::<Vec<_>>(), rig.engine.stats().counters))
    };
    let (want, once) = ask(On::Gpu { ordinal, capture: true }, SampleOn::Device)?;
    let mut text = Vec::new();
    for (what, sample_on) in [("drawn by the device", SampleOn::Device), ("by the host", SampleOn::Host)] {
        let (got, counted) = ask(On::GpuTwice { ordinal }, sample_on)?;
        if got != want {
            return Err(format!("{what}: other tokens"));
        }
        if (once.verified, counted.verified) != (0, counted.graph_launches) || counted.verified == 0 {
            return Err(format!("{what}: {} of {} steps ran twice", counted.verified, counted.graph_launches));
        }
        text.push(format!("{what} {}", counted.verified));
    }
    Ok(format!("steps: {}", text.join(", ")))
}

/// Conversations that grow, side by side and among strangers: with what earlier turns left they have the same tokens, and each turn
/// runs what is new alone.
fn kept(on: On, path: &Path) -> Verdict {
    const TALKS: usize = 6;
    let drafts = || match ModelFile::open(path).is_ok_and(|file| has_draft_block(&file)) {
        true => vec![Drafts::Off, Drafts::OwnBlock(3)],
        false => vec![Drafts::Off],
    };
    // What everybody got, and how many tokens of prompts were known and could be.
    let converse = |drafts, prefix_cache| {
        let logprobs = matches!(drafts, Drafts::Off).then_some(2);
        let switches = Switches { prefix_cache, ..Switches::default() };
        let rig = Rig::with(on, path, limits(16, 64), switches, drafts, Numerics::Serving)?;
        let mut rng = Rng(37);
        let mut all = Vec::new();
        let mut talks: Vec<Vec<u32>> = (0..TALKS).map(|i| prompt(&mut rng, 3 + 23 * i, rig.vocab)).collect();
        let mut known = 0;
        for turn in 0..4 {
            let mut asked = talks.clone();
            asked.extend((0..4).map(|i| prompt(&mut rng, 5 + 19 * i, rig.vocab)));
            let requests = asked.into_iter().enumerate().map(|(i, prompt)| {
                let temperature = [0.0, 0.9, 1.0][i % 3];
                let repetition = [1.0, 1.2][i % 2];
                let sampling = SamplerConfig { temperature, repetition, seed: i as u64, ..SamplerConfig::default() };
                Request { logprobs, ..request(prompt, 9 + (7 * i + 5 * turn) as u32 % 17, sampling, 0) }
            });
            let got = rig.ask(requests.collect())?;
            for (i, (talk, tokens)) in talks.iter_mut().zip(&got).enumerate() {
                talk.extend(ids(tokens));
                // The last token has not been run.
                known += if turn < 3 { talk.len() as u64 - 1 } else { 0 };
                talk.extend(prompt(&mut rng, 1 + (i * 13 + turn * 5) % 30, rig.vocab));
            }
            all.extend(got);
        }
        Ok::<_, String>((all, rig.engine.stats().cached_tokens, known))
    };
    let mut text = Vec::new();
    for (off, kept) in drafts().into_iter().zip(drafts()) {
        let what = if matches!(off, Drafts::Off) { "alone" } else { "with drafts" };
        let (want, none, _) = converse(off, false)?;
        let (got, cached, known) = converse(kept, true)?;
        if let Some(i) = (0..want.len()).find(|&i| want[i] != got[i]) {
            return Err(format!("{what}, request {i}: {:?} wanted, {:?}", ids(&want[i]), ids(&got[i])));
        }
        if (none, cached) != (0, known) {
            return Err(format!("{what}: {cached} tokens of prompts were known, of {known}; {none} without"));
        }
        text.push(format!("{what} {cached}"));
    }
    Ok(format!("tokens that were not run again: {}", text.join(", ")))
}

/// Requests that are drafted for, of every class that the device draws itself; their seeds count from 0.
fn drafted_requests(vocab: u32) -> Vec<Request> {
    let mut rng = Rng(23);
    (0..15)
        .map(|i: usize| {
            let sampling = match i / 3 {
                0 => SamplerConfig { temperature: 0.0, ..SamplerConfig::default() },
                1 => SamplerConfig { top_k: 40, top_p: 0.95, min_p: 0.01, ..SamplerConfig::default() },
                2 => SamplerConfig { presence: 0.4, frequency: 0.3, repetition: 1.1, ..SamplerConfig::default() },
                3 => SamplerConfig { temperature: 0.0, repetition: 1.3, ..SamplerConfig::default() },
                // Few tokens, all about as likely.
                _ => {
                    let bias = (0..4).map(|i| (40 + 50 * i, 60.0)).collect();
                    SamplerConfig { temperature: 8.0, bias, ..SamplerConfig::default() }
                }
            };
            let len = 1 + rng.below(130);
            let sampling = SamplerConfig { seed: i as u64, ..sampling };
            Request { logprobs: None, ..request(prompt(&mut rng, len, vocab), N_DRAFTED, sampling, 0) }
        })
        .collect()
}

fn ids(tokens: &[TokenEvent]) -> Vec<u32> {
    tokens.iter().map(|token| token.id).collect()
}

/// Requests alone and then all at once, beside others that are drafted for or cannot be: the tokens that were wanted. Gives
/// the drafts verified and accepted of each that ran alone.
fn drafted(rig: &Rig, want: &[Vec<u32>]) -> Result<Vec<(u64, u64)>, String> {
    let check = |what: &str, i: usize, got: &[TokenEvent]| match ids(got) == want[i] {
        true => Ok(()),
        false => Err(format!("request {i} {what}: {:?} wanted, {:?}", want[i], ids(got))),
    };
    let mut counts = Vec::new();
    for (i, request) in drafted_requests(rig.vocab).into_iter().enumerate() {
        let before = rig.engine.stats();
        check("alone", i, &rig.ask(vec![request])?[0])?;
        let after = rig.engine.stats();
        counts.push((after.drafted - before.drafted, after.accepted - before.accepted));
    }
    let mut rng = Rng(29);
    let stranger = |i: usize| {
        let sampling = SamplerConfig { seed: 1000 + i as u64, ..SamplerConfig::default() };
        let len = 1 + rng.below(60);
        let stranger = request(prompt(&mut rng, len, rig.vocab), 20 + i as u32, sampling, 2);
        Request { logprobs: i.is_multiple_of(2).then_some(2), ..stranger }
    };
    let mut all = drafted_requests(rig.vocab);
    all.extend((0..9).map(stranger));
    for (i, got) in rig.ask(all)?.iter().take(want.len()).enumerate() {
        check("among others", i, got)?;
    }
    Ok(counts)
}

/// Scripts whose drafts are all wrong, half right or all right change no token.
fn scripted_drafts(suite: &Suite, path: &Path) -> Verdict {
    let rig = |drafts| {
        let gpu = On::Gpu { ordinal: suite.ordinal(), capture: true };
        Rig::with(gpu, path, limits(16, 128), Switches::default(), drafts, Numerics::Serving)
    };
    let plain = rig(Drafts::Off)?;
    let vocab = plain.vocab;
    let want: Vec<Vec<u32>> = (drafted_requests(vocab).into_iter())
        .map(|request| plain.ask(vec![request]).map(|got| ids(&got[0])))
        .collect::<Result<_, _>>()?;
    drop(plain);
    let mut rng = Rng(31);
    // Of request `i`, the class is `i % 3`.
    let script: Vec<u32> = (want.iter().enumerate())
        .flat_map(|(i, tokens)| tokens.iter().map(move |&token| (i % 3, token)))
        .map(|(class, token)| match class == 2 || class == 1 && rng.below(2) == 0 {
            true => token,
            false => (token + 1) % vocab,
        })
        .collect();
    let mut text = String::new();
    for k in 1..=4 {
        let counts =
            drafted(&rig(Drafts::Script(k, script.clone()))?, &want).map_err(|why| format!("{k} drafts: {why}"))?;
        for (i, &(drafted, accepted)) in counts.iter().enumerate() {
            let right = match i % 3 {
                0 => accepted == 0,
                1 => accepted > 0 && accepted < drafted,
                _ => accepted == drafted,
            };
            if !right || drafted < 20 {
                return Err(format!("{k} drafts, request {i}: {accepted} of {drafted} accepted"));
            }
        }
        let sum = |class: usize| counts.iter().skip(class).step_by(3).map(|&(_, accepted)| accepted).sum::<u64>();
        text += &format!("{k} drafts: {}, {} and {} accepted; ", sum(0), sum(1), sum(2));
    }
    Ok(text)
}

/// The model's own drafts change no token.
fn own_drafts(suite: &Suite, path: &Path, numerics: Numerics) -> Verdict {
    let rig = |drafts, rows| {
        let gpu = On::Gpu { ordinal: suite.ordinal(), capture: true };
        Rig::with(gpu, path, limits(16, rows), Switches::default(), drafts, numerics)
    };
    let plain = rig(Drafts::Off, 128)?;
    let want: Vec<Vec<u32>> = (drafted_requests(plain.vocab).into_iter())
        .map(|request| plain.ask(vec![request]).map(|got| ids(&got[0])))
        .collect::<Result<_, _>>()?;
    drop(plain);
    let mut text = String::new();
    let mut all = 0;
    for k in 1..=4 {
        let mut counts = Vec::new();
        // Rows of a step cut prompts elsewhere.
        for rows in [128, 19] {
            let why = |why| format!("{k} drafts, {rows} rows: {why}");
            counts.push(drafted(&rig(Drafts::OwnBlock(k), rows)?, &want).map_err(why)?);
        }
        if counts[0] != counts[1] {
            return Err(format!("{k} drafts: how prompts were cut shows: {counts:?}"));
        }
        let (drafted, accepted) = counts[0].iter().fold((0, 0), |sum, n| (sum.0 + n.0, sum.1 + n.1));
        all += accepted;
        text += &format!("{k} drafts: {accepted} of {drafted} accepted; ");
    }
    if all == 0 { Err(format!("none was ever right: {text}")) } else { Ok(text) }
}
