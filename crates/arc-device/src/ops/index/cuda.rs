//! The indexer on the GPU: scores of all visible rows, then the best of them.

use crate::cuda::{Arg, Cuda, CudaBuf, Grid, kernel};
use crate::error::Result;
use crate::ops::latent::RowFormat;
use crate::ops::quant::INDEX_DIM;
use crate::ops_v4::{LatentLayer, LatentState, LatentWork};

/// Most scores that a block of `index_pick` keeps in shared memory.
const KEPT: usize = 48 << 10;
/// Heads of the scores by int8 `mma`.
const STRAIGHT_HEADS: usize = 64;

impl Cuda {
    /// The stage `index_select`.
    pub(crate) fn index_choose(
        &mut self,
        ws: &mut LatentWork<Cuda>,
        state: &LatentState<Cuda>,
        layer: &LatentLayer<'_, Cuda>,
        rows: usize,
    ) -> Result<()> {
        let Some((cfg, keys)) = layer.index else { return Ok(()) };
        let args = self.latent_args(ws, state, None, layer, true, rows)?;
        let picks = ws.picks.ptr();
        let most = self.tokens() / keys.ratio;
        let room = self.kv.parts.as_ref().map_or(0, CudaBuf::len);
        let scores = self.kv.parts.as_ref().map_or(0, CudaBuf::ptr);
        assert!(most <= room, "scores of {most} rows");
        // A block of `index_pick` counts its share in 16 bits.
        assert!(most.div_ceil(8) < 1 << 16, "a choice among {most} rows");
        // As on the CPU.
        let factor = (cfg.dim as f32).sqrt().recip() * (cfg.heads as f32).sqrt().recip();
        let straight = layer.key_format == RowFormat::Fp4 && cfg.heads == STRAIGHT_HEADS && cfg.dim == INDEX_DIM;
        let processors = self.multiprocessors() as usize;
        let at_once = (room / most.max(1)).min(rows);
        let view = self.view();
        for first in (0..rows).step_by(at_once) {
            let here = at_once.min(rows - first);
            let tasks = most.div_ceil(8);
            let blocks =
                (2 * processors).div_ceil(here).min(if straight { processors } else { 8 * processors }).min(tasks);
            self.launch(
                kernel!("index_score"),
                Grid::xy(blocks as u32, here as u32, 256).shared((4 * cfg.heads * cfg.dim) as u32),
                &[
                    Arg::of(&args),
                    scores.into(),
                    (most as u32).into(),
                    (first as u32).into(),
                    factor.into(),
                    u32::from(straight).into(),
                    Arg::of(&view),
                ],
            )?;
            let cluster = match most {
                0..=16384 => 1,
                _ => 8,
            };
            let kept = (most.div_ceil(cluster) + 4).min(KEPT);
            let grid = Grid {
                blocks: [cluster as u32, here as u32, 1],
                threads: 1024,
                shared: 4 * kept as u32,
                cluster: if cluster > 1 { cluster as u32 } else { 0 },
            };
            self.launch(
                kernel!("index_pick"),
                grid,
                &[
                    Arg::of(&args),
                    scores.into(),
                    picks.into(),
                    (most as u32).into(),
                    (first as u32).into(),
                    (kept as u32).into(),
                    Arg::of(&view),
                ],
            )?;
        }
        Ok(())
    }
}
