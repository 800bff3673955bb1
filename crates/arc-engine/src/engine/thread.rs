//! The engine thread: take what callers sent, read what landed, admit, plan, enqueue.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use arc_device::DeviceLoop;
use arc_device::count::Counters;
use arc_device::ops::sample::Scratch;
use arc_device::step::{Landed, Limits, Part, Row, StepDelta, landed_flags};
use tracing::{debug, info, warn};

use crate::burst::{Burst, InFlight};
use crate::engine::ends::EndedBy;
use crate::engine::handle::{EngineFault, KEPT_STEPS, Shared, Shutdown, lock};
use crate::engine::{EngineConfig, RequestId, SampleOn, Speculate};
use crate::grammar::MaskPool;
use crate::request::FinishReason;
use crate::sampler::HostDraw;
use crate::scheduler::kept::Prefixes;
use crate::scheduler::queue::Queue;
use crate::scheduler::{Scheduler, SchedulerConfig, StepPlan, Want};
use crate::sequence::{Sequence, Submission, Taken, micros};
use crate::stats::split::SplitMean;
use crate::stats::{EngineStats, StepRecord};

/// Everything that the engine thread owns.
pub(crate) struct EngineThread<L> {
    pub(super) config: EngineConfig,
    pub(super) shared: Arc<Shared>,
    pub(super) burst: Burst<L>,
    pub(super) scheduler: Scheduler,
    /// For rows that the host draws; made with the first.
    pub(super) scratch: Option<Scratch>,
    pub(super) masks: MaskPool,
    pub(super) queue: Queue<Submission>,
    /// By slot.
    pub(super) sequences: Vec<Option<Sequence>>,
    /// Changes that the next `stage` sends.
    pub(super) delta: StepDelta,
    pub(super) plan: StepPlan,
    /// Head rows that the host draws in this step.
    pub(super) host_heads: Vec<u32>,
    /// The row table as it was last staged.
    staged: Vec<Row>,
    pub(super) stats: EngineStats,
    split: SplitMean,
    /// Counters up to the last step: a step's cost is what they moved since.
    counted: Counters,
    last_commit_ns: u64,
    idle: bool,
    stop: Option<Shutdown>,
    pub(super) arrivals: VecDeque<Submission>,
    ends: Vec<(RequestId, FinishReason)>,
    /// Sequences that ended in the step being read; told so once the step's record is out.
    pub(super) ended: Vec<(Sequence, FinishReason, Option<String>)>,
    pub(super) last_end: Instant,
}

impl<L: DeviceLoop> EngineThread<L> {
    pub fn new(config: EngineConfig, limits: Limits, shared: Arc<Shared>, dev: L) -> Self {
        let burst = Burst::new(dev, config.poll_limit);
        let max_drafts = burst.max_drafts();
        if max_drafts == 0 && matches!(config.speculate, Speculate::Fixed(_)) {
            warn!("there is nothing that could draft tokens: none are speculated on");
        }
        let scheduler = Scheduler::new(SchedulerConfig {
            speculate: config.speculate,
            max_drafts,
            prefixes: match (config.switches.prefix_cache, burst.rewinds()) {
                (false, _) => Prefixes::Off,
                (true, false) => Prefixes::Whole,
                (true, true) => Prefixes::Any,
            },
            limits,
            buckets: config.buckets.clone(),
            burst: config.burst.max(1),
            mixed_step_us: config.mixed_step_ms * 1e3,
        });
        let slots = scheduler.slots();
        if slots < limits.slots {
            warn!(slots, asked = limits.slots, "a step has too few rows or heads for all slots");
        }
        let mut engine = EngineThread {
            masks: MaskPool::new(config.mask_workers),
            queue: Queue::default(),
            sequences: (0..slots).map(|_| None).collect(),
            delta: StepDelta { release: Vec::with_capacity(slots), ..StepDelta::default() },
            plan: StepPlan::default(),
            host_heads: Vec::with_capacity(slots),
            staged: Vec::new(),
            stats: EngineStats::default(),
            split: SplitMean::default(),
            counted: burst.counters(),
            last_commit_ns: 0,
            idle: true,
            stop: None,
            arrivals: VecDeque::new(),
            ends: Vec::new(),
            ended: Vec::with_capacity(slots),
            last_end: Instant::now(),
            config,
            shared,
            burst,
            scheduler,
            scratch: None,
        };
        engine.publish(None);
        engine
    }

