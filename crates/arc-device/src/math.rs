//! Elementary functions and reductions in one fixed operation order: the CPU half of a pair of twins.
//!
//! `math.cuh` holds the CUDA half, line for line. Both use only IEEE-rounded f32 add, subtract, multiply, divide, square
//! root and fused multiply-add, and integer operations, so scalar code, every [`Isa`](crate::simd::Isa) and the GPU give
//! the same bits. Anything that chooses a token or an expert goes through here; libm never does, since every libm
//! rounds differently.
//!
//! Every NaN result is the one NaN [`NAN`]: processors disagree about payloads and signs of NaN, so bits would too.
//!
//! Largest errors, in units in the last place of the f32 result against f64, over all 2^32 inputs (test
//! `full_sweep`):
//!
//! | function | at most |
//! |---|---|
//! | `exp` | 1.02 |
//! | `ln` | 0.87 |
//! | `tanh` | 1.34 |
//! | `sigmoid` | 2.41 |
//! | `softplus` | 3 (every 10,007th input only) |
//!
//! `silu` and `gelu_tanh` are `x` times a sigmoid and add its rounding and their own.
//!
//! Scalar functions are `#[inline(always)]`: a loop inside a [`multiversion!`](crate::simd) body that calls them is
//! vectorised for each instruction set.

use crate::simd::multiversion;

/// The NaN that every function here returns.
pub const NAN: f32 = f32::from_bits(0x7fc0_0000);

/// Adding 1.5 * 2^23 rounds a small f32 to the nearest integer, ties to even, and leaves it in the low mantissa bits.
const ROUND: f32 = 12_582_912.0;
/// ln 2 with 9 significant bits, so that its product with an exponent is exact, and the rest of ln 2.
const LN2_HI: f32 = f32::from_bits(0x3f31_8000); // 0.693359375
const LN2_LO: f32 = -2.121_944_4e-4;

/// 2^s for -126 <= s <= 127.
#[inline(always)]
fn pow2(s: i32) -> f32 {
    f32::from_bits((s.wrapping_add(127) as u32) << 23)
}

/// e^x. Exact 1 at 0, `+inf` above 88.73, denormals below -87.33, 0 below -103.98.
///
/// x = n ln 2 + r with |r| <= ln(2)/2; e^r = 1 + r + r^2 q(r) with q minimax of degree 4 (relative error 3.1e-9, ours);
/// the factor 2^n is applied as two powers, so that a denormal result is rounded once.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // The clamps keep n in range; both ends have already reached inf and 0. A NaN passes through them.
    let c = if x > 89.0 { 89.0 } else { x };
    let c = if c < -104.0 { -104.0 } else { c };
    let t = c.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = t - ROUND;
    let p = exp_reduced(c, n);
    let i = t.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = i >> 1;
    let e = p * pow2(half) * pow2(i.wrapping_sub(half));
    if x.is_nan() { NAN } else { e }
}

/// e^(c - n ln 2) where the difference is at most about ln(2)/2.
#[inline(always)]
fn exp_reduced(c: f32, n: f32) -> f32 {
    let r = n.mul_add(-LN2_HI, c);
    let r = n.mul_add(-LN2_LO, r);
    let q = f32::from_bits(0x3ab5_11a9); // 1.3814467e-3
    let q = q.mul_add(r, f32::from_bits(0x3c09_1d36)); // 8.368781e-3
    let q = q.mul_add(r, f32::from_bits(0x3d2a_ac7a)); // 4.1668393e-2
    let q = q.mul_add(r, f32::from_bits(0x3e2a_aa48)); // 1.666652e-1
    let q = q.mul_add(r, f32::from_bits(0x3eff_fffe)); // 4.9999994e-1
    1.0 + (r * r).mul_add(q, r)
}

/// [`exp`] for -87 <= x <= 0, the same bits in fewer operations; below -87 (and at -inf) it stays at `exp(-87)`.
///
/// For weights that are truncated to a multiple of 2^-40, where everything below -28 is 0 anyway. No NaN may come here.
#[inline(always)]
pub fn exp_of_nonpositive(x: f32) -> f32 {
    let c = if x < -87.0 { -87.0 } else { x };
    let t = c.mul_add(std::f32::consts::LOG2_E, ROUND);
    let p = exp_reduced(c, t - ROUND);
    // n >= -126, so one power suffices. `ROUND`'s own bits leave the word when shifted: only n is left.
    p * f32::from_bits((t.to_bits() << 23).wrapping_add(1.0f32.to_bits()))
}

