//! The sampler: from a row of logits to a token. **Exact**: given equal logits, parameters and seed, every device, batch
//! size and instruction set gives the same token.
//!
//! Three things make it so. Random words are a pure function of seed and output position ([`rng`](crate::rng)).
//! Probabilities are integers ("mass"), whose sums do not depend on order. Ties are decided by an order: larger logit,
//! then lower id.
//!
//! # One row, in order
//!
//! 0. **Check.** A NaN or `+inf` among the logits, or made by step 1, is [`RowFault::NonFiniteLogits`]. `-inf` is a mask.
//! 1. **Processors**, each operation rounded, no fma: bias; grammar mask; `min_tokens` mask on stop ids; then for each
//!    token seen: repetition (`x > 0 ? x / r : x * r`, prompt and output), `x - presence`, `x - frequency * count`
//!    (output only); then DRY. What is absent costs nothing. All `-inf` now is [`RowFault::NothingToSample`].
//! 2. **Greedy** where temperature is 0: the first id in the order. Filters cannot change it and do not run.
//! 3. **Mass** of id i: `trunc(2^40 * exp((x[i] - max) / temperature))`, the quotient an IEEE division, `exp` from
//!    [`math`](crate::math). At most 2^23 ids, so that no sum overflows.
//! 4. **Filters**, in this order: `top_k` keeps the first k; `top_p` keeps the shortest prefix, never empty, whose mass
//!    is at least `ceil(P * left / 2^32)`, `left` being what `top_k` left; `min_p` keeps ids with mass at least `M`.
//! 5. **Draw.** The first id, in id order, at which the running mass of what is kept exceeds
//!    `mulhi(draw_word(seed, draw_index, choice), total mass)`.
//! 6. **Logprobs**, where asked for, of the model's own distribution (before step 1, temperature 1):
//!    `(x - max) - ln(S * 2^-40)`, S being the sum of masses, as f32.
//!
//! Source: ours; the filters and penalties are the field's (top-p: Holtzman et al. 2020; min-p: Nguyen et al. 2024;
//! repetition: Keskar et al. 2019; DRY: p-e-w 2024).

mod compact;
pub mod cpu;
pub(crate) mod cuda;
pub mod dry;
mod passes;
mod process;
pub mod seen;
mod select;

pub use cpu::{Scratch, logprobs_row, sample_row};

use crate::step::landed_flags;

/// Ids a vocabulary may have, so that a sum of masses fits a `u64`.
pub const VOCAB_MAX: usize = 1 << 23;

/// Sampler parameters as a request states them. [`Default`] is temperature 1 and nothing else.
///
/// Ranges are the caller's to check; a value that means "absent" costs nothing when a row is drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplerConfig {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely tokens. 0: absent.
    pub top_k: u32,
    /// Keep the shortest most likely prefix with this probability. 1.0: absent.
    pub top_p: f32,
    /// Keep tokens at least this likely, relative to the most likely one. 0.0: absent.
    pub min_p: f32,
    /// Taken from every token that the output holds. 0.0: absent.
    pub presence: f32,
    /// Taken from a token once for each time that the output holds it. 0.0: absent.
    pub frequency: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or output. 1.0: absent.
    pub repetition: f32,
    /// Stop ids are masked while the output is shorter. 0: absent.
    pub min_tokens: u32,
    /// Key of the generator.
    pub seed: u64,
    /// Which of a request's `n` choices this is, from 0.
    pub choice: u32,
    /// Added to the logits of these ids; each id once.
    pub bias: Vec<(u32, f32)>,
    /// Penalty on continuing a repetition. A multiplier of exactly 0.0 is the same as `None`.
    pub dry: Option<DryConfig>,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        SamplerConfig {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            presence: 0.0,
            frequency: 0.0,
            repetition: 1.0,
            min_tokens: 0,
            seed: 0,
            choice: 0,
            bias: Vec::new(),
            dry: None,
        }
    }
}

/// DRY: where the text's end repeats an earlier passage of L tokens, L at least `allowed_length`, the token that
/// followed there loses `multiplier * base^(L - allowed_length)`.
#[derive(Debug, Clone, PartialEq)]
pub struct DryConfig {
    /// 0.0: absent.
    pub multiplier: f32,
    /// At least 1.
    pub base: f32,
    /// Repetitions shorter than this are free. At least 1.
    pub allowed_length: u32,
    /// Tokens looked back at; `u32::MAX`: all. 0: absent.
    pub window: u32,
    /// Ids that no repetition reaches across.
    pub breakers: Vec<u32>,
}

/// [`SamplerParams::flags`]: temperature is 0.
pub const GREEDY: u32 = 1;

/// Sampler parameters as a device reads them: every rounding of a human value is done once, here.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SamplerParams {
    /// Key of the generator.
    pub seed: u64,
    /// `P = round(top_p * 2^32)`; absent at 2^32.
    pub top_p: u64,
    /// `M = ceil(min_p * 2^40)`, at most 2^40; absent at 0.
    pub min_p: u64,
    /// Above 0; 1 where greedy.
    pub temperature: f32,
    /// Absent at 1.
    pub repetition: f32,
    /// Absent at 0.
    pub presence: f32,
    /// Absent at 0.
    pub frequency: f32,
    /// Absent at 0.
    pub top_k: u32,
    /// Absent at 0.
    pub min_tokens: u32,
    /// Index among a request's choices.
    pub choice: u32,
    /// Bits: [`GREEDY`].
    pub flags: u32,
}
const _: () = assert!(size_of::<SamplerParams>() == 56);