    /// Runs until it is stopped or fails, and leaves nobody waiting.
    pub fn main(mut self) {
        let fault = match catch_unwind(AssertUnwindSafe(|| self.run())) {
            Ok(Ok(())) => None,
            Ok(Err(fault)) => Some(fault),
            Err(panic) => Some(EngineFault::Panic(panic_message(&*panic))),
        };
        self.close(fault);
    }

    fn run(&mut self) -> Result<(), EngineFault> {
        loop {
            self.take_inbox();
            self.land()?;
            self.admit();
            if self.burst.in_flight() < self.window() && self.issue()? {
                continue;
            }
            if self.burst.in_flight() > 0 {
                self.wait()?;
                continue;
            }
            // All rows of these sequences have landed, and none said that it was the last: they would wait for ever.
            assert_eq!(self.scheduler.n_running(), 0, "sequences ran to their length and did not end");
            if self.stop.is_some() && self.queue.is_empty() {
                return Ok(());
            }
            self.idle = true;
            self.shared.sleep(None);
        }
    }

    /// Steps that may be in flight once the next is enqueued.
    fn window(&self) -> usize {
        if self.config.switches.device_loop { self.scheduler.window() } else { 1 }
    }

    /// Takes what callers sent since the last look.
    fn take_inbox(&mut self) {
        if !self.shared.rung.swap(false, Ordering::AcqRel) {
            return;
        }
        {
            let mut inbox = lock(&self.shared.inbox);
            std::mem::swap(&mut inbox.submissions, &mut self.arrivals);
            std::mem::swap(&mut inbox.ends, &mut self.ends);
            self.stop = inbox.stop;
        }
        while let Some(submission) = self.arrivals.pop_front() {
            self.stats.arrival_steps_max = self.stats.arrival_steps_max.max(self.burst.in_flight() as u64);
            let blocks = Limits::blocks_for(submission.request.total_tokens() as usize);
            self.queue.push(submission, blocks);
        }
        while let Some((id, reason)) = self.ends.pop() {
            self.end_for_caller(id, reason);
        }
        if self.stop == Some(Shutdown::Stop) {
            self.cancel_all();
        }
        self.finish_ended();
    }

    /// Gives places to waiting requests for as long as there are some.
    fn admit(&mut self) {
        while let Some(free_blocks) = self.scheduler.admissible_blocks() {
            let Some(submission) = self.queue.pop_admissible(free_blocks) else { break };
            let request = submission.request.request();
            let (prompt, max_out): (Arc<[u32]>, _) = (request.prompt.as_slice().into(), submission.request.max_out());
            let declined = self.burst.declines(&request.sampling);
            if let Some(why) = declined {
                self.stats.declined[why as usize] += 1;
            }
            let host = self.config.switches.sample_on == SampleOn::Host || declined.is_some();
            let vocab = self.shared.limits.vocab;
            let draw = host.then(|| HostDraw::new(&request.sampling, &request.stop_ids, &prompt, max_out, vocab));
            let want = Want {
                prompt,
                max_out,
                score: request.prompt_logprobs.is_some(),
                two_part: host || request.grammar.is_some(),
                speculates: !host && request.grammar.is_none() && request.logprobs.is_none(),
                depth: request.depth,
            };
            if want.max_out == 0 && want.scored_rows() == 0 {
                // Nothing to draw and nothing to score.
                self.finish_queued(submission, FinishReason::Length);
                continue;
            }
            let place = self.scheduler.admit(want.clone()).expect("slot and blocks are free");
            let slot = usize::from(place.slot);
            lock(&self.shared.inbox).queued -= 1;
            self.stats.cached_tokens += u64::from(place.cached);
            let keeps = self.config.switches.prefix_cache;
            let (mut sequence, init) = Sequence::admit(submission, place, &want, draw, keeps);
            let queue_us = micros(sequence.submitted, sequence.admitted);
            debug!(id = sequence.id.0, slot, n_prompt = want.prompt.len(), queue_us, "admitted");
            self.stats.queue_time.add(queue_us as f64);
            if let Some(job) = sequence.start_matcher(vocab.div_ceil(32) as usize) {
                self.masks.submit(job);
            }
            self.delta.admit.push(init);
            self.sequences[slot] = Some(sequence);
        }
    }

