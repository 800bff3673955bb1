//! Steps in flight: enqueued ahead of what has landed, watched without a wait that the device could feel.
//!
//! A device that runs a step where it is enqueued has landed it when [`Burst::enqueue`] returns; nothing here depends
//! on that, and nothing is slower for it.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use arc_device::count::Counters;
use arc_device::error::{DeviceError, Fault};
use arc_device::ops::sample::{Declined, SamplerConfig};
use arc_device::step::{Landed, Part, StepClocks, StepDelta, StepKey};
use arc_device::{DeviceLoop, StreamState};

use crate::stats::StepRecord;

/// Spinning on the head before sleeping: about what a sleep costs.
const SPIN: Duration = Duration::from_micros(50);
/// Between queries of the stream. The head is read far more often, and costs no driver call.
const QUERY_EVERY: Duration = Duration::from_millis(1);
/// Sleeping when a step is later than expected: short, as it may land any moment.
const LATE: Duration = Duration::from_micros(100);

/// A step that was enqueued and not yet read.
#[derive(Debug, Clone, Copy)]
pub struct InFlight {
    /// Its number.
    pub step: u64,
    /// Head rows that it lands.
    pub n_heads: u32,
    /// Drafts that it makes for a slot; `None` where a drafter only looks on.
    pub drafts: Option<u32>,
    /// Its record as far as the host knows it.
    pub record: StepRecord,
    /// What it is expected to take.
    pub expected_us: f64,
    /// Whether the step before was already over when this one was enqueued for want of work.
    pub after_idle: bool,
    /// Whether it ran in two parts, so that its device times hold waiting for the host.
    pub two_part: bool,
}

/// A device with its steps in flight.
#[derive(Debug)]
pub struct Burst<L> {
    dev: L,
    in_flight: VecDeque<InFlight>,
    /// The last step that was enqueued whole.
    enqueued: u64,
    /// A step whose forward part was enqueued alone.
    forward: Option<u64>,
    /// When the oldest step in flight is expected to land.
    due: Instant,
    queried: Instant,
    polls: u32,
    poll_limit: u32,
}

impl<L: DeviceLoop> Burst<L> {
    /// Nothing in flight. After `poll_limit` queries of the stream without a landing the device counts as stuck.
    pub fn new(dev: L, poll_limit: u32) -> Self {
        let now = Instant::now();
        Burst {
            enqueued: dev.head(),
            dev,
            in_flight: VecDeque::new(),
            forward: None,
            due: now,
            queried: now,
            polls: 0,
            poll_limit,
        }
    }

    /// Steps in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Applies changes before the next step.
    pub fn stage(&mut self, delta: &StepDelta) -> Result<(), DeviceError> {
        self.dev.stage(delta)
    }

    /// Enqueues the forward part of a step. Its sampling part is the next to be enqueued.
    pub fn enqueue_forward(&mut self, key: StepKey) -> Result<(), DeviceError> {
        assert!(self.forward.is_none() && key.part == Part::Forward, "{key} after {:?}", self.forward);
        self.forward = Some(self.dev.enqueue(key)?);
        Ok(())
    }

    /// Enqueues a whole step, or the rest of one.
    pub fn enqueue(&mut self, key: StepKey) -> Result<u64, DeviceError> {
        assert_eq!(self.forward.is_some(), key.part == Part::Sample, "{key} after {:?}", self.forward);
        let step = self.dev.enqueue(key)?;
        assert!(self.forward.take().is_none_or(|forward| forward == step), "two parts of a step have one number");
        assert_eq!(step, self.enqueued + 1, "steps are numbered one by one");
        self.enqueued = step;
        Ok(step)
    }

    /// Notes the facts of the step that was just enqueued.
    pub fn follow(&mut self, step: InFlight) {
        assert_eq!(step.step, self.enqueued, "followed as it is enqueued");
        if self.in_flight.is_empty() {
            self.expect(step.expected_us);
        }
        self.in_flight.push_back(step);
    }

    /// The oldest step in flight, if it has landed. A fault word comes before whatever landed with it.
    pub fn next_landed(&mut self) -> Result<Option<InFlight>, DeviceError> {
        let Some(&step) = self.in_flight.front() else { return Ok(None) };
        if self.dev.head() < step.step {
            return Ok(None);
        }
        self.check_fault()?;
        self.in_flight.pop_front();
        self.polls = 0;
        if let Some(next) = self.in_flight.front() {
            self.expect(next.expected_us);
        }
        Ok(Some(step))
    }