/// Natural logarithm. `-inf` at ±0, NaN below 0, `+inf` at `+inf`; denormals are handled.
///
/// x = 2^e m with m in [sqrt(1/2), sqrt 2); ln m = f - f^2/2 + f^3 p(f), f = m - 1, p minimax of degree 7 (relative
/// error 5.9e-9, ours).
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    let tiny = x < f32::MIN_POSITIVE;
    let scaled = if tiny { x * 8_388_608.0 } else { x };
    let bits = scaled.to_bits() as i32;
    let k = bits.wrapping_sub(0x3f35_04f3) >> 23;
    let f = f32::from_bits(bits.wrapping_sub(k << 23) as u32) - 1.0;
    let e = k as f32 - if tiny { 23.0 } else { 0.0 };
    let p = f32::from_bits(0xbd9c_5a2a); // -7.634385e-2
    let p = p.mul_add(f, f32::from_bits(0x3e02_b7cc)); // 1.2765425e-1
    let p = p.mul_add(f, f32::from_bits(0xbe06_c767)); // -1.31620035e-1
    let p = p.mul_add(f, f32::from_bits(0x3e11_6c09)); // 1.4201368e-1
    let p = p.mul_add(f, f32::from_bits(0xbe2a_3893)); // -1.6623144e-1
    let p = p.mul_add(f, f32::from_bits(0x3e4c_d00a)); // 2.0001236e-1
    let p = p.mul_add(f, f32::from_bits(0xbe80_0115)); // -2.5000826e-1
    let p = p.mul_add(f, f32::from_bits(0x3eaa_aaaa)); // 3.333333e-1
    let z = f * f;
    let y = f * z * p;
    let y = e.mul_add(LN2_LO, y);
    let y = z.mul_add(-0.5, y);
    let r = e.mul_add(LN2_HI, f + y);
    let r = if x == f32::INFINITY { x } else { r };
    let r = if x > 0.0 { r } else { NAN };
    if x == 0.0 { f32::NEG_INFINITY } else { r }
}

/// ln(1 + u) for u >= 0, accurate where u is small.
///
/// w = 1 + u is rounded; the lost part is put back to first order: ln w + (u - (w - 1)) / w.
#[inline(always)]
pub fn ln_1p(u: f32) -> f32 {
    let w = 1.0 + u;
    let r = ln(w) + (u - (w - 1.0)) / w;
    // inf - inf above; and the sum would round away the last bits of u where w == 1.
    let r = if u == f32::INFINITY { u } else { r };
    let r = if w == 1.0 { u } else { r };
    if r.is_nan() { NAN } else { r }
}

/// ln(1 + e^x), computed as max(x, 0) + ln_1p(e^-|x|), so that it neither overflows nor loses its small values.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let r = ln_1p(exp(-x.abs()));
    let r = (if x > 0.0 { x } else { 0.0 }) + r;
    if x.is_nan() { NAN } else { r }
}

/// 1 / (1 + e^-x), from e^-|x|, so that it does not lose its small values.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let z = exp(-x.abs());
    let top = if x < 0.0 { z } else { 1.0 };
    let r = top / (1.0 + z);
    if x.is_nan() { NAN } else { r }
}

/// x * sigmoid(x), each operation rounded. NaN at `-inf`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    let r = x * sigmoid(x);
    if r.is_nan() { NAN } else { r }
}

/// The tanh form of GELU: x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3), computed as x * sigmoid(2u).
///
/// The two are the same function; the second keeps its relative accuracy for negative x. NaN at `-inf`.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    let cube = 0.044_715 * x * x;
    let u = x.mul_add(cube, x) * 1.595_769; // 2 sqrt(2/pi)
    let r = x * sigmoid(u);
    if r.is_nan() { NAN } else { r }
}

/// Hyperbolic tangent: an odd polynomial below 0.625 (minimax, relative error 4.4e-9, ours), 1 - 2/(e^2|x| + 1) above.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let p = f32::from_bits(0xbbba_f0e6); // -5.704987e-3
    let p = p.mul_add(z, f32::from_bits(0x3ca9_134e)); // 2.0639088e-2
    let p = p.mul_add(z, f32::from_bits(0xbd5c_1e2d)); // -5.3739715e-2
    let p = p.mul_add(z, f32::from_bits(0x3e08_8393)); // 1.3331442e-1
    let p = p.mul_add(z, f32::from_bits(0xbeaa_aa99)); // -3.333328e-1
    let near = a.mul_add(z * p, a);
    let far = 1.0 - 2.0 / (exp(a + a) + 1.0);
    let r = (if a < 0.625 { near } else { far }).copysign(x);
    if x.is_nan() { NAN } else { r }
}

/// 1 / sqrt(x), both operations IEEE-rounded.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    let r = 1.0 / x.sqrt();
    if r.is_nan() { NAN } else { r }
}

/// Length of one chunk of [`sum`].
pub const SUM_CHUNK: usize = 1024;

/// One chunk folded to its sum: element i takes i + 512, then i + 256, ... then i + 1. `first(i)` is element i + element
/// i + 512, where a missing element is +0.0.
#[inline(always)]
fn fold_chunk(mut first: impl FnMut(usize) -> f32) -> f32 {
    let mut t = [0.0f32; SUM_CHUNK / 2];
    for (i, t) in t.iter_mut().enumerate() {
        *t = first(i);
    }
    let mut half = SUM_CHUNK / 4;
    while half > 0 {
        let (lo, hi) = t.split_at_mut(half);
        for (lo, hi) in lo.iter_mut().zip(&hi[..half]) {
            *lo += hi;
        }
        half /= 2;
    }
    t[0]
}

