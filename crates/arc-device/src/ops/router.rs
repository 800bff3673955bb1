//! The gate of a mixture of experts: scores, choice and weights. Exact.
//!
//! ```text
//! score[e] = sqrt(softplus(gate[e] . h))                     dot in the order of math::dot
//! hashed     E = table[token]                                the gate still decides the weights
//! learned    E = the `chosen` largest of score[e] + bias[e]  larger first, then the lower id; bias only chooses
//! weight[e] = score[e] / (sum over E of score) * scale
//! ```
//!
//! `E` is handed on in ascending order of ids, and the sum is taken in that order. An expert that a hash table names
//! twice counts twice. A score that is NaN makes every weight of the row NaN, so that the row's logits are NaN and the
//! sampler refuses the row, instead of going on with a plausible choice. Source: DeepSeek-V4's published model code
//! (`Gate`).

use crate::math::{NAN, dot, softplus};

/// The most experts that a layer may have.
pub const MAX_EXPERTS: usize = 1024;
/// The most experts that a row may choose.
pub const MAX_CHOSEN: usize = 16;

/// What a layer's gate fixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterConfig {
    /// Routed experts, at most [`MAX_EXPERTS`].
    pub experts: usize,
    /// Experts a row, at most [`MAX_CHOSEN`] and `experts`.
    pub chosen: usize,
    /// Multiplies the normalised weights.
    pub scale: f32,
}

/// How a layer chooses.
pub(crate) enum Choice<'a> {
    /// The ids that the table gives the row's token, `[chosen]`.
    Hashed(&'a [u32]),
    /// Selection bias, `[experts]`.
    Learned(&'a [f32]),
}

/// Scores of every expert. `gate`: `[score.len(), h.len()]`.
pub(crate) fn scores(score: &mut [f32], h: &[f32], gate: &[f32]) {
    for (score, row) in score.iter_mut().zip(gate.chunks_exact(h.len())) {
        *score = softplus(dot(row, h)).sqrt();
    }
}

/// Chooses experts, `ids` ascending, with their weights. `ids`, `weights`: `[cfg.chosen]`; `score`: `[cfg.experts]`.
pub(crate) fn choose(ids: &mut [u32], weights: &mut [f32], score: &[f32], choice: &Choice<'_>, cfg: &RouterConfig) {
    match choice {
        Choice::Hashed(table) => ids.copy_from_slice(table),
        Choice::Learned(bias) => top(ids, score, bias),
    }
    ids.sort_unstable();
    let mut total = 0.0;
    for (weight, &id) in weights.iter_mut().zip(ids.iter()) {
        *weight = score[id as usize];
        total += *weight;
    }
    let faulty = score.iter().any(|score| score.is_nan());
    for weight in weights {
        *weight = if faulty { NAN } else { *weight / total * cfg.scale };
    }
}

/// The `ids.len()` largest of `score + bias`, larger first, then the lower id. A NaN counts as the largest: the row is
/// refused in any case, but the ids stay in range.
fn top(ids: &mut [u32], score: &[f32], bias: &[f32]) {
    let mut best = [f32::NEG_INFINITY; MAX_CHOSEN];
    let n = ids.len();
    let mut filled = 0;
    for (e, (score, bias)) in score.iter().zip(bias).enumerate() {
        let value = score + bias;
        let value = if value.is_nan() { f32::INFINITY } else { value };
        // Equal values stay behind those with lower ids, which were there first.
        let place = best[..filled].iter().position(|&other| value > other).unwrap_or(filled);
        if place == n {
            continue;
        }
        filled = (filled + 1).min(n);
        best.copy_within(place..filled - 1, place + 1);
        ids.copy_within(place..filled - 1, place + 1);
        (best[place], ids[place]) = (value, e as u32);
    }
}

pub(crate) mod cuda;
#[cfg(test)]
mod tests;
