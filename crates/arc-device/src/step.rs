//! The state that varies between steps, in the layout that both sides of a device read.
//!
//! A step is a table of [`Row`]s. Everything a step needs to know about a sequence stands in its slot: position, last
//! token, limits, sampler parameters, block table. [`StepDelta`] carries changes; what does not change is not sent.
//!
//! # Speculation
//!
//! A slot can hold *drafts*: up to [`MAX_DRAFTS`] tokens that it may emit next. Its decode row is then followed by rows
//! with [`row_flags::VERIFY`], of which the one at offset `j` feeds draft `j`, counted from 1. Each draws the token of its
//! own output position `n_out + j`, with that position's draw word, and with counts and history as if drafts `1..=j` had
//! been emitted. A draw *counts* where all draws before it equal the drafts: these are the tokens of plain decoding, at any
//! temperature. They are emitted one by one, as far as a stop id or the length; the rest is taken back. State is
//! addressed by position and counts are those of emitted tokens, so to take back is not to move on.
//!
//! A row that verifies is inert where its slot holds no such draft, and where its draw would be past `max_out`. Whatever
//! a drafter says, the tokens are the same: drafts decide how many of them a step lands.

use crate::ops::sample::SamplerConfig;

/// Stop ids a slot can hold.
pub const MAX_STOP_IDS: usize = 16;
/// Alternatives that a row can report beside its own token.
pub const MAX_TOP_LOGPROBS: usize = 20;
/// Drafts that a slot can hold.
pub const MAX_DRAFTS: usize = 4;
/// Tokens that one step can land for a sequence: one, plus accepted drafts.
pub const MAX_STEP_TOKENS: usize = MAX_DRAFTS + 1;
/// In [`Row::token`]: feed the slot's own last token, or in a row with [`row_flags::VERIFY`] its draft.
pub const TOKEN_OF_SLOT: u32 = u32::MAX;

/// One token's place in a step: position `pos[slot] + offset`.
///
/// Rows of a slot stand together, each one position after the one before it: rows run in parallel, and no two may have
/// one place. A row that breaks this does not run, and is a fault of its sequence.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Row {
    /// The sequence's slot.
    pub slot: u16,
    /// Bits of [`row_flags`].
    pub flags: u16,
    /// Distance from the slot's position: 0 for a decode row, 0..n for a chunk.
    pub offset: u32,
    /// Token id to feed, or [`TOKEN_OF_SLOT`].
    pub token: u32,
    /// The id that follows the row, where the host knows it: in every row of a prompt but its last. The one whose logprob
    /// [`row_flags::SCORE`] wants, and what a draft block reads beside the row.
    pub target: u32,
}
const _: () = assert!(size_of::<Row>() == 16);

/// Bits of [`Row::flags`].
pub mod row_flags {
    /// Goes through the output head. Head rows are numbered in table order.
    pub const HEAD: u16 = 1;
    /// Draws a token: the last row of a slot, but for those that verify. Implies `HEAD`.
    pub const SAMPLE: u16 = 2;
    /// Reports the logprob of `target`. Implies `HEAD`.
    pub const SCORE: u16 = 4;
    /// Fills a bucket; reads and writes nothing of a sequence.
    pub const PADDING: u16 = 8;
    /// Feeds the slot's draft of the row's offset and draws: see the module's notes. Follows a row with `SAMPLE` and
    /// [`TOKEN_OF_SLOT`](super::TOKEN_OF_SLOT), offsets rising by one. Implies `HEAD`.
    pub const VERIFY: u16 = 16;
    /// The slot wants drafts for its next step. Only with `SAMPLE`.
    pub const PROPOSE: u16 = 32;
    /// Any of these goes through the output head.
    pub const HEADS: u16 = HEAD | SAMPLE | SCORE | VERIFY;
    /// Any of these draws.
    pub const DRAWS: u16 = SAMPLE | VERIFY;
}

/// Bits of [`SlotInit::flags`].
pub mod slot_flags {
    /// Stop ids do not end the sequence.
    pub const IGNORE_STOP: u32 = 1;
}

