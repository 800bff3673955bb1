//! Random bytes that are sound weights.
//!
//! A row's random bytes are the words of Philox with key = seed and counter = (0 and up, row, hash of the tensor's name).

use arc_device::format::Format;
use arc_device::format::half::{f16_to_f32, f32_to_f16};
use arc_device::rng::philox_bytes;

use super::table::{Draw, TensorSpec};

/// Bytes of a tensor that are worth a thread.
const THREAD_BYTES: usize = 1 << 20;

/// See [`super::Synthetic::fill`].
pub(super) fn fill(seed: u64, tensor: &TensorSpec, first_row: usize, out: &mut [u8]) {
    let row_bytes = tensor.row_bytes();
    assert!(out.len().is_multiple_of(row_bytes), "{} bytes of rows of {row_bytes}", out.len());
    assert!(first_row + out.len() / row_bytes <= tensor.rows(), "rows of {}", tensor.name);
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(out.len() / THREAD_BYTES);
    if threads < 2 {
        return fill_rows(seed, tensor, first_row, out);
    }
    let rows = (out.len() / row_bytes).div_ceil(threads);
    std::thread::scope(|scope| {
        for (i, out) in out.chunks_mut(rows * row_bytes).enumerate() {
            scope.spawn(move || fill_rows(seed, tensor, first_row + i * rows, out));
        }
    });
}

fn fill_rows(seed: u64, tensor: &TensorSpec, first_row: usize, out: &mut [u8]) {
    let hash = fnv1a(&tensor.name);
    let key = [seed as u32, (seed >> 32) as u32];
    let row_bytes = tensor.row_bytes();
    let mut random = vec![0; random_bytes(tensor)];
    for (row, out) in (first_row..).zip(out.chunks_exact_mut(row_bytes)) {
        let row = u32::try_from(row).expect("tensors have fewer rows");
        philox_bytes([0, row, hash as u32, (hash >> 32) as u32], key, &mut random);
        match (tensor.format, tensor.draw) {
            (_, Draw::Picks(n)) => picks(&random, n, out),
            (Some(Format::F32), Draw::Values { mean, std }) => floats(&random, mean, std, out),
            (Some(Format::F16), Draw::Values { mean, std }) => halves(&random, mean, std, out),
            (Some(format), Draw::Values { std, .. }) => blocks(&random, format, std, out),
            (None, Draw::Values { .. }) => unreachable!("{} holds integers", tensor.name),
        }
    }
}

/// Random bytes that a row takes: as many as it has, and of a block one more, up to a multiple of 16.
fn random_bytes(tensor: &TensorSpec) -> usize {
    match tensor.format {
        Some(format) if format.block_len() > 1 => tensor.cols() / format.block_len() * block_random(format),
        _ => tensor.row_bytes(),
    }
}

fn block_random(format: Format) -> usize {
    (format.block_bytes() + 1).next_multiple_of(16)
}

/// FNV-1a, 64 bits.
fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Half the width of a uniform distribution of standard deviation 1: sqrt(3).
const SPREAD: f32 = 1.732_050_8;

/// Uniform around `mean`; 24 random bits each.
fn floats(random: &[u8], mean: f32, std: f32, out: &mut [u8]) {
    let unit = std * SPREAD / (1 << 23) as f32;
    for (out, word) in out.chunks_exact_mut(4).zip(random.chunks_exact(4)) {
        let word = i32::from_le_bytes(word.try_into().expect("4 bytes")) >> 8;
        out.copy_from_slice(&(mean + word as f32 * unit).to_le_bytes());
    }
}

/// Uniform around `mean`; 16 random bits each, rounded to F16.
fn halves(random: &[u8], mean: f32, std: f32, out: &mut [u8]) {
    let unit = std * SPREAD / (1 << 15) as f32;
    for (out, word) in out.chunks_exact_mut(2).zip(random.chunks_exact(2)) {
        let word = i16::from_le_bytes([word[0], word[1]]);
        out.copy_from_slice(&f32_to_f16(mean + f32::from(word) * unit).to_le_bytes());
    }
}

/// Random blocks whose scales give the values this standard deviation and mean 0.
fn blocks(random: &[u8], format: Format, std: f32, out: &mut [u8]) {
    let bytes = format.block_bytes();
    for (block, random) in out.chunks_exact_mut(bytes).zip(random.chunks_exact(block_random(format))) {
        block.copy_from_slice(&random[..bytes]);
        // The byte behind them makes the block's scale its own: up to an eighth more.
        let more = u16::from(random[bytes] & 127);
        let scale = |rms: f32| (f32_to_f16(std / rms) + more).to_le_bytes();
        match format {
            // Codes of -128 ..= 127, all alike: sqrt(65535 / 12 + 1 / 4).
            Format::Q8_0 => block[..2].copy_from_slice(&scale(73.9)),
            // Any pattern, sign and group scale.
            Format::Iq2Xxs => block[..2].copy_from_slice(&scale(IQ2_RMS)),
            Format::Q2K => {
                // Codes 0 ..= 3 with a minimum of 1.5 scales are -1.5, -0.5, 0.5 or 1.5 scales, and sub-scales of 8 ..=
                // 15 go with minimums alike: sqrt(1.25 * 137.5).
                for byte in &mut block[..16] {
                    let sub_scale = *byte & 7 | 8;
                    *byte = sub_scale << 4 | sub_scale;
                }
                let d = scale(13.11);
                block[80..82].copy_from_slice(&d);
                let d = f16_to_f32(u16::from_le_bytes(d));
                block[82..84].copy_from_slice(&f32_to_f16(1.5 * d).to_le_bytes());
            }
            _ => unreachable!("the recipe has no {}", format.name()),
        }
    }
}

/// Root of the mean square of IQ2_XXS values with a block scale of 1, over all patterns and group scales.
const IQ2_RMS: f32 = 53.36;

/// Distinct integers below `n`, each set alike: Floyd's algorithm, one word a pick.
///
/// Source: Bentley, Floyd, "Programming pearls: a sample of brilliance", CACM 30 (9), 1987.
fn picks(random: &[u8], n: usize, out: &mut [u8]) {
    let k = out.len() / 4;
    let mut picked: Vec<u32> = Vec::with_capacity(k);
    for (i, word) in random.chunks_exact(4).enumerate() {
        let last = (n - k + i) as u32;
        let word = u32::from_le_bytes(word.try_into().expect("4 bytes"));
        let pick = ((u64::from(word) * u64::from(last + 1)) >> 32) as u32;
        picked.push(if picked.contains(&pick) { last } else { pick });
    }
    out.chunks_exact_mut(4).zip(picked).for_each(|(out, pick)| out.copy_from_slice(&pick.to_le_bytes()));
}
