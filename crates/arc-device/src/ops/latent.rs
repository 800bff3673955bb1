//! Latent attention: every head reads the same rows, and a row is key and value at once.
//!
//! A row is `[dim]`; its last [`ROPE_DIM`] values are rotated to the position of its token. Query `t` sees the rows of
//! tokens `t - window + 1 ..= t`, and of a compressed layer some or all rows of its compressor:
//!
//! ```text
//! s[n] = (q . row[n]) * scale
//! M    = max(max of s, sink)
//! o    = sum of exp(s[n] - M) row[n]  /  (sum of exp(s[n] - M) + exp(sink - M))
//! ```
//!
//! Rows are taken window first, ascending, then compressed ones, ascending, in tiles of [`TILE_ROWS`] counted from the
//! first row of the query's own list; a tile's sums are joined to the total by the usual rescaling, and the sink comes
//! last. So the bits of a query depend on its own rows only. **Invariant, bounded**: other devices may order a dot
//! product differently.
//!
//! # State
//!
//! The row of token `t` stands at `t % ring` of its sequence, `ring` = window + [`DRAFT_ROWS`]. A query that follows
//! others of its sequence in the step reads those from the step's workspace, for the ring is written after the layer's
//! attention: a chunk may be longer than the ring. Source: DeepSeek-V4's published model code (`Attention`,
//! `sparse_attn`).

use super::compress::DRAFT_ROWS;
use super::kv::cpu::rotate;
use super::kv::{Rope, RopeStyle};
use super::quant::{self, KvRow};
use crate::math::exp;
use crate::simd::multiversion;

/// Values at the end of a row, a query head or an index key that rotate, in adjacent pairs.
pub const ROPE_DIM: usize = 64;
/// Rows of a tile.
pub const TILE_ROWS: usize = 32;
/// The longest row.
pub const MAX_DIM: usize = 512;
/// Query heads that read a tile together.
pub(crate) const TASK_HEADS: usize = 16;

/// What one layer's latent attention fixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LatentConfig {
    /// Query heads.
    pub heads: usize,
    /// Values of a head and of a row; at most [`MAX_DIM`], a multiple of 16.
    pub dim: usize,
    /// Rows of recent tokens that a query sees, its own included.
    pub window: usize,
    /// Groups of consecutive heads that the first output projection keeps apart; divides `heads`.
    pub groups: usize,
    /// Values that a group leaves.
    pub group_out: usize,
    /// Multiplies every score.
    pub scale: f32,
    /// Added to the mean squares of the norms.
    pub eps: f32,
}

impl LatentConfig {
    /// Rows of a sequence's ring.
    pub fn ring(&self) -> usize {
        self.window + DRAFT_ROWS
    }

    /// Values of all query heads.
    pub fn q_dim(&self) -> usize {
        self.heads * self.dim
    }

    /// The first position that the query at `pos` sees in the window.
    pub fn first_visible(&self, pos: u32) -> usize {
        (pos as usize + 1).saturating_sub(self.window)
    }
}

const ROPE: Rope = Rope { dim: ROPE_DIM, style: RopeStyle::Adjacent };

/// Rotates the end of one head or row. `table`: cosine and sine of the position, `[ROPE_DIM / 2, 2]`.
pub(crate) fn rope(x: &mut [f32], table: &[f32]) {
    let start = x.len() - ROPE_DIM;
    rotate(&mut x[start..], table, ROPE);
}

/// Undoes [`rope`].
pub(crate) fn inverse_rope(x: &mut [f32], table: &[f32]) {
    let mut mirrored = [0.0; ROPE_DIM];
    for (out, cs) in mirrored.chunks_exact_mut(2).zip(table.chunks_exact(2)) {
        (out[0], out[1]) = (cs[0], -cs[1]);
    }
    rope(x, &mirrored);
}

/// Scratch of a team member.
pub(crate) struct Work {
    rows: [[f32; MAX_DIM]; TILE_ROWS],
    sums: [[f32; MAX_DIM]; TASK_HEADS],
    top: [f32; TASK_HEADS],
    weight: [f32; TASK_HEADS],
}