/// What a slot starts with. Everything is known at admission, so nothing is sent while the sequence decodes.
#[derive(Debug, Clone)]
pub struct SlotInit {
    /// Which slot.
    pub slot: u16,
    /// Tells this sequence from the slot's former ones; echoed in every [`Landed`].
    pub generation: u32,
    /// The sequence ends with `length` when it has emitted this many tokens. At least 1 where a row samples.
    pub max_out: u32,
    /// Bits of [`slot_flags`].
    pub flags: u32,
    /// Ids that end the sequence; at most [`MAX_STOP_IDS`].
    pub stop_ids: Vec<u32>,
    /// Sampler parameters.
    pub sampling: SamplerConfig,
    /// KV blocks in position order, for prompt and output together. A block that several sequences hold is one that
    /// none of them writes to.
    pub blocks: Vec<u32>,
    /// The prompt where a penalty reads it, else empty.
    pub penalty_prompt: Vec<u32>,
    /// Position of the first row that will run: above 0 where the blocks already hold a shared prefix.
    pub pos: u32,
    /// Report the logprob of every drawn token, with this many alternatives (at most [`MAX_TOP_LOGPROBS`]).
    pub logprobs: Option<u32>,
    /// Alternatives to report beside the logprob of a scored prompt token (at most [`MAX_TOP_LOGPROBS`]).
    pub prompt_top: u32,
}

/// A token that the host drew from fetched logits. The slot's sample row emits it in place of a draw of its own; what
/// follows a draw (counts, logprobs, stop ids, length) is the device's as ever.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forced {
    /// The row's slot.
    pub slot: u16,
    /// The token to emit.
    pub token: u32,
    /// 0, or bits of [`landed_flags::FAULT`]: nothing could be drawn, and the row ends with these.
    pub fault: u32,
}

/// Changes before a step, applied in the order of the fields: a slot may be released and admitted in one delta.
/// `masks` and `forced` hold for the next sampling ([`Part::Whole`] or [`Part::Sample`]) only.
#[derive(Debug, Clone, Default)]
pub struct StepDelta {
    /// Slots whose sequence ends now (cancelled, or its tokens are complete): rows that still name them are inert.
    pub release: Vec<u16>,
    /// Slots that start a sequence.
    pub admit: Vec<SlotInit>,
    /// A new row table; `None` keeps the last one.
    pub rows: Option<Vec<Row>>,
    /// Grammar bitmasks: slot and one bit a token, lowest bit first.
    pub masks: Vec<(u16, Vec<u32>)>,
    /// Tokens that the host drew, for a [`Part::Sample`] step.
    pub forced: Vec<Forced>,
}

/// Which kernels a step runs; the key of a recorded graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StepKey {
    /// Rows, padding included.
    pub rows: u32,
    /// Rows that go through the output head, or the bucket above: the table says which, and how many.
    pub heads: u32,
    /// Longest context of the step.
    pub ctx: CtxClass,
    /// Which part of the step.
    pub part: Part,
    /// Drafts to make for each row with [`row_flags::PROPOSE`], at most [`MAX_DRAFTS`]. 0: no drafter runs; otherwise it
    /// follows every row of the step, also where `draft_rows` is 0 and this is 1.
    pub drafts: u32,
    /// Rows with [`row_flags::PROPOSE`], or the bucket above; 0 where `drafts` is.
    pub draft_rows: u32,
}

impl StepKey {
    /// A step without a drafter.
    pub fn new(rows: u32, heads: u32, ctx: CtxClass, part: Part) -> Self {
        StepKey { rows, heads, ctx, part, drafts: 0, draft_rows: 0 }
    }

    /// The same with a drafter that makes `drafts` drafts in each of `draft_rows` rows.
    pub fn drafting(self, drafts: u32, draft_rows: u32) -> Self {
        // Where nobody wants one, their number makes no difference, and should make no key of its own.
        StepKey { drafts: if draft_rows == 0 { drafts.min(1) } else { drafts }, draft_rows, ..self }
    }
}

impl std::fmt::Display for StepKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rows={} heads={} ctx={:?} part={:?}", self.rows, self.heads, self.ctx, self.part)?;
        match self.drafts {
            0 => Ok(()),
            n => write!(f, " drafts={n}x{}", self.draft_rows),
        }
    }
}

/// Context classes. Kernels read true lengths; a class drops launches, sizes grids and says which kernels there is room for: a
/// position beyond it is a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum CtxClass {
    /// Up to 2,048 tokens.
    Short,
    /// Up to 65,536 tokens.
    Medium,
    /// Up to the limit.
    Long,
}

impl CtxClass {
    /// The class of a context of `tokens`.
    pub fn of(tokens: u32) -> Self {
        match tokens {
            0..=2048 => CtxClass::Short,
            2049..=65536 => CtxClass::Medium,
            _ => CtxClass::Long,
        }
    }

    /// The largest context of the class.
    pub fn limit(self) -> u32 {
        match self {
            CtxClass::Short => 2048,
            CtxClass::Medium => 65536,
            CtxClass::Long => u32::MAX,
        }
    }
}