    /// Plans a step and enqueues it. `false`: there is nothing to run.
    fn issue(&mut self) -> Result<bool, EngineFault> {
        let began = Instant::now();
        let Some(key) = self.scheduler.plan(&mut self.plan) else { return Ok(false) };
        let planned = Instant::now();
        if self.plan.rows != self.staged {
            std::mem::swap(&mut self.plan.rows, &mut self.staged);
            self.delta.rows = Some(std::mem::take(&mut self.staged));
        }
        self.stage()?;
        let mut record = StepRecord {
            rows: key.rows,
            seqs: self.plan.seqs,
            plan_us: micros_f64(planned - began),
            ..StepRecord::default()
        };
        let two_part = key.part == Part::Forward;
        let step = if two_part { self.two_part(key, &mut record)? } else { self.burst.enqueue(key)? };
        let counters = self.burst.counters();
        record.step = step;
        record.enqueue_us = micros_f64(planned.elapsed()) - record.mask_wait_us;
        record.counted = counters - self.counted;
        self.counted = counters;
        self.stats.prompt_tokens += u64::from(self.plan.prompt_rows);
        self.stats.padding_rows += u64::from(key.rows - self.plan.n_rows);
        self.stats.two_part_steps += u64::from(two_part);
        self.burst.follow(InFlight {
            step,
            n_heads: self.plan.n_heads,
            drafts: (key.drafts == 0 || key.draft_rows > 0).then_some(key.drafts),
            expected_us: self.scheduler.cost().predict_us(key.rows),
            after_idle: std::mem::take(&mut self.idle),
            two_part,
            record,
        });
        Ok(true)
    }

    /// Sends the changes that have come together. Their vectors are kept for the next.
    pub(super) fn stage(&mut self) -> Result<(), EngineFault> {
        let delta = &mut self.delta;
        let quiet = delta.release.is_empty() && delta.admit.is_empty() && delta.rows.is_none();
        if quiet && delta.masks.is_empty() && delta.forced.is_empty() {
            return Ok(());
        }
        self.burst.stage(delta)?;
        delta.release.clear();
        delta.admit.clear();
        delta.forced.clear();
        if let Some(rows) = delta.rows.take() {
            self.staged = rows;
        }
        for (slot, bits) in delta.masks.drain(..) {
            if let Some(sequence) = &mut self.sequences[usize::from(slot)] {
                sequence.give_back_bits(bits);
            }
        }
        Ok(())
    }

    /// Reads every step that has landed.
    pub(super) fn land(&mut self) -> Result<(), EngineFault> {
        while let Some(mut step) = self.burst.next_landed()? {
            let began = Instant::now();
            let mut scored = false;
            let mut heads = 0..step.n_heads as usize;
            while let Some(head_idx) = heads.next() {
                let landed = self.burst.landed(step.step, head_idx);
                scored |= landed.flags & landed_flags::SCORED != 0;
                let verified = Verified::of(heads.clone().map(|idx| self.burst.landed(step.step, idx)));
                heads.start += verified.rows as usize;
                step.record.drafted += verified.drafts;
                step.record.accepted += landed.n_tokens.saturating_sub(1);
                step.record.tokens += self.take(&landed, verified);
            }
            if scored {
                self.flush_scores();
            }
            self.clock(&mut step);
            self.burst.read_to(step.step);
            step.record.drain_us = micros_f64(began.elapsed());
            self.stats.step(&step.record);
            if let Some(split) = self.split.add(&step.record) {
                info!(target: "arc::step", "{split}");
                self.stats.split = Some(split);
            }
            self.publish(Some(step.record));
            self.finish_ended();
        }
        Ok(())
    }

    /// Waits for the oldest step in flight, or until somebody rings.
    pub(super) fn wait(&mut self) -> Result<(), EngineFault> {
        let shared = &self.shared;
        Ok(self.burst.wait(|time: Duration| shared.sleep(Some(time)))?)
    }

