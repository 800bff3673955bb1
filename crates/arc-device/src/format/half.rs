//! Conversions between f32 and the 8- and 16-bit float encodings, in integer arithmetic: exact, and the same bits on
//! every machine.

/// IEEE binary16 to f32. Exact; a NaN keeps its sign and payload.
pub const fn f16_to_f32(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let exponent = bits as u32 >> 10 & 31;
    let mantissa = bits as u32 & 0x3ff;
    let magnitude = match (exponent, mantissa) {
        (0, 0) => 0,
        // Subnormal: mantissa * 2^-24, with its leading one shifted out and counted in the exponent.
        (0, _) => {
            let top = 31 - mantissa.leading_zeros();
            (top + 103) << 23 | (mantissa << (23 - top) & 0x7f_ffff)
        }
        (31, _) => 0x7f80_0000 | mantissa << 13,
        _ => (exponent + 112) << 23 | mantissa << 13,
    };
    f32::from_bits(sign | magnitude)
}

/// f32 to IEEE binary16, to nearest, ties to even; beyond 65,519 infinity. A NaN keeps its sign and upper payload and
/// becomes quiet.
pub const fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00 | (magnitude >> 13 & 0x3ff) as u16;
    }
    if magnitude >= 0x4780_0000 {
        return sign | 0x7c00;
    }
    let exponent = magnitude >> 23;
    if exponent >= 113 {
        // Normal: a carry out of the mantissa moves the exponent, up to infinity, as it should.
        return sign | (round_shift(magnitude - (112 << 23), 13)) as u16;
    }
    if exponent < 102 {
        return sign;
    }
    sign | round_shift(magnitude & 0x7f_ffff | 0x80_0000, 126 - exponent) as u16
}

/// bfloat16 to f32. Exact.
pub const fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// f32 to bfloat16, to nearest, ties to even. A NaN keeps its sign and upper payload and becomes quiet.
pub const fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if bits & 0x7fff_ffff > 0x7f80_0000 {
        return (bits >> 16) as u16 | 0x40;
    }
    round_shift(bits, 16) as u16
}

/// E8M0 (a power of two, `2^(byte - 127)`) to f32. Exact, 0 being the subnormal 2^-127; 255 is NaN.
///
/// Source: OCP Microscaling Formats 1.0, section 5.4.1.
pub const fn e8m0_to_f32(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits((byte as u32) << 23),
    }
}

/// Half of an E8M0 scale, `2^(byte - 128)`: what MXFP4's doubled integers are multiplied by. Exact, subnormals
/// included.
///
/// NOTE: 255 gives 2^127 where E8M0 has NaN. GGUF files are defined by their decoder, which does the same.
pub const fn e8m0_half_to_f32(byte: u8) -> f32 {
    f32::from_bits(if byte < 2 { 0x0020_0000 << byte } else { (byte as u32 - 1) << 23 })
}

/// The smallest E8M0 scale that is not below `value`: `2^ceil(log2(value))`. Read off the bits, not computed by a
/// logarithm that may be wrong at the powers themselves. `value` must be positive, normal and at most 2^127.
pub const fn f32_to_e8m0_up(value: f32) -> u8 {
    let bits = value.to_bits();
    (bits >> 23) as u8 + (bits & 0x7f_ffff != 0) as u8
}

/// `bits >> shift` rounded to nearest, ties to even. `1 <= shift <= 31`; `bits` far enough below 2^32 not to wrap.
#[inline(always)]
pub(super) const fn round_shift(bits: u32, shift: u32) -> u32 {
    let odd = bits >> shift & 1;
    (bits + ((1 << (shift - 1)) - 1) + odd) >> shift
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Payloads of NaNs differ between implementations; whether a value is one may not.
    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    #[test]
    fn all_16_bit_patterns_convert_as_the_half_crate_does() {
        for bits in 0..=u16::MAX {
            let f16 = half::f16::from_bits(bits);
            let bf16 = half::bf16::from_bits(bits);
            assert!(same(f16_to_f32(bits), f16.to_f32_const()), "f16 {bits:#06x}");
            assert!(same(bf16_to_f32(bits), bf16.to_f32_const()), "bf16 {bits:#06x}");
            if !f16.is_nan() {
                assert_eq!(f32_to_f16(f16_to_f32(bits)), bits, "f16 round trip");
            }
            if !bf16.is_nan() {
                assert_eq!(f32_to_bf16(bf16_to_f32(bits)), bits, "bf16 round trip");
            }
        }
    }

    /// Every value where rounding can change its mind: each 16-bit value, the midpoint to the next, and one f32 to
    /// either side of both.
    #[test]
    fn rounding_agrees_with_the_half_crate_at_every_boundary() {
        let check = |value: f32| {
            let (ours, theirs) = (f32_to_f16(value), half::f16::from_f32_const(value));
            assert!(ours == theirs.to_bits() || theirs.is_nan() && ours & 0x7fff > 0x7c00, "f16 of {value:e}");
            let (ours, theirs) = (f32_to_bf16(value), half::bf16::from_f32_const(value));
            assert!(ours == theirs.to_bits() || theirs.is_nan() && ours & 0x7fff > 0x7f80, "bf16 of {value:e}");
        };
        for bits in 0..=u16::MAX {
            let f16 = f16_to_f32(bits).to_bits();
            let f16_next = f16_to_f32(bits.wrapping_add(1)).to_bits();
            let bf16 = u32::from(bits) << 16;
            for centre in [f16, (f16 >> 1) + (f16_next >> 1), bf16, bf16 + 0x8000] {
                for neighbour in [centre.wrapping_sub(1), centre, centre.wrapping_add(1)] {
                    check(f32::from_bits(neighbour));
                }
            }
        }
        let mut state = 1u32;
        for _ in 0..1_000_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            check(f32::from_bits(state ^ state >> 16));
        }
    }

    #[test]
    fn e8m0_is_a_power_of_two_at_every_byte() {
        for byte in 0..=u8::MAX {
            let half = 2f64.powi(i32::from(byte) - 128);
            assert_eq!(f64::from(e8m0_half_to_f32(byte)), half, "byte {byte}");
            if byte < 255 {
                assert_eq!(f64::from(e8m0_to_f32(byte)), 2.0 * half, "byte {byte}");
            }
        }
        assert!(e8m0_to_f32(255).is_nan());
    }

    #[test]
    fn a_scale_is_the_next_power_of_two_and_a_power_is_its_own() {
        for byte in 1..=254 {
            let power = e8m0_to_f32(byte);
            let [below, above] = [power.to_bits() - 1, power.to_bits() + 1].map(f32::from_bits);
            assert_eq!(f32_to_e8m0_up(power), byte);
            if byte > 1 {
                assert_eq!(f32_to_e8m0_up(below), byte, "just below 2^{}", i32::from(byte) - 127);
            }
            if byte < 254 {
                assert_eq!(f32_to_e8m0_up(above), byte + 1, "just above 2^{}", i32::from(byte) - 127);
            }
        }
    }
}
