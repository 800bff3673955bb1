//! Random bytes that are sound weights: rows of the device layer's [`SyntheticRows`], and tables of picks.

use arc_device::ops::synthetic::{SyntheticRows, random_row, tensor_key};

use super::table::{Draw, TensorSpec};

/// The rows of a tensor of real numbers; `None` for a table of picks.
pub(super) fn rows(seed: u64, tensor: &TensorSpec, first_row: usize) -> Option<SyntheticRows> {
    match tensor.draw {
        Draw::Values { mean, std } => {
            Some(SyntheticRows { seed, tensor: tensor_key(&tensor.name), first_row, mean, std })
        }
        Draw::Picks(_) => None,
    }
}

/// See [`super::Synthetic::fill`].
pub(super) fn fill(seed: u64, tensor: &TensorSpec, first_row: usize, out: &mut [u8]) {
    let row_bytes = tensor.row_bytes();
    assert!(out.len().is_multiple_of(row_bytes), "{} bytes of rows of {row_bytes}", out.len());
    assert!(first_row + out.len() / row_bytes <= tensor.rows(), "rows of {}", tensor.name);
    match (rows(seed, tensor, first_row), tensor.format, tensor.draw) {
        (Some(rows), Some(format), _) => rows.fill(format, tensor.cols(), out),
        (_, _, Draw::Picks(n)) => {
            let mut random = vec![0; row_bytes];
            for (row, out) in (first_row..).zip(out.chunks_exact_mut(row_bytes)) {
                random_row(seed, tensor_key(&tensor.name), row, &mut random);
                picks(&random, n, out);
            }
        }
        (_, None, Draw::Values { .. }) => unreachable!("{} holds integers", tensor.name),
        (None, Some(_), Draw::Values { .. }) => unreachable!("real numbers have rows"),
    }
}

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
