//! Which sequences run, and which of their rows the next step holds.
//!
//! The scheduler plans from what was *enqueued*, never from what landed: positions and output lengths are known before
//! their tokens are. So it can plan several steps ahead, and a sequence that reaches its length leaves the table by
//! itself. What it cannot foresee, a stop id, makes a few rows inert on the device, and is told by [`Scheduler::end`].
//!
//! Drafts that turn out right are luck that it does not plan with: each step in flight counts for one token until
//! [`Scheduler::landed`] says how many there were.

pub mod buckets;
pub mod cost;
pub mod kept;
pub mod queue;
pub mod speculation;

use std::sync::Arc;

use arc_device::step::{CtxClass, Limits, Part, Row, StepKey, TOKEN_OF_SLOT, row_flags};

use crate::blocks::BlockManager;
use crate::scheduler::buckets::Buckets;
use crate::scheduler::cost::CostModel;
use crate::scheduler::kept::{Kept, Prefixes};
use crate::scheduler::speculation::{Others, Pace, Speculate, StepCosts};

/// Rows of a chunk below which prefill would hardly move, however slow a step is.
pub const MIN_CHUNK: u32 = 8;
/// Steps in flight where the host must see each token, or where a chunk makes steps long: one that runs and one behind
/// it, so that the device never waits for the plan.
const SHORT_WINDOW: usize = 2;

/// What a scheduler is told once.
#[derive(Debug, Clone)]
pub struct SchedulerConfig {
    /// Sizes fixed at load.
    pub limits: Limits,
    /// Row counts that the device runs.
    pub buckets: Buckets,
    /// Most steps in flight.
    pub burst: usize,
    /// Longest step, as far as it can be foreseen, while a sequence decodes.
    pub mixed_step_us: f64,
    /// How many drafts are verified.
    pub speculate: Speculate,
    /// The most that the device can make for a slot.
    pub max_drafts: u32,
    /// What of an ended sequence may be used again.
    pub prefixes: Prefixes,
}

/// A sequence that wants to start.
#[derive(Debug, Clone)]
pub struct Want {
    /// Its prompt; not empty.
    pub prompt: Arc<[u32]>,
    /// Tokens it may emit; 0: scores only.
    pub max_out: u32,
    /// Whether its prompt tokens are scored.
    pub score: bool,
    /// Whether the host must see its logits or its tokens before each draw.
    pub two_part: bool,
    /// Whether it may have several tokens a step: nobody wants to see each of them before the next.
    pub speculates: bool,
    /// Prompt tokens that count as run.
    pub depth: u32,
}

impl Want {
    /// Blocks that it holds from admission to end.
    pub fn blocks(&self) -> usize {
        Limits::blocks_for(self.prompt.len() + self.max_out as usize)
    }

    /// Prompt rows that run: the last token feeds the first draw, and scores end one before it.
    fn prompt_rows(&self) -> u32 {
        self.prompt.len() as u32 - u32::from(self.max_out == 0)
    }

    /// Prompt rows that are scored: row `p` scores token `p + 1`.
    pub fn scored_rows(&self) -> u32 {
        if self.score { self.prompt.len() as u32 - 1 } else { 0 }
    }
}

/// A place for a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The slot.
    pub slot: u16,
    /// Its generation, unlike any before.
    pub generation: u32,
    /// Blocks in position order.
    pub blocks: Vec<u32>,
    /// Tokens whose rows are there.
    pub depth: u32,
    /// Those of them that a sequence before left.
    pub cached: u32,
}

/// One step as planned. Reused from step to step.
#[derive(Debug, Default)]
pub struct StepPlan {
    /// The row table, padded to the key.
    pub rows: Vec<Row>,
    /// Rows that are no padding.
    pub n_rows: u32,
    /// Rows among them that belong to prompts.
    pub prompt_rows: u32,
    /// Rows that go through the output head.
    pub n_heads: u32,
    /// Sequences that have rows.
    pub seqs: u32,
    /// Longest context, were every draft right.
    pub context: u32,
    /// Rows that ask for drafts.
    pub draft_rows: u32,
    /// Head index and slot of the rows that draw for a sequence that needs two parts.
    pub two_part: Vec<(u32, u16)>,
}

impl StepPlan {
    fn clear(&mut self) {
        self.rows.clear();
        self.two_part.clear();
        (self.n_rows, self.prompt_rows, self.n_heads, self.seqs, self.context) = (0, 0, 0, 0, 0);
        self.draft_rows = 0;
    }
}

