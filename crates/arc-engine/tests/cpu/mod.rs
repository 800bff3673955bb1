//! An engine over a model on the CPU device, and everything that a request got in one piece.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use arc_device::cpu::Cpu;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{BLOCK_TOKENS, Limits};
use arc_engine::engine::{self, EngineConfig, EngineHandle};
use arc_engine::load::{LoadError, ModelFile};
use arc_engine::model::{Model, ModelConfig};
use arc_engine::request::{Event, EventSink, FinishReason, Finished, Request, TokenEvent};
use arc_engine::runner::Runner;

/// SmolLM2-135M-Instruct.
pub const SMOLLM2: &str = "smollm2-135m-instruct-q4_1.gguf";
/// Gemma 3 270M.
pub const GEMMA3: &str = "gemma-3-270m-q4_k_m.gguf";

/// Path of a tiny fixture.
pub fn tiny(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny").join(name).join("model.gguf")
}

/// A golden, as text.
pub fn golden(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Limits for `slots` sequences of up to `context` tokens, all with their blocks at once.
pub fn limits(slots: usize, context: usize, rows: usize) -> Limits {
    Limits { slots, rows, heads: rows.min(128), context, blocks: slots * context.div_ceil(BLOCK_TOKENS), ring: 16 }
}

/// An engine under test.
pub struct Rig {
    pub engine: EngineHandle,
    pub vocab: u32,
}

impl Rig {
    pub fn new(model: &Path, threads: usize, limits: Limits) -> Rig {
        Rig::with(model, threads, limits, EngineConfig::default())
    }

    pub fn with(model: &Path, threads: usize, limits: Limits, config: EngineConfig) -> Rig {
        Rig::over(model, threads, limits, config, |_, _| {}, Runner::new)
    }

    /// Of a model whose configuration is changed first, in a runner that `make` puts together.
    pub fn over(
        model: &Path,
        threads: usize,
        limits: Limits,
        config: EngineConfig,
        change: impl FnOnce(&mut ModelConfig, &ModelFile),
        make: impl FnOnce(Cpu, Model<Cpu>) -> Runner<Cpu> + Send + 'static,
    ) -> Rig {
        let file = ModelFile::open(model).expect("the model opens");
        let mut model_config = ModelConfig::read(&file).expect("the model has a configuration");
        change(&mut model_config, &file);
        let vocab = model_config.shape().vocab as u32;
        let make = move || {
            let mut dev = Cpu::new(threads, limits);
            let model = Model::load(&mut dev, &file, &model_config, &limits)?;
            Ok::<_, LoadError>(make(dev, model))
        };
        let engine = engine::spawn(config, limits, vocab, make).expect("the model loads");
        Rig { engine, vocab }
    }

    /// Submits a request.
    pub fn start(&self, request: Request) -> Answer {
        let (sink, events) = channel();
        self.engine.submit(request, Box::new(sink)).expect("a valid request and a place in the queue");
        Answer(events)
    }

    /// Submits a request that holds the whole engine up at its first token, until the sender of what comes back with the
    /// answer is used or dropped.
    pub fn start_held(&self, request: Request) -> (Answer, Sender<()>) {
        let (to, events) = channel();
        let (go, gate) = channel();
        let sink = Held { to, gate: Some(gate) };
        self.engine.submit(request, Box::new(sink)).expect("a valid request and a place in the queue");
        (Answer(events), go)
    }

    /// Answers of requests that run together.
    pub fn ask(&self, requests: impl IntoIterator<Item = Request>) -> Vec<Output> {
        let answers: Vec<Answer> = requests.into_iter().map(|request| self.start(request)).collect();
        answers.into_iter().map(Answer::wait).collect()
    }
}

/// A sink that does what none should: it blocks, once.
struct Held {
    to: Sender<Event>,
    gate: Option<Receiver<()>>,
}

impl EventSink for Held {
    fn send(&mut self, event: Event) -> bool {
        if let Event::Token(_) = event
            && let Some(gate) = self.gate.take()
        {
            let _ = gate.recv();
        }
        self.to.send(event).is_ok()
    }
}

/// A greedy request for exactly `n` tokens with `top` alternatives each.
pub fn greedy(prompt: &[u32], n: u32, top: u32) -> Request {
    let sampling = SamplerConfig { temperature: 0.0, ..SamplerConfig::default() };
    Request { max_tokens: Some(n), logprobs: Some(top), ..Request::new(prompt.to_vec(), sampling) }
}

/// A request that only scores its prompt, with `top` alternatives a token.
pub fn score(prompt: &[u32], top: u32) -> Request {
    Request { max_tokens: Some(0), logprobs: None, prompt_logprobs: Some(top), ..greedy(prompt, 0, 0) }
}

/// A request under way.
pub struct Answer(Receiver<Event>);

/// Id, logprob and alternatives of each scored or drawn token, numbers as bits.
pub type Bits = Vec<(u32, Option<u32>, Vec<(u32, u32)>)>;

/// Everything that a request got.
#[derive(Debug)]
pub struct Output {
    /// Of prompt tokens 1, 2, ...
    pub scores: Vec<TokenEvent>,
    pub tokens: Vec<TokenEvent>,
    pub finished: Finished,
}

impl Output {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    /// Panics unless the request ended by reaching its length.
    pub fn complete(self) -> Output {
        assert_eq!(self.finished.reason, FinishReason::Length, "{:?}", self.finished);
        self
    }

    /// Tokens, logprobs and alternatives, prompt first, as bits: equal where, and only where, all numbers are the same.
    pub fn bits(&self) -> Bits {
        let bits = |token: &TokenEvent| {
            let top = token.top.iter().map(|&(id, logprob)| (id, logprob.to_bits())).collect();
            (token.id, token.logprob.map(f32::to_bits), top)
        };
        self.scores.iter().chain(&self.tokens).map(bits).collect()
    }
}

impl Answer {
    /// Waits for the end.
    pub fn wait(self) -> Output {
        let (mut scores, mut tokens) = (Vec::new(), Vec::new());
        loop {
            match self.next() {
                Event::Prompt(batch) => scores.extend(batch),
                Event::Cached(_) => {}
                Event::Token(token) => tokens.push(token),
                Event::Finished(finished) => return Output { scores, tokens, finished },
            }
        }
    }

    fn next(&self) -> Event {
        self.0.recv_timeout(Duration::from_secs(600)).expect("an event within ten minutes")
    }
}
