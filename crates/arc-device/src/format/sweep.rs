//! E4M3 and E2M1 conversions over f32 patterns, against "the nearest value, and of two the one with the even code".
//!
//! All 2^32 patterns in release mode, a sample in debug mode.

use std::sync::atomic::{AtomicU64, Ordering};

use super::fp4::{e2m1_to_f32, encode_e2m1, f32_to_e2m1};
use super::fp8::{E4M3_NAN, decode_e4m3, e4m3_to_f32, encode_e4m3, f32_to_e4m3};
use crate::simd::{Isa, force_isa};

type Encode = fn(&[f32], f32, &mut [u8]);

/// A small float by its definition: the magnitudes in the order of their codes.
struct Small {
    magnitudes: Vec<f64>,
    sign: u8,
    nan: u8,
}

fn e4m3() -> Small {
    let magnitude = |code: u32| match (code >> 3, f64::from(code & 7)) {
        (0, mantissa) => mantissa * 2f64.powi(-9),
        (exponent, mantissa) => (1.0 + mantissa / 8.0) * 2f64.powi(exponent as i32 - 7),
    };
    Small { magnitudes: (0..0x7f).map(magnitude).collect(), sign: 0x80, nan: 0x7f }
}

fn e2m1() -> Small {
    Small { magnitudes: vec![0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], sign: 8, nan: 7 }
}

/// What a sweep saw.
#[derive(Debug, Default)]
struct Seen {
    visited: AtomicU64,
    wrong: AtomicU64,
}

const CHUNK: u32 = 1 << 12;

