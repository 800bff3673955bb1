//! The loops of the sampler that compilers do not vectorise: keeping what passes a test, closed up, in order.

use super::passes::{LANES, TILE};
#[cfg(target_arch = "x86_64")]
use crate::simd::Isa;
use crate::simd::isa;

/// What the lists of [`collect`] must have beyond the row: a vector store writes this many places at once.
pub(super) const SLACK: usize = 16;

/// Ids and logits at or above `cut`, in id order; returns how many.
///
/// `x`: `[vocab]`, no NaN; `group_max`: of its scan. `ids`, `xs`: at least `[vocab + SLACK]`, overwritten from the front
/// and scribbled on up to [`SLACK`] places past the result.
pub(super) fn collect(x: &[f32], group_max: &[f32], cut: f32, ids: &mut [u32], xs: &mut [f32]) -> usize {
    assert_eq!(group_max.len(), x.len().div_ceil(TILE) * LANES);
    assert!(ids.len() >= x.len() + SLACK && xs.len() >= x.len() + SLACK);
    let (groups, _) = group_max.as_chunks::<LANES>();
    let mut n = 0;
    for (idx, (tile, group)) in x.chunks(TILE).zip(groups).enumerate() {
        if !group.iter().fold(false, |any, &max| any | (max >= cut)) {
            continue;
        }
        let first = (idx * TILE) as u32;
        n = match isa() {
            // SAFETY: `isa` names a set only if the CPU has it. n is at most `first`, and the tile ends inside `x`, so
            // both lists have room for the tile and SLACK more.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { append_avx512(tile, first, cut, ids, xs, n) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { append_avx2(tile, first, cut, ids, xs, n) },
            _ => append(tile, first, cut, ids, xs, n),
        };
    }
    n
}

fn append(tile: &[f32], first: u32, cut: f32, ids: &mut [u32], xs: &mut [f32], mut n: usize) -> usize {
    for (i, &x) in tile.iter().enumerate() {
        // Written always, counted if it passes: a branch here would be guessed wrong.
        (ids[n], xs[n]) = (first + i as u32, x);
        n += usize::from(x >= cut);
    }
    n
}

/// # Safety
/// The CPU must have the features, and both lists at least `n + tile.len() + SLACK` places.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,popcnt")]
unsafe fn append_avx512(tile: &[f32], first: u32, cut: f32, ids: &mut [u32], xs: &mut [f32], mut n: usize) -> usize {
    use std::arch::x86_64::*;

    debug_assert!(n + tile.len() + SLACK <= ids.len().min(xs.len()));
    let (vectors, rest) = tile.as_chunks::<16>();
    let cuts = _mm512_set1_ps(cut);
    let mut lane_ids = _mm512_add_epi32(
        _mm512_set1_epi32(first as i32),
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
    );
    for vector in vectors {
        // SAFETY: the array has 16 floats. The stores write places n..n + 16, which exist by the caller's promise: n
        // grows by at most one for each element gone by.
        unsafe {
            let x = _mm512_loadu_ps(vector.as_ptr());
            let pass = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, cuts);
            _mm512_storeu_epi32(ids.as_mut_ptr().add(n).cast(), _mm512_maskz_compress_epi32(pass, lane_ids));
            _mm512_storeu_ps(xs.as_mut_ptr().add(n), _mm512_maskz_compress_ps(pass, x));
            n += pass.count_ones() as usize;
        }
        lane_ids = _mm512_add_epi32(lane_ids, _mm512_set1_epi32(16));
    }
    append(rest, first + (tile.len() - rest.len()) as u32, cut, ids, xs, n)
}

/// # Safety
/// The CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1")]
unsafe fn append_avx2(tile: &[f32], first: u32, cut: f32, ids: &mut [u32], xs: &mut [f32], mut n: usize) -> usize {
    use std::arch::x86_64::*;

    let (vectors, rest) = tile.as_chunks::<8>();
    let cuts = _mm256_set1_ps(cut);
    for (v, vector) in vectors.iter().enumerate() {
        // SAFETY: the array has 8 floats.
        let x = unsafe { _mm256_loadu_ps(vector.as_ptr()) };
        let mut pass = _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(x, cuts)) as u32;
        while pass != 0 {
            let lane = pass.trailing_zeros();
            (ids[n], xs[n]) = (first + v as u32 * 8 + lane, vector[lane as usize]);
            n += 1;
            pass &= pass - 1;
        }
    }
    append(rest, first + (tile.len() - rest.len()) as u32, cut, ids, xs, n)
}