/// Sums `value(i)` for i in 0..n in the order of [`sum`].
///
/// For use inside a multiversioned body; [`sum`], [`dot`] and [`sum_sq`] are this with three closures.
#[inline(always)]
pub fn sum_by(n: usize, value: impl Fn(usize) -> f32) -> f32 {
    let mut total = 0.0;
    let mut start = 0;
    while start + SUM_CHUNK <= n {
        total += fold_chunk(|i| value(start + i) + value(start + i + SUM_CHUNK / 2));
        start += SUM_CHUNK;
    }
    if start < n {
        let mut padded = [0.0f32; SUM_CHUNK];
        for (i, slot) in padded[..n - start].iter_mut().enumerate() {
            *slot = value(start + i);
        }
        total += fold_chunk(|i| padded[i] + padded[i + SUM_CHUNK / 2]);
    }
    total
}

/// The larger of two, where a NaN loses to anything.
#[inline(always)]
fn max_of(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

multiversion! {
    /// Sum in the one order that every exact op uses: chunks of 1,024 consecutive elements; inside a chunk, element i
    /// takes i + 512, then i + 256, ... then i + 1, missing elements being +0.0; chunk sums are added to +0.0 in
    /// ascending order.
    ///
    /// A CPU does the halvings as vertical SIMD adds, a GPU as register adds and shuffles. `x`: `[n]`; n = 0 gives +0.0.
    pub fn sum(x: &[f32]) -> f32 {
        sum_by(x.len(), |i| x[i])
    }

    /// Dot product: each product is rounded, then [`sum`]'s order. `x` and `y`: `[n]`; panics if the lengths differ.
    pub fn dot(x: &[f32], y: &[f32]) -> f32 {
        assert_eq!(x.len(), y.len(), "dot of vectors of different length");
        sum_by(x.len(), |i| x[i] * y[i])
    }

    /// Sum of squares: each square is rounded, then [`sum`]'s order. `x`: `[n]`.
    pub fn sum_sq(x: &[f32]) -> f32 {
        sum_by(x.len(), |i| x[i] * x[i])
    }

    /// The largest element, ignoring NaN; `-inf` for an empty slice. `x`: `[n]`. No order matters.
    ///
    /// NOTE: which of -0.0 and +0.0 is returned is not specified; they compare equal.
    pub fn max(x: &[f32]) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 64];
        let (blocks, rest) = x.as_chunks::<64>();
        for block in blocks {
            for (lane, &x) in lanes.iter_mut().zip(block) {
                *lane = max_of(*lane, x);
            }
        }
        rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |a, &b| max_of(a, b))
    }

    /// `out[i] = exp(x[i])`, see [`exp`]. `out`, `x`: `[n]`; panics if the lengths differ.
    pub fn exp_slice(out: &mut [f32], x: &[f32]) {
        map(out, x, exp);
    }

    /// `out[i] = ln(x[i])`, see [`ln`]. `out`, `x`: `[n]`; panics if the lengths differ.
    pub fn ln_slice(out: &mut [f32], x: &[f32]) {
        map(out, x, ln);
    }

    /// `out[i] = tanh(x[i])`, see [`tanh`]. `out`, `x`: `[n]`; panics if the lengths differ.
    pub fn tanh_slice(out: &mut [f32], x: &[f32]) {
        map(out, x, tanh);
    }

    /// `out[i] = sigmoid(x[i])`, see [`sigmoid`]. `out`, `x`: `[n]`; panics if the lengths differ.
    pub fn sigmoid_slice(out: &mut [f32], x: &[f32]) {
        map(out, x, sigmoid);
    }

    /// `out[i] = softplus(x[i])`, see [`softplus`]. `out`, `x`: `[n]`; panics if the lengths differ.
    pub fn softplus_slice(out: &mut [f32], x: &[f32]) {
        map(out, x, softplus);
    }

    /// `out[i] = silu(x[i])`, see [`silu`]. `out`, `x`: `[n]`; panics if the lengths differ.
    pub fn silu_slice(out: &mut [f32], x: &[f32]) {
        map(out, x, silu);
    }

    /// `out[i] = gelu_tanh(x[i])`, see [`gelu_tanh`]. `out`, `x`: `[n]`; panics if the lengths differ.
    pub fn gelu_tanh_slice(out: &mut [f32], x: &[f32]) {
        map(out, x, gelu_tanh);
    }
}

#[inline(always)]
fn map(out: &mut [f32], x: &[f32], f: impl Fn(f32) -> f32) {
    assert_eq!(out.len(), x.len(), "elementwise function of slices of different length");
    for (out, &x) in out.iter_mut().zip(x) {
        *out = f(x);
    }
}

#[cfg(test)]
mod tests;