    /// What a head row of a landed step left.
    pub fn landed(&self, step: u64, head_idx: usize) -> Landed {
        self.dev.landed(step, head_idx)
    }

    /// When a landed step ran.
    pub fn clocks(&self, step: u64) -> StepClocks {
        self.dev.clocks(step)
    }

    /// Frees a landed step's place in the ring.
    pub fn read_to(&mut self, step: u64) {
        self.dev.read_to(step);
    }

    /// Whether the device draws rows with these parameters itself.
    pub fn declines(&self, sampling: &SamplerConfig) -> Option<Declined> {
        self.dev.declines(sampling)
    }

    /// The most drafts that a step can make for a slot.
    pub fn max_drafts(&self) -> u32 {
        self.dev.max_drafts()
    }

    /// See [`DeviceLoop::rewinds`].
    pub fn rewinds(&self) -> bool {
        self.dev.rewinds()
    }

    /// Everything that was counted.
    pub fn counters(&self) -> Counters {
        self.dev.counters()
    }

    /// Waits for the oldest step in flight: a short spin, then one pause of at most a millisecond, which the caller may
    /// cut short. Returns when it may have landed, or for the caller to look around and call again.
    pub fn wait(&mut self, pause: impl FnOnce(Duration)) -> Result<(), DeviceError> {
        let Some(step) = self.in_flight.front().map(|s| s.step) else { return Ok(()) };
        if self.spin(|dev| dev.head() >= step) {
            return Ok(());
        }
        let now = Instant::now();
        if now.duration_since(self.queried) >= QUERY_EVERY && self.query(step, |dev| dev.head() >= step)? {
            return Ok(());
        }
        let rest = self.due.saturating_duration_since(now);
        pause(if rest.is_zero() { LATE } else { rest.min(QUERY_EVERY) });
        Ok(())
    }

    /// Gathers head rows' logits of the step whose forward part was enqueued, and waits until they are here.
    pub fn fetch(&mut self, heads: &[u32]) -> Result<(), DeviceError> {
        let step = self.forward.expect("rows are fetched between the parts of a step");
        self.dev.fetch_rows(heads)?;
        let here = |dev: &L| (0..heads.len()).all(|idx| dev.fetched(idx).is_some());
        self.polls = 0;
        while !self.spin(here) {
            if self.queried.elapsed() >= QUERY_EVERY && self.query(step, here)? {
                break;
            }
            std::thread::sleep(LATE);
        }
        self.polls = 0;
        self.check_fault()
    }

    /// Logits of the `idx`-th row fetched, `[vocab]`.
    pub fn fetched(&self, idx: usize) -> &[f32] {
        self.dev.fetched(idx).expect("`fetch` waited for it")
    }

    fn expect(&mut self, us: f64) {
        self.due = Instant::now() + Duration::from_secs_f64((us / 1e6).clamp(0.0, 60.0));
    }

    fn spin(&self, here: impl Fn(&L) -> bool) -> bool {
        let began = Instant::now();
        loop {
            if here(&self.dev) {
                return true;
            }
            if began.elapsed() >= SPIN {
                return false;
            }
            std::hint::spin_loop();
        }
    }

    /// Asks the driver about the stream, and says whether what was waited for is here.
    ///
    /// NOTE: the state is read before the head. The other way round, a step that lands between the two reads makes the
    /// stream look idle and short.
    fn query(&mut self, step: u64, here: impl Fn(&L) -> bool) -> Result<bool, DeviceError> {
        self.queried = Instant::now();
        let state = self.dev.poll()?;
        let landed = self.dev.head();
        let arrived = here(&self.dev);
        self.check_fault()?;
        if arrived {
            return Ok(true);
        }
        if state == StreamState::Idle {
            // An idle stream has run everything: steps that did not land are lost, and so are rows that were fetched.
            return Err(DeviceError::Fault(Fault::LostStep { enqueued: self.enqueued.max(step), landed }));
        }
        self.polls += 1;
        if self.polls >= self.poll_limit {
            return Err(DeviceError::Fault(Fault::Stuck { step }));
        }
        Ok(false)
    }

    fn check_fault(&self) -> Result<(), DeviceError> {
        self.dev.fault().map_or(Ok(()), |fault| Err(DeviceError::Fault(fault)))
    }
}