/// Keeps the list's entries at or above `cut`, in order; returns how many. `ids`, `xs`: `[n]`, no NaN.
pub(super) fn keep_from(ids: &mut [u32], xs: &mut [f32], cut: f32) -> usize {
    assert_eq!(ids.len(), xs.len());
    #[cfg(target_arch = "x86_64")]
    if isa() == Isa::Avx512 {
        // SAFETY: the CPU has the set; the lists are equally long.
        return unsafe { keep_from_avx512(ids, xs, cut) };
    }
    keep_if(ids, xs, 0, 0, |_, x| x >= cut)
}

/// Keeps the list's entries for which `keep(index, logit)`, in order; returns how many. `ids`, `xs`: `[n]`.
pub(super) fn keep_where(ids: &mut [u32], xs: &mut [f32], keep: impl Fn(usize, f32) -> bool) -> usize {
    keep_if(ids, xs, 0, 0, keep)
}

/// Closes up entries `from..` behind the first `n`, which are kept already.
fn keep_if(ids: &mut [u32], xs: &mut [f32], from: usize, mut n: usize, keep: impl Fn(usize, f32) -> bool) -> usize {
    for i in from..ids.len() {
        let (id, x) = (ids[i], xs[i]);
        (ids[n], xs[n]) = (id, x);
        n += usize::from(keep(i, x));
    }
    n
}

/// # Safety
/// The CPU must have the features, and the lists be equally long.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,popcnt")]
unsafe fn keep_from_avx512(ids: &mut [u32], xs: &mut [f32], cut: f32) -> usize {
    use std::arch::x86_64::*;

    let whole = ids.len() / 16 * 16;
    let cuts = _mm512_set1_ps(cut);
    let mut n = 0;
    for i in (0..whole).step_by(16) {
        // SAFETY: i + 16 is within both lists, and n is at most i: each store lands on entries already loaded.
        unsafe {
            let id = _mm512_loadu_epi32(ids.as_ptr().add(i).cast());
            let x = _mm512_loadu_ps(xs.as_ptr().add(i));
            let pass = _mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, cuts);
            _mm512_storeu_epi32(ids.as_mut_ptr().add(n).cast(), _mm512_maskz_compress_epi32(pass, id));
            _mm512_storeu_ps(xs.as_mut_ptr().add(n), _mm512_maskz_compress_ps(pass, x));
            n += pass.count_ones() as usize;
        }
    }
    keep_if(ids, xs, whole, n, |_, x| x >= cut)
}

/// Overwrites the list from the front with the indices at which it holds `value`; returns how many.
pub(super) fn indices_of(list: &mut [u32], value: u32) -> usize {
    #[cfg(target_arch = "x86_64")]
    if isa() == Isa::Avx512 {
        // SAFETY: the CPU has the set.
        return unsafe { indices_of_avx512(list, value) };
    }
    indices_from(list, value, 0, 0)
}

fn indices_from(list: &mut [u32], value: u32, from: usize, mut n: usize) -> usize {
    for i in from..list.len() {
        let equal = list[i] == value;
        list[n] = i as u32;
        n += usize::from(equal);
    }
    n
}

/// # Safety
/// The CPU must have the features.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,popcnt")]
unsafe fn indices_of_avx512(list: &mut [u32], value: u32) -> usize {
    use std::arch::x86_64::*;

    let whole = list.len() / 16 * 16;
    let values = _mm512_set1_epi32(value as i32);
    let mut indices = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    let mut n = 0;
    for i in (0..whole).step_by(16) {
        // SAFETY: i + 16 is within the list, and n is at most i: the store lands on entries already loaded.
        unsafe {
            let x = _mm512_loadu_epi32(list.as_ptr().add(i).cast());
            let pass = _mm512_cmpeq_epi32_mask(x, values);
            _mm512_storeu_epi32(list.as_mut_ptr().add(n).cast(), _mm512_maskz_compress_epi32(pass, indices));
            n += pass.count_ones() as usize;
        }
        indices = _mm512_add_epi32(indices, _mm512_set1_epi32(16));
    }
    indices_from(list, value, whole, n)
}
