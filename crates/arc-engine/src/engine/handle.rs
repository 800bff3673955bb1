//! The plain side of the engine: what every caller holds, whatever the device is.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use arc_device::error::DeviceError;

use crate::engine::{EngineConfig, RequestId};
use crate::request::{EventSink, FinishReason, Request, RequestError, RequestLimits, ValidRequest};
use crate::sequence::Submission;
use crate::stats::{EngineStats, StepRecord};

/// Steps that [`EngineHandle::last_steps`] can look back on.
pub const KEPT_STEPS: usize = 4096;

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SubmitError {
    /// The request is wrong: a 400.
    #[error(transparent)]
    Invalid(#[from] RequestError),
    /// The queue is full: a 429 with Retry-After.
    #[error("{queued} requests are waiting, which is the most allowed; try again in {retry_after_ms} ms")]
    Full {
        /// Requests that wait.
        queued: usize,
        /// When a place is likely to be free, from the pace of the last requests.
        retry_after_ms: u64,
    },
    /// The engine is shutting down: a 503.
    #[error("the engine is shutting down")]
    Stopped,
    /// The engine failed: a 503.
    #[error("the engine failed: {0}")]
    Failed(EngineFault),
}

/// Why the engine stands still. Latched: nothing runs after it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineFault {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The engine thread panicked: a defect of ours.
    #[error("the engine thread panicked: {0}")]
    Panic(String),
}

/// Whether the engine serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// It takes requests.
    Ready,
    /// It finishes what it has and takes nothing new.
    Draining,
    /// It was shut down.
    Stopped,
    /// It failed. The process should end with an error.
    Failed(EngineFault),
}

/// How to shut down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// Finish everything that was submitted.
    Drain,
    /// Cancel everything.
    Stop,
}

/// The way to the engine thread. Cheap to clone; dropping the last one stops the engine, and waits until what its device held is
/// given back.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
    /// Stops the thread with the last handle. The thread itself holds `shared`, so that cannot count the handles.
    _last: Arc<StopOnDrop>,
}

impl EngineHandle {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        let last = Arc::new(StopOnDrop(shared.clone()));
        EngineHandle { shared, _last: last }
    }

    /// Checks a request and queues it. Its events go to `sink`, the last of them `Finished`.
    /// Errors: the request is wrong, the queue is full, or the engine takes nothing any more.
    pub fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<RequestId, SubmitError> {
        self.submit_valid(ValidRequest::new(request, &self.shared.limits)?, sink)
    }

    /// Queues a request that was checked against [`EngineHandle::limits`]; panics where it was against others, since it
    /// might never start.
    pub fn submit_valid(&self, request: ValidRequest, sink: Box<dyn EventSink>) -> Result<RequestId, SubmitError> {
        assert_eq!(request.limits(), &self.shared.limits, "a request is valid for the engine that it was checked for");
        let mut inbox = lock(&self.shared.inbox);
        match &inbox.health {
            Health::Ready => {}
            Health::Draining | Health::Stopped => return Err(SubmitError::Stopped),
            Health::Failed(fault) => return Err(SubmitError::Failed(fault.clone())),
        }
        if inbox.queued >= self.shared.config.queue {
            inbox.refused_full += 1;
            return Err(SubmitError::Full { queued: inbox.queued, retry_after_ms: inbox.retry_after_ms() });
        }
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        inbox.queued += 1;
        inbox.submitted += 1;
        inbox.submissions.push_back(Submission { id, request, sink, submitted: Instant::now() });
        self.shared.ring(inbox);
        Ok(id)
    }

    /// Cancels a request at the next step border. Unknown and ended requests are nothing to cancel.
    pub fn cancel(&self, id: RequestId) {
        self.end(id, FinishReason::Cancelled);
    }

    /// Ends a request at the next step border for a reason that its caller knows, such as a stop string. As [`cancel`](Self::cancel)
    /// otherwise.
    pub fn end(&self, id: RequestId, reason: FinishReason) {
        let mut inbox = lock(&self.shared.inbox);
        if inbox.closed {
            return;
        }
        inbox.ends.push((id, reason));
        self.shared.ring(inbox);
    }

    /// What requests are checked against.
    pub fn limits(&self) -> RequestLimits {
        self.shared.limits
    }

    /// Totals and what stands now, as of the last step.
    pub fn stats(&self) -> EngineStats {
        let mut stats = lock(&self.shared.published).stats;
        let inbox = lock(&self.shared.inbox);
        stats.submitted = inbox.submitted;
        stats.refused_full = inbox.refused_full;
        stats.queued = inbox.queued;
        stats.queue_cap = self.shared.config.queue;
        stats
    }

    /// Records of the last steps, oldest first: at most `n`, and at most [`KEPT_STEPS`].
    pub fn last_steps(&self, n: usize) -> Vec<StepRecord> {
        let published = lock(&self.shared.published);
        let skip = published.steps.len().saturating_sub(n);
        published.steps.iter().skip(skip).copied().collect()
    }

    /// Records of the steps after `step`, oldest first, as far as they are kept: for a reader that comes by regularly.
    pub fn steps_after(&self, step: u64) -> Vec<StepRecord> {
        let published = lock(&self.shared.published);
        let skip = published.steps.partition_point(|record| record.step <= step);
        published.steps.iter().skip(skip).copied().collect()
    }

    /// What the engine was told at its start.
    pub fn config(&self) -> &EngineConfig {
        &self.shared.config
    }

    /// Whether the engine serves.
    pub fn health(&self) -> Health {
        lock(&self.shared.inbox).health.clone()
    }

    /// Why the engine failed, if it did: the process should then end with an error.
    pub fn fault(&self) -> Option<EngineFault> {
        match self.health() {
            Health::Failed(fault) => Some(fault),
            _ => None,
        }
    }

    /// Blocks until the engine thread has ended, and says why if it failed: for a thread whose part it is to end the
    /// process then.
    pub fn wait(&self) -> Option<EngineFault> {
        let inbox = lock(&self.shared.inbox);
        let running = |inbox: &mut Inbox| !inbox.ended;
        drop(self.shared.ended.wait_while(inbox, running).unwrap_or_else(PoisonError::into_inner));
        self.fault()
    }

    /// Shuts down and waits for the engine to end, whoever else does too. Must not be called from a sink.
    pub fn shutdown(&self, how: Shutdown) {
        self.shared.stop(how);
        self.wait();
        self.shared.join();
    }
}

