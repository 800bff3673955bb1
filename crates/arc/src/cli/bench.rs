//! `arc bench`: what this machine reaches with a model, through the engine's own front door.

mod ab;
mod bandwidth;
mod mixed;

use std::{
    io::{self, Write},
    process::ExitCode,
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Result, bail};
use arc::{
    config::{Auto, Config, Device, SETTINGS, Scope, Switch},
    open::{self, Described, Sizes},
};
use arc_device::ops::sample::SamplerConfig;
use arc_engine::{
    engine::{EngineHandle, Shutdown},
    request::{Event, EventSink, FinishReason, Request, RequestLimits, ValidRequest},
    stats::{StepRecord, split::StepSplit},
};
use serde_json::{Value, json};

use super::{EngineFlags, generate::DrawFlags, open_model};
use mixed::Mixed;

/// Longest prompt, output or depth: more than any model's context, and sums of them are numbers still.
const MOST_TOKENS: i64 = 1 << 24;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Name or path of the model
    model: String,
    /// Prompt tokens of the prefill measurement; 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(..=MOST_TOKENS))]
    pp: u32,
    /// Tokens generated in the decode measurement; 0 leaves it out
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(..=MOST_TOKENS))]
    tg: u32,
    /// Sequences side by side
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    batch: u32,
    /// Position at which sequences begin, behind a prompt that nobody ran; DeepSeek-V4's rows before it are random. Takes
    /// a context as long
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=MOST_TOKENS))]
    depth: u32,
    /// Decode behind the prompt that was just run, in the same sequence: a depth that is a real context
    #[arg(long, conflicts_with = "mixed")]
    together: bool,
    /// Measured repetitions
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    reps: u32,
    /// Repetitions before them that do not count
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(0..=1000))]
    warm_up: u32,
    /// Measure instead how the sequences feel a prompt that arrives while they decode, and what it waits
    #[arg(long, conflicts_with = "depth")]
    mixed: bool,
    /// Measure instead what this setting changes, taking turns with how it is: `--ab sample_on=host`; may be given several times
    #[arg(long, value_name = "SETTING=VALUE", conflicts_with = "mixed")]
    ab: Vec<String>,
    /// Turns of either side of --ab
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..=100))]
    turns: u32,
    #[command(flatten)]
    draws: DrawFlags,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    pub flags: EngineFlags,
}

/// Rates of the repetitions.
struct Series(Vec<f64>);

impl Series {
    fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let mid = sorted.len() / 2;
        if sorted.len() % 2 == 1 { sorted[mid] } else { (sorted[mid - 1] + sorted[mid]) / 2.0 }
    }

    fn ends(&self) -> (f64, f64) {
        self.0.iter().fold((f64::INFINITY, 0.0), |(min, max), x| (x.min(min), x.max(max)))
    }

    fn json(&self) -> Value {
        let (min, max) = self.ends();
        json!({"median": self.median(), "min": min, "max": max, "all": self.0})
    }

    fn text(&self) -> String {
        let (min, max) = self.ends();
        format!("{:8.2} tok/s  ({min:.2} to {max:.2} in {} runs)", self.median(), self.0.len())
    }
}

/// One decode run.
struct Decode {
    tokens_per_s: f64,
    step: Value,
    bytes_per_step: f64,
    bytes_per_s: f64,
}

impl Args {
    fn check(&self) -> Result<()> {
        if self.pp == 0 && self.tg == 0 {
            bail!("nothing to measure: --pp and --tg are both 0");
        }
        if self.mixed && (self.pp == 0 || self.tg == 0) {
            bail!("--mixed needs both --pp and --tg");
        }
        if self.together && (self.pp == 0 || self.tg == 0) {
            bail!("--together needs both --pp and --tg");
        }
        // Prompts of several would enter one behind the other, while the first ones decode.
        if self.together && self.batch > 1 {
            bail!("--together measures one sequence: leave --batch out");
        }
        let any = RequestLimits { vocab: u32::MAX, context: u32::MAX, kv_tokens: u32::MAX, default_max_tokens: 1 };
        ValidRequest::new(request(self, vec![0], 1), &any)?;
        Ok(())
    }

