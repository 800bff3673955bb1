//! Accuracy against f64, one set of bits on every instruction set, and the edges of each function's domain.

use super::*;
use crate::simd::Isa;
use crate::simd::force_isa;

struct Case {
    name: &'static str,
    scalar: fn(f32) -> f32,
    slice: fn(&mut [f32], &[f32]),
    oracle: fn(f64) -> f64,
    /// Documented largest error over all inputs, in ulp of the result or of `floor`, whichever is larger.
    ulp_max: f64,
    floor: f64,
    /// FNV-1a of the results at `sampled_inputs`: pins the bits across compilers and machines.
    bits: u64,
}

const DENORMAL_SIGMOID: f64 = 3e-36;

const CASES: [Case; 7] = [
    Case {
        name: "exp",
        scalar: exp,
        slice: exp_slice,
        oracle: f64::exp,
        ulp_max: 1.02,
        floor: 0.0,
        bits: 0x7277_ede1_6350_db08,
    },
    Case {
        name: "ln",
        scalar: ln,
        slice: ln_slice,
        oracle: f64::ln,
        ulp_max: 0.87,
        floor: 0.0,
        bits: 0x8c2c_ffd0_1fa6_58d4,
    },
    Case {
        name: "tanh",
        scalar: tanh,
        slice: tanh_slice,
        oracle: f64::tanh,
        ulp_max: 1.34,
        floor: 0.0,
        bits: 0x2cca_d9f6_46ff_7343,
    },
    Case {
        name: "sigmoid",
        scalar: sigmoid,
        slice: sigmoid_slice,
        oracle: sigmoid_f64,
        ulp_max: 2.41,
        floor: 0.0,
        bits: 0x2d6c_9f2a_eac6_da7a,
    },
    Case {
        name: "softplus",
        scalar: softplus,
        slice: softplus_slice,
        oracle: softplus_f64,
        ulp_max: 3.0,
        floor: 0.0,
        bits: 0xcc9a_f6cd_f15a_0be4,
    },
    // Below about -87 the sigmoid is denormal and its few bits are all that the product has.
    Case {
        name: "silu",
        scalar: silu,
        slice: silu_slice,
        oracle: silu_f64,
        ulp_max: 4.0,
        floor: DENORMAL_SIGMOID,
        bits: 0x1351_8017_5d77_72d6,
    },
    // The sigmoid's argument is rounded, and its error is amplified by the argument itself, up to 87.
    Case {
        name: "gelu_tanh",
        scalar: gelu_tanh,
        slice: gelu_tanh_slice,
        oracle: gelu_f64,
        ulp_max: 256.0,
        floor: DENORMAL_SIGMOID,
        bits: 0x5e38_9e74_83ce_ff4b,
    },
];

fn sigmoid_f64(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn softplus_f64(x: f64) -> f64 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

fn silu_f64(x: f64) -> f64 {
    x * sigmoid_f64(x)
}

fn gelu_f64(x: f64) -> f64 {
    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + f64::from(0.044_715f32) * x * x * x);
    x * sigmoid_f64(2.0 * u)
}

/// Error of `got` in units of the last place that an f32 has at the size of `want` or of `floor`.
fn ulp_error(got: f32, want: f64, floor: f64) -> f64 {
    let rounded = want as f32;
    if want.is_nan() || rounded.is_nan() {
        return if got.is_nan() { 0.0 } else { f64::INFINITY };
    }
    if rounded.is_infinite() || got.is_infinite() {
        return if got == rounded { 0.0 } else { f64::INFINITY };
    }
    let exponent = ((rounded.abs().max(floor as f32).to_bits() >> 23) & 0xff).max(1) as i32;
    (f64::from(got) - want).abs() / 2f64.powi(exponent - 150)
}

