//! Loops over a whole row, each compiled for every instruction set. None divides work by threads: a row is one core's.
//!
//! A row is cut into tiles of [`TILE`] consecutive ids (the last may be short), and each tile into [`LANES`] groups: the
//! ids of a tile that are equal modulo [`LANES`]. The first pass leaves the maximum of every group, so that later passes
//! skip tiles, and a lower bound of the k-th largest logit is found among the groups alone.

use crate::math::exp_of_nonpositive;
use crate::simd::multiversion;

/// Ids of a tile. A tile's masses sum below 2^51, and each half of them (see [`halves`]) to at most 2^30.
pub(super) const TILE: usize = 1024;
/// Groups of a tile.
pub(super) const LANES: usize = 16;
/// Ids that a pass handles at once.
const STRIDE: usize = 64;

/// What the first pass finds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scan {
    /// The largest logit; `-inf` if all are masked. Never -0.0: which of two zeros a scan meets first is its own.
    pub max: f32,
    /// Whether there is a NaN or `+inf`.
    pub non_finite: bool,
}

#[inline(always)]
fn max_of(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// A mass in two halves of 20 bits: `hi * 2^20 + lo = trunc(2^40 * e)` for 0 <= e <= 1.
///
/// Both conversions are exact or truncate once, and both fit 32 bits, which vectors convert and add twice as fast.
#[inline(always)]
fn halves(e: f32) -> (u32, u32) {
    const TWO_20: f32 = 1_048_576.0;
    let scaled = e * TWO_20;
    // SAFETY: 0 <= e <= 1 (exp of a number at most 0, never NaN: the row was checked), so 0 <= scaled <= 2^20.
    let hi = unsafe { scaled.to_int_unchecked::<i32>() };
    let rest = (scaled - hi as f32) * TWO_20;
    // SAFETY: rest is the fraction of `scaled`, in [0, 1), times 2^20.
    let lo = unsafe { rest.to_int_unchecked::<i32>() };
    (hi as u32, lo as u32)
}

/// exp((x - max) / t); the quotient is left out where it changes nothing.
#[inline(always)]
fn weight<const UNIT: bool>(x: f32, max: f32, t: f32) -> f32 {
    let d = x - max;
    exp_of_nonpositive(if UNIT { d } else { d / t })
}

#[inline(always)]
fn tile_sums<const UNIT: bool>(x: &[f32], max: f32, t: f32, sums: &mut [u64]) -> u64 {
    let mut total = 0;
    for (tile, sum) in x.chunks(TILE).zip(sums) {
        let (mut hi, mut lo) = (0u32, 0u32);
        for &x in tile {
            let (h, l) = halves(weight::<UNIT>(x, max, t));
            hi += h;
            lo += l;
        }
        *sum = (u64::from(hi) << 20) + u64::from(lo);
        total += *sum;
    }
    total
}

#[inline(always)]
fn each_mass<const UNIT: bool>(x: &[f32], max: f32, t: f32, out: &mut [u64]) -> u64 {
    let mut total = 0;
    for (&x, out) in x.iter().zip(out) {
        let (hi, lo) = halves(weight::<UNIT>(x, max, t));
        *out = (u64::from(hi) << 20) + u64::from(lo);
        total += *out;
    }
    total
}

multiversion! {
    /// Finds the maximum of the row and of every group, and whether a logit is NaN or `+inf`.
    /// `x`: `[vocab]`. `group_max`: `[tiles, LANES]`, overwritten; groups without an id get `-inf`.
    pub(super) fn scan(x: &[f32], group_max: &mut [f32]) -> Scan {
        assert_eq!(group_max.len(), x.len().div_ceil(TILE) * LANES);
        let mut bad = [0u32; STRIDE];
        let mut max = [f32::NEG_INFINITY; LANES];
        let (groups, _) = group_max.as_chunks_mut::<LANES>();
        for (tile, group) in x.chunks(TILE).zip(groups) {
            let mut m = [f32::NEG_INFINITY; STRIDE];
            let (blocks, rest) = tile.as_chunks::<STRIDE>();
            for block in blocks {
                for ((m, bad), &x) in m.iter_mut().zip(&mut bad).zip(block) {
                    *m = max_of(*m, x);
                    *bad |= u32::from(x.is_nan() | (x == f32::INFINITY));
                }
            }
            for ((m, bad), &x) in m.iter_mut().zip(&mut bad).zip(rest) {
                *m = max_of(*m, x);
                *bad |= u32::from(x.is_nan() | (x == f32::INFINITY));
            }
            for lane in 0..LANES {
                let pair = |i: usize| max_of(m[lane + 2 * i * LANES], m[lane + (2 * i + 1) * LANES]);
                group[lane] = max_of(pair(0), pair(1));
                max[lane] = max_of(max[lane], group[lane]);
            }
        }
        Scan {
            max: max.iter().fold(f32::NEG_INFINITY, |a, &b| max_of(a, b)) + 0.0,
            non_finite: bad.iter().fold(0, |a, b| a | b) != 0,
        }
    }

    /// Sums of mass by tile, and their total. `x`: `[vocab]`, checked, with maximum `max`; `t` > 0. `sums`: `[tiles]`.
    pub(super) fn mass_sums(x: &[f32], max: f32, t: f32, sums: &mut [u64]) -> u64 {
        if t == 1.0 { tile_sums::<true>(x, max, t, sums) } else { tile_sums::<false>(x, max, t, sums) }
    }

    /// Masses, and their total. `x`, `out`: `[n]`; no `x` is above `max`.
    pub(super) fn masses(x: &[f32], max: f32, t: f32, out: &mut [u64]) -> u64 {
        assert_eq!(x.len(), out.len());
        if t == 1.0 { each_mass::<true>(x, max, t, out) } else { each_mass::<false>(x, max, t, out) }
    }

    /// `-inf` wherever the mask's bit is 0. `mask`: one bit a token, lowest first; long enough for `x`.
    pub(super) fn mask_out(x: &mut [f32], mask: &[u32]) {
        assert!(mask.len() * 32 >= x.len());
        for (x, &word) in x.chunks_mut(32).zip(mask) {
            if word == u32::MAX {
                continue;
            }
            for (i, x) in x.iter_mut().enumerate() {
                *x = if word >> i & 1 == 1 { *x } else { f32::NEG_INFINITY };
            }
        }
    }

    /// Places of `x` among bins of equal width, counted down from `max`; the last bin takes all that is lower. Equal
    /// logits share a bin, and a larger logit is never in a later one. `x`, `out`: `[n]`; `scale` >= 0, not NaN.
    pub(super) fn bins_below(x: &[f32], max: f32, scale: f32, last: u32, out: &mut [u32]) {
        assert_eq!(x.len(), out.len());
        let limit = last as f32;
        for (&x, out) in x.iter().zip(out) {
            let place = (max - x) * scale;
            // Also catches 0 * inf, which only the maximum or a scale of 0 can make.
            let place = if place > 0.0 { place } else { 0.0 };
            let place = if place < limit { place } else { limit };
            // SAFETY: 0 <= place <= last, which is below 2^31.
            *out = unsafe { place.to_int_unchecked::<i32>() } as u32;
        }
    }

    /// The smallest logit above `-inf`, or `+inf`. `x`: `[n]`, no NaN.
    pub(super) fn finite_min(x: &[f32]) -> f32 {
        let mut min = [f32::INFINITY; STRIDE];
        let (blocks, rest) = x.as_chunks::<STRIDE>();
        let update = |m: &mut f32, x: f32| *m = if x < *m && x > f32::NEG_INFINITY { x } else { *m };
        for block in blocks {
            for (m, &x) in min.iter_mut().zip(block) {
                update(m, x);
            }
        }
        for (m, &x) in min.iter_mut().zip(rest) {
            update(m, x);
        }
        min.iter().fold(f32::INFINITY, |a, &b| if b < a { b } else { a })
    }
}

/// First id of the row at the maximum. `group_max` is [`scan`]'s.
pub(super) fn first_at(x: &[f32], group_max: &[f32], max: f32) -> usize {
    let (groups, _) = group_max.as_chunks::<LANES>();
    let tile = groups.iter().position(|g| g.contains(&max)).expect("the maximum is in some group");
    let within = x[tile * TILE..].iter().position(|&x| x == max).expect("the group's maximum is in its tile");
    tile * TILE + within
}
