//! Compressors: one row for every `ratio` tokens, pooled from a ring of recent tokens. Exact.
//!
//! A token leaves `a` and `g` `[overlap * dim]` (its values, and its gates with the position's bias added). Row `w`
//! covers tokens `w ratio .. (w + 1) ratio` and exists as soon as the last of them does. Pooling is a softmax of its own
//! in every channel `c`, over slots in ascending order of tokens:
//!
//! ```text
//! overlap 1   slots (p, c)                  for p in w ratio .. (w + 1) ratio
//! overlap 2   slots (p, c)                  for p in (w - 1) ratio .. w ratio, absent for w = 0
//!             slots (p, dim + c)            for p in w ratio .. (w + 1) ratio
//! top = max of g     e = exp(g - top)     row[c] = (sum of fma(e, a, ..)) / (sum of e)
//! row = rope(rms_norm(row), position w ratio)
//! ```
//!
//! # State
//!
//! `a` and `g` of token `p` stand at `p % ring` of the sequence's ring; nothing is shifted, accumulated or cleared, and
//! which slots are read follows from the row's position alone. [`Compressor::ring`] leaves room for tokens that are
//! computed and taken back: 8 at ratio 4, 16 at ratio 128. Finished rows live in the sequence's blocks.
//!
//! Source: DeepSeek-V4's published model code (`Compressor`).

use std::ops::Range;

use crate::math::exp;
use crate::simd::multiversion;
use crate::step::BLOCK_TOKENS;

/// Tokens past the committed ones that may be computed and taken back.
pub const DRAFT_ROWS: usize = 16;

/// The shape of one compressor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compressor {
    /// Tokens a row.
    pub ratio: usize,
    /// Windows that a row reads: its own, or its own and the one before. 1 or 2.
    pub overlap: usize,
    /// Values of a row.
    pub dim: usize,
}

impl Compressor {
    /// Values that a token leaves, twice: `a` and `g`.
    pub fn width(&self) -> usize {
        self.overlap * self.dim
    }

    /// Tokens that a sequence's ring holds: those of a row, and as many to spare as may be taken back.
    pub fn ring(&self) -> usize {
        let read = self.overlap * self.ratio;
        read + DRAFT_ROWS.min(read)
    }

    /// Elements of a layer's rings over all slots.
    pub fn ring_elements(&self, slots: usize) -> usize {
        slots * self.ring() * 2 * self.width()
    }

    /// Rows of one block of [`BLOCK_TOKENS`] tokens. Where a row spans several blocks, it lies in the last of them and
    /// the others stay empty.
    pub fn rows_per_block(&self) -> usize {
        (BLOCK_TOKENS / self.ratio).max(1)
    }

    /// Rows that the query at `pos` sees.
    pub fn visible(&self, pos: u32) -> usize {
        (pos as usize + 1) / self.ratio
    }

    /// Which row of the pool holds row `w` of a sequence with these blocks: one in the block of its last token, which is
    /// the block that the step's row which completes it has claimed for itself.
    pub(crate) fn place(&self, blocks: &[u32], w: usize) -> usize {
        let last = (w + 1) * self.ratio - 1;
        blocks[last / BLOCK_TOKENS] as usize * self.rows_per_block() + last % BLOCK_TOKENS / self.ratio
    }

    /// Tokens that row `w` reads, one slot each.
    pub(crate) fn tokens(&self, w: usize) -> Range<usize> {
        let own = w * self.ratio;
        let before = if self.overlap == 2 && w > 0 { self.ratio } else { 0 };
        own - before..own + self.ratio
    }

    /// First channel that row `w` reads of token `p`.
    pub(crate) fn channel(&self, w: usize, p: usize) -> usize {
        if p < w * self.ratio { 0 } else { (self.overlap - 1) * self.dim }
    }
}

/// Channels that are pooled together: their sums stay in registers or L1.
const LANES: usize = 64;

/// Pools one row. `row`: `[dim]`; `slot(i)` gives values and gates `[dim]` of the `i`-th of `n` slots.
pub(crate) fn pool<'a>(row: &mut [f32], n: usize, slot: impl Fn(usize) -> (&'a [f32], &'a [f32])) {
    for (chunk, row) in row.chunks_mut(LANES).enumerate() {
        let (from, len) = (chunk * LANES, row.len());
        let part = |i: usize| {
            let (a, g) = slot(i);
            (&a[from..from + len], &g[from..from + len])
        };
        let (mut top, mut sum) = ([f32::NEG_INFINITY; LANES], [0.0; LANES]);
        (0..n).for_each(|i| raise(&mut top[..len], part(i).1));
        row.fill(0.0);
        (0..n).for_each(|i| gather(row, &mut sum[..len], &top[..len], part(i).0, part(i).1));
        row.iter_mut().zip(&sum).for_each(|(row, sum)| *row /= sum);
    }
}

multiversion! {
    fn raise(top: &mut [f32], g: &[f32]) {
        for (top, &g) in top.iter_mut().zip(g) {
            *top = if g > *top { g } else { *top };
        }
    }

    fn gather(row: &mut [f32], sum: &mut [f32], top: &[f32], a: &[f32], g: &[f32]) {
        for ((((row, sum), top), a), g) in row.iter_mut().zip(sum).zip(top).zip(a).zip(g) {
            let e = exp(g - top);
            *row = e.mul_add(*a, *row);
            *sum += e;
        }
    }
}

#[cfg(test)]
mod tests;
