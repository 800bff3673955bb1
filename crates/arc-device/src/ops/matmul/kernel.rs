//! The inner loop of an integer-coded product: 16 weight rows by a few activation rows over one slice.
//!
//! Three instruction sets, one result: everything up to `dot` is integer, and the float operations after it are the
//! ones that [`matmul`](super) states, in that order.

use super::pack::{SLICE_BLOCKS, Slice, TILE};
use crate::format::{Codes, Coding, Format};
use crate::simd::Isa;

/// Activation rows that the vector kernels take together.
pub(crate) const MAX_ROWS: usize = 8;

/// int8 activations of some rows, as [`super::cpu::Activations`] keeps them: `cols` values a row, scales and sums
/// beside them.
#[derive(Clone, Copy)]
pub(crate) struct Quantised<'a> {
    /// `[rows, cols]`.
    pub q: &'a [i8],
    /// `[rows, cols / 32]`: d_x.
    pub d: &'a [f32],
    /// `[rows, cols / 16]`: sums of q.
    pub sums: &'a [i32],
    pub cols: usize,
}

/// What a kernel has to know of a format.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    per_half: bool,
    has_min: bool,
    offset: i32,
    /// Codes above 127: two of them times 127 overflow an i16.
    wide: bool,
}

impl Shape {
    pub fn of(format: Format) -> Shape {
        let shape = |codes: Codes, per_half| Shape {
            per_half,
            has_min: codes.has_min,
            offset: i32::from(codes.offset),
            wide: codes.max > 127,
        };
        match format.coding() {
            Coding::PerBlock(codes) => shape(codes, false),
            Coding::PerHalf(codes) => shape(codes, true),
            Coding::Float => unreachable!("float formats have no codes"),
        }
    }
}

/// `acc[r] += slice * x[row + r]` for `acc.len()` activation rows, over blocks `first .. first + n` of them.
///
/// # Safety
/// The caller is compiled for `isa`, and the machine has it.
#[inline(always)]
pub(crate) unsafe fn dot_slice(
    isa: Isa,
    shape: Shape,
    slice: &Slice,
    x: Quantised<'_>,
    row: usize,
    first: usize,
    n: usize,
    acc: &mut [[f32; TILE]],
) {
    let rows = acc.len();
    assert!(n <= SLICE_BLOCKS && (first + n) * 32 <= x.cols && (row + rows) * x.cols <= x.q.len());
    assert!(x.d.len() == x.q.len() / 32 && x.sums.len() == x.q.len() / 16);
    match isa {
        // SAFETY: bounds asserted above; the instruction set by the caller's promise.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => unsafe {
            match (shape.per_half, shape.has_min) {
                (false, false) => x86::rows_avx512::<false, false>(shape, slice, x, row, first, n, acc),
                (false, true) => x86::rows_avx512::<false, true>(shape, slice, x, row, first, n, acc),
                (true, false) => x86::rows_avx512::<true, false>(shape, slice, x, row, first, n, acc),
                (true, true) => x86::rows_avx512::<true, true>(shape, slice, x, row, first, n, acc),
            }
        },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => unsafe {
            for (r, acc) in acc.iter_mut().enumerate() {
                x86::row_avx2(shape, slice, x, row + r, first, n, acc);
            }
        },
        _ => {
            for (r, acc) in acc.iter_mut().enumerate() {
                row_scalar(shape, slice, x, row + r, first, n, acc);
            }
        }
    }
}

fn row_scalar(
    shape: Shape,
    slice: &Slice,
    x: Quantised<'_>,
    row: usize,
    first: usize,
    n: usize,
    total: &mut [f32; TILE],
) {
    let mut acc = [0.0f32; TILE];
    for b in 0..n {
        let block = row * x.cols / 32 + first + b;
        let q = &x.q[32 * block..32 * block + 32];
        let sums = [x.sums[2 * block], x.sums[2 * block + 1]];
        let d_x = x.d[block];
        for lane in 0..TILE {
            let half = |h: usize| -> i32 {
                let dot: i32 = (16 * h..16 * h + 16)
                    .map(|k| i32::from(slice.codes[b][64 * (k / 4) + 4 * lane + k % 4]) * i32::from(q[k]))
                    .sum();
                dot - shape.offset * sums[h]
            };
            let (dot, min) = if shape.per_half {
                let (sc, min) = (&slice.sc[b], &slice.min[b]);
                (sc[0][lane] * half(0) + sc[1][lane] * half(1), min[0][lane] * sums[0] + min[1][lane] * sums[1])
            } else {
                (half(0) + half(1), sums[0] + sums[1])
            };
            acc[lane] = (slice.d[b][lane] * d_x).mul_add(dot as f32, acc[lane]);
            if shape.has_min {
                acc[lane] = (slice.m[b][lane] * d_x).mul_add(min as f32, acc[lane]);
            }
        }
    }
    for lane in 0..TILE {
        total[lane] += acc[lane];
    }
}