impl Default for Work {
    fn default() -> Work {
        Work {
            rows: [[0.0; MAX_DIM]; TILE_ROWS],
            sums: [[0.0; MAX_DIM]; TASK_HEADS],
            top: [0.0; TASK_HEADS],
            weight: [0.0; TASK_HEADS],
        }
    }
}

/// Attention of up to [`TASK_HEADS`] heads of one query over `n` rows, of which `read(i, out)` decodes the `i`-th.
/// `out`, `q`: `[sinks.len(), dim]`.
pub(crate) fn attend(
    work: &mut Work,
    out: &mut [f32],
    q: &[f32],
    sinks: &[f32],
    scale: f32,
    n: usize,
    read: impl Fn(usize, &mut [f32]),
) {
    let dim = q.len() / sinks.len();
    for h in 0..sinks.len() {
        work.sums[h][..dim].fill(0.0);
        (work.top[h], work.weight[h]) = (f32::NEG_INFINITY, 0.0);
    }
    for first in (0..n).step_by(TILE_ROWS) {
        let len = TILE_ROWS.min(n - first);
        for (i, row) in work.rows[..len].iter_mut().enumerate() {
            read(first + i, &mut row[..dim]);
        }
        for (h, q) in q.chunks_exact(dim).enumerate() {
            tile(
                q,
                &work.rows[..len],
                &mut work.sums[h][..dim],
                std::slice::from_mut(&mut work.top[h]),
                std::slice::from_mut(&mut work.weight[h]),
                scale,
            );
        }
    }
    for (h, out) in out.chunks_exact_mut(dim).enumerate() {
        let (top, sink) = (work.top[h], sinks[h]);
        let most = if sink > top { sink } else { top };
        let ours = exp(top - most);
        let total = work.weight[h] * ours + exp(sink - most);
        out.iter_mut().zip(&work.sums[h]).for_each(|(out, sum)| *out = sum * ours / total);
    }
}

/// Lanes of a dot product: element `i` belongs to lane `i % LANES`.
const LANES: usize = 16;

multiversion! {
    /// Joins one tile of rows to a head's sums. `top` and `weight` hold one value each.
    fn tile(
        q: &[f32],
        rows: &[[f32; MAX_DIM]],
        sums: &mut [f32],
        top: &mut [f32],
        weight: &mut [f32],
        scale: f32,
    ) {
        let mut s = [0.0f32; TILE_ROWS];
        let mut most = top[0];
        for (s, row) in s.iter_mut().zip(rows) {
            let mut lanes = [0.0f32; LANES];
            for (q, row) in q.as_chunks::<LANES>().0.iter().zip(row.as_chunks::<LANES>().0) {
                for lane in 0..LANES {
                    lanes[lane] = q[lane].mul_add(row[lane], lanes[lane]);
                }
            }
            let mut half = LANES / 2;
            while half > 0 {
                for lane in 0..half {
                    lanes[lane] += lanes[lane + half];
                }
                half /= 2;
            }
            *s = lanes[0] * scale;
            most = if *s > most { *s } else { most };
        }
        let old = exp(top[0] - most);
        let mut total = weight[0] * old;
        sums.iter_mut().for_each(|sum| *sum *= old);
        for (s, row) in s.iter().zip(rows) {
            let e = exp(s - most);
            total += e;
            for (sum, row) in sums.iter_mut().zip(row) {
                *sum = e.mul_add(*row, *sum);
            }
        }
        (top[0], weight[0]) = (most, total);
    }
}

/// How rows of recent and compressed tokens, and index rows, are kept. The round trips are those of [`quant`].
///
/// [`quant`]: super::quant
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowFormat {
    /// `[dim]` f32, little-endian.
    F32,
    /// A row as f32, its unrotated values after the FP8 round trip.
    RoundedFp8,
    /// A row as E4M3 codes, BF16 for the rotated values, and scales: 584 bytes of 512 values.
    Fp8,
    /// An index row as f32, transformed and after the FP4 round trip.
    RoundedFp4,
    /// An index row transformed, rounded to BF16, as E2M1 codes and scales: 68 bytes of 128 values.
    Fp4,
}

impl RowFormat {
    /// Bytes of a row of `dim` values.
    pub fn row_bytes(self, dim: usize) -> usize {
        match self {
            RowFormat::F32 | RowFormat::RoundedFp8 | RowFormat::RoundedFp4 => 4 * dim,
            RowFormat::Fp8 => kv_row(dim).bytes(),
            RowFormat::Fp4 => quant::INDEX_ROW_BYTES,
        }
    }