/// Slots, blocks, and how far each sequence was enqueued.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    blocks: BlockManager,
    cost: CostModel,
    costs: StepCosts,
    generations: Vec<u32>,
    running: Vec<Option<Running>>,
    free_slots: Vec<u16>,
    kept: Kept,
    /// Slots in order of admission: the oldest prompt gets its rows first.
    order: Vec<u16>,
}

#[derive(Debug)]
struct Running {
    want: Want,
    blocks: Vec<u32>,
    /// Rows enqueued that are sure to count, which is the next position but for drafts that turn out right.
    pos: u32,
    /// Draws enqueued, counted likewise.
    out: u32,
    /// Rows in flight that verify.
    verifying: u32,
    /// Drafts that its last row asked for.
    asked: u32,
    pace: Pace,
}

impl Running {
    fn prefills(&self) -> bool {
        self.pos < self.want.prompt_rows()
    }

    fn decodes(&self) -> bool {
        !self.prefills() && self.out < self.want.max_out
    }

    /// Tokens to come after those that are enqueued.
    fn left(&self) -> u32 {
        self.want.max_out - self.out
    }

    /// The longest context that its rows may see.
    fn context(&self) -> u32 {
        (self.pos + self.verifying).min(self.want.prompt.len() as u32 + self.want.max_out)
    }

    /// Flags of a row that draws, when `self` is past it. A draft is of use where two tokens are to come.
    fn draws(&mut self) -> u16 {
        self.asked = if self.left() > 1 { self.pace.drafts() } else { 0 };
        row_flags::HEAD | row_flags::SAMPLE | if self.asked > 0 { row_flags::PROPOSE } else { 0 }
    }
}

impl Scheduler {
    /// Nothing runs. Slots that one step could not hold, one row and one head each, are never used.
    pub fn new(config: SchedulerConfig) -> Self {
        let limits = config.limits;
        let slots = limits.slots.min(limits.rows).min(limits.heads).min(usize::from(u16::MAX));
        assert!(slots > 0 && limits.ring > 0, "nothing can run within {limits:?}");
        Scheduler {
            blocks: BlockManager::new(limits.blocks),
            cost: CostModel::default(),
            costs: StepCosts::default(),
            generations: vec![0; slots],
            running: (0..slots).map(|_| None).collect(),
            free_slots: (0..slots as u16).rev().collect(),
            order: Vec::with_capacity(slots),
            kept: Kept::default(),
            config,
        }
    }

    /// Blocks that a sequence could be admitted with now; `None` where no slot is free. What is kept is given up for it.
    pub fn admissible_blocks(&self) -> Option<usize> {
        let slots = !self.free_slots.is_empty() || !self.kept.is_empty();
        slots.then(|| self.blocks.free() + self.kept.blocks())
    }

    /// Gives a sequence its slot and all the blocks that it will ever need; `None` where they are not free. It goes on where a kept
    /// sequence ends that its prompt begins with.
    pub fn admit(&mut self, want: Want) -> Option<Place> {
        let need = want.blocks();
        self.admissible_blocks().filter(|&free| need <= free)?;
        let found = self.kept.take(&want, self.config.prefixes, self.free_slots.is_empty());
        let (found, cached) = found.map_or((None, 0), |(left, cached)| (Some(left), cached));
        let mut blocks = Vec::new();
        let kept_slot = found.map(|left| {
            blocks = left.blocks;
            self.blocks.release(blocks.split_off(need.min(blocks.len())));
            left.slot
        });
        while self.blocks.free() < need - blocks.len() || (kept_slot.is_none() && self.free_slots.is_empty()) {
            let oldest = self.kept.pop().expect("what is kept has what is missing");
            self.blocks.release(oldest.blocks);
            self.free_slots.push(oldest.slot);
        }
        let slot = kept_slot.or_else(|| self.free_slots.pop()).expect("one is free");
        blocks.extend(self.blocks.reserve(need - blocks.len()).expect("so many are free"));
        self.order.push(slot);
        let generation = self.generations[usize::from(slot)].wrapping_add(1);
        self.generations[usize::from(slot)] = generation;
        let pos = want.depth.max(cached);
        let place = Place { slot, generation, blocks: blocks.clone(), depth: pos, cached };
        let speculate = if want.speculates { self.config.speculate } else { Speculate::Off };
        let pace = Pace::new(speculate, self.config.max_drafts);
        self.running[usize::from(slot)] = Some(Running { want, blocks, pos, out: 0, verifying: 0, asked: 0, pace });
        Some(place)
    }

