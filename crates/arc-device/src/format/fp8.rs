//! FP8 (E4M3) codes: sign, four exponent bits (bias 7), three mantissa bits; no infinity, 0x7f and 0xff are NaN, the
//! largest value is 448, the smallest 2^-9.
//!
//! Source: OCP 8-bit Floating Point 1.0 (E4M3); NaN and saturation as NVIDIA's `cvt.rn.satfinite.e4m3x2.f32` has them.
//! Everything here is integer arithmetic and exact float arithmetic: the same bits on every machine.

use super::half::round_shift;
use crate::simd::multiversion;

/// The largest value.
pub const E4M3_MAX: f32 = 448.0;
/// The code that stands for "not a number".
pub const E4M3_NAN: u8 = 0x7f;

/// f32 to E4M3, to nearest, ties to the even code; beyond 448, infinities included, ±448. Every NaN gives
/// [`E4M3_NAN`], whatever its sign.
#[inline(always)]
pub const fn f32_to_e4m3(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // The smallest normal is 2^-6. Below it codes are multiples of 2^-9, which is what the last bit of 2^14 is worth:
    // the addition rounds.
    let smallest_normal = 121 << 23;
    let code = if magnitude < smallest_normal {
        (f32::from_bits(magnitude) + 16_384.0).to_bits() & 0xff
    } else {
        // A carry out of the mantissa moves the exponent, as it should.
        let code = round_shift(magnitude - (120 << 23), 20);
        if code > 0x7e { 0x7e } else { code }
    };
    if magnitude > 0x7f80_0000 { E4M3_NAN } else { (bits >> 24 & 0x80 | code) as u8 }
}

/// E4M3 to f32. Exact; [`E4M3_NAN`] and 0xff give NaN.
#[inline(always)]
pub const fn e4m3_to_f32(code: u8) -> f32 {
    let magnitude = (code & 0x7f) as u32;
    let sign = (code as u32 & 0x80) << 24;
    // Both formats have the same shape: moved into place, the code is a number 2^120 too small, subnormals included.
    let value = f32::from_bits(magnitude << 20) * f32::from_bits((120 + 127) << 23);
    if magnitude == 0x7f { f32::NAN } else { f32::from_bits(value.to_bits() | sign) }
}

multiversion! {
    /// `out[i] = e4m3(x[i] * factor)`, as [`f32_to_e4m3`] rounds. Equal lengths. A power-of-two `factor` makes the
    /// product exact, or too small for any code.
    pub fn encode_e4m3(x: &[f32], factor: f32, out: &mut [u8]) {
        assert_eq!(x.len(), out.len(), "a code for each value");
        for (out, x) in out.iter_mut().zip(x) {
            *out = f32_to_e4m3(x * factor);
        }
    }

    /// `out[i] = codes[i] * scale`. Equal lengths. Exact for a power-of-two `scale`, unless the product leaves f32.
    pub fn decode_e4m3(codes: &[u8], scale: f32, out: &mut [f32]) {
        assert_eq!(codes.len(), out.len(), "a value for each code");
        for (out, code) in out.iter_mut().zip(codes) {
            *out = e4m3_to_f32(*code) * scale;
        }
    }
}