/// The largest error among every `stride`-th of the f32 with bits in `from..to`, and where it is.
fn largest_error(case: &Case, from: u64, to: u64, stride: usize) -> (f64, f32) {
    let mut worst = (0.0, 0.0);
    let mut bits = (from..to).step_by(stride);
    let mut x = [0.0; 4096];
    let mut y = [0.0; 4096];
    loop {
        let mut n = 0;
        for (x, bits) in x.iter_mut().zip(&mut bits) {
            *x = f32::from_bits(bits as u32);
            n += 1;
        }
        if n == 0 {
            return worst;
        }
        (case.slice)(&mut y[..n], &x[..n]);
        for (&x, &y) in x[..n].iter().zip(&y) {
            let error = ulp_error(y, (case.oracle)(f64::from(x)), case.floor);
            if error > worst.0 {
                worst = (error, x);
            }
        }
    }
}

/// A prime stride through all f32 bit patterns, and the patterns at which something changes.
fn sampled_inputs() -> Vec<f32> {
    let edges = [0.0, 1.0, 88.72283, 88.72284, 89.0, 87.33655, 103.97208, 103.9721, 104.0, 0.625, f32::MIN_POSITIVE];
    let edges = edges.into_iter().chain([f32::MAX, f32::INFINITY, f32::NAN, f32::EPSILON, f32::from_bits(1)]);
    let mut inputs: Vec<f32> = edges.flat_map(|x| [x, -x]).collect();
    inputs.extend((0..=u32::MAX).step_by(65_537).map(f32::from_bits));
    inputs
}

#[test]
fn errors_stay_in_the_stated_bounds() {
    let stride = if cfg!(debug_assertions) { 65_537 } else { 10_007 };
    for case in &CASES {
        let (error, at) = largest_error(case, 0, 1 << 32, stride);
        assert!(error <= case.ulp_max, "{}({at:e}): {error} ulp, stated {}", case.name, case.ulp_max);
    }
}

#[test]
#[ignore = "sweeps all 2^32 inputs of every function: minutes in release mode"]
fn full_sweep() {
    for case in &CASES {
        let half = std::thread::scope(|s| {
            let upper = s.spawn(|| largest_error(case, 1 << 31, 1 << 32, 1));
            let lower = largest_error(case, 0, 1 << 31, 1);
            [lower, upper.join().expect("the sweep does not panic")]
        });
        let (error, at) = if half[0].0 > half[1].0 { half[0] } else { half[1] };
        println!("{}: {error:.3} ulp at {at:e}", case.name);
        assert!(error <= case.ulp_max, "{}({at:e}): {error} ulp, stated {}", case.name, case.ulp_max);
    }
}

#[test]
fn one_set_of_bits_on_every_isa() {
    let inputs = sampled_inputs();
    let mut changed = Vec::new();
    for case in &CASES {
        let scalar: Vec<u32> = inputs.iter().map(|&x| (case.scalar)(x).to_bits()).collect();
        for &isa in Isa::available() {
            let _forced = force_isa(isa);
            let mut out = vec![0.0; inputs.len()];
            (case.slice)(&mut out, &inputs);
            for ((&x, &want), got) in inputs.iter().zip(&scalar).zip(&out) {
                assert_eq!(got.to_bits(), want, "{}({x:e}) on {isa:?}", case.name);
            }
        }
        let hash = scalar.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, &bits| {
            bits.to_le_bytes().iter().fold(h, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
        });
        if hash != case.bits {
            changed.push(format!("{}: {hash:#018x}", case.name));
        }
    }
    assert!(changed.is_empty(), "the bits changed, now {changed:#?}");
}

#[test]
fn the_short_exp_gives_the_bits_of_exp() {
    let stride = if cfg!(debug_assertions) { 10_007 } else { 1_009 };
    let first = (-0.0f32).to_bits();
    let last = (-87.0f32).to_bits();
    let mut n = 0;
    for x in (first..=last).step_by(stride).chain([first, last]).map(f32::from_bits) {
        assert_eq!(exp_of_nonpositive(x).to_bits(), exp(x).to_bits(), "at {x:e}");
        n += 1;
    }
    assert!(n > 100_000);
    assert_eq!(exp_of_nonpositive(0.0), 1.0);
    assert!(exp_of_nonpositive(f32::NEG_INFINITY) < 2e-38);
}