/// Compares `encode` with the definition over every `stride`-th chunk of positive patterns and their negatives.
fn sweep(small: &Small, encode: Encode, stride: u32) -> Seen {
    let halves: Vec<f64> = small.magnitudes.array_windows().map(|[a, b]| (a + b) / 2.0).collect();
    let (seen, next) = (Seen::default(), AtomicU64::new(0));
    let work = || {
        let mut x = vec![0.0f32; CHUNK as usize];
        let (mut positive, mut negative) = (vec![0u8; CHUNK as usize], vec![0u8; CHUNK as usize]);
        loop {
            let chunk = next.fetch_add(u64::from(stride), Ordering::Relaxed);
            if chunk >= u64::from((1 << 31) / CHUNK) {
                break;
            }
            let first = chunk as u32 * CHUNK;
            x.iter_mut().zip(first..).for_each(|(x, bits)| *x = f32::from_bits(bits));
            encode(&x, 1.0, &mut positive);
            x.iter_mut().for_each(|x| *x = -*x);
            encode(&x, 1.0, &mut negative);
            let (mut code, mut wrong) = (0, 0);
            for ((x, positive), negative) in x.iter().zip(&positive).zip(&negative) {
                let magnitude = f64::from(-*x);
                let expected = if magnitude.is_nan() {
                    [small.nan; 2]
                } else {
                    // Patterns ascend, so the code never falls inside a chunk.
                    while code < halves.len()
                        && (magnitude > halves[code] || magnitude == halves[code] && code % 2 == 1)
                    {
                        code += 1;
                    }
                    [code as u8, code as u8 | small.sign]
                };
                wrong += u64::from(*positive != expected[0]) + u64::from(*negative != expected[1]);
            }
            seen.visited.fetch_add(2 * u64::from(CHUNK), Ordering::Relaxed);
            seen.wrong.fetch_add(wrong, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(2, usize::from) {
            scope.spawn(work);
        }
    });
    seen
}

#[test]
fn every_f32_pattern_is_rounded_to_the_nearest_code() {
    let stride = if cfg!(debug_assertions) { 499 } else { 1 };
    for (name, small, encode) in [("e4m3", e4m3(), encode_e4m3 as Encode), ("e2m1", e2m1(), encode_e2m1)] {
        let Seen { visited, wrong } = sweep(&small, encode, stride);
        let all = u64::from(((1 << 31) / CHUNK).div_ceil(stride)) * 2 * u64::from(CHUNK);
        assert_eq!(visited.into_inner(), all, "{name}: patterns visited");
        assert!(stride > 1 || all == 1 << 32);
        assert_eq!(wrong.into_inner(), 0, "{name}: patterns with a wrong code");
    }
}

/// Conversions with one mistake each, over a sample of the patterns: the sweep must see all of them.
#[test]
fn the_sweep_catches_mistakes() {
    fn mapped(x: &[f32], out: &mut [u8], code: impl Fn(f32) -> u8) {
        out.iter_mut().zip(x).for_each(|(out, x)| *out = code(*x));
    }
    let e4m3_mutants: [(&str, Encode, u64); 4] = [
        ("ties away from zero", |x, _, out| mapped(x, out, |x| f32_to_e4m3(nudged(x))), 100),
        ("truncated", |x, _, out| mapped(x, out, |x| f32_to_e4m3(f32::from_bits(x.to_bits() & 0xfff0_0000))), 500_000),
        (
            "subnormals flushed",
            |x, _, out| mapped(x, out, |x| f32_to_e4m3(if x.abs() < 0.0156 { 0.0 * x } else { x })),
            500_000,
        ),
        (
            "infinity kept as NaN",
            |x, _, out| mapped(x, out, |x| if x.is_infinite() { E4M3_NAN } else { f32_to_e4m3(x) }),
            1,
        ),
    ];
    let e2m1_mutants: [(&str, Encode, u64); 2] = [
        ("ties away from zero", |x, _, out| mapped(x, out, |x| f32_to_e2m1(nudged(x))), 4),
        (
            "sign of zero lost",
            |x, _, out| mapped(x, out, |x| f32_to_e2m1(x) % if x.abs() < 0.25 { 8 } else { 16 }),
            1 << 20,
        ),
    ];
    // Values where conversions change their mind end in zeros: their chunks are multiples of 128.
    for (small, mutants) in [(e4m3(), &e4m3_mutants[..]), (e2m1(), &e2m1_mutants[..])] {
        for (name, mutant, least) in mutants {
            let wrong = sweep(&small, *mutant, 128).wrong.into_inner();
            assert!(wrong >= *least, "{name}: only {wrong} patterns tell");
        }
    }
    let sound = sweep(&e4m3(), |x, _, out| mapped(x, out, f32_to_e4m3), 128);
    assert_eq!(sound.wrong.into_inner(), 0);
}

/// One f32 away from zero, which turns a tie into the larger neighbour and moves nothing else that is not next to one.
fn nudged(x: f32) -> f32 {
    if x.is_nan() { x } else { f32::from_bits(x.to_bits() | 1) }
}

#[test]
fn every_code_decodes_to_its_value_and_back() {
    let small = e4m3();
    for code in 0..=u8::MAX {
        let value = e4m3_to_f32(code);
        match small.magnitudes.get(usize::from(code & 0x7f)) {
            Some(magnitude) => {
                assert_eq!(f64::from(value.abs()), *magnitude, "e4m3 {code:#04x}");
                assert_eq!(value.is_sign_negative(), code >= 0x80, "e4m3 {code:#04x}");
                assert_eq!(f32_to_e4m3(value), code);
            }
            None => assert!(value.is_nan(), "e4m3 {code:#04x}"),
        }
    }
    for code in 0..16 {
        let value = e2m1_to_f32(code);
        assert_eq!(f64::from(value.abs()), e2m1().magnitudes[usize::from(code & 7)], "e2m1 {code}");
        assert_eq!(value.is_sign_negative(), code >= 8, "e2m1 {code}");
        assert_eq!(f32_to_e2m1(value), code);
    }
}

#[test]
fn every_instruction_set_gives_the_same_codes() {
    let x: Vec<f32> = (0..1 << 20).map(|i: u32| f32::from_bits(i.wrapping_mul(0x9e37_79b1))).collect();
    for &isa in Isa::available() {
        let _forced = force_isa(isa);
        for factor in [1.0, 0.25, 2f32.powi(60)] {
            let mut codes = vec![0; x.len()];
            encode_e4m3(&x, factor, &mut codes);
            assert!(x.iter().zip(&codes).all(|(x, code)| *code == f32_to_e4m3(x * factor)), "{isa:?} {factor}");
            encode_e2m1(&x, factor, &mut codes);
            assert!(x.iter().zip(&codes).all(|(x, code)| *code == f32_to_e2m1(x * factor)), "{isa:?} {factor}");
        }
        let codes: Vec<u8> = (0..=255).collect();
        let mut values = vec![0.0; 256];
        decode_e4m3(&codes, 0.5, &mut values);
        for (code, value) in codes.into_iter().zip(values) {
            let expected = e4m3_to_f32(code) * 0.5;
            assert!(value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(), "{isa:?} {code}");
        }
    }
}
