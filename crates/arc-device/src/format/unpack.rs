//! Where the bits of each integer-coded format lie.
//!
//! Layouts are byte ranges of a block. `l` is the index of a value inside 32 consecutive ones, `s` the index of a group
//! of 32 inside the block, `h` the half (16 values) of such a group.

use super::half::{e8m0_half_to_f32, f16_to_f32};
use super::iq2;
use super::{Block32, Format, Scales};

/// Values of FP4 codes (E2M1: sign, exponent, mantissa), doubled so that they are integers, plus the offset 12.
pub(crate) const FP4_DOUBLED: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// The group `s` of 32 values of one block. `block` has exactly `format.block_bytes()` bytes.
pub(super) fn unpack(format: Format, block: &[u8], s: usize) -> Block32 {
    match format {
        Format::F32 | Format::F16 | Format::Bf16 | Format::Fp8 => unreachable!("float formats have no integer view"),
        Format::Q8_0 => q8_0(block),
        Format::Q4_0 => q4_0(block),
        Format::Q4_1 => q4_1(block),
        Format::Q5_0 => q5_0(block),
        Format::Q5_1 => q5_1(block),
        Format::Q2K => q2_k(block, s),
        Format::Q3K => q3_k(block, s),
        Format::Q4K => q4_k(block, s),
        Format::Q5K => q5_k(block, s),
        Format::Q6K => q6_k(block, s),
        Format::Iq2Xxs => iq2_xxs(block, s),
        Format::Mxfp4 => mxfp4(block),
    }
}

fn f16_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// Nibbles of 16 bytes: values 0..16 are the low ones, 16..32 the high ones.
fn nibbles(qs: &[u8]) -> [u8; 32] {
    std::array::from_fn(|l| if l < 16 { qs[l] & 15 } else { qs[l - 16] >> 4 })
}

fn per_block(d: f32, m: f32, codes: [u8; 32]) -> Block32 {
    Block32 { codes, scales: Scales::PerBlock { d, m } }
}

/// `0..2` d f16, `2..34` codes i8.
fn q8_0(block: &[u8]) -> Block32 {
    per_block(f16_at(block, 0), 0.0, std::array::from_fn(|l| block[2 + l] ^ 0x80))
}

/// `0..2` d f16, `2..18` nibbles.
fn q4_0(block: &[u8]) -> Block32 {
    per_block(f16_at(block, 0), 0.0, nibbles(&block[2..]))
}

/// `0..2` d f16, `2..4` m f16, `4..20` nibbles.
fn q4_1(block: &[u8]) -> Block32 {
    per_block(f16_at(block, 0), f16_at(block, 2), nibbles(&block[4..]))
}

/// Nibbles with a fifth bit: bit `l` of `high` belongs to value `l`.
fn nibbles_and_bit(qs: &[u8], high: u32) -> [u8; 32] {
    let low = nibbles(qs);
    std::array::from_fn(|l| low[l] | ((high >> l & 1) as u8) << 4)
}

/// `0..2` d f16, `2..6` fifth bits, `6..22` nibbles.
fn q5_0(block: &[u8]) -> Block32 {
    per_block(f16_at(block, 0), 0.0, nibbles_and_bit(&block[6..], u32_at(block, 2)))
}

/// `0..2` d f16, `2..4` m f16, `4..8` fifth bits, `8..24` nibbles.
fn q5_1(block: &[u8]) -> Block32 {
    per_block(f16_at(block, 0), f16_at(block, 2), nibbles_and_bit(&block[8..], u32_at(block, 4)))
}

/// Two bits of value `l` of group `s`: 32 bytes hold four groups, the first in the lowest bits.
fn crumb(qs: &[u8], s: usize, l: usize) -> u8 {
    qs[s / 4 * 32 + l] >> (s % 4 * 2) & 3
}

/// `0..16` scale (low nibble) and minimum (high nibble) per 16 values, `16..80` codes, `80..82` d f16, `82..84` dmin f16.
fn q2_k(block: &[u8], s: usize) -> Block32 {
    let scales = [block[2 * s], block[2 * s + 1]];
    Block32 {
        codes: std::array::from_fn(|l| crumb(&block[16..80], s, l)),
        scales: Scales::PerHalf {
            d: f16_at(block, 80),
            sc: scales.map(|byte| i32::from(byte & 15)),
            m: -f16_at(block, 82),
            min: scales.map(|byte| i32::from(byte >> 4)),
        },
    }
}