#[test]
fn edges() {
    assert_eq!(exp(0.0), 1.0);
    assert_eq!(exp(-0.0), 1.0);
    assert_eq!(exp(f32::INFINITY), f32::INFINITY);
    assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
    assert_eq!(exp(-103.972_1), 0.0);
    assert_eq!(exp(-103.0).to_bits(), 1);
    assert_eq!(ln(1.0).to_bits(), 0);
    assert_eq!(ln(0.0), f32::NEG_INFINITY);
    assert_eq!(ln(-0.0), f32::NEG_INFINITY);
    assert_eq!(ln(f32::INFINITY), f32::INFINITY);
    assert_eq!(softplus(f32::NEG_INFINITY), 0.0);
    assert_eq!(softplus(1000.0), 1000.0);
    assert_eq!(sigmoid(0.0), 0.5);
    assert_eq!(sigmoid(f32::INFINITY), 1.0);
    assert_eq!(sigmoid(f32::NEG_INFINITY), 0.0);
    assert_eq!(tanh(f32::NEG_INFINITY), -1.0);
    assert_eq!(tanh(-0.0).to_bits(), (-0.0f32).to_bits());
    assert_eq!(rsqrt(4.0), 0.5);
    assert_eq!(rsqrt(0.0), f32::INFINITY);
    for nan in [f32::NAN, -f32::NAN, f32::from_bits(0xff80_0001)] {
        for case in &CASES {
            assert_eq!((case.scalar)(nan).to_bits(), NAN.to_bits(), "{}", case.name);
        }
        assert_eq!(rsqrt(nan).to_bits(), NAN.to_bits());
    }
    assert_eq!(ln(-1.0).to_bits(), NAN.to_bits());
    assert_eq!(rsqrt(-1.0).to_bits(), NAN.to_bits());
}

/// The order of `sum` written as its definition reads, one element at a time.
fn sum_by_definition(x: &[f32]) -> f32 {
    let mut total = 0.0;
    for chunk in x.chunks(1024) {
        let mut t = chunk.to_vec();
        t.resize(1024, 0.0);
        for half in [512, 256, 128, 64, 32, 16, 8, 4, 2, 1] {
            for i in 0..half {
                t[i] += t[i + half];
            }
        }
        total += t[0];
    }
    total
}

/// Numbers of very different size and both signs, so that another order gives other bits.
fn uneven(n: usize, seed: u32) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let [a, b, _, _] = crate::rng::philox4x32([i, seed, 0, 0], [1, 2]);
            let mantissa = (a as i32) as f32 / 2_147_483_648.0;
            mantissa * f32::from_bits((127 - 12 + b % 24) << 23)
        })
        .collect()
}

#[test]
fn sums_follow_the_stated_order() {
    let lengths = [0, 1, 2, 3, 5, 31, 64, 127, 576, 1000, 1023, 1024, 1025, 1536, 2048, 3000, 4096, 7168, 20_000];
    let mut differs_from_plain_order = 0;
    for n in lengths {
        let x = uneven(n, 1);
        let y = uneven(n, 2);
        let products: Vec<f32> = x.iter().zip(&y).map(|(x, y)| x * y).collect();
        let squares: Vec<f32> = x.iter().map(|x| x * x).collect();
        for &isa in Isa::available() {
            let _forced = force_isa(isa);
            assert_eq!(sum(&x).to_bits(), sum_by_definition(&x).to_bits(), "sum of {n} on {isa:?}");
            assert_eq!(dot(&x, &y).to_bits(), sum_by_definition(&products).to_bits(), "dot of {n} on {isa:?}");
            assert_eq!(sum_sq(&x).to_bits(), sum_by_definition(&squares).to_bits(), "sum_sq of {n} on {isa:?}");
            assert_eq!(max(&x), x.iter().copied().fold(f32::NEG_INFINITY, f32::max), "max of {n} on {isa:?}");
        }
        let plain = x.iter().fold(0.0, |a, b| a + b);
        differs_from_plain_order += u32::from(plain.to_bits() != sum(&x).to_bits());
    }
    assert!(differs_from_plain_order >= 8, "the inputs cannot tell one order from another");
    assert_eq!(sum(&[-0.0; 1024]).to_bits(), 0);
    assert_eq!(max(&[f32::NAN, -1.0, f32::NAN]), -1.0);
}