    /// Ends a slot's sequence. Slot and blocks are free at once: whatever uses them next is enqueued later.
    pub fn end(&mut self, slot: u16) {
        let running = self.running[usize::from(slot)].take().expect("a slot ends once");
        self.blocks.release(running.blocks);
        self.order.retain(|&s| s != slot);
        self.free_slots.push(slot);
    }

    /// Ends a slot's sequence and keeps what it left there: the rows of `tokens`, until slot or blocks are wanted.
    pub fn keep(&mut self, slot: u16, tokens: Vec<u32>) {
        let running = self.running[usize::from(slot)].take().expect("a slot ends once");
        self.order.retain(|&s| s != slot);
        let mut blocks = running.blocks;
        self.blocks.release(blocks.split_off(Limits::blocks_for(tokens.len())));
        self.kept.push(kept::Left { slot, blocks, tokens, speculated: running.want.speculates });
    }

    /// Blocks of what is kept.
    pub fn kept_blocks(&self) -> usize {
        self.kept.blocks()
    }

    /// Takes in what a step took that made `drafts` drafts for a slot: up to its logits, and from there on. `None`: a
    /// drafter looked on, which takes as long as the step has rows and tells nothing of what a draft takes.
    pub fn observe(&mut self, rows: u32, drafts: Option<u32>, fwd_us: f64, tail_us: f64) {
        self.cost.observe(rows, fwd_us + tail_us);
        if let Some(drafts) = drafts {
            self.costs.observe(rows, drafts, fwd_us, tail_us);
        }
    }

    /// Takes in what a step landed for a slot that drew: `rows` rows verified, `verified` of them a draft, and `tokens`
    /// were emitted.
    pub fn landed(&mut self, slot: u16, rows: u32, verified: u32, tokens: u32) {
        let running = self.running[usize::from(slot)].as_mut().expect("a slot lands what it ran");
        let right = tokens.saturating_sub(1);
        running.verifying -= rows;
        running.pos += right;
        running.out += right;
        running.pace.landed(verified, right);
        if running.pace.is_due() {
            let mut others = Others::default();
            for other in self.order.iter().filter(|&&other| other != slot).map(|&other| self.at(other)) {
                if other.decodes() {
                    others.rows += 1 + other.pace.drafts();
                    others.tokens += other.pace.tokens();
                    others.drafts = others.drafts.max(other.pace.drafts());
                }
            }
            let costs = &self.costs;
            self.running[usize::from(slot)].as_mut().expect("it is there").pace.decide(others, costs);
        }
    }

    /// The cost of steps as seen so far.
    pub fn cost(&self) -> &CostModel {
        &self.cost
    }

    /// The KV pool.
    pub fn blocks(&self) -> &BlockManager {
        &self.blocks
    }

    /// Sequences in slots.
    pub fn n_running(&self) -> usize {
        self.order.len()
    }

    /// Slots that can be used at all.
    pub fn slots(&self) -> usize {
        self.running.len()
    }

    /// How many steps may be in flight once the next is enqueued.
    pub fn window(&self) -> usize {
        let short = self.order.iter().map(|&slot| self.at(slot)).any(|r| r.prefills() || r.want.two_part);
        let most = if short { SHORT_WINDOW.min(self.config.burst) } else { self.config.burst };
        most.min(self.config.limits.ring).max(1)
    }

    /// Fills in the next step and moves every sequence past its rows. `None`: there is nothing to run.
    pub fn plan(&mut self, plan: &mut StepPlan) -> Option<StepKey> {
        plan.clear();
        let mut spare = self.spare_rows();
        for idx in 0..self.order.len() {
            self.plan_decode(self.order[idx], &mut spare, plan);
        }
        let cap = self.row_cap(plan.n_rows);
        for idx in 0..self.order.len() {
            self.plan_chunk(self.order[idx], cap, plan);
        }
        if plan.n_rows == 0 {
            return None;
        }
        let rows = self.config.buckets.pad(plan.n_rows);
        let heads = self.config.buckets.heads(rows, plan.n_heads, self.config.limits.heads as u32);
        plan.rows.resize(rows as usize, Row { flags: row_flags::PADDING, ..Row::default() });
        let part = if plan.two_part.is_empty() { Part::Whole } else { Part::Forward };
        // A drafter that has a cache wants to see every row, from the prompt on.
        let drafts = self.order.iter().map(|&slot| self.at(slot).pace.drafts()).max().unwrap_or(0);
        let draft_rows = self.config.buckets.draft_rows(rows, plan.draft_rows, self.running.len() as u32);
        Some(StepKey::new(rows, heads, CtxClass::of(plan.context), part).drafting(drafts, draft_rows))
    }

