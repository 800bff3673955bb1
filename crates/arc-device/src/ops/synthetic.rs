//! Rows of random weights, made where they are needed: by the device that keeps them, or on the host. Exact.
//!
//! A row's random bytes are the words of Philox with key = seed and counter = (0 and up, row, tensor). They become a
//! stored row of a format with integer arithmetic and IEEE operations alone, so its bytes are the same whoever makes
//! them:
//!
//! ```text
//! F32        mean + (word >> 8) * (std * sqrt(3) / 2^23)      one signed word a value
//! F16        mean + word * (std * sqrt(3) / 2^15)             half a word a value, rounded to F16
//! Q8_0, IQ2_XXS, Q2_K                                         mean 0
//!            a block takes its own number of random bytes and one more, up to a multiple of 16; its scale becomes
//!            f16(std / rms of the codes), plus the low 7 bits of the byte behind the block
//! ```

pub(crate) mod cuda;

use crate::format::Format;
use crate::format::half::{f16_to_f32, f32_to_f16};
use crate::rng::philox_bytes;

/// Bytes that are worth a thread.
const THREAD_BYTES: usize = 1 << 20;

/// Half the width of a uniform distribution of standard deviation 1: sqrt(3).
const SPREAD: f32 = 1.732_050_8;
/// Codes of -128 ..= 127, all alike: sqrt(65535 / 12 + 1 / 4).
const Q8_RMS: f32 = 73.9;
/// Root of the mean square of IQ2_XXS values with a block scale of 1, over all patterns, signs and group scales.
const IQ2_RMS: f32 = 53.36;
/// Codes 0 ..= 3 with a minimum of 1.5 scales are -1.5, -0.5, 0.5 or 1.5 scales, and sub-scales of 8 ..= 15 go with
/// minimums alike: sqrt(1.25 * 137.5).
const Q2K_RMS: f32 = 13.11;

/// Rows of one tensor, from some row on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SyntheticRows {
    /// Of the model.
    pub seed: u64,
    /// Of the tensor: [`tensor_key`] of its name.
    pub tensor: u64,
    /// The row of the tensor that comes first.
    pub first_row: usize,
    /// Mean of the values; 0 in block formats.
    pub mean: f32,
    /// Their standard deviation.
    pub std: f32,
}

