//! Steps whose draw the host has a part in: a grammar's mask, or a row that is drawn on the host.
//!
//! Only the draw of a step needs the token before it; the forward pass does not. So the forward part goes in first, right
//! behind the last step; then the host reads the last token, and the masks are written while the device computes.

use std::time::{Duration, Instant};

use arc_device::DeviceLoop;
use arc_device::ops::sample::Scratch;
use arc_device::step::{Forced, Part, StepKey};

use crate::engine::ends::EndedBy;
use crate::engine::handle::EngineFault;
use crate::engine::thread::{EngineThread, micros_f64};
use crate::grammar::{MaskDone, MatcherState};
use crate::request::FinishReason;
use crate::stats::StepRecord;

impl<L: DeviceLoop> EngineThread<L> {
    /// Enqueues both parts of the planned step.
    pub(super) fn two_part(&mut self, key: StepKey, record: &mut StepRecord) -> Result<u64, EngineFault> {
        // Drafts follow the draws.
        self.burst.enqueue_forward(key.drafting(0, 0))?;
        while self.burst.in_flight() > 0 {
            self.land()?;
            if self.burst.in_flight() > 0 {
                self.wait()?;
            }
        }
        let began = Instant::now();
        self.await_masks();
        record.mask_wait_us = micros_f64(began.elapsed());
        let fetched = self.draw_on_host()?;
        self.stage_masks();
        self.stage()?;
        let step = self.burst.enqueue(StepKey { part: Part::Sample, ..key })?;
        record.host_us = fetched.map_or(0.0, |fetched| micros_f64(fetched.elapsed()));
        Ok(step)
    }

    /// Waits for the masks of the rows that are about to be drawn.
    fn await_masks(&mut self) {
        let limit = Duration::from_millis(self.config.mask_timeout_ms);
        let deadline = Instant::now() + limit;
        while self.plan.two_part.iter().any(|&(_, slot)| self.awaits_mask(slot)) {
            match self.masks.next(deadline.saturating_duration_since(Instant::now())) {
                Some(done) => self.take_mask(done),
                None => self.give_up_masks(),
            }
        }
        self.finish_ended();
    }

    fn awaits_mask(&self, slot: u16) -> bool {
        self.sequences[usize::from(slot)].as_ref().is_some_and(|s| matches!(s.matcher, MatcherState::Working))
    }

    fn take_mask(&mut self, done: MaskDone) {
        let slot = usize::from(done.slot);
        let current = self.sequences[slot].as_mut().filter(|s| s.place.generation == done.generation);
        // Its sequence may have ended while the worker was busy.
        let Some(sequence) = current else { return };
        match done.result {
            Ok(matcher) => sequence.matcher = MatcherState::Ready(matcher),
            Err(error) => {
                self.stats.row_faults += 1;
                self.end(slot, EndedBy::Host, FinishReason::Grammar, Some(error.to_string()));
            }
        }
    }

    /// Ends the rows whose masks did not come: one slow grammar must not hold up everybody else for ever.
    fn give_up_masks(&mut self) {
        for idx in 0..self.plan.two_part.len() {
            let (_, slot) = self.plan.two_part[idx];
            if self.awaits_mask(slot) {
                self.stats.row_faults += 1;
                let error = format!("grammar: no mask within {} ms", self.config.mask_timeout_ms);
                self.end(usize::from(slot), EndedBy::Host, FinishReason::Error, Some(error));
            }
        }
    }

    /// Fetches the logits of the rows that the host draws, in one copy, and draws. When they were there, if there are such rows.
    fn draw_on_host(&mut self) -> Result<Option<Instant>, EngineFault> {
        let (sequences, plan) = (&self.sequences, &self.plan);
        let rows = || {
            plan.two_part.iter().filter_map(|&(head, slot)| {
                let sequence = sequences[usize::from(slot)].as_ref()?;
                Some((head, sequence, sequence.host.as_ref()?))
            })
        };
        self.host_heads.clear();
        self.host_heads.extend(rows().map(|(head, ..)| head));
        if self.host_heads.is_empty() {
            return Ok(None);
        }
        self.burst.fetch(&self.host_heads)?;
        let fetched = Instant::now();
        let (vocab, context) = (self.shared.limits.vocab as usize, self.shared.limits.context as usize);
        let scratch = self.scratch.get_or_insert_with(|| Scratch::new(vocab, context));
        for (idx, (_, sequence, host)) in rows().enumerate() {
            let drawn = host.draw(self.burst.fetched(idx), sequence.mask_bits(), scratch);
            let (token, fault) = drawn.map_or_else(|fault| (0, fault.landed_flag()), |token| (token, 0));
            self.delta.forced.push(Forced { slot: sequence.place.slot, token, fault });
        }
        self.stats.host_rows += self.host_heads.len() as u64;
        Ok(Some(fetched))
    }

    /// Puts the masks of device rows into the delta; [`EngineThread::stage`] gives their memory back.
    fn stage_masks(&mut self) {
        for &(_, slot) in &self.plan.two_part {
            let Some(sequence) = self.sequences[usize::from(slot)].as_mut().filter(|s| s.host.is_none()) else {
                continue;
            };
            if let Some(bits) = sequence.lend_bits() {
                self.delta.masks.push((slot, bits));
            }
        }
    }
}
