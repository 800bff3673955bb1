//! The indexer: scores of compressed rows for a query, and the best of them. Exact.
//!
//! ```text
//! S[w] = sum over heads i of weight[i] * relu(q[i] . key[w])       for every visible w
//! ```
//!
//! both sums in the order of [`math::sum`](crate::math::sum), products rounded first. Chosen are the `top` largest, of
//! equal ones those with the lower `w`; they are handed on in ascending order. Where no more than `top` rows are visible,
//! all are chosen and nothing is scored. A NaN among the scores marks the row [`FAULT`], and its attention is NaN.
//! Source: DeepSeek-V4's published model code (`Indexer`).

use crate::simd::multiversion;

/// Stands first in a row's choice when a score was NaN.
pub const FAULT: u32 = u32::MAX;
/// The most rows that an indexer may choose.
pub const MAX_TOP: usize = 2048;
/// Index heads and their length, at most; both powers of two.
pub const MAX_INDEX_DIM: usize = 128;

/// What a layer's indexer fixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IndexConfig {
    /// Query heads; a power of two, at most [`MAX_INDEX_DIM`].
    pub heads: usize,
    /// Values of a head and of a key; a power of two, at most [`MAX_INDEX_DIM`].
    pub dim: usize,
    /// Rows to choose, at most [`MAX_TOP`].
    pub top: usize,
}

multiversion! {
    /// Score of one key. `q`: `[weights.len(), key.len()]`; `weights`: `[heads]`.
    pub(crate) fn score(q: &[f32], weights: &[f32], key: &[f32]) -> f32 {
        let (heads, dim) = (weights.len(), key.len());
        let mut terms = [0.0f32; MAX_INDEX_DIM];
        for ((term, q), weight) in terms.iter_mut().zip(q.chunks_exact(dim)).zip(weights) {
            let mut products = [0.0f32; MAX_INDEX_DIM];
            for ((product, q), key) in products.iter_mut().zip(q).zip(key) {
                *product = q * key;
            }
            let s = fold(&mut products[..dim]);
            *term = weight * if s < 0.0 { 0.0 } else { s };
        }
        fold(&mut terms[..heads])
    }
}

/// [`math::sum`](crate::math::sum) of a power of two of elements: its first halvings add +0 to each, which changes -0
/// only.
#[inline(always)]
fn fold(x: &mut [f32]) -> f32 {
    x.iter_mut().for_each(|x| *x += 0.0);
    let mut half = x.len() / 2;
    while half > 0 {
        let (lo, hi) = x.split_at_mut(half);
        lo.iter_mut().zip(&hi[..half]).for_each(|(lo, hi)| *lo += *hi);
        half /= 2;
    }
    x[0]
}

/// Keeps the best of a stream of scores without holding them all.
pub(crate) struct Best {
    top: usize,
    len: usize,
    /// Score, mirrored so that larger scores are smaller numbers, above the row's number.
    kept: [u64; 2 * MAX_TOP],
    faulty: bool,
}

impl Best {
    /// For the `top` best.
    pub fn new(top: usize) -> Best {
        Best { top, len: 0, kept: [0; 2 * MAX_TOP], faulty: false }
    }

    /// Offers row `w`.
    pub fn offer(&mut self, w: u32, score: f32) {
        self.faulty |= score.is_nan();
        // -0 and +0 are equal scores.
        let bits = (score + 0.0).to_bits();
        let ascending = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
        if self.len == 2 * self.top {
            self.cut();
        }
        self.kept[self.len] = u64::from(!ascending) << 32 | u64::from(w);
        self.len += 1;
    }

    fn cut(&mut self) {
        if self.len > self.top {
            self.kept[..self.len].select_nth_unstable(self.top - 1);
            self.len = self.top;
        }
    }

    /// Writes the best, ascending by row; as many as were offered, at most `top`.
    pub fn write(mut self, out: &mut [u32]) {
        self.cut();
        let out = &mut out[..self.len];
        out.iter_mut().zip(&self.kept).for_each(|(out, kept)| *out = *kept as u32);
        out.sort_unstable();
        if self.faulty {
            out[0] = FAULT;
        }
    }
}

pub(crate) mod cuda;
#[cfg(test)]
mod tests;
