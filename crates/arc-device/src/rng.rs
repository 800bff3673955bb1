//! The one random generator: Philox4x32-10, a pure function of key and counter.
//!
//! There is no generator state, so nothing can be shared, locked, replayed out of order or drawn twice by accident: a
//! row's random word follows from its request's seed and its own position. `rng.cuh` is the CUDA twin, line for line.
//!
//! Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

use crate::simd::multiversion;

const MUL_0: u32 = 0xD251_1F53;
const MUL_1: u32 = 0xCD9E_8D57;
const WEYL_0: u32 = 0x9E37_79B9;
const WEYL_1: u32 = 0xBB67_AE85;
const ROUNDS: u32 = 10;

/// Philox4x32-10: four random words from a 128-bit counter and a 64-bit key.
#[inline]
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..ROUNDS {
        let p0 = u64::from(MUL_0) * u64::from(c0);
        let p1 = u64::from(MUL_1) * u64::from(c2);
        let n0 = (p1 >> 32) as u32 ^ c1 ^ k0;
        let n2 = (p0 >> 32) as u32 ^ c3 ^ k1;
        c1 = p1 as u32;
        c3 = p0 as u32;
        c0 = n0;
        c2 = n2;
        k0 = k0.wrapping_add(WEYL_0);
        k1 = k1.wrapping_add(WEYL_1);
    }
    [c0, c1, c2, c3]
}

/// Counters that [`philox_bytes`] takes together.
const LANES: usize = 16;

multiversion! {
    /// Fills `out` with the words of `counter` and its successors, little-endian, 16 bytes each; the last may be cut.
    ///
    /// Only the first word of the counter counts up; panics where it would pass 2^32.
    pub fn philox_bytes(counter: [u32; 4], key: [u32; 2], out: &mut [u8]) {
        assert!(out.len().div_ceil(16) <= (u32::MAX - counter[0]) as usize, "{} bytes from {}", out.len(), counter[0]);
        for (i, out) in out.chunks_mut(16 * LANES).enumerate() {
            let mut c = [[0u32; LANES]; 4];
            for lane in 0..LANES {
                // Lanes past the last one may wrap: they are not used.
                c[0][lane] = counter[0].wrapping_add((i * LANES + lane) as u32);
                c[1][lane] = counter[1];
                c[2][lane] = counter[2];
                c[3][lane] = counter[3];
            }
            let [mut k0, mut k1] = key;
            for _ in 0..ROUNDS {
                for lane in 0..LANES {
                    let p0 = u64::from(MUL_0) * u64::from(c[0][lane]);
                    let p1 = u64::from(MUL_1) * u64::from(c[2][lane]);
                    c[0][lane] = (p1 >> 32) as u32 ^ c[1][lane] ^ k0;
                    c[2][lane] = (p0 >> 32) as u32 ^ c[3][lane] ^ k1;
                    c[1][lane] = p1 as u32;
                    c[3][lane] = p0 as u32;
                }
                k0 = k0.wrapping_add(WEYL_0);
                k1 = k1.wrapping_add(WEYL_1);
            }
            let mut bytes = [0u8; 16 * LANES];
            for (lane, bytes) in bytes.chunks_exact_mut(16).enumerate() {
                for (word, bytes) in bytes.chunks_exact_mut(4).enumerate() {
                    bytes.copy_from_slice(&c[word][lane].to_le_bytes());
                }
            }
            out.copy_from_slice(&bytes[..out.len()]);
        }
    }
}

/// The random word of one drawn token.
///
/// `seed` is the request's; `draw_index` is the token's position in the output, from 0; `choice` is the index among a
/// request's `n` choices. Key = seed (low word first), counter = (`draw_index`, `choice`, 0, 0); of the four output
/// words, the first is the low half and the second the high half of the result.
#[inline]
pub fn draw_word(seed: u64, draw_index: u32, choice: u32) -> u64 {
    let [lo, hi, _, _] = philox4x32([draw_index, choice, 0, 0], [seed as u32, (seed >> 32) as u32]);
    u64::from(hi) << 32 | u64::from(lo)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, force_isa};

    /// The three known answers that Random123 publishes for philox4x32-10.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32(counter, key), expected, "counter {counter:x?} key {key:x?}");
        }
    }

    #[test]
    fn bytes_are_the_words_of_successive_counters() {
        let (counter, key) = ([7, 1, 2, 3], [11, 13]);
        let words = (0..40).flat_map(|i| philox4x32([7 + i, 1, 2, 3], key));
        let want: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
        for &isa in Isa::available() {
            let _forced = force_isa(isa);
            for len in [0, 1, 16, 255, 256, 257, 640] {
                let mut out = vec![0; len];
                philox_bytes(counter, key, &mut out);
                assert_eq!(out, want[..len], "{len} bytes {isa:?}");
            }
        }
    }

    #[test]
    fn draw_word_places_seed_index_and_choice() {
        let [w0, w1, _, _] = philox4x32([7, 3, 0, 0], [0x89ab_cdef, 0x0123_4567]);
        assert_eq!(draw_word(0x0123_4567_89ab_cdef, 7, 3), u64::from(w1) << 32 | u64::from(w0));
        assert_ne!(draw_word(1, 0, 0), draw_word(1, 1, 0));
        assert_ne!(draw_word(1, 0, 1), draw_word(1, 1, 0));
        assert_ne!(draw_word(1, 0, 0), draw_word(1 << 32, 0, 0));
    }
}