/// The word of a tensor's name: FNV-1a, 64 bits.
pub fn tensor_key(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// The random bytes of one row of a tensor.
pub fn random_row(seed: u64, tensor: u64, row: usize, out: &mut [u8]) {
    let row = u32::try_from(row).expect("tensors have fewer rows");
    philox_bytes([0, row, tensor as u32, (tensor >> 32) as u32], [seed as u32, (seed >> 32) as u32], out);
}

impl SyntheticRows {
    /// Whether there are such rows in this format.
    pub const fn has(format: Format) -> bool {
        matches!(format, Format::F32 | Format::F16 | Format::Q8_0 | Format::Iq2Xxs | Format::Q2K)
    }

    /// The same tensor's rows from `rows` further on.
    pub const fn skip(self, rows: usize) -> Self {
        Self { first_row: self.first_row + rows, ..self }
    }

    /// Writes rows of `cols` values, as many as fit, with the threads of the machine. `out`: whole rows. Panics for a
    /// format without such rows.
    pub fn fill(&self, format: Format, cols: usize, out: &mut [u8]) {
        let row_bytes = format.row_bytes(cols).expect("rows are whole blocks");
        assert!(Self::has(format), "no random rows in {}", format.name());
        assert!(out.len().is_multiple_of(row_bytes), "{} bytes of rows of {row_bytes}", out.len());
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(out.len() / THREAD_BYTES);
        if threads < 2 {
            return self.fill_rows(format, cols, out);
        }
        let rows = (out.len() / row_bytes).div_ceil(threads);
        std::thread::scope(|scope| {
            for (i, out) in out.chunks_mut(rows * row_bytes).enumerate() {
                scope.spawn(move || self.skip(i * rows).fill_rows(format, cols, out));
            }
        });
    }

    fn fill_rows(&self, format: Format, cols: usize, out: &mut [u8]) {
        let mut random = vec![0; random_bytes(format, cols)];
        let row_bytes = out.len().min(cols / format.block_len() * format.block_bytes());
        for (row, out) in (self.first_row..).zip(out.chunks_exact_mut(row_bytes)) {
            random_row(self.seed, self.tensor, row, &mut random);
            match format {
                Format::F32 => floats(&random, self.mean, self.std, out),
                Format::F16 => halves(&random, self.mean, self.std, out),
                _ => blocks(&random, format, self.std, out),
            }
        }
    }
}

/// Random bytes that a row takes: as many as it has, and of a block one more, up to a multiple of 16.
fn random_bytes(format: Format, cols: usize) -> usize {
    match format.block_len() {
        1 => cols * format.block_bytes(),
        len => cols / len * block_random(format),
    }
}

fn block_random(format: Format) -> usize {
    (format.block_bytes() + 1).next_multiple_of(16)
}

/// Uniform around `mean`; 24 random bits each.
fn floats(random: &[u8], mean: f32, std: f32, out: &mut [u8]) {
    let unit = float_unit(std);
    for (out, word) in out.chunks_exact_mut(4).zip(random.chunks_exact(4)) {
        let word = i32::from_le_bytes(word.try_into().expect("4 bytes")) >> 8;
        out.copy_from_slice(&(mean + word as f32 * unit).to_le_bytes());
    }
}

/// Uniform around `mean`; 16 random bits each, rounded to F16.
fn halves(random: &[u8], mean: f32, std: f32, out: &mut [u8]) {
    let unit = half_unit(std);
    for (out, word) in out.chunks_exact_mut(2).zip(random.chunks_exact(2)) {
        let word = i16::from_le_bytes([word[0], word[1]]);
        out.copy_from_slice(&f32_to_f16(mean + f32::from(word) * unit).to_le_bytes());
    }
}

fn float_unit(std: f32) -> f32 {
    std * SPREAD / (1 << 23) as f32
}

fn half_unit(std: f32) -> f32 {
    std * SPREAD / (1 << 15) as f32
}

/// The least scale of a block, as F16 bits, that gives values this standard deviation.
fn block_scale(format: Format, std: f32) -> u16 {
    f32_to_f16(match format {
        Format::Q8_0 => std / Q8_RMS,
        Format::Iq2Xxs => std / IQ2_RMS,
        Format::Q2K => std / Q2K_RMS,
        _ => unreachable!("no random blocks in {}", format.name()),
    })
}

/// Random blocks whose scales give the values this standard deviation and mean 0.
fn blocks(random: &[u8], format: Format, std: f32, out: &mut [u8]) {
    let (bytes, least) = (format.block_bytes(), block_scale(format, std));
    for (block, random) in out.chunks_exact_mut(bytes).zip(random.chunks_exact(block_random(format))) {
        block.copy_from_slice(&random[..bytes]);
        // The byte behind them makes the block's scale its own: up to an eighth more.
        let scale = least + u16::from(random[bytes] & 127);
        if format != Format::Q2K {
            block[..2].copy_from_slice(&scale.to_le_bytes());
            continue;
        }
        for byte in &mut block[..16] {
            let sub_scale = *byte & 7 | 8;
            *byte = sub_scale << 4 | sub_scale;
        }
        block[80..82].copy_from_slice(&scale.to_le_bytes());
        block[82..84].copy_from_slice(&f32_to_f16(1.5 * f16_to_f32(scale)).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::{SyntheticRows, tensor_key};
    use crate::format::Format;
    use crate::ops::matmul::{Bytes, MatrixSource};

    #[test]
    fn a_row_is_the_same_in_any_run_and_matrix() {
        let rows = SyntheticRows { seed: 3, tensor: tensor_key("some"), first_row: 5, mean: 0.0, std: 0.02 };
        for format in Format::ALL.into_iter().filter(|&format| SyntheticRows::has(format)) {
            let (n, cols) = (9, 512);
            let row_bytes = format.row_bytes(cols).expect("whole blocks");
            let mut all = vec![0; n * row_bytes];
            rows.fill(format, cols, &mut all);
            let part = MatrixSource { format, rows: n, cols, bytes: Bytes::Synthetic(rows) };
            part.check("part").expect("its size is its own");
            assert_eq!(part.stored(), all);
            for at in [0, 1, 8] {
                let run = part.rows(at, n - at);
                assert_eq!(run.stored()[..], all[at * row_bytes..], "{} from {at}", format.name());
                assert_ne!(run.stored()[..16], all[(at + 1) % n * row_bytes..][..16], "rows differ");
            }
        }
    }

    #[test]
    #[should_panic(expected = "no random rows in q4_k")]
    fn a_format_without_recipe_is_refused() {
        let rows = SyntheticRows { seed: 0, tensor: 0, first_row: 0, mean: 0.0, std: 1.0 };
        rows.fill(Format::Q4K, 256, &mut [0; 144]);
    }
}