    /// Hands what a row left to its sequence. Returns the tokens that it emitted.
    fn take(&mut self, landed: &Landed, verified: Verified) -> u32 {
        let slot = landed.slot as usize;
        assert!(slot < self.sequences.len(), "a row landed for slot {slot} of {}", self.sequences.len());
        let current = self.sequences[slot].as_mut().filter(|s| s.place.generation == landed.generation);
        let Some(sequence) = current else {
            // Its sequence has ended: what was in flight for it goes nowhere, least of all to the next one.
            self.stats.dropped_tokens += u64::from(landed.n_tokens);
            return 0;
        };
        if landed.flags & landed_flags::SCORED == 0 {
            self.scheduler.landed(sequence.place.slot, verified.rows, verified.drafts, landed.n_tokens);
        }
        let before = sequence.n_out;
        let taken = sequence.take(landed);
        let emitted = sequence.n_out - before;
        self.stats.output_tokens += u64::from(emitted);
        match taken {
            Taken::GoesOn => {
                if emitted > 0
                    && let Some(job) = sequence.advance_matcher(landed.tokens[emitted as usize - 1])
                {
                    self.masks.submit(job);
                }
            }
            Taken::Over(reason, error) => {
                self.stats.row_faults += u64::from(reason == FinishReason::Error);
                self.end(slot, EndedBy::Device, reason, error.map(str::to_owned));
            }
            Taken::Complete => self.end(slot, EndedBy::Host, FinishReason::Length, None),
            Taken::Gone => self.end(slot, EndedBy::Host, FinishReason::Cancelled, None),
        }
        emitted
    }

    fn flush_scores(&mut self) {
        for slot in 0..self.sequences.len() {
            if self.sequences[slot].as_mut().is_some_and(|s| !s.flush_scores()) {
                self.end(slot, EndedBy::Host, FinishReason::Cancelled, None);
            }
        }
    }

    /// Fills in what the device noted, and lets the cost model learn from them.
    fn clock(&mut self, step: &mut InFlight) {
        let clocks = self.burst.clocks(step.step);
        let us = |from: u64, to: u64| to.saturating_sub(from) as f64 / 1e3;
        // Between a step's two parts the device waits while the host draws.
        let host_us = step.record.host_us;
        step.record.fwd_us = (us(clocks.start_ns, clocks.sample_ns) - host_us).max(0.0);
        step.record.sample_us = us(clocks.sample_ns, clocks.commit_ns) + host_us;
        step.record.kv_bytes = clocks.kv_bytes;
        if !step.after_idle {
            step.record.gap_us = us(self.last_commit_ns, clocks.start_ns);
        }
        self.last_commit_ns = clocks.commit_ns;
        if !step.two_part {
            self.scheduler.observe(step.record.rows, step.drafts, step.record.fwd_us, step.record.sample_us);
        }
    }

    /// Shows the numbers as they stand.
    pub(super) fn publish(&mut self, step: Option<StepRecord>) {
        let line = self.scheduler.cost().line();
        self.stats.running = self.scheduler.n_running();
        self.stats.slots = self.scheduler.slots();
        self.stats.kv_blocks_total = self.scheduler.blocks().total();
        self.stats.kv_blocks_kept = self.scheduler.kept_blocks();
        self.stats.kv_blocks_used =
            self.scheduler.blocks().total() - self.scheduler.blocks().free() - self.stats.kv_blocks_kept;
        self.stats.counters = self.burst.counters();
        self.stats.passes_max = self.queue.passes_max();
        (self.stats.cost_base_us, self.stats.cost_per_row_us) = (line.base_us, line.per_row_us);
        let mut published = lock(&self.shared.published);
        published.stats = self.stats;
        if let Some(step) = step {
            if published.steps.len() == KEPT_STEPS {
                published.steps.pop_front();
            }
            published.steps.push_back(step);
        }
    }
}

/// The rows behind one that drew, which verified drafts.
#[derive(Debug, Clone, Copy, Default)]
struct Verified {
    rows: u32,
    /// Those of them that had a draft.
    drafts: u32,
}

impl Verified {
    /// Of the entries that follow the row's.
    fn of(entries: impl Iterator<Item = Landed>) -> Verified {
        let mut verified = Verified::default();
        for landed in entries.take_while(|landed| landed.flags & landed_flags::VERIFIED != 0) {
            verified.rows += 1;
            verified.drafts += u32::from(landed.flags & landed_flags::INERT == 0);
        }
        verified
    }
}

pub(super) fn micros_f64(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
