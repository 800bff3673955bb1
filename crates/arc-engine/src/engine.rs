//! The engine: one thread that owns the device, and handles for everybody else.
//!
//! A request's life: [`EngineHandle::submit`] checks and queues it; the engine thread admits it to a slot with all its
//! KV blocks, runs its prompt in chunks among the decoding rows of others, then one row a step, and sends each token to
//! the request's sink as it lands. The loop is `run` in `engine/thread.rs`.

mod ends;
pub mod handle;
mod thread;
mod two_part;

use std::sync::{Arc, mpsc};

use arc_device::DeviceLoop;
use arc_device::step::{BLOCK_TOKENS, Limits};

pub use crate::engine::handle::{EngineFault, EngineHandle, Health, Shutdown, SubmitError};
use crate::engine::handle::{Shared, lock};
use crate::engine::thread::EngineThread;
use crate::request::RequestLimits;
use crate::scheduler::buckets::Buckets;
pub use crate::scheduler::speculation::Speculate;

/// Names a request from `submit` to its last event. Never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Who draws.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SampleOn {
    /// The device, wherever it can.
    #[default]
    Device,
    /// The host, for every row.
    Host,
}

/// Mechanisms that can be switched off to see what they cost and that they change no token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switches {
    /// Enqueue steps ahead of what has landed.
    pub device_loop: bool,
    /// Who draws.
    pub sample_on: SampleOn,
    /// Keep what sequences leave in their slots, for prompts that begin the same.
    pub prefix_cache: bool,
}

impl Default for Switches {
    fn default() -> Self {
        Switches { device_loop: true, sample_on: SampleOn::Device, prefix_cache: true }
    }
}

/// What an engine is told once.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Requests that may wait for admission.
    pub queue: usize,
    /// Most steps in flight.
    pub burst: usize,
    /// Longest step, as far as it can be foreseen, while a sequence decodes.
    pub mixed_step_ms: f64,
    /// `max_tokens` where a request names none, if it fits.
    pub default_max_tokens: u32,
    /// Row counts that the device runs.
    pub buckets: Buckets,
    /// Mechanisms that can be switched off.
    pub switches: Switches,
    /// How many drafts are verified, where the device has a drafter.
    pub speculate: Speculate,
    /// Threads for grammar masks; they start with the first grammar.
    pub mask_workers: usize,
    /// A grammar that takes longer than this for one mask ends its request with an error.
    pub mask_timeout_ms: u64,
    /// Queries of the stream, one a millisecond, without a step landing, after which the device counts as stuck.
    pub poll_limit: u32,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            queue: 256,
            burst: 8,
            mixed_step_ms: 50.0,
            default_max_tokens: 8192,
            buckets: Buckets::Exact,
            switches: Switches::default(),
            speculate: Speculate::Auto,
            mask_workers: 2,
            mask_timeout_ms: 1_000,
            poll_limit: 30_000,
        }
    }
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError<E> {
    /// The device or the model could not be made.
    #[error(transparent)]
    Make(E),
    /// The engine thread panicked while it made them.
    #[error("the engine thread panicked while loading")]
    Panicked,
    /// The system gave no thread.
    #[error("no thread for the engine: {0}")]
    Thread(#[source] std::io::Error),
}

/// Starts an engine: `make` runs on the new thread and builds the device there, since a device never leaves its
/// thread. Returns when it is built.
///
/// `limits` are the sizes that `make` builds with; `vocab` is the model's.
pub fn spawn<L, E, F>(config: EngineConfig, limits: Limits, vocab: u32, make: F) -> Result<EngineHandle, SpawnError<E>>
where
    L: DeviceLoop,
    E: Send + 'static,
    F: FnOnce() -> Result<L, E> + Send + 'static,
{
    let request_limits = RequestLimits {
        vocab,
        context: u32::try_from(limits.context).unwrap_or(u32::MAX),
        kv_tokens: u32::try_from(limits.blocks.saturating_mul(BLOCK_TOKENS)).unwrap_or(u32::MAX),
        default_max_tokens: config.default_max_tokens,
    };
    let shared = Arc::new(Shared::new(request_limits, config.clone()));
    let (made, ready) = mpsc::channel();
    let thread = std::thread::Builder::new().name("arc-engine".into()).spawn({
        let shared = shared.clone();
        move || match make() {
            Ok(dev) => {
                let engine = EngineThread::new(config, limits, shared, dev);
                // The caller waits for this; it cannot have gone.
                let _ = made.send(Ok(()));
                engine.main();
            }
            Err(error) => {
                let _ = made.send(Err(error));
            }
        }
    });
    let thread = thread.map_err(SpawnError::Thread)?;
    match ready.recv() {
        Ok(Ok(())) => {
            lock(&shared.inbox).thread = Some(thread);
            Ok(EngineHandle::new(shared))
        }
        Ok(Err(error)) => Err(SpawnError::Make(error)),
        Err(mpsc::RecvError) => Err(SpawnError::Panicked),
    }
}
