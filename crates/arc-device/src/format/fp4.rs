//! FP4 (E2M1) codes: sign, two exponent bits (bias 1), one mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives
//! (code 8 is -0); neither infinity nor NaN.
//!
//! Source: OCP Microscaling Formats 1.0, section 5.3.3; NaN and saturation as NVIDIA's `cvt.rn.satfinite.e2m1x2.f32`
//! has them. Everything here is integer arithmetic and exact float arithmetic: the same bits on every machine.

use super::half::round_shift;
use crate::simd::multiversion;

/// The largest value.
pub const E2M1_MAX: f32 = 6.0;

/// f32 to E2M1 in the low four bits, to nearest, ties to the even code; beyond 6, infinities included, ±6.
///
/// NOTE: there is no code for NaN, and every NaN gives +6: whoever quantises must look for NaN first.
#[inline(always)]
pub const fn f32_to_e2m1(value: f32) -> u8 {
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // The smallest normal is 1. Below it codes are multiples of 0.5, which is what the last bit of 2^22 is worth: the
    // addition rounds.
    let smallest_normal = 127 << 23;
    let code = if magnitude < smallest_normal {
        (f32::from_bits(magnitude) + 4_194_304.0).to_bits() & 7
    } else {
        let code = round_shift(magnitude - (126 << 23), 22);
        if code > 7 { 7 } else { code }
    };
    if magnitude > 0x7f80_0000 { 7 } else { (bits >> 28 & 8 | code) as u8 }
}

/// E2M1 (the low four bits) to f32. Exact.
#[inline(always)]
pub const fn e2m1_to_f32(code: u8) -> f32 {
    let sign = (code as u32 & 8) << 28;
    let value = f32::from_bits((code as u32 & 7) << 22) * f32::from_bits((126 + 127) << 23);
    f32::from_bits(value.to_bits() | sign)
}

multiversion! {
    /// `out[i] = e2m1(x[i] * factor)`, one code a byte, as [`f32_to_e2m1`] rounds. Equal lengths. A power-of-two
    /// `factor` makes the product exact, or too small for any code.
    pub fn encode_e2m1(x: &[f32], factor: f32, out: &mut [u8]) {
        assert_eq!(x.len(), out.len(), "a code for each value");
        for (out, x) in out.iter_mut().zip(x) {
            *out = f32_to_e2m1(x * factor);
        }
    }
}
