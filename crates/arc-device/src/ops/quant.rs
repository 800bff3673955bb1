//! What DeepSeek-V4 stores of a row, and the round trips that stand for it. Exact.
//!
//! # Scales
//!
//! A block of values shares one power of two, an E8M0 byte `e` for `2^(e - 127)`:
//!
//! ```text
//! FP8   amax = max(max |x|, 1e-4)         s = 2^ceil(log2(amax * (1/448)))   code = e4m3(x / s)
//! FP4   amax = max(max |x|, 6 * 2^-126)   s = 2^ceil(log2(amax * (1/6)))     code = e2m1(x / s)
//! ```
//!
//! in f32, the reciprocals rounded to f32 and the logarithm read off the bits. Division by `s` is exact. Source: the
//! released DeepSeek-V4 kernels (`act_quant`, `fp4_act_quant`, scale format ue8m0).
//!
//! NOTE: a block that holds a NaN or an infinity gets the scale 255, E8M0's NaN, and decodes to NaN throughout: the
//! fault reaches the logits instead of becoming a plausible number.
//!
//! # Rows
//!
//! ```text
//! KV row      [nope] E4M3 codes, [rope] BF16, [nope / 64] scales, zeros up to a multiple of 8
//! index row   [64] bytes of E2M1 codes, [4] scales
//! ```
//!
//! In both, scale `b` belongs to the `b`-th block. Of the 16 bytes of codes of an index block, byte `j` holds value `j`
//! in its low and value `j + 16` in its high nibble, so that a register of bytes splits into two of consecutive values.

use crate::format::fp4::{E2M1_MAX, e2m1_to_f32, f32_to_e2m1};
use crate::format::fp8::{E4M3_MAX, e4m3_to_f32, f32_to_e4m3};
use crate::format::half::{bf16_to_f32, e8m0_to_f32, f32_to_bf16, f32_to_e8m0_up};
use crate::simd::multiversion;

pub(crate) mod cuda;
#[cfg(test)]
mod tests;

/// Values of a KV row that share a scale.
pub const KV_BLOCK: usize = 64;
/// Inputs of an FP8 linear that share a scale.
pub const FP8_INPUT_BLOCK: usize = 128;
/// Values of an index row, and the length of the Hadamard transform.
pub const INDEX_DIM: usize = 128;
/// Values of an index row that share a scale.
pub const INDEX_BLOCK: usize = 32;
/// Bytes of an index row.
pub const INDEX_ROW_BYTES: usize = INDEX_DIM / 2 + INDEX_DIM / INDEX_BLOCK;

/// How the inputs of linears are rounded whose weights the release stores in FP8 or FP4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inputs {
    /// Not at all.
    F32,
    /// By [`fp8_round_trip`], as the released kernels do, the first output projection of attention excepted.
    Fp8,
    /// To int8 per 32 values, where weights are integer-coded or FP8: integer-coded ones by their own contract, FP8 ones
    /// by [`int8_round_trip`].
    Int8,
}

/// The scale byte of a block that holds a NaN or an infinity.
const POISON: u8 = 255;

/// How many values of a KV row are stored as E4M3 (`nope`) and, behind them, as BF16 (`rope`). Production: 448 and 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvRow {
    /// Values without rope, a multiple of [`KV_BLOCK`].
    pub nope: usize,
    /// Values with rope.
    pub rope: usize,
}

impl KvRow {
    /// Values of a row.
    pub const fn dim(self) -> usize {
        self.nope + self.rope
    }

    /// Bytes of a stored row: 584 in production.
    pub const fn bytes(self) -> usize {
        (self.nope + 2 * self.rope + self.nope / KV_BLOCK).next_multiple_of(8)
    }
}

