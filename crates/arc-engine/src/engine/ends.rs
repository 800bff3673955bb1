//! How requests end: by themselves, by their callers, or with the engine.

use std::time::Instant;

use arc_device::DeviceLoop;
use tracing::{debug, error};

use crate::engine::RequestId;
use crate::engine::handle::{EngineFault, Health, lock};
use crate::engine::thread::EngineThread;
use crate::request::FinishReason;
use crate::sequence::{Sequence, Submission};

/// Weight of the newest interval in the mean time between the ends of requests.
const NEWEST_END: f64 = 0.1;

/// Who knew first that a sequence is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndedBy {
    /// Its slot has run nothing since.
    Device,
    /// Steps in flight may still run it.
    Host,
}

impl<L: DeviceLoop> EngineThread<L> {
    /// Ends a request, wherever it is, because its caller says so.
    pub(super) fn end_for_caller(&mut self, id: RequestId, reason: FinishReason) {
        let runs = |s: &Option<Sequence>| s.as_ref().is_some_and(|s| s.id == id);
        if let Some(submission) = self.queue.remove(|s| s.id == id) {
            self.finish_queued(submission, reason);
        } else if let Some(slot) = self.sequences.iter().position(runs) {
            let place = self.sequences[slot].as_ref().expect("it runs").place.slot;
            self.end(slot, EndedBy::Host, reason, None);
            // The device knows of no end.
            if self.delta.release.last() != Some(&place) {
                self.delta.release.push(place);
            }
        }
    }

    pub(super) fn cancel_all(&mut self) {
        while let Some(submission) = self.queue.pop() {
            self.finish_queued(submission, FinishReason::Cancelled);
        }
        for slot in 0..self.sequences.len() {
            if self.sequences[slot].is_some() {
                self.end(slot, EndedBy::Host, FinishReason::Cancelled, None);
            }
        }
    }

    /// Ends a request that never got a slot.
    pub(super) fn finish_queued(&mut self, submission: Submission, reason: FinishReason) {
        lock(&self.shared.inbox).queued -= 1;
        self.stats.finished.add(reason);
        self.publish(None);
        submission.finish(reason, None);
    }

    /// Ends a slot's sequence. Its last event is sent by [`EngineThread::finish_ended`].
    pub(super) fn end(&mut self, slot: usize, by: EndedBy, reason: FinishReason, error: Option<String>) {
        let mut sequence = self.sequences[slot].take().expect("a sequence ends once");
        let slot = sequence.place.slot;
        // Where the host ends it, steps in flight go on: that hurts nobody where later positions are not looked at.
        let good = by == EndedBy::Device || self.burst.rewinds();
        match sequence.kept().filter(|_| good && reason != FinishReason::Error) {
            Some(tokens) => self.scheduler.keep(slot, tokens),
            None => self.scheduler.end(slot),
        }
        if let Some(at) = self.delta.admit.iter().position(|init| init.slot == slot) {
            // The device has not heard of it, and what is released is released before anything is admitted.
            self.delta.admit.remove(at);
        } else if !matches!(reason, FinishReason::Stop | FinishReason::Length) || sequence.only_scores() {
            // Releasing a slot that ended by itself would change nothing.
            self.delta.release.push(slot);
        }
        self.stats.end(&sequence.times(), reason);
        self.ended.push((sequence, reason, error));
    }

    /// Tells the sequences that ended, after their numbers are out: who hears of an end also sees it in the stats.
    pub(super) fn finish_ended(&mut self) {
        if self.ended.is_empty() {
            return;
        }
        {
            let mut inbox = lock(&self.shared.inbox);
            let every_ms = self.last_end.elapsed().as_secs_f64() * 1e3 / self.ended.len() as f64;
            inbox.end_every_ms += (every_ms - inbox.end_every_ms) * NEWEST_END;
            self.last_end = Instant::now();
        }
        self.publish(None);
        for (mut sequence, reason, error) in self.ended.drain(..) {
            debug!(id = sequence.id.0, ?reason, error, n_out = sequence.n_out, "finished");
            sequence.finish(reason, error);
        }
    }

    /// Ends everything that is left, after health says why.
    pub(super) fn close(&mut self, fault: Option<EngineFault>) {
        let (reason, message) = match &fault {
            Some(fault) => {
                error!(%fault, "the engine failed");
                (FinishReason::Error, Some(fault.to_string()))
            }
            None => (FinishReason::Cancelled, None),
        };
        {
            let mut inbox = lock(&self.shared.inbox);
            inbox.health = fault.map_or(Health::Stopped, Health::Failed);
            inbox.closed = true;
            inbox.queued = 0;
            self.arrivals.append(&mut inbox.submissions);
        }
        while let Some(submission) = self.queue.pop() {
            self.arrivals.push_back(submission);
        }
        self.arrivals.iter().for_each(|_| self.stats.finished.add(reason));
        for sequence in self.sequences.iter_mut().filter_map(Option::take) {
            self.stats.end(&sequence.times(), reason);
            self.ended.push((sequence, reason, message.clone()));
        }
        self.stats.running = 0;
        (self.stats.kv_blocks_used, self.stats.kv_blocks_kept) = (0, 0);
        lock(&self.shared.published).stats = self.stats;
        for (mut sequence, reason, error) in self.ended.drain(..) {
            sequence.finish(reason, error);
        }
        for submission in self.arrivals.drain(..) {
            submission.finish(reason, message.clone());
        }
        lock(&self.shared.inbox).ended = true;
        self.shared.ended.notify_all();
    }
}
