use super::{HcConfig, MIXES, STREAMS, collapse, expand, mixes, split, split_head};
use crate::simd::{Isa, force_isa};

const CFG: HcConfig = HcConfig { dim: 96, iterations: 20, eps: 1e-6, norm_eps: 1e-6 };

/// Deterministic values between -1 and 1.
fn values(n: usize, seed: usize) -> Vec<f32> {
    let mut state = seed as u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    next();
    (0..n).map(|_| next()).collect()
}

/// How the oracle may be wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mutant {
    None,
    RowsFirst,
    CombTransposed,
    PostWithoutTwo,
}

/// The formulas of the module in f64.
fn oracle(m: &[f32], base: &[f32], scale: &[f32], iterations: usize, mutant: Mutant) -> Vec<f64> {
    let eps = f64::from(CFG.eps);
    let m: Vec<f64> =
        (0..MIXES).map(|i| f64::from(m[i]) * f64::from(scale[(i / 4).min(2)]) + f64::from(base[i])).collect();
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let mut out = vec![0.0; MIXES];
    for k in 0..STREAMS {
        out[k] = sigmoid(m[k]) + eps;
        out[4 + k] = sigmoid(m[4 + k]) * if mutant == Mutant::PostWithoutTwo { 1.0 } else { 2.0 };
    }
    let mut c = [[0.0; 4]; 4];
    for j in 0..4 {
        let total: f64 = (0..4).map(|k| m[8 + 4 * j + k].exp()).sum();
        (0..4).for_each(|k| c[j][k] = m[8 + 4 * j + k].exp() / total + eps);
    }
    let rows = |c: &mut [[f64; 4]; 4]| {
        for row in c.iter_mut() {
            let total = row.iter().sum::<f64>() + eps;
            row.iter_mut().for_each(|x| *x /= total);
        }
    };
    let columns = |c: &mut [[f64; 4]; 4]| {
        for k in 0..4 {
            let total = (0..4).map(|j| c[j][k]).sum::<f64>() + eps;
            (0..4).for_each(|j| c[j][k] /= total);
        }
    };
    if mutant != Mutant::RowsFirst {
        columns(&mut c);
    }
    for _ in 1..iterations {
        rows(&mut c);
        columns(&mut c);
    }
    for j in 0..4 {
        for k in 0..4 {
            out[8 + 4 * j + k] = if mutant == Mutant::CombTransposed { c[k][j] } else { c[j][k] };
        }
    }
    out
}

fn worst(got: &[f32], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(got, want)| (f64::from(*got) - want).abs()).fold(0.0, f64::max)
}

#[test]
fn mixing_values_agree_with_f64_and_the_mutants_do_not() {
    let (base, scale) = (values(MIXES, 1), [1.3, 0.8, 2.5]);
    let mut caught = [Mutant::RowsFirst, Mutant::CombTransposed, Mutant::PostWithoutTwo].map(|mutant| (mutant, 0));
    for seed in 0..50 {
        let raw = values(MIXES, 10 + seed);
        // Few iterations have not converged, so that their order shows.
        for iterations in [1, 2, 3, 20] {
            let cfg = HcConfig { iterations, ..CFG };
            let mut bits = None;
            for &isa in Isa::available() {
                let _forced = force_isa(isa);
                let mut m: [f32; MIXES] = raw.clone().try_into().expect("MIXES values");
                split(&mut m, &base, &scale, &cfg);
                assert_eq!(*bits.get_or_insert(m), m, "{isa:?}");
            }
            let got = bits.expect("the scalar set is always there");
            let error = worst(&got, &oracle(&raw, &base, &scale, iterations, Mutant::None));
            assert!(error < 2e-6, "{iterations} iterations: {error}");
            for (mutant, caught) in &mut caught {
                let wrong = oracle(&raw, &base, &scale, iterations, *mutant);
                *caught += usize::from(iterations == 2 && worst(&got, &wrong) > 1e-4);
            }
        }
    }
    assert!(caught.iter().all(|caught| caught.1 >= 45), "of 50 each: {caught:?}");
}

#[test]
fn a_site_agrees_with_f64() {
    let (dim, n) = (CFG.dim, STREAMS * CFG.dim);
    let (x, mix, out) = (values(n, 3), values(MIXES * n, 4), values(dim, 5));
    let mut m = [0.0; MIXES];
    mixes(&mut m, &x, &mix, CFG.norm_eps);
    let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / n as f64;
    let factor = 1.0 / (mean + 1e-6).sqrt();
    let dot = |i: usize| (0..n).map(|k| f64::from(mix[i * n + k]) * f64::from(x[k])).sum::<f64>() * factor;
    let want: Vec<f64> = (0..MIXES).map(dot).collect();
    assert!(worst(&m, &want) < 1e-4 && want.iter().any(|m| m.abs() > 1.0));
    let mut y = vec![0.0; dim];
    collapse(&mut y, &x, &m[..4]);
    let want: Vec<f64> = (0..dim).map(|i| (0..4).map(|k| f64::from(m[k]) * f64::from(x[k * dim + i])).sum()).collect();
    assert!(worst(&y, &want) < 1e-5);
    let mut moved = x.clone();
    expand(&mut moved, &out, &m);
    for k in 0..4 {
        let from = |j: usize, i: usize| f64::from(m[8 + 4 * j + k]) * f64::from(x[j * dim + i]);
        let want: Vec<f64> = (0..dim)
            .map(|i| f64::from(m[4 + k]) * f64::from(out[i]) + (0..4).map(|j| from(j, i)).sum::<f64>())
            .collect();
        assert!(worst(&moved[k * dim..(k + 1) * dim], &want) < 1e-4);
    }
    let mut pre = [0.3, -2.0, 0.0, 5.0];
    split_head(&mut pre, &[0.1; 4], 2.0, 0.5);
    let want: Vec<f64> =
        [0.3, -2.0, 0.0, 5.0f64].iter().map(|m| 1.0 / (1.0 + (-(m * 2.0 + 0.1)).exp()) + 0.5).collect();
    assert!(worst(&pre, &want) < 1e-6);
}

#[test]
fn a_nan_spreads() {
    let mut x = values(STREAMS * CFG.dim, 3);
    x[7] = f32::NAN;
    let mut m = [0.0; MIXES];
    mixes(&mut m, &x, &values(MIXES * x.len(), 4), CFG.norm_eps);
    split(&mut m, &[0.0; MIXES], &[1.0; 3], &CFG);
    assert!(m.iter().all(|m| m.is_nan()));
}