multiversion! {
    /// Stores a KV row. `x`: `[row.dim()]`, after rope; `out`: `[row.bytes()]`.
    pub fn pack_kv_row(row: KvRow, x: &[f32], out: &mut [u8]) {
        let (nope, rope) = split_kv(row, x, out.len());
        let (codes, rest) = out.split_at_mut(row.nope);
        let (halves, scales) = rest.split_at_mut(2 * row.rope);
        scales.fill(0);
        for ((x, codes), scale) in nope.chunks_exact(KV_BLOCK).zip(codes.chunks_exact_mut(KV_BLOCK)).zip(scales) {
            *scale = fp8_scale(x);
            let factor = inverse(*scale);
            for (code, x) in codes.iter_mut().zip(x) {
                *code = f32_to_e4m3(x * factor);
            }
        }
        for (half, x) in halves.chunks_exact_mut(2).zip(rope) {
            half.copy_from_slice(&f32_to_bf16(*x).to_le_bytes());
        }
    }

    /// Reads a KV row back. `stored`: `[row.bytes()]`; `out`: `[row.dim()]`.
    pub fn unpack_kv_row(row: KvRow, stored: &[u8], out: &mut [f32]) {
        split_kv(row, out, stored.len());
        let (codes, rest) = stored.split_at(row.nope);
        let (halves, scales) = rest.split_at(2 * row.rope);
        let (nope, rope) = out.split_at_mut(row.nope);
        for ((out, codes), scale) in nope.chunks_exact_mut(KV_BLOCK).zip(codes.chunks_exact(KV_BLOCK)).zip(scales) {
            let scale = e8m0_to_f32(*scale);
            for (out, code) in out.iter_mut().zip(codes) {
                *out = e4m3_to_f32(*code) * scale;
            }
        }
        for (out, half) in rope.iter_mut().zip(halves.chunks_exact(2)) {
            *out = bf16_to_f32(u16::from_le_bytes([half[0], half[1]]));
        }
    }

    /// What storing as E4M3 with a scale per `block` values leaves of `x`, in place: the first values of a KV row with
    /// [`KV_BLOCK`], the inputs of an FP8 linear with [`FP8_INPUT_BLOCK`]. `x`: a whole number of blocks.
    pub fn fp8_round_trip(x: &mut [f32], block: usize) {
        assert!(x.len().is_multiple_of(block), "{} values in blocks of {block}", x.len());
        for x in x.chunks_exact_mut(block) {
            let scale = fp8_scale(x);
            let (factor, scale) = (inverse(scale), e8m0_to_f32(scale));
            for x in x {
                *x = e4m3_to_f32(f32_to_e4m3(*x * factor)) * scale;
            }
        }
    }

    /// What int8 with a scale per 32 values leaves of `x`, in place: `q * d` of [`matmul`](crate::ops::matmul)'s rule.
    /// For the inputs of FP8 weights, which have no integer view. `x`: a multiple of 32 values.
    pub fn int8_round_trip(x: &mut [f32]) {
        assert!(x.len().is_multiple_of(32), "{} values in blocks of 32", x.len());
        for x in x.chunks_exact_mut(32) {
            let amax = amax(x);
            let d = amax / 127.0;
            if amax == 0.0 {
                continue;
            }
            let poison = !amax.is_finite();
            for x in x {
                let q = ((*x / amax) * 127.0).round_ties_even();
                *x = if poison { f32::NAN } else { q * d };
            }
        }
    }

    /// The orthonormal Walsh-Hadamard transform of 128 values in Sylvester's order, in place: `x * H / sqrt(128)`.
    ///
    /// `H[i][j]` is -1 to the number of common bits of `i` and `j`. Seven passes of sums and differences of values at
    /// distance 1, 2, 4, .. 64, in this order, then one product with f32(128^-0.5).
    pub fn hadamard(x: &mut [f32]) {
        assert_eq!(x.len(), INDEX_DIM, "values of a transform");
        for distance in [1, 2, 4, 8, 16, 32, 64] {
            for pair in x.chunks_exact_mut(2 * distance) {
                let (low, high) = pair.split_at_mut(distance);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
        }
        for x in x {
            *x *= 0.088_388_346;
        }
    }

    /// Rounds to BF16, in place.
    pub fn round_to_bf16(x: &mut [f32]) {
        for x in x {
            *x = bf16_to_f32(f32_to_bf16(*x));
        }
    }

    /// Stores transformed values as E2M1 with a scale per 32. `x`: `[128]`; `out`: `[INDEX_ROW_BYTES]`.
    pub fn pack_fp4_row(x: &[f32], out: &mut [u8]) {
        assert_eq!((x.len(), out.len()), (INDEX_DIM, INDEX_ROW_BYTES), "values and bytes of an index row");
        let (codes, scales) = out.split_at_mut(INDEX_DIM / 2);
        for ((x, codes), scale) in x.chunks_exact(INDEX_BLOCK).zip(codes.chunks_exact_mut(16)).zip(scales) {
            *scale = fp4_scale(x);
            let factor = inverse(*scale);
            for j in 0..16 {
                codes[j] = f32_to_e2m1(x[j] * factor) | f32_to_e2m1(x[j + 16] * factor) << 4;
            }
        }
    }

    /// Reads an index row back: the transformed values. `stored`: `[INDEX_ROW_BYTES]`; `out`: `[128]`.
    pub fn unpack_index_row(stored: &[u8], out: &mut [f32]) {
        assert_eq!((out.len(), stored.len()), (INDEX_DIM, INDEX_ROW_BYTES), "values and bytes of an index row");
        let (codes, scales) = stored.split_at(INDEX_DIM / 2);
        for ((out, codes), scale) in out.chunks_exact_mut(INDEX_BLOCK).zip(codes.chunks_exact(16)).zip(scales) {
            let scale = e8m0_to_f32(*scale);
            for j in 0..16 {
                out[j] = e2m1_to_f32(codes[j] & 15) * scale;
                out[j + 16] = e2m1_to_f32(codes[j] >> 4) * scale;
            }
        }
    }

    /// What storing as E2M1 with a scale per 32 values leaves of `x`, in place. `x`: a multiple of 32 values.
    pub fn fp4_round_trip(x: &mut [f32]) {
        assert!(x.len().is_multiple_of(INDEX_BLOCK), "{} values in blocks of {INDEX_BLOCK}", x.len());
        for x in x.chunks_exact_mut(INDEX_BLOCK) {
            let scale = fp4_scale(x);
            let (factor, scale) = (inverse(scale), e8m0_to_f32(scale));
            for x in x {
                *x = e2m1_to_f32(f32_to_e2m1(*x * factor)) * scale;
            }
        }
    }
}

/// Stores an index key or query as served: transform, rounding to BF16, FP4. `x`: `[128]` after rope, overwritten with
/// the rounded transform; `out`: `[INDEX_ROW_BYTES]`.
pub fn pack_index_row(x: &mut [f32], out: &mut [u8]) {
    hadamard(x);
    round_to_bf16(x);
    pack_fp4_row(x, out);
}

/// What the `simulated` numerics make of an index key or query, in place: transform, then FP4, without the BF16 rounding
/// between. `x`: `[128]` after rope.
pub fn simulate_index_row(x: &mut [f32]) {
    hadamard(x);
    fp4_round_trip(x);
}

fn split_kv(row: KvRow, x: &[f32], stored_len: usize) -> (&[f32], &[f32]) {
    assert!(row.nope.is_multiple_of(KV_BLOCK), "{row:?} is no whole number of blocks");
    assert_eq!((x.len(), stored_len), (row.dim(), row.bytes()), "values and bytes of {row:?}");
    x.split_at(row.nope)
}

/// The largest magnitude; infinity or NaN where there is one, since the bits of |x| order like the numbers, those last.
#[inline(always)]
fn amax(x: &[f32]) -> f32 {
    let mut top = 0u32;
    for x in x {
        top = top.max(x.to_bits() & 0x7fff_ffff);
    }
    f32::from_bits(top)
}

#[inline(always)]
fn fp8_scale(x: &[f32]) -> u8 {
    scale_byte(amax(x), 1e-4, 1.0 / E4M3_MAX)
}

#[inline(always)]
fn fp4_scale(x: &[f32]) -> u8 {
    // 6 * 2^-126: the scale never falls below the smallest normal number.
    scale_byte(amax(x), f32::from_bits(0x01c0_0000), 1.0 / E2M1_MAX)
}

#[inline(always)]
fn scale_byte(amax: f32, floor: f32, reciprocal: f32) -> u8 {
    if amax.is_finite() { f32_to_e8m0_up(amax.max(floor) * reciprocal) } else { POISON }
}

/// `1 / scale`, exact: scales of blocks lie in 2^-126 ..= 2^126. For a poisoned block any number will do, as every code
/// is multiplied by NaN.
#[inline(always)]
fn inverse(scale: u8) -> f32 {
    if scale == POISON { 0.0 } else { f32::from_bits((254 - u32::from(scale)) << 23) }
}
