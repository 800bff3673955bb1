//! Rows of random weights made on the GPU.

use super::{SyntheticRows, block_scale, float_unit, half_unit};
use crate::cuda::{Cuda, Grid, args, kernel};
use crate::error::Result;
use crate::format::Format;

/// Blocks of the grid at most: they walk over what is left.
const MOST_BLOCKS: usize = 1 << 16;
/// Threads of a block of those that make a block of codes each.
const BLOCK_THREADS: usize = 128;

/// Writes `n` rows of `cols` values in their stored format, the bytes of [`SyntheticRows::fill`]. `to`: device address,
/// 16-byte aligned. Load time only. Panics for a format without such rows.
pub(crate) fn fill(dev: &mut Cuda, to: u64, rows: SyntheticRows, format: Format, cols: usize, n: usize) -> Result<()> {
    assert!(SyntheticRows::has(format), "no random rows in {}", format.name());
    assert!(to.is_multiple_of(16), "rows at {to:#x}");
    let first = u32::try_from(rows.first_row).expect("tensors have fewer rows");
    let words = [rows.seed as u32, (rows.seed >> 32) as u32, rows.tensor as u32, (rows.tensor >> 32) as u32];
    let [s0, s1, t0, t1] = words;
    let (width, count) = (cols as u32, n as u32);
    if n == 0 || cols == 0 {
        return Ok(());
    }
    let (kernel, unit, values) = match format {
        Format::F32 => (kernel!("arc_synthetic_f32"), float_unit(rows.std), 4),
        Format::F16 => (kernel!("arc_synthetic_f16"), half_unit(rows.std), 8),
        _ => {
            let kernel = match format {
                Format::Q8_0 => kernel!("arc_synthetic_q8_0"),
                Format::Iq2Xxs => kernel!("arc_synthetic_iq2_xxs"),
                _ => kernel!("arc_synthetic_q2_k"),
            };
            let blocks = cols / format.block_len();
            let grid = Grid::new((n * blocks).div_ceil(BLOCK_THREADS).min(MOST_BLOCKS) as u32, BLOCK_THREADS as u32);
            let least = u32::from(block_scale(format, rows.std));
            return dev.launch(kernel, grid, args![to, s0, s1, t0, t1, first, least, blocks as u32, count]);
        }
    };
    let grid = Grid::xy(cols.div_ceil(values * 256) as u32, n.min(MOST_BLOCKS - 1) as u32, 256);
    dev.launch(kernel, grid, args![to, s0, s1, t0, t1, first, rows.mean, unit, width, count])
}
