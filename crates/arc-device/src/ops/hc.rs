//! Hyper-connections: four residual streams a token, mixed by small matrices that the token itself decides. Exact.
//!
//! `X` `[STREAMS, dim]` are a token's streams, `f` the same flattened, stream-major. A site owns `mix`
//! `[MIXES, STREAMS * dim]`, `base` `[MIXES]` and `scale` `[3]`; its rows are 4 for `pre`, 4 for `post`, 16 for `comb`,
//! the last as a row-major `[from, to]`.
//!
//! ```text
//! m        = (mix f) * rsqrt(mean(f^2) + norm_eps)            one statistic for all streams; dot in the order of math
//! pre[k]   = sigmoid(m[k] * scale[0] + base[k]) + eps
//! post[k]  = 2 * sigmoid(m[4 + k] * scale[1] + base[4 + k])
//! C[j,k]   = softmax over k of (m[8 + 4 j + k] * scale[2] + base[8 + 4 j + k]) + eps
//! C        = columns of C, then (iterations - 1) times rows, columns: each divided by (its sum + eps)
//! y        = sum over k of pre[k] * X[k]
//! after the sublayer      X'[k] = post[k] * out + sum over j of C[j,k] * X[j]
//! ```
//!
//! Products and sums are rounded one by one, sums of four in ascending order from the first term. `j` is the stream a
//! value comes from, `k` the one it goes to. Source: DeepSeek-V4's published model code (`hc_pre`, `hc_post`,
//! `hc_split_sinkhorn`); manifold-constrained hyper-connections, Xie et al. 2025.

use crate::math::{dot, exp, rsqrt, sigmoid, sum_sq};
use crate::simd::multiversion;

/// Residual streams of a token.
pub const STREAMS: usize = 4;
/// Mixing values of a site: `pre`, `post` and `comb`.
pub const MIXES: usize = STREAMS * (2 + STREAMS);
/// Where `comb` begins among them.
const COMB: usize = 2 * STREAMS;

/// What all sites of a model share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HcConfig {
    /// Width of a stream.
    pub dim: usize,
    /// Normalisations of `comb`, the first softmax and column pass counting as one; at least 1.
    pub iterations: usize,
    /// Added to `pre`, to the softmax, and to every sum that divides.
    pub eps: f32,
    /// Added to the mean square.
    pub norm_eps: f32,
}

/// Raw mixing values of a token: `out[i] = (mix[i] . f) * rsqrt(mean(f^2) + norm_eps)`. `mix`: `[out.len(), f.len()]`.
pub(crate) fn mixes(out: &mut [f32], f: &[f32], mix: &[f32], norm_eps: f32) {
    let factor = rsqrt(sum_sq(f) / f.len() as f32 + norm_eps);
    for (out, row) in out.iter_mut().zip(mix.chunks_exact(f.len())) {
        *out = dot(row, f) * factor;
    }
}

/// Turns raw mixing values into `pre`, `post` and `comb`, in place.
pub(crate) fn split(m: &mut [f32; MIXES], base: &[f32], scale: &[f32], cfg: &HcConfig) {
    for (i, m) in m.iter_mut().enumerate() {
        *m = *m * scale[(i / STREAMS).min(2)] + base[i];
    }
    for k in 0..STREAMS {
        m[k] = sigmoid(m[k]) + cfg.eps;
        m[STREAMS + k] = 2.0 * sigmoid(m[STREAMS + k]);
    }
    let comb = &mut m[COMB..];
    for row in comb.chunks_exact_mut(STREAMS) {
        let top = row.iter().fold(f32::NEG_INFINITY, |top, &x| if x > top { x } else { top });
        row.iter_mut().for_each(|x| *x = exp(*x - top));
        let total = ((row[0] + row[1]) + row[2]) + row[3];
        row.iter_mut().for_each(|x| *x = *x / total + cfg.eps);
    }
    divide(comb, STREAMS, 1, cfg.eps);
    for _ in 1..cfg.iterations {
        divide(comb, 1, STREAMS, cfg.eps);
        divide(comb, STREAMS, 1, cfg.eps);
    }
}

/// Divides every line of `comb` by its sum plus `eps`. A line's elements stand `step` apart, lines `line` apart: rows
/// are `(1, STREAMS)`, columns `(STREAMS, 1)`.
fn divide(comb: &mut [f32], step: usize, line: usize, eps: f32) {
    for first in (0..STREAMS).map(|i| i * line) {
        let total = (1..STREAMS).fold(comb[first], |sum, i| sum + comb[first + i * step]) + eps;
        (0..STREAMS).for_each(|i| comb[first + i * step] /= total);
    }
}

/// `pre` of the head: `sigmoid(m[k] * scale + base[k]) + eps`.
pub(crate) fn split_head(m: &mut [f32; STREAMS], base: &[f32], scale: f32, eps: f32) {
    for (m, base) in m.iter_mut().zip(base) {
        *m = sigmoid(*m * scale + base) + eps;
    }
}

multiversion! {
    /// `y = sum over k of pre[k] * X[k]`. `y`: `[dim]`; `x`: `[STREAMS, dim]`.
    pub(crate) fn collapse(y: &mut [f32], x: &[f32], pre: &[f32]) {
        let dim = y.len();
        for (i, y) in y.iter_mut().enumerate() {
            *y = ((pre[0] * x[i] + pre[1] * x[dim + i]) + pre[2] * x[2 * dim + i]) + pre[3] * x[3 * dim + i];
        }
    }

    /// `X'[k] = post[k] * out + sum over j of C[j, k] * X[j]`, in place. `mixing`: `[MIXES]` as [`split`] leaves it.
    pub(crate) fn expand(x: &mut [f32], out: &[f32], mixing: &[f32]) {
        let dim = out.len();
        let (post, comb) = mixing[STREAMS..].split_at(STREAMS);
        for (i, out) in out.iter().enumerate() {
            let old = [x[i], x[dim + i], x[2 * dim + i], x[3 * dim + i]];
            for k in 0..STREAMS {
                let at = |j: usize| comb[STREAMS * j + k] * old[j];
                x[k * dim + i] = post[k] * out + (((at(0) + at(1)) + at(2)) + at(3));
            }
        }
    }
}

pub(crate) mod cuda;
#[cfg(test)]
mod tests;