/// `top_p` that keeps everything.
pub const TOP_P_ABSENT: u64 = 1 << 32;
/// Mass of the most likely token.
pub const MASS_ONE: u64 = 1 << 40;

impl SamplerParams {
    /// Fixes the roundings. Values outside their ranges are clamped to the nearest end; NaN is the caller's to refuse.
    pub fn new(config: &SamplerConfig) -> Self {
        let greedy = config.temperature <= 0.0;
        let fixed = |x: f32, one: u64| f64::from(x.clamp(0.0, 1.0)) * one as f64;
        SamplerParams {
            seed: config.seed,
            top_p: fixed(config.top_p, TOP_P_ABSENT).round() as u64,
            min_p: fixed(config.min_p, MASS_ONE).ceil() as u64,
            temperature: if greedy { 1.0 } else { config.temperature.min(f32::MAX) },
            repetition: config.repetition,
            presence: config.presence,
            frequency: config.frequency,
            top_k: config.top_k,
            min_tokens: config.min_tokens,
            choice: config.choice,
            flags: if greedy { GREEDY } else { 0 },
        }
    }

    /// Whether a penalty reads the tokens of prompt or output.
    pub fn reads_seen(&self) -> bool {
        self.repetition != 1.0 || self.presence != 0.0 || self.frequency != 0.0
    }
}

/// A token that a sequence holds, with how often.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SeenToken {
    /// Token id.
    pub id: u32,
    /// Times in the output.
    pub in_output: u32,
    /// Whether the prompt holds it.
    pub in_prompt: bool,
}

/// What a row's processors read besides its parameters, wherever that state lives. [`Default`]: nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct RowInputs<'a> {
    /// Ids and what to add to their logits.
    pub bias: &'a [(u32, f32)],
    /// One bit a token, lowest bit first, 1 where allowed: at least `vocab / 32` words, rounded up.
    pub grammar: Option<&'a [u32]>,
    /// Ids that [`SamplerParams::min_tokens`] masks.
    pub stop_ids: &'a [u32],
    /// Distinct tokens of prompt and output. Read only where [`SamplerParams::reads_seen`].
    pub seen: &'a [SeenToken],
    /// Drafts that are taken to have been emitted after what `seen` holds. Read only where `seen` is.
    pub drafts: &'a [u32],
    /// DRY, where the request has it.
    pub dry: Option<DryInputs<'a>>,
    /// Report the logprob of the drawn token with this many alternatives, at most
    /// [`MAX_TOP_LOGPROBS`](crate::step::MAX_TOP_LOGPROBS).
    pub logprobs: Option<u32>,
}

/// What DRY reads.
#[derive(Debug, Clone, Copy)]
pub struct DryInputs<'a> {
    /// Parameters and power table, made once for a request.
    pub table: &'a dry::DryTable,
    /// Prompt, output, and drafts that are taken to have been emitted, in order.
    pub history: &'a [u32],
}

/// Why nothing could be drawn. The row ends; its neighbours are untouched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum RowFault {
    /// A logit is NaN or `+inf`, from the model or after a processor overflowed.
    #[error("the logits hold NaN or infinity")]
    NonFiniteLogits,
    /// Every token is masked.
    #[error("every token is masked")]
    NothingToSample,
    /// A bias, stop id, history token or scored token is outside the vocabulary.
    #[error("a token id is outside the vocabulary")]
    TokenOutOfRange,
}

impl RowFault {
    /// The bit of [`landed_flags`] that reports it.
    pub fn landed_flag(self) -> u32 {
        match self {
            RowFault::NonFiniteLogits => landed_flags::NON_FINITE,
            RowFault::NothingToSample => landed_flags::NOTHING_TO_SAMPLE,
            RowFault::TokenOutOfRange => landed_flags::OUT_OF_RANGE,
        }
    }
}

/// Why a device does not draw a row itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Declined {
    /// It has no DRY.
    Dry,
    /// More tokens are biased than it has room for.
    Bias,
    /// The vocabulary is larger than it has room for.
    Vocab,
}

impl Declined {
    /// All of them, by their numbers.
    pub const ALL: [Declined; 3] = [Declined::Dry, Declined::Bias, Declined::Vocab];

    /// As metrics name it.
    pub fn word(self) -> &'static str {
        match self {
            Declined::Dry => "dry",
            Declined::Bias => "bias",
            Declined::Vocab => "vocab",
        }
    }
}

/// What a row cost, counted. Temperature alone: 2 passes and nothing else; greedy: 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Passes over the whole vocabulary.
    pub passes: u32,
    /// Copies of the row, made only where a processor changes it.
    pub copies: u32,
    /// Selections: 1 for each of `top_k`, `top_p` and `min_p` that is present and for the alternatives of logprobs.
    pub selects: u32,
    /// Sorts: 1 where alternatives of logprobs are put in order, never for a draw.
    pub sorts: u32,
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Work) {
        self.passes += other.passes;
        self.copies += other.copies;
        self.selects += other.selects;
        self.sorts += other.sorts;
    }
}

/// The outcome of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampled {
    /// The token, or why there is none.
    pub token: Result<u32, RowFault>,
    /// Natural log of the model's probability of the token; NaN where not asked for. The alternatives are in
    /// [`Scratch::top`].
    pub logprob: f32,
    /// What it cost.
    pub work: Work,
}

/// An alternative and the natural log of its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Natural log of the model's probability.
    pub logprob: f32,
}

#[cfg(test)]
mod tests;
