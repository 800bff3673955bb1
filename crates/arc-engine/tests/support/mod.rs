//! An engine over a scripted device: a tiny "model" whose tokens follow from what was fed, and every misfortune on demand.
#![allow(dead_code, unused_imports, reason = "each test binary uses a part")]

mod fake;
mod model;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_device::error::DeviceError;
use arc_device::ops::sample::SamplerConfig;
use arc_device::step::Limits;
use arc_engine::engine::{self, EngineConfig, EngineHandle};
use arc_engine::grammar::{MaskError, TokenMask};
use arc_engine::request::{Event, EventSink, Finished, Request, TokenEvent};

pub use fake::{Fake, Log, Script, StepLog};
pub use model::{POISON, VOCAB, expected, expected_masked, expected_score, logprob};

/// Marks a request that the fake device cannot draw for.
pub const HOST_SEED: u64 = 0x4057;

pub fn limits() -> Limits {
    Limits { slots: 8, rows: 64, heads: 16, context: 256, blocks: 48, ring: 16 }
}

pub fn sampling() -> SamplerConfig {
    SamplerConfig { temperature: 0.0, seed: 1, ..SamplerConfig::default() }
}

pub fn request(prompt: &[u32], max_tokens: u32) -> Request {
    let mut request = Request::new(prompt.to_vec(), sampling());
    request.max_tokens = Some(max_tokens);
    request
}

/// An engine over a fake.
pub struct Rig {
    pub engine: EngineHandle,
    pub log: Arc<Mutex<Log>>,
}

impl Rig {
    pub fn new(config: EngineConfig, limits: Limits, script: Script) -> Rig {
        let log = Arc::new(Mutex::new(Log::default()));
        let make = {
            let log = log.clone();
            move || Ok::<_, DeviceError>(Fake::new(limits, script, log))
        };
        let engine = engine::spawn(config, limits, VOCAB, make).expect("nothing to go wrong");
        Rig { engine, log }
    }

    pub fn plain() -> Rig {
        Rig::new(EngineConfig::default(), limits(), Script::default())
    }

    pub fn start(&self, request: Request) -> Answer {
        let (sink, events) = channel();
        let id = self.engine.submit(request, Box::new(sink)).expect("a place in the queue");
        Answer { id, events }
    }

    pub fn ask(&self, request: Request) -> Output {
        self.start(request).wait()
    }
}

/// A request under way.
pub struct Answer {
    pub id: engine::RequestId,
    pub events: Receiver<Event>,
}

/// Everything that a request got.
#[derive(Debug)]
pub struct Output {
    pub scores: Vec<TokenEvent>,
    pub tokens: Vec<TokenEvent>,
    pub finished: Finished,
}

impl Output {
    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|t| t.id).collect()
    }
}

impl Answer {
    /// Waits for the end; panics where the rules of events are broken.
    pub fn wait(self) -> Output {
        let (mut scores, mut tokens) = (Vec::new(), Vec::new());
        let mut cached = 0;
        loop {
            match self.events.recv_timeout(Duration::from_secs(20)).expect("an event in 20 s") {
                Event::Cached(n) => {
                    assert!(cached == 0 && n > 0 && scores.is_empty() && tokens.is_empty());
                    cached = n;
                }
                Event::Prompt(batch) => {
                    assert!(tokens.is_empty() && !batch.is_empty());
                    scores.extend(batch);
                }
                Event::Token(token) => tokens.push(token),
                Event::Finished(finished) => {
                    assert!(self.events.recv_timeout(Duration::from_millis(1)).is_err(), "an event after the last");
                    assert_eq!((finished.output_tokens as usize, finished.cached_tokens), (tokens.len(), cached));
                    return Output { scores, tokens, finished };
                }
            }
        }
    }
}

/// A grammar whose next tokens depend on the last: ids of the next class modulo 3. It may end badly.
#[derive(Debug, Clone, Default)]
pub struct Classes {
    pub class: u32,
    pub accepted: usize,
    /// No token may follow this many.
    pub dead_end_after: Option<usize>,
    /// All tokens are masked after this many, which the grammar does not notice.
    pub empty_after: Option<usize>,
    /// Panics when it has taken this many.
    pub panic_after: Option<usize>,
    /// Takes this long for each mask.
    pub takes: Duration,
}

impl Classes {
    pub fn allows(out: &[u32], id: u32) -> bool {
        id % 3 == out.last().map_or(0, |last| (last + 1) % 3)
    }
}

impl TokenMask for Classes {
    fn accept(&mut self, token: u32) -> std::result::Result<(), MaskError> {
        if token % 3 != self.class {
            return Err(MaskError(format!("token {token} is not in class {}", self.class)));
        }
        self.class = (token + 1) % 3;
        self.accepted += 1;
        assert_ne!(self.panic_after, Some(self.accepted), "the script says so");
        if self.dead_end_after == Some(self.accepted) {
            return Err(MaskError("dead end".into()));
        }
        Ok(())
    }

    fn mask(&mut self, out: &mut [u32]) -> std::result::Result<(), MaskError> {
        std::thread::sleep(self.takes);
        assert_eq!(out.len(), VOCAB.div_ceil(32) as usize);
        out.fill(0);
        if self.empty_after != Some(self.accepted) {
            (0..VOCAB).filter(|id| id % 3 == self.class).for_each(|id| out[id as usize / 32] |= 1 << (id % 32));
        }
        Ok(())
    }
}

/// A sink that stops listening after `n` events.
pub struct Fickle {
    pub n: usize,
    pub to: Sender<Event>,
}

impl EventSink for Fickle {
    fn send(&mut self, event: Event) -> bool {
        self.n = self.n.saturating_sub(1);
        let _ = self.to.send(event);
        self.n > 0
    }
}
