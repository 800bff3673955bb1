//! Root-mean-square norm. Exact.
//!
//! `out[c] = (x[c] * rsqrt(mean(x^2) + eps)) * weight[c]`, every operation rounded, the sum of squares in the order of
//! [`math::sum_sq`](crate::math::sum_sq). Source: Zhang & Sennrich 2019.

use crate::math::{rsqrt, sum_sq};
use crate::simd::multiversion;

/// Normalises one row. `out`, `x`, `weight`: `[dim]`.
pub(crate) fn rms_norm(out: &mut [f32], x: &[f32], weight: &[f32], eps: f32) {
    scale_by(out, x, weight, factor(x, eps));
}

/// Normalises one row in place.
pub(crate) fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) {
    let factor = factor(x, eps);
    scale_in_place(x, weight, factor);
}

/// Normalises one row in place, without weights.
pub(crate) fn rms_scale(x: &mut [f32], eps: f32) {
    let factor = factor(x, eps);
    x.iter_mut().for_each(|x| *x *= factor);
}

fn factor(x: &[f32], eps: f32) -> f32 {
    rsqrt(sum_sq(x) / x.len() as f32 + eps)
}

multiversion! {
    fn scale_by(out: &mut [f32], x: &[f32], weight: &[f32], factor: f32) {
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = (x * factor) * weight;
        }
    }

    fn scale_in_place(x: &mut [f32], weight: &[f32], factor: f32) {
        for (x, weight) in x.iter_mut().zip(weight) {
            *x = (*x * factor) * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{rms_norm, rms_norm_in_place};
    use crate::simd::{Isa, force_isa};

    #[test]
    fn agrees_with_f64_and_with_itself() {
        for dim in [1, 2, 63, 64, 576, 1024, 1025, 2600] {
            let x: Vec<f32> = (0..dim).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.13).collect();
            let weight: Vec<f32> = (0..dim).map(|i| 0.5 + (i % 7) as f32 * 0.25).collect();
            let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / dim as f64;
            let mut bits = None;
            for &isa in Isa::available() {
                let _forced = force_isa(isa);
                let mut out = vec![f32::NAN; dim];
                rms_norm(&mut out, &x, &weight, 1e-5);
                for i in 0..dim {
                    let want = f64::from(x[i]) / (mean + 1e-5).sqrt() * f64::from(weight[i]);
                    assert!((f64::from(out[i]) - want).abs() <= want.abs() * 1e-6, "{dim} {i}: {} {want}", out[i]);
                }
                let mut same = x.clone();
                rms_norm_in_place(&mut same, &weight, 1e-5);
                assert_eq!(same, out);
                assert_eq!(*bits.get_or_insert(out.clone()), out, "{isa:?}");
            }
        }
    }

    #[test]
    fn a_nan_spreads_over_its_row() {
        let mut x = [1.0f32; 40];
        x[39] = f32::NAN;
        let mut out = [0.0; 40];
        rms_norm(&mut out, &x, &[1.0; 40], 1e-6);
        assert!(out.iter().all(|v| v.is_nan()));
    }
}