/// Sixteen f16 to f32.
///
/// # Safety
/// The machine has F16C and AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx,f16c")]
#[inline]
pub(crate) unsafe fn f16x16(bytes: &[u8; 32]) -> [f32; TILE] {
    use std::arch::x86_64::{_mm_loadu_si128, _mm256_cvtph_ps, _mm256_storeu_ps};
    let mut out = [0.0; TILE];
    // SAFETY: both loads lie in the 32 bytes, both stores in the 16 floats.
    unsafe {
        _mm256_storeu_ps(out.as_mut_ptr(), _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().cast())));
        _mm256_storeu_ps(out.as_mut_ptr().add(8), _mm256_cvtph_ps(_mm_loadu_si128(bytes.as_ptr().add(16).cast())));
    }
    out
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use super::{MAX_ROWS, Quantised, Shape, Slice, TILE};

    /// # Safety
    /// AVX-512 F and VNNI; bounds as in `dot_slice`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub unsafe fn rows_avx512<const PER_HALF: bool, const HAS_MIN: bool>(
        shape: Shape,
        slice: &Slice,
        x: Quantised<'_>,
        row: usize,
        first: usize,
        n: usize,
        acc: &mut [[f32; TILE]],
    ) {
        let mut row = row;
        let mut acc = acc;
        while !acc.is_empty() {
            let take = match acc.len() {
                MAX_ROWS.. => 8,
                4.. => 4,
                2.. => 2,
                _ => 1,
            };
            let (now, rest) = acc.split_at_mut(take);
            // SAFETY: the rows are inside the bounds that the caller checked.
            unsafe {
                match take {
                    8 => block_avx512::<8, PER_HALF, HAS_MIN>(shape, slice, x, row, first, n, now),
                    4 => block_avx512::<4, PER_HALF, HAS_MIN>(shape, slice, x, row, first, n, now),
                    2 => block_avx512::<2, PER_HALF, HAS_MIN>(shape, slice, x, row, first, n, now),
                    _ => block_avx512::<1, PER_HALF, HAS_MIN>(shape, slice, x, row, first, n, now),
                }
            }
            row += take;
            acc = rest;
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")]
    #[inline]
    unsafe fn block_avx512<const R: usize, const PER_HALF: bool, const HAS_MIN: bool>(
        shape: Shape,
        slice: &Slice,
        x: Quantised<'_>,
        row: usize,
        first: usize,
        n: usize,
        acc: &mut [[f32; TILE]],
    ) {
        // SAFETY (whole body): loads of `slice` stay in its arrays, since n <= SLICE_BLOCKS; loads of `x` stay inside
        // rows row .. row + R, blocks first .. first + n, which the caller checked.
        unsafe {
            let mut sum = [_mm512_setzero_ps(); R];
            for b in 0..n {
                let block = |r: usize| (row + r) * x.cols / 32 + first + b;
                let codes = slice.codes[b].as_ptr();
                let total = |r: usize| {
                    let sums = x.sums.as_ptr().add(2 * block(r));
                    *sums + *sums.add(1)
                };
                let mut low = [_mm512_setzero_si512(); R];
                let mut high = [_mm512_setzero_si512(); R];
                if !PER_HALF {
                    // The code of zero is taken off before the products are added: the same integer.
                    for r in 0..R {
                        low[r] = _mm512_set1_epi32(-(shape.offset * total(r)));
                    }
                }
                for g in 0..8 {
                    let code = _mm512_loadu_si512(codes.add(64 * g).cast());
                    for r in 0..R {
                        let q = x.q.as_ptr().add(32 * block(r) + 4 * g).cast::<i32>().read_unaligned();
                        let into = if PER_HALF && g >= 4 { &mut high[r] } else { &mut low[r] };
                        *into = _mm512_dpbusd_epi32(*into, code, _mm512_set1_epi32(q));
                    }
                }
                let d = _mm512_loadu_ps(slice.d[b].as_ptr());
                for r in 0..R {
                    let d_x = _mm512_set1_ps(*x.d.as_ptr().add(block(r)));
                    let sums = x.sums.as_ptr().add(2 * block(r));
                    let mut dot = low[r];
                    if PER_HALF {
                        let off = |h: usize| _mm512_set1_epi32(shape.offset * *sums.add(h));
                        let sc = |h: usize| _mm512_loadu_si512(slice.sc[b][h].as_ptr().cast());
                        let a = _mm512_mullo_epi32(sc(0), _mm512_sub_epi32(low[r], off(0)));
                        let c = _mm512_mullo_epi32(sc(1), _mm512_sub_epi32(high[r], off(1)));
                        dot = _mm512_add_epi32(a, c);
                    }
                    sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(d, d_x), _mm512_cvtepi32_ps(dot), sum[r]);
                    if HAS_MIN {
                        let m = _mm512_loadu_ps(slice.m[b].as_ptr());
                        let min = if PER_HALF {
                            let min = |h: usize| _mm512_loadu_si512(slice.min[b][h].as_ptr().cast());
                            let a = _mm512_mullo_epi32(min(0), _mm512_set1_epi32(*sums));
                            let c = _mm512_mullo_epi32(min(1), _mm512_set1_epi32(*sums.add(1)));
                            _mm512_cvtepi32_ps(_mm512_add_epi32(a, c))
                        } else {
                            _mm512_set1_ps(total(r) as f32)
                        };
                        sum[r] = _mm512_fmadd_ps(_mm512_mul_ps(m, d_x), min, sum[r]);
                    }
                }
            }
            for r in 0..R {
                let out = acc[r].as_mut_ptr();
                _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), sum[r]));
            }
        }
    }

    /// # Safety
    /// AVX2 and FMA; bounds as in `dot_slice`.
    #[target_feature(enable = "avx2,fma,f16c")]
    pub unsafe fn row_avx2(
        shape: Shape,
        slice: &Slice,
        x: Quantised<'_>,
        row: usize,
        first: usize,
        n: usize,
        acc: &mut [f32; TILE],
    ) {
        // SAFETY (whole body): as in `block_avx512`, with lanes `8 * half .. 8 * half + 8` of the 16.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            let mut sum = [_mm256_setzero_ps(); 2];
            for b in 0..n {
                let block = row * x.cols / 32 + first + b;
                let sums = [x.sums[2 * block], x.sums[2 * block + 1]];
                let d_x = _mm256_set1_ps(x.d[block]);
                for (half, sum) in sum.iter_mut().enumerate() {
                    let mut parts = [_mm256_setzero_si256(); 2];
                    for g in 0..8 {
                        let code = _mm256_loadu_si256(slice.codes[b].as_ptr().add(64 * g + 32 * half).cast());
                        let q = x.q.as_ptr().add(32 * block + 4 * g).cast::<i32>().read_unaligned();
                        let q = _mm256_set1_epi32(q);
                        let dot = if shape.wide {
                            // Seven bits and the eighth apart, so that no pair of products leaves an i16.
                            let low = _mm256_maddubs_epi16(_mm256_and_si256(code, _mm256_set1_epi8(127)), q);
                            let top = _mm256_and_si256(_mm256_srli_epi16::<7>(code), _mm256_set1_epi8(1));
                            let top = _mm256_madd_epi16(_mm256_maddubs_epi16(top, q), ones);
                            _mm256_add_epi32(_mm256_madd_epi16(low, ones), _mm256_slli_epi32::<7>(top))
                        } else {
                            _mm256_madd_epi16(_mm256_maddubs_epi16(code, q), ones)
                        };
                        let part = &mut parts[usize::from(g >= 4)];
                        *part = _mm256_add_epi32(*part, dot);
                    }
                    let lanes = |v: &[i32; TILE]| _mm256_loadu_si256(v.as_ptr().add(8 * half).cast());
                    let floats = |v: &[f32; TILE]| _mm256_loadu_ps(v.as_ptr().add(8 * half));
                    let off = |h: usize| _mm256_set1_epi32(shape.offset * sums[h]);
                    let parts = [_mm256_sub_epi32(parts[0], off(0)), _mm256_sub_epi32(parts[1], off(1))];
                    let (dot, min) = if shape.per_half {
                        let (sc, min) = (&slice.sc[b], &slice.min[b]);
                        let scaled = |v: &[[i32; TILE]; 2], by: [__m256i; 2]| {
                            let a = _mm256_mullo_epi32(lanes(&v[0]), by[0]);
                            _mm256_add_epi32(a, _mm256_mullo_epi32(lanes(&v[1]), by[1]))
                        };
                        (scaled(sc, parts), scaled(min, sums.map(|sum| _mm256_set1_epi32(sum))))
                    } else {
                        (_mm256_add_epi32(parts[0], parts[1]), _mm256_set1_epi32(sums[0] + sums[1]))
                    };
                    let d = _mm256_mul_ps(floats(&slice.d[b]), d_x);
                    *sum = _mm256_fmadd_ps(d, _mm256_cvtepi32_ps(dot), *sum);
                    if shape.has_min {
                        let m = _mm256_mul_ps(floats(&slice.m[b]), d_x);
                        *sum = _mm256_fmadd_ps(m, _mm256_cvtepi32_ps(min), *sum);
                    }
                }
            }
            for (half, sum) in sum.into_iter().enumerate() {
                let out = acc.as_mut_ptr().add(8 * half);
                _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(out), sum));
            }
        }
    }
}
