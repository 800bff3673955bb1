//! The indexer on the GPU: scores of all visible rows, then the best of them.

use crate::MemoryClass;
use crate::cuda::{Arg, Cuda, CudaBuf, Grid, kernel};
use crate::error::Result;
use crate::ops::index::{IndexConfig, MAX_INDEX_DIM};
use crate::ops::latent::RowFormat;
use crate::ops::quant::INDEX_DIM;
use crate::ops_v4::{LatentLayer, LatentState, LatentWork};

/// Most scores that a block of `index_pick` keeps in shared memory.
const KEPT: usize = 48 << 10;
/// Heads of the scores by int8 `mma`.
const STRAIGHT_HEADS: usize = 64;
/// Most scores that `index_choose` picks among, and blocks that score, at most.
const MOST_CHOSEN: usize = 64 * 256;
const SCORERS: usize = 64;
/// Words of a choice: its number, how many blocks of the row's own kernel have left what they have to, how many heads are there;
/// heads as keys are stored; their weights, then scores, with numbers.
const PACKED_AT: usize = 4;
const WEIGHTS_AT: usize = PACKED_AT + MAX_INDEX_DIM * (INDEX_DIM / 2 + 4) / 4;
const SCORES_AT: usize = WEIGHTS_AT + 2 * MAX_INDEX_DIM;

/// How the index query of a step came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Came {
    /// It is there when the row's own kernel has let its successor start.
    Early,
    /// It is there when that kernel has ended.
    Late,
    /// Its heads arrive, packed, while that kernel and its successor run.
    Beside,
}

/// What one row's choice beside a product needs.
pub(crate) struct Choice {
    words: CudaBuf<u32>,
    /// How the last index query came.
    pub came: Came,
    /// Blocks of the last row's own kernel.
    pub rows_blocks: u32,
}

impl Choice {
    /// For the longest context.
    pub(crate) fn new(dev: &mut Cuda) -> Result<Choice> {
        let scores = dev.limits.context.min(MOST_CHOSEN);
        let words = dev.take("one row's choice", MemoryClass::Workspace, SCORES_AT + 2 * scores)?;
        Ok(Choice { words, came: Came::Early, rows_blocks: 0 })
    }

    /// Whether one row's choice among the keys of a context of `tokens` can run beside a product.
    pub(crate) fn fits(&self, layer: &LatentLayer<'_, Cuda>, tokens: usize) -> bool {
        let most = layer.index.map_or(usize::MAX, |(_, keys)| tokens / keys.ratio);
        straight(layer) && 2 * most <= self.words.len() - SCORES_AT
    }

    /// Address of the number of the choice before.
    pub(crate) fn number(&self) -> u64 {
        self.words.ptr()
    }

    /// Address of how many blocks of the row's own kernel have left what they have to.
    pub(crate) fn left(&self) -> u64 {
        self.words.ptr() + 4
    }

    /// Address of how many heads of the index query are there.
    fn heads(&self) -> u64 {
        self.words.ptr() + 8
    }

    /// Address of the heads' weights, each with the number of the choice.
    pub(crate) fn weights(&self) -> u64 {
        self.words.ptr() + 4 * WEIGHTS_AT as u64
    }

    /// Address of the index query, a key a head.
    pub(crate) fn packed(&self) -> u64 {
        self.words.ptr() + 4 * PACKED_AT as u64
    }
}

/// `Sent` of index.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Sent {
    packed: u64,
    weights: u64,
    scores: u64,
    number: u64,
    heads: u64,
    left: u64,
    blocks: u32,
    most: u32,
    factor: f32,
}
const _: () = assert!(size_of::<Sent>() == 64);

/// Whether keys and queries may meet as integers.
fn straight(layer: &LatentLayer<'_, Cuda>) -> bool {
    let fits = |index: IndexConfig| index.heads == STRAIGHT_HEADS && index.dim == INDEX_DIM;
    layer.key_format == RowFormat::Fp4 && layer.index.is_some_and(|(index, _)| fits(index))
}

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
        let straight = straight(layer);
        let came =
            self.latent.choice.as_mut().map_or(Came::Early, |choice| std::mem::replace(&mut choice.came, Came::Early));
        if let Some(choice) = self.latent.choice.as_ref().filter(|_| came == Came::Beside) {
            let (blocks, view) = (most.div_ceil(8 * 8).clamp(1, SCORERS) + 1, self.view());
            let sent = Sent {
                packed: choice.packed(),
                weights: choice.weights(),
                scores: choice.words.ptr() + 4 * SCORES_AT as u64,
                number: choice.number(),
                heads: choice.heads(),
                left: choice.left(),
                blocks: choice.rows_blocks,
                most: most as u32,
                factor,
            };
            return self.launch(
                kernel!("index_choose"),
                Grid::new(blocks as u32, 256),
                &[Arg::of(&args), Arg::of(&sent), picks.into(), Arg::of(&view)],
            );
        }
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
                    u32::from(came == Came::Late).into(),
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