impl std::fmt::Debug for EngineHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineHandle").field("health", &self.health()).finish_non_exhaustive()
    }
}

struct StopOnDrop(Arc<Shared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop(Shutdown::Stop);
        // A process that ended meanwhile would end under the feet of the device's driver.
        self.0.join();
    }
}

/// What the handles and the engine thread both see.
pub(crate) struct Shared {
    pub limits: RequestLimits,
    pub config: EngineConfig,
    pub next_id: AtomicU64,
    /// Something is in the inbox. Read once a step, so that a step takes no lock for an empty inbox.
    pub rung: AtomicBool,
    pub inbox: Mutex<Inbox>,
    pub bell: Condvar,
    pub ended: Condvar,
    pub published: Mutex<Published>,
}

/// What callers send.
pub(crate) struct Inbox {
    pub submissions: VecDeque<Submission>,
    /// Requests that end, and why.
    pub ends: Vec<(RequestId, FinishReason)>,
    pub stop: Option<Shutdown>,
    pub health: Health,
    /// The engine thread takes nothing any more: what is sent now would stay.
    pub closed: bool,
    /// Everybody was told, and the thread is about to end.
    pub ended: bool,
    /// Requests submitted and not yet admitted, here and in the engine's own queue.
    pub queued: usize,
    pub submitted: u64,
    pub refused_full: u64,
    /// Mean time between the ends of requests.
    pub end_every_ms: f64,
    pub thread: Option<JoinHandle<()>>,
}

impl Inbox {
    fn retry_after_ms(&self) -> u64 {
        self.end_every_ms.clamp(1_000.0, 60_000.0) as u64
    }
}

/// What the engine shows.
pub(crate) struct Published {
    pub stats: EngineStats,
    pub steps: VecDeque<StepRecord>,
}

impl Shared {
    pub fn new(limits: RequestLimits, config: EngineConfig) -> Self {
        Shared {
            limits,
            config,
            next_id: AtomicU64::new(1),
            rung: AtomicBool::new(false),
            inbox: Mutex::new(Inbox {
                submissions: VecDeque::new(),
                ends: Vec::new(),
                stop: None,
                health: Health::Ready,
                closed: false,
                ended: false,
                queued: 0,
                submitted: 0,
                refused_full: 0,
                end_every_ms: 0.0,
                thread: None,
            }),
            bell: Condvar::new(),
            ended: Condvar::new(),
            published: Mutex::new(Published {
                stats: EngineStats::default(),
                steps: VecDeque::with_capacity(KEPT_STEPS),
            }),
        }
    }

    fn ring(&self, inbox: MutexGuard<'_, Inbox>) {
        self.rung.store(true, Ordering::Release);
        drop(inbox);
        self.bell.notify_one();
    }

    fn stop(&self, how: Shutdown) {
        let mut inbox = lock(&self.inbox);
        if inbox.health == Health::Ready {
            inbox.health = Health::Draining;
        }
        if inbox.stop != Some(Shutdown::Stop) {
            inbox.stop = Some(how);
        }
        self.ring(inbox);
    }

    /// Waits for the engine thread, unless somebody else does or it is the caller: a sink may hold the last handle.
    fn join(&self) {
        let thread = lock(&self.inbox).thread.take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            // A panic was caught inside, and is the engine's fault; there is nothing left to learn from the result.
            let _ = thread.join();
        }
    }

    /// The engine thread's sleep: until something is sent, or for `at_most`.
    pub fn sleep(&self, at_most: Option<Duration>) {
        let inbox = lock(&self.inbox);
        let quiet = |_: &mut Inbox| !self.rung.load(Ordering::Acquire);
        match at_most {
            Some(time) => drop(self.bell.wait_timeout_while(inbox, time, quiet)),
            None => drop(self.bell.wait_while(inbox, quiet)),
        }
    }
}

/// A lock whose holder panicked still guards plain numbers and lists: nothing in them can be half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