    fn sampling(&self) -> SamplerConfig {
        self.draws.over(SamplerConfig { temperature: 0.0, ..SamplerConfig::default() })
    }

    /// Sequences that run at once.
    fn seqs(&self) -> u32 {
        self.batch + u32::from(self.mixed)
    }

    /// The configuration with room for every sequence at once, whatever the defaults for sharing are.
    fn sized(&self, config: &Config, model: &Described) -> Result<Config> {
        let mut sized = config.clone();
        let (prompt_len, decoded) = (self.pp + 1, self.tg + 2);
        let longest = self.depth + if self.together { prompt_len + decoded } else { prompt_len.max(decoded) };
        let seqs = self.seqs();
        if let Some(slots) = config.slots.value().filter(|&slots| slots < seqs) {
            bail!(
                "the setting `slots` is {slots}, but {seqs} sequences are to run at once: leave it out, or lower --batch"
            );
        }
        let room = longest.next_multiple_of(32);
        if config.kv_tokens.value().is_none() {
            sized.kv_tokens = Auto::Value(room * seqs);
        }
        let most = u32::try_from(model.config.context()).unwrap_or(u32::MAX);
        let context = config.context.value().unwrap_or(most);
        if longest > context {
            let choice = if context < most { "set --context, or lower" } else { "lower" };
            bail!("{longest} tokens are to be measured, but the context is {context}: {choice} --pp, --tg or --depth");
        }
        if config.context.value().is_none() && longest > open::CONTEXT_DEFAULT {
            sized.context = Auto::Value(room.min(most));
        }
        // All of them are submitted at once.
        sized.queue = sized.queue.max(seqs);
        // Every prompt is measured whole.
        sized.prefix_cache = Switch::Off;
        Ok(sized)
    }
}

/// What one engine reached.
struct Figures {
    /// Prompt tokens a second.
    prefill: Series,
    decodes: Vec<Decode>,
    mixed: Mixed,
    /// The last mean split of step times, where there were steps enough.
    split: Option<StepSplit>,
}

impl Figures {
    fn measure(args: &Args, model: &Described, config: &Config) -> Result<Figures> {
        // Token ids are all it takes, so that a model without a tokenizer can be measured too.
        let sizes = Sizes { random_rows: args.depth > 0, ..Sizes::slots(args.seqs()) };
        let engine = &open::start_engine(model, config, sizes)?;
        let vocab = engine.limits().vocab;
        let (mut prefills, mut decodes, mut mixed) = (Vec::new(), Vec::new(), Mixed::default());
        for rep in 0..args.warm_up + args.reps {
            let counts = rep >= args.warm_up;
            if args.mixed {
                // What comes before tells the scheduler what steps cost.
                mixed.arrival(engine, args, vocab, rep)?;
                mixed = if counts { mixed } else { Mixed::default() };
                continue;
            }
            // Prefill and decode take turns, so that a drift of the machine touches both.
            let (prefill, decode) = if args.together {
                let both = Pass::run(engine, args, vocab, rep, args.pp, args.tg)?;
                (Some(both.prefill(args)), Some(both.decode(engine, args)))
            } else {
                let pass = |n, prompt, output| {
                    (n > 0).then(|| Pass::run(engine, args, vocab, rep, prompt, output)).transpose()
                };
                let prefill = pass(args.pp, args.pp, 0)?.map(|pass| pass.prefill(args));
                (prefill, pass(args.tg, 1, args.tg)?.map(|pass| pass.decode(engine, args)))
            };
            if counts {
                prefills.extend(prefill);
                decodes.extend(decode);
            }
        }
        // The device closes before the figures are told: it may have a table of its own to write.
        engine.shutdown(Shutdown::Stop);
        Ok(Figures { prefill: Series(prefills), decodes, mixed, split: engine.stats().split })
    }