    /// Rows, and heads, that the step may have for drafts beside what decodes and what begins to.
    fn spare_rows(&self) -> u32 {
        let limits = &self.config.limits;
        let (mut rows, mut heads) = (limits.rows as u32, limits.heads as u32);
        let mut prefills = false;
        for running in self.order.iter().map(|&slot| self.at(slot)) {
            prefills |= running.prefills();
            rows = rows.saturating_sub(u32::from(running.decodes()));
            heads = heads.saturating_sub(1);
        }
        rows.saturating_sub(if prefills { MIN_CHUNK } else { 0 }).min(heads)
    }

    /// Rows that the step may have in all, given those that decode.
    fn row_cap(&self, n_decode: u32) -> u32 {
        let max = self.config.limits.rows as u32;
        if n_decode == 0 {
            return max;
        }
        let within = self.cost.rows_within(self.config.mixed_step_us).max(n_decode + MIN_CHUNK).min(max);
        match self.config.buckets.floor(within) {
            // The bucket below has no room beside the decoding rows: the one above is the least that makes progress.
            rows if rows <= n_decode => self.config.buckets.pad(within).min(max),
            rows => rows,
        }
    }

    fn plan_decode(&mut self, slot: u16, spare: &mut u32, plan: &mut StepPlan) {
        let running = self.running[usize::from(slot)].as_mut().expect("in order, so running");
        if !running.decodes() {
            return;
        }
        if running.want.two_part {
            plan.two_part.push((plan.n_heads, slot));
        }
        running.pos += 1;
        running.out += 1;
        let verify = running.asked.min(running.pace.drafts()).min(running.left()).min(*spare);
        *spare -= verify;
        running.verifying += verify;
        let flags = running.draws();
        plan.draft_rows += u32::from(running.asked > 0);
        plan.rows.push(Row { slot, flags, token: TOKEN_OF_SLOT, ..Row::default() });
        let flags = row_flags::HEAD | row_flags::VERIFY;
        plan.rows.extend((1..=verify).map(|offset| Row { slot, flags, offset, token: TOKEN_OF_SLOT, target: 0 }));
        plan.n_rows += 1 + verify;
        plan.n_heads += 1 + verify;
        plan.seqs += 1;
        plan.context = plan.context.max(running.context());
    }

    fn plan_chunk(&mut self, slot: u16, cap: u32, plan: &mut StepPlan) {
        let heads = self.config.limits.heads as u32;
        let running = self.running[usize::from(slot)].as_mut().expect("in order, so running");
        if !running.prefills() {
            return;
        }
        let first = running.pos;
        let last = first + (running.want.prompt_rows() - first).min(cap.saturating_sub(plan.n_rows));
        for pos in first..last {
            let (at, want) = (pos as usize, &running.want);
            let next = want.prompt.get(at + 1).copied();
            let target = next.unwrap_or(0);
            let mut row = Row { slot, flags: 0, offset: pos - first, token: want.prompt[at], target };
            let scored = pos < want.scored_rows();
            if scored || next.is_none() {
                if plan.n_heads == heads {
                    break;
                }
                if scored {
                    row.flags = row_flags::HEAD | row_flags::SCORE;
                } else {
                    running.out = 1;
                    row.flags = running.draws();
                    plan.draft_rows += u32::from(running.asked > 0);
                    if running.want.two_part {
                        plan.two_part.push((plan.n_heads, slot));
                    }
                }
                plan.n_heads += 1;
            }
            plan.rows.push(row);
            running.pos += 1;
        }
        let n = running.pos - first;
        plan.n_rows += n;
        plan.prompt_rows += n;
        plan.seqs += u32::from(n > 0);
        plan.context = plan.context.max(running.pos);
    }

    fn at(&self, slot: u16) -> &Running {
        self.running[usize::from(slot)].as_ref().expect("in order, so running")
    }
}

#[cfg(test)]
mod tests;
