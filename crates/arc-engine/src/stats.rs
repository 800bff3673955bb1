//! What a step cost, and what all of them did. Log, metrics, benchmarks and tests read the same records.

pub mod histogram;
pub mod split;

use arc_device::count::Counters;
use arc_device::ops::sample::Declined;

use crate::request::FinishReason;
use crate::stats::histogram::Histogram;
use crate::stats::split::StepSplit;

/// One step: what it ran, what it moved, where its time went. Times are microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepRecord {
    /// Step number, from 1.
    pub step: u64,
    /// Rows, padding included.
    pub rows: u32,
    /// Sequences that had rows.
    pub seqs: u32,
    /// Tokens that it landed.
    pub tokens: u32,
    /// Drafts that it verified.
    pub drafted: u32,
    /// Those of them that were emitted.
    pub accepted: u32,
    /// What was launched, replayed, allocated, copied and waited for, and the bytes of weights that it had to read. A step that
    /// warm-up missed is recorded here.
    pub counted: Counters,
    /// Deciding what runs.
    pub plan_us: f64,
    /// Handing it to the device; on a device that runs a step where it is enqueued, the step itself too.
    pub enqueue_us: f64,
    /// Device time from the step's start to its logits; of rows with a grammar, to their masks where these come later.
    pub fwd_us: f64,
    /// Device time from the logits to the commit, which is drawing, the host's too, and drafting.
    pub sample_us: f64,
    /// Of it the time of rows that the host draws, from where it has their logits until the device has what it drew.
    pub host_us: f64,
    /// Device time between the last step's commit and this one's start; 0 where the engine had nothing to run.
    pub gap_us: f64,
    /// Reading the ring and sending events.
    pub drain_us: f64,
    /// Waiting for grammar masks, an upper bound of what the device waited.
    pub mask_wait_us: f64,
    /// Bytes of KV cache that the step had to read, as its device found when it ran.
    pub kv_bytes: u64,
}

/// Requests by how they ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FinishedCounts {
    /// On a stop id.
    pub stop: u64,
    /// At `max_tokens`.
    pub length: u64,
    /// By their caller.
    pub cancelled: u64,
    /// By a fault, or a grammar that could not go on.
    pub error: u64,
}

impl FinishedCounts {
    pub(crate) fn add(&mut self, reason: FinishReason) {
        match reason {
            FinishReason::Stop => self.stop += 1,
            FinishReason::Length => self.length += 1,
            FinishReason::Cancelled => self.cancelled += 1,
            FinishReason::Grammar | FinishReason::Error => self.error += 1,
        }
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.stop + self.length + self.cancelled + self.error
    }
}

/// How long a request took, in microseconds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestTimes {
    pub first_token_us: Option<f64>,
    /// Mean of the tokens after the first.
    pub token_us: Option<f64>,
    pub request_us: f64,
}

/// A snapshot of the engine: totals since it started, and what stands now.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct EngineStats {
    /// Requests accepted by `submit`.
    pub submitted: u64,
    /// Requests refused because the queue was full.
    pub refused_full: u64,
    /// Requests that ended.
    pub finished: FinishedCounts,
    /// Requests that wait for admission.
    pub queued: usize,
    /// The bound of the queue.
    pub queue_cap: usize,
    /// Sequences in slots.
    pub running: usize,
    /// Slots.
    pub slots: usize,
    /// KV blocks held by sequences.
    pub kv_blocks_used: usize,
    /// KV blocks of ended sequences that are kept until somebody needs them.
    pub kv_blocks_kept: usize,
    /// KV blocks of the pool.
    pub kv_blocks_total: usize,
    /// Prompt tokens that did not run, since a sequence before had left them.
    pub cached_tokens: u64,
    /// Prompt tokens run.
    pub prompt_tokens: u64,
    /// Tokens emitted to callers.
    pub output_tokens: u64,
    /// Tokens that landed after their sequence had ended, and were dropped.
    pub dropped_tokens: u64,
    /// Drafts verified.
    pub drafted: u64,
    /// Drafts emitted: tokens beyond one a step.
    pub accepted: u64,
    /// Steps landed.
    pub steps: u64,
    /// Rows run, padding included.
    pub rows: u64,
    /// Padding rows run.
    pub padding_rows: u64,
    /// Steps that ran in two parts, for a grammar or for host rows.
    pub two_part_steps: u64,
    /// Rows drawn on the host.
    pub host_rows: u64,
    /// Sequences whose rows the device declined to draw, by [`Declined`].
    pub declined: [u64; Declined::ALL.len()],
    /// Bytes of KV cache that steps had to read.
    pub kv_bytes: u64,
    /// Everything that was counted.
    pub counters: Counters,
    /// Microseconds that the engine thread waited for grammar masks.
    pub mask_wait_us: f64,
    /// Row faults: requests that ended with `error` while the device went on.
    pub row_faults: u64,
    /// The most steps that were in flight when a request arrived: what an arrival waits for.
    pub arrival_steps_max: u64,
    /// The most times that a waiting request was passed by smaller ones.
    pub passes_max: u32,
    /// Fitted cost of a step without rows.
    pub cost_base_us: f64,
    /// Fitted cost of a row.
    pub cost_per_row_us: f64,
    /// The last mean split of step times, once there is one.
    pub split: Option<StepSplit>,
    /// Submission to admission.
    pub queue_time: Histogram,
    /// Submission to first token.
    pub first_token_time: Histogram,
    /// Mean time of a token after the first, one entry a request.
    pub token_time: Histogram,
    /// Submission to end.
    pub request_time: Histogram,
    /// Commit to commit.
    pub step_time: Histogram,
}

impl EngineStats {
    pub(crate) fn step(&mut self, r: &StepRecord) {
        self.steps += 1;
        self.rows += u64::from(r.rows);
        self.drafted += u64::from(r.drafted);
        self.accepted += u64::from(r.accepted);
        self.kv_bytes += r.kv_bytes;
        self.mask_wait_us += r.mask_wait_us;
        self.step_time.add(r.gap_us + r.fwd_us + r.sample_us);
    }

    pub(crate) fn end(&mut self, times: &RequestTimes, reason: FinishReason) {
        self.finished.add(reason);
        self.request_time.add(times.request_us);
        if let Some(us) = times.first_token_us {
            self.first_token_time.add(us);
        }
        if let Some(us) = times.token_us {
            self.token_time.add(us);
        }
    }
}