    /// Output tokens a second.
    fn decode(&self) -> Series {
        Series(self.decodes.iter().map(|d| d.tokens_per_s).collect())
    }
}

/// What stands beside figures, so that one file can be told from another.
fn setting_of(args: &Args, model: &Described, config: &Config) -> Value {
    let sampling = args.sampling();
    let engine = SETTINGS.iter().filter(|s| s.scope == Scope::Engine);
    let settings = engine.map(|s| (s.name.to_owned(), json!(config.show(s.name)))).collect::<serde_json::Map<_, _>>();
    json!({
        "arc": env!("CARGO_PKG_VERSION"),
        "model": args.model,
        "architecture": model.config.arch(),
        "format": model.main_format(),
        "device": if config.device == Device::Cpu { "cpu" } else { "cuda" },
        "cpu": bandwidth::cpu_name(),
        "batch": args.batch,
        "depth": args.depth,
        "together": args.together,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition,
        },
        "settings": settings,
    })
}

pub fn run(args: &Args, config: &Config) -> Result<ExitCode> {
    args.check()?;
    if !args.ab.is_empty() {
        return ab::run(args, config);
    }
    let model = open_model(&args.model, config)?;
    let sized = args.sized(config, &model)?;
    let threads = open::threads(config);
    let on_cpu = config.device == Device::Cpu;
    // What the processor can read says nothing of a GPU.
    let roof = on_cpu.then(|| bandwidth::read_bytes_per_s(threads));
    let figures = Figures::measure(args, &model, &sized)?;
    let (prefill, decodes, mixed) = (&figures.prefill, &figures.decodes, &figures.mixed);
    let decode = figures.decode();
    let bandwidth = Series(decodes.iter().map(|d| d.bytes_per_s).collect());
    let bytes_per_step = decodes.last().map_or(0.0, |d| d.bytes_per_step);
    let mut out = io::stdout().lock();
    if args.json {
        let mut body = setting_of(args, &model, &sized);
        if let Some(roof) = roof {
            body["threads"] = json!(threads);
            body["read_bytes_per_s"] = json!(roof);
        }
        if args.mixed {
            body["mixed"] = mixed.json(args);
        }
        if args.pp > 0 && !args.mixed {
            // Of the last sequence to have one.
            let ms = |rate: &f64| 1e3 * f64::from(args.pp * args.batch) / rate;
            let first_token = Series(prefill.0.iter().map(ms).collect());
            let (rate, first_token) = (prefill.json(), first_token.json());
            body["prefill"] = json!({"tokens": args.pp, "tokens_per_s": rate, "first_token_ms": first_token});
        }
        if args.tg > 0 && !args.mixed {
            body["decode"] = json!({
                "tokens": args.tg,
                "tokens_per_s": decode.json(),
                "bytes_per_step": bytes_per_step,
                "bytes_per_s": bandwidth.json(),
                "step": decodes.last().map(|d| &d.step),
            });
        }
        if let Some(StepSplit { total_us, fwd_us, sample_us, other_us, rows }) = figures.split {
            body["step_us"] =
                json!({"total": total_us, "fwd": fwd_us, "sample": sample_us, "other": other_us, "rows": rows});
        }
        writeln!(out, "{body:#}")?;
        return Ok(ExitCode::SUCCESS);
    }
    let plural = if threads == 1 { "" } else { "s" };
    let place = if on_cpu {
        format!("{}, {threads} thread{plural}", bandwidth::cpu_name())
    } else {
        format!("GPU {}", config.gpu)
    };
    let mut depth = if args.depth > 0 { format!(", from position {} on", args.depth) } else { String::new() };
    if args.together {
        depth += ", the prompt before what is decoded";
    }
    writeln!(out, "{}, {} on {place}{depth}", args.model, model.main_format())?;
    if args.mixed {
        writeln!(out, "{}", mixed.text(args))?;
        return Ok(ExitCode::SUCCESS);
    }
    let of_roof = roof.map(|roof| format!("{:.1} GB/s that {threads} thread{plural} can read", roof / 1e9));
    if args.pp > 0 {
        writeln!(out, "prefill {:>5} x {:<3} {}", args.pp, args.batch, prefill.text())?;
    }
    if args.tg > 0 {
        writeln!(out, "decode  {:>5} x {:<3} {}", args.tg, args.batch, decode.text())?;
        let of_roof = of_roof.map_or_else(String::new, |roof| format!(" of the {roof}"));
        let (bytes, rate) = (bytes_per_step / 1e6, bandwidth.median() / 1e9);
        writeln!(out, "a step reads {bytes:.1} MB of weights and more: {rate:.1} GB/s{of_roof}")?;
    } else if let Some(roof) = of_roof {
        writeln!(out, "{roof}")?;
    }
    if let Some(split) = figures.split {
        writeln!(out, "{split}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Sequences that ran side by side.
struct Pass {
    start: Instant,
    ends: Vec<Times>,
}

impl Pass {
    /// Runs prompts of `prompt_len` tokens behind the depth, and `output` tokens behind the first that each gives.
    fn run(engine: &EngineHandle, args: &Args, vocab: u32, rep: u32, prompt_len: u32, output: u32) -> Result<Pass> {
        let start = Instant::now();
        let tokens = |seq| prompt(args.depth + prompt_len, vocab, rep, seq);
        let ends = run_batch(engine, args.batch, |seq| deep(args, tokens(seq), output + 1))?;
        Ok(Pass { start, ends })
    }

    /// When every sequence has its first token.
    fn begun(&self) -> Instant {
        self.ends.iter().map(|seq| seq.first).max().unwrap_or(self.start)
    }

    /// Prompt tokens a second, from submission to the last first token.
    fn prefill(&self, args: &Args) -> f64 {
        f64::from(args.pp * args.batch) / (self.begun() - self.start).as_secs_f64()
    }

    /// Output tokens a second, from when every sequence has its first token to the last token.
    fn decode(&self, engine: &EngineHandle, args: &Args) -> Decode {
        let begin = self.begun();
        let end = self.ends.iter().map(|seq| seq.last).max().unwrap_or(begin);
        let tokens = self.ends.iter().flat_map(|seq| &seq.tokens).filter(|at| **at > begin).count();
        let seconds = (end - begin).as_secs_f64();
        let steps = engine.last_steps(args.tg as usize);
        let bytes: u64 = steps.iter().map(|s| s.counted.weight_bytes + s.kv_bytes).sum();
        let bytes_per_step = bytes as f64 / steps.len().max(1) as f64;
        // A step lands a token for each sequence, and more where drafts were right.
        let landed: u64 = steps.iter().map(|s| u64::from(s.tokens)).sum();
        let n_steps = tokens as f64 * steps.len() as f64 / landed.max(1) as f64;
        Decode {
            tokens_per_s: tokens as f64 / seconds,
            step: step_json(&steps),
            bytes_per_step,
            bytes_per_s: bytes_per_step * n_steps / seconds,
        }
    }
}

/// What a step was and took: medians, so that a prompt's step or one after a pause does not show; and what all of the pass's steps
/// counted, in which it does.
fn step_json(steps: &[StepRecord]) -> Value {
    let all = |of: fn(&StepRecord) -> u64| steps.iter().map(of).sum::<u64>();
    let median = |of: fn(&StepRecord) -> f64| {
        if steps.is_empty() { 0.0 } else { Series(steps.iter().map(of).collect()).median() }
    };
    json!({
        "rows": median(|s| s.rows.into()),
        "drafted": median(|s| s.drafted.into()),
        "tokens": median(|s| s.tokens.into()),
        "fwd_us": median(|s| s.fwd_us),
        "sample_us": median(|s| s.sample_us),
        "gap_us": median(|s| s.gap_us),
        "launches": median(|s| s.counted.launches as f64),
        "graph_launches": median(|s| s.counted.graph_launches as f64),
        "graph_kernels": median(|s| s.counted.graph_kernels as f64),
        "of_all": {
            "steps": steps.len(),
            "launches": all(|s| s.counted.launches),
            "graphs": all(|s| s.counted.graphs),
            "verified": all(|s| s.counted.verified),
            "graph_launches": all(|s| s.counted.graph_launches),
            "allocs": all(|s| s.counted.allocs),
            "frees": all(|s| s.counted.frees),
            "syncs": all(|s| s.counted.syncs),
            "h2d_copies": all(|s| s.counted.h2d_copies),
            "d2h_copies": all(|s| s.counted.d2h_copies),
        },
    })
}

fn request(args: &Args, prompt: Vec<u32>, max_tokens: u32) -> Request {
    let sampling = args.sampling();
    Request { max_tokens: Some(max_tokens), ignore_stop: true, ..Request::new(prompt, sampling) }
}

/// One of whose prompt the first tokens count as run.
fn deep(args: &Args, prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request { depth: args.depth, ..request(args, prompt, max_tokens) }
}

/// Token ids that are the same in every run of the program and different in every repetition and sequence.
fn prompt(len: u32, vocab: u32, rep: u32, seq: u32) -> Vec<u32> {
    let mut state = (u64::from(rep) << 32 | u64::from(seq)) ^ 0x9E37_79B9_7F4A_7C15;
    let next = || {
        // Numerical Recipes' generator; the high bits are good enough to pick tokens.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % u64::from(vocab)) as u32
    };
    std::iter::repeat_with(next).take(len as usize).collect()
}

/// When the tokens of a sequence came.
struct Times {
    first: Instant,
    last: Instant,
    tokens: Vec<Instant>,
}

/// Notes the time on the engine thread, as soon as there is something to note.
struct Stopwatch {
    seq: usize,
    events: mpsc::Sender<(usize, Instant, Option<FinishReason>, Option<String>)>,
}

impl EventSink for Stopwatch {
    fn send(&mut self, event: Event) -> bool {
        let (reason, error) = match event {
            Event::Finished(f) => (Some(f.reason), f.error),
            Event::Token(_) => (None, None),
            Event::Prompt(_) | Event::Cached(_) => return true,
        };
        self.events.send((self.seq, Instant::now(), reason, error)).is_ok()
    }
}

fn run_batch(engine: &EngineHandle, batch: u32, request: impl Fn(u32) -> Request) -> Result<Vec<Times>> {
    let (sender, events) = mpsc::channel();
    for seq in 0..batch {
        let sink = Stopwatch { seq: seq as usize, events: sender.clone() };
        engine.submit(request(seq), Box::new(sink))?;
    }
    drop(sender);
    let mut tokens = vec![Vec::new(); batch as usize];
    for (seq, at, reason, error) in events {
        match reason {
            None => tokens[seq].push(at),
            Some(FinishReason::Length) => {}
            Some(_) => bail!("{}", error.unwrap_or_else(|| "a sequence ended early".to_owned())),
        }
    }
    // The records of the last step are published just after its events.
    while engine.stats().running > 0 && engine.fault().is_none() {
        std::thread::sleep(Duration::from_micros(200));
    }
    tokens
        .into_iter()
        .map(|tokens| match (tokens.first(), tokens.last()) {
            (Some(&first), Some(&last)) => Ok(Times { first, last, tokens }),
            _ => bail!("a sequence ended without a token"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_tell_their_middle_and_ends() {
        let series = Series(vec![3.0, 1.0, 2.0]);
        assert_eq!((series.median(), series.ends()), (2.0, (1.0, 3.0)));
        assert_eq!(Series(vec![4.0, 1.0]).median(), 2.5);
    }

    #[test]
    fn prompts_differ_and_stay_in_the_vocabulary() {
        let (a, b) = (prompt(100, 50, 1, 0), prompt(100, 50, 1, 1));
        assert!(a != b && a.iter().all(|id| *id < 50));
        assert_eq!(a, prompt(100, 50, 1, 0));
    }
}