/// `0..32` third bits (bit `s` of byte `l`), `32..96` low bits, `96..108` scales, `108..110` d f16.
///
/// Sixteen scales of six bits, minus 32: the low nibbles of scales 0..8 and the high nibbles for 8..16 are in the first
/// eight bytes; the upper two bits of scale `i` are bits `2 * (i / 4)` of byte `8 + i % 4`.
fn q3_k(block: &[u8], s: usize) -> Block32 {
    let scales = &block[96..108];
    let scale = |h: usize| {
        let i = 2 * s + h;
        let low = scales[i % 8] >> (i / 8 * 4) & 15;
        let high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
        i32::from(low | high << 4) - 32
    };
    Block32 {
        codes: std::array::from_fn(|l| crumb(&block[32..96], s, l) | (block[l] >> s & 1) << 2),
        scales: Scales::PerHalf { d: f16_at(block, 108), sc: [scale(0), scale(1)], m: 0.0, min: [0, 0] },
    }
}

/// Scale and minimum of group `s` in the head that Q4_K and Q5_K share: `0..2` d f16, `2..4` dmin f16, `4..16` eight
/// scales and eight minimums of six bits.
///
/// Bytes 0..4 hold scales 0..4 and bytes 4..8 minimums 0..4 in their low six bits; their upper two bits complete scales
/// and minimums 4..8, whose low nibbles are the low (scale) and high (minimum) nibbles of bytes 8..12.
fn k_scale_min(block: &[u8], s: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (sc, min) = if s < 4 {
        (packed[s] & 63, packed[s + 4] & 63)
    } else {
        let low = packed[s + 4];
        (low & 15 | packed[s - 4] >> 6 << 4, low >> 4 | packed[s] >> 6 << 4)
    };
    (f16_at(block, 0) * f32::from(sc), -(f16_at(block, 2) * f32::from(min)))
}

/// Four bits of value `l` of group `s`: 32 bytes hold two groups, the first in the low nibbles.
fn nibble(qs: &[u8], s: usize, l: usize) -> u8 {
    qs[s / 2 * 32 + l] >> (s % 2 * 4) & 15
}

/// `0..16` head (`k_scale_min`), `16..144` nibbles.
fn q4_k(block: &[u8], s: usize) -> Block32 {
    let (d, m) = k_scale_min(block, s);
    per_block(d, m, std::array::from_fn(|l| nibble(&block[16..], s, l)))
}

/// `0..16` head (`k_scale_min`), `16..48` fifth bits (bit `s` of byte `l`), `48..176` nibbles.
fn q5_k(block: &[u8], s: usize) -> Block32 {
    let (d, m) = k_scale_min(block, s);
    per_block(d, m, std::array::from_fn(|l| nibble(&block[48..], s, l) | (block[16 + l] >> s & 1) << 4))
}

/// `0..128` low nibbles, `128..192` upper two bits, `192..208` scales i8 per 16 values, `208..210` d f16.
///
/// Of each 128 values, groups 0 and 1 are the low nibbles of 64 bytes, groups 2 and 3 the high ones.
fn q6_k(block: &[u8], s: usize) -> Block32 {
    let low = &block[s / 4 * 64 + s % 2 * 32..];
    let scale = |h: usize| i32::from(block[192 + 2 * s + h] as i8);
    Block32 {
        codes: std::array::from_fn(|l| low[l] >> (s % 4 / 2 * 4) & 15 | crumb(&block[128..192], s, l) << 4),
        scales: Scales::PerHalf { d: f16_at(block, 208), sc: [scale(0), scale(1)], m: 0.0, min: [0, 0] },
    }
}

/// `0..2` d f16, then 8 bytes per group: four pattern indices, and a u32 of four 7-bit sign indices and a 4-bit scale.
fn iq2_xxs(block: &[u8], s: usize) -> Block32 {
    let group = &block[2 + 8 * s..10 + 8 * s];
    let signs_and_scale = u32_at(group, 4);
    let codes = std::array::from_fn(|l| {
        let magnitude = iq2::magnitude(group[l / 8], l % 8);
        let negative = iq2::is_negative(signs_and_scale >> (7 * (l / 8)) & 127, l % 8);
        if negative { iq2::MAX - magnitude } else { iq2::MAX + magnitude }
    });
    let scale = 2 * (signs_and_scale >> 28) + 1;
    per_block(f16_at(block, 0) * scale as f32 * 0.125, 0.0, codes)
}

/// `0..1` scale E8M0, `1..17` nibbles, each an FP4 code.
fn mxfp4(block: &[u8]) -> Block32 {
    per_block(e8m0_half_to_f32(block[0]), 0.0, nibbles(&block[1..]).map(|code| FP4_DOUBLED[usize::from(code)]))
}