    /// Rows of plain numbers up to about 2, as stored; for measurements.
    pub fn random_rows(self, dim: usize, rows: usize, seed: u64) -> Vec<u8> {
        let row_bytes = self.row_bytes(dim);
        let mut bytes = vec![0; (rows * row_bytes).next_multiple_of(8)];
        let mut state = seed;
        for word in bytes.as_chunks_mut().0 {
            *word = split_mix(&mut state).to_le_bytes();
        }
        bytes.truncate(rows * row_bytes);
        // Sign and mantissa of an f32 or BF16 between 1/2 and 1.
        let halve = |high: &mut [u8]| (high[0], high[1]) = (high[0] & 0x7f, high[1] & 0x80 | 0x3f);
        for row in bytes.chunks_exact_mut(row_bytes) {
            match self {
                RowFormat::F32 | RowFormat::RoundedFp8 | RowFormat::RoundedFp4 => {
                    row.as_chunks_mut::<4>().0.iter_mut().for_each(|x| halve(&mut x[2..]));
                }
                RowFormat::Fp8 => {
                    let (codes, rest) = row.split_at_mut(dim - ROPE_DIM);
                    // Without the largest exponents, NaN among them.
                    codes.iter_mut().for_each(|code| *code &= 0xbf);
                    let (rope, scales) = rest.split_at_mut(2 * ROPE_DIM);
                    rope.as_chunks_mut::<2>().0.iter_mut().for_each(|x| halve(x));
                    scales.fill(127);
                }
                RowFormat::Fp4 => row[dim / 2..].fill(127),
            }
        }
        bytes
    }

    /// What storing a row and reading it again leaves of it. Once more changes nothing, but for index rows, whose
    /// transform is part of it.
    pub(crate) fn round(self, x: &mut [f32]) {
        let plain = x.len() - ROPE_DIM;
        match self {
            RowFormat::F32 => {}
            RowFormat::RoundedFp8 => quant::fp8_round_trip(&mut x[..plain], quant::KV_BLOCK),
            RowFormat::Fp8 => {
                quant::fp8_round_trip(&mut x[..plain], quant::KV_BLOCK);
                quant::round_to_bf16(&mut x[plain..]);
            }
            RowFormat::RoundedFp4 => quant::simulate_index_row(x),
            RowFormat::Fp4 => {
                quant::hadamard(x);
                quant::round_to_bf16(x);
                quant::fp4_round_trip(x);
            }
        }
    }

    /// Stores a row, rounding it. `out`: `row_bytes(x.len())`.
    pub(crate) fn write(self, out: &mut [u8], x: &[f32]) {
        let mut buf = [0.0; MAX_DIM];
        let row = &mut buf[..x.len()];
        row.copy_from_slice(x);
        match self {
            RowFormat::F32 | RowFormat::RoundedFp8 | RowFormat::RoundedFp4 => {
                self.round(row);
                for (out, x) in out.as_chunks_mut::<4>().0.iter_mut().zip(row) {
                    *out = x.to_le_bytes();
                }
            }
            RowFormat::Fp8 => quant::pack_kv_row(kv_row(x.len()), x, out),
            RowFormat::Fp4 => quant::pack_index_row(row, out),
        }
    }

    /// Reads a row. `bytes`: `row_bytes(out.len())`.
    pub(crate) fn read(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            RowFormat::F32 | RowFormat::RoundedFp8 | RowFormat::RoundedFp4 => {
                for (bytes, out) in bytes.as_chunks::<4>().0.iter().zip(out) {
                    *out = f32::from_le_bytes(*bytes);
                }
            }
            RowFormat::Fp8 => quant::unpack_kv_row(kv_row(out.len()), bytes, out),
            RowFormat::Fp4 => quant::unpack_index_row(bytes, out),
        }
    }
}

/// The next word of SplitMix64 (Steele, Lea, Flood 2014).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

fn kv_row(dim: usize) -> KvRow {
    KvRow { nope: dim - ROPE_DIM, rope: ROPE_DIM }
}

pub mod cuda;
#[cfg(test)]
mod tests;