/// Parts of a step. Rows with a grammar run a step as two graphs, so that the host can see a token before the next draw.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Part {
    /// Forward pass, sample and commit.
    Whole,
    /// Forward pass and output head only.
    Forward,
    /// Sample and commit only.
    Sample,
}

/// What a head row left in the ring. What the rows that verify drew stands in the entry of the row that they follow.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Landed {
    /// The row's slot.
    pub slot: u32,
    /// The slot's generation when the row ran.
    pub generation: u32,
    /// Bits of [`landed_flags`].
    pub flags: u32,
    /// Valid entries of `tokens`; 0 for rows that scored, verified, were inert or faulted.
    pub n_tokens: u32,
    /// Tokens emitted by this step.
    pub tokens: [u32; MAX_STEP_TOKENS],
    /// Valid entries of `top_ids` and `top_logprobs`.
    pub n_top: u32,
    /// Natural log of the model's probability of the (first) emitted or scored token; NaN when not asked for.
    pub logprob: f32,
    /// Rank-ordered alternatives: larger logit first, then lower id.
    pub top_ids: [u32; MAX_TOP_LOGPROBS],
    /// Their natural logs.
    pub top_logprobs: [f32; MAX_TOP_LOGPROBS],
}
const _: () = assert!(size_of::<Landed>() == 204);

impl Default for Landed {
    fn default() -> Self {
        Landed {
            slot: 0,
            generation: 0,
            flags: 0,
            n_tokens: 0,
            tokens: [0; MAX_STEP_TOKENS],
            n_top: 0,
            logprob: f32::NAN,
            top_ids: [0; MAX_TOP_LOGPROBS],
            top_logprobs: [0.0; MAX_TOP_LOGPROBS],
        }
    }
}

impl Landed {
    /// As far as it is valid, printed: NaN equals NaN, and other numbers are equal where their bits are.
    pub fn told(&self) -> String {
        let Landed { slot, flags, logprob, .. } = *self;
        let (tokens, n) = (&self.tokens[..self.n_tokens as usize], self.n_top as usize);
        format!("slot {slot} {tokens:?} {flags:#x} {logprob} {:?} {:?}", &self.top_ids[..n], &self.top_logprobs[..n])
    }
}

/// Bits of [`Landed::flags`].
pub mod landed_flags {
    /// The sequence ended on one of its stop ids; the id is the last of `tokens`.
    pub const DONE_STOP: u32 = 1;
    /// The sequence reached its `max_out`.
    pub const DONE_LENGTH: u32 = 2;
    /// A row fault: logits with NaN or +inf. The row is done.
    pub const NON_FINITE: u32 = 4;
    /// A row fault: every token was masked. The row is done.
    pub const NOTHING_TO_SAMPLE: u32 = 8;
    /// A row fault: its token, position or block was out of range, or another row's. The row is done.
    pub const OUT_OF_RANGE: u32 = 16;
    /// The slot had ended or was released; nothing ran for it.
    pub const INERT: u32 = 32;
    /// `logprob` is that of the row's `target`.
    pub const SCORED: u32 = 64;
    /// The row verified a draft, or with [`INERT`] did not, since there was none.
    pub const VERIFIED: u32 = 128;
    /// Any of these ends the sequence.
    pub const DONE: u32 = DONE_STOP | DONE_LENGTH | FAULT;
    /// Any row fault.
    pub const FAULT: u32 = NON_FINITE | NOTHING_TO_SAMPLE | OUT_OF_RANGE;
}

/// What a device notes of a step: time stamps, in nanoseconds of one clock, and what depends on positions, which nobody else
/// knows while steps are in flight.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StepClocks {
    /// When the step began.
    pub start_ns: u64,
    /// When its logits were complete.
    pub sample_ns: u64,
    /// When it was committed.
    pub commit_ns: u64,
    /// Bytes of KV cache that its stages had to read, as [`KvRead`](crate::count::kv::KvRead) counts them.
    pub kv_bytes: u64,
}

/// Sizes that are fixed at load; all memory follows from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences that can be in flight.
    pub slots: usize,
    /// Rows of the largest step.
    pub rows: usize,
    /// Rows of a step that go through the output head.
    pub heads: usize,
    /// Tokens of the longest sequence.
    pub context: usize,
    /// KV blocks in the pool, over all sequences.
    pub blocks: usize,
    /// Steps that the ring holds.
    pub ring: usize,
}

/// Tokens of one KV block: also the tile in which attention counts keys.
pub const BLOCK_TOKENS: usize = 32;

impl Limits {
    /// Blocks that one sequence of `tokens` takes.
    pub fn blocks_for(tokens: usize) -> usize {
        tokens.div_ceil(BLOCK_TOKENS)
    }
}
