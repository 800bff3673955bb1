//! Row tables for stages that look at sequences.

use arc_device::ops::sample::SamplerConfig;
use arc_device::step::{BLOCK_TOKENS, Row, SlotInit, StepDelta, row_flags};

/// Neighbouring rows of one sequence, which has its slot and its blocks for itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Position of the first row.
    pub pos: usize,
    /// Rows.
    pub rows: usize,
    /// Whether they read and write anything; otherwise they are padding.
    pub live: bool,
}

/// Positions that every sequence has room for.
pub fn context(runs: &[Run]) -> usize {
    let longest = runs.iter().map(|run| run.pos + run.rows).max().unwrap_or(0);
    longest.next_power_of_two().max(128)
}

/// Admits a sequence for every run, and stages the rows of all. The sequence's blocks are scattered over its share of the
/// pool, which holds `context` positions a run.
pub fn delta(runs: &[Run], context: usize) -> StepDelta {
    let per = context / BLOCK_TOKENS;
    let mut delta = StepDelta::default();
    let mut rows = Vec::new();
    for (slot, run) in runs.iter().enumerate() {
        if run.live {
            delta.admit.push(SlotInit {
                slot: slot as u16,
                generation: 1,
                max_out: 4,
                flags: 0,
                stop_ids: Vec::new(),
                sampling: SamplerConfig::default(),
                // 77 and a power of two have no common factor.
                blocks: (0..per).map(|b| (slot * per + (b * 77 + 5) % per) as u32).collect(),
                penalty_prompt: Vec::new(),
                pos: run.pos as u32,
                logprobs: None,
                prompt_top: 0,
            });
        }
        let flags = if run.live { 0 } else { row_flags::PADDING };
        rows.extend((0..run.rows).map(|i| Row { slot: slot as u16, flags, offset: i as u32, token: 1, target: 0 }));
    }
    delta.rows = Some(rows);
    delta
}
