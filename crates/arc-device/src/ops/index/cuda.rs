//! The indexer on the GPU: scores of all visible rows, then the best of them.

use crate::MemoryClass;
use crate::cuda::{Arg, Cuda, CudaBuf, Grid, kernel};
use crate::error::Result;
use crate::ops::compress::Compressor;
use crate::ops::index::{IndexConfig, MAX_INDEX_DIM};
use crate::ops::latent::RowFormat;
use crate::ops::latent::cuda::BESIDE_BLOCKS;
use crate::ops::quant::INDEX_DIM;
use crate::ops_v4::{LatentLayer, LatentState, LatentWork};
use crate::step::BLOCK_TOKENS;

/// Most scores that a block of `index_pick` keeps in shared memory.
const KEPT: usize = 48 << 10;
/// Heads of the scores by int8 `mma`.
const STRAIGHT_HEADS: usize = 64;
/// Most keys that `index_choose` chooses among, and keys of a block of it: `kFew` of choose.cuh and `kChooserKeys` of latent.cuh. Of
/// more, `index_choose_many` chooses where it can.
const FEW: usize = 2048;
const CHOOSER_KEYS: usize = 32;
/// What `index_choose_many` has: blocks that score and scores that each of them keeps, at most; scores of warps that such a
/// block tells the others; and the most rows that it may choose.
const MANY_SCORERS: usize = 128;
const MANY_KEPT: usize = 2072;
const MANY_BESTS: usize = 16;
const MANY_TOP: usize = 1024;
/// Keys that are scored together, and a block's: its warps have one each at least. The kernel looks at fewer entries of a list
/// (`kLook`) without asking whether they are there.
const TILE: usize = 8;
const LEAST_KEPT: usize = 8 * TILE;
/// Words of a choice: its number, how many blocks of the row's own kernel have left what they have to; with numbers, heads as they
/// are sent, eight words for 32 values, their weights, then scores; the number for the attention, and behind it which keys of every
/// block of `index_choose` are chosen.
const PACKED_AT: usize = 4;
const WEIGHTS_AT: usize = PACKED_AT + MAX_INDEX_DIM * INDEX_DIM / 4;
const SCORES_AT: usize = WEIGHTS_AT + 2 * MAX_INDEX_DIM;
const CHOSEN_AT: usize = SCORES_AT + 2 * FEW;
const WORDS: usize = CHOSEN_AT + 4 * (1 + FEW / CHOOSER_KEYS);
const _: () = assert!(CHOSEN_AT.is_multiple_of(4));

/// How the index query of a step came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Came {
    /// It is there when the row's own kernel has let its successor start.
    Early,
    /// It is there when that kernel has ended.
    Late,
    /// Its heads are sent, packed, while that kernel and its successor run.
    Beside,
}

/// What one row's choice beside a product needs.
pub(crate) struct Choice {
    words: CudaBuf<u32>,
    /// What blocks of `index_choose_many` tell one another, and the lists that they make; their words.
    many: CudaBuf<u32>,
    /// Multiprocessors.
    processors: usize,
    /// How the last index query came.
    pub came: Came,
    /// Blocks of the last row's own kernel.
    pub rows_blocks: u32,
    /// Whether its attention takes the choice as it is sent, where it has tiles.
    pub in_tiles: bool,
}

impl Choice {
    /// For the longest context.
    pub(crate) fn new(dev: &mut Cuda) -> Result<Choice> {
        let words = dev.take("one row's choice", MemoryClass::Workspace, WORDS)?;
        // Keys are of at least four tokens there.
        let most = dev.limits.context / 4;
        let bests = 2 * MANY_SCORERS * MANY_BESTS;
        // Blocks have whole tiles.
        let lists = 4 * (most + MANY_SCORERS * LEAST_KEPT);
        let words_many = bests + if most > FEW { lists } else { 0 };
        let many = dev.take("a choice among many", MemoryClass::Workspace, words_many)?;
        let processors = dev.multiprocessors() as usize;
        Ok(Choice { words, many, processors, came: Came::Early, rows_blocks: 0, in_tiles: false })
    }

    /// Blocks of `index_choose_many` that score, and entries of a list of each, for at most so many keys: those of the row's own
    /// kernel leave no room beside them. `None` where another kernel has to choose.
    fn many(&self, layer: &LatentLayer<'_, Cuda>, most: usize) -> Option<(usize, usize)> {
        let (index, keys) = layer.index?;
        let scorers = self.processors.checked_sub(BESIDE_BLOCKS as usize + 1)?.min(MANY_SCORERS);
        let kept = (TILE * most.div_ceil(TILE).div_ceil(scorers.max(1))).max(LEAST_KEPT);
        let room = (self.many.len() - 2 * MANY_SCORERS * MANY_BESTS) / 4;
        let fits = keys.ratio == BLOCK_TOKENS / TILE && index.top <= MANY_TOP && kept <= MANY_KEPT;
        (most > FEW && scorers > 0 && fits && scorers * kept <= room).then_some((scorers, kept))
    }

    /// Whether one row's choice among the keys of a context of `tokens` can run beside a product.
    pub(crate) fn fits(&self, layer: &LatentLayer<'_, Cuda>, tokens: usize) -> bool {
        let most = layer.index.map_or(usize::MAX, |(_, keys)| tokens / keys.ratio);
        straight(layer) && (self.are_few(most) || self.many(layer, most).is_some())
    }

    /// Whether `index_choose` can choose among so many keys: its blocks wait for one another, and a multiprocessor has room for one.
    fn are_few(&self, most: usize) -> bool {
        most <= FEW && most.div_ceil(CHOOSER_KEYS) < self.processors
    }

    /// Whether `index_choose` can do it, and its keys are those of the rows that are chosen.
    pub(crate) fn few(&self, layer: &LatentLayer<'_, Cuda>, tokens: usize) -> bool {
        let alike = |(_, keys): (IndexConfig, Compressor)| {
            self.are_few(tokens / keys.ratio) && layer.rows.is_some_and(|rows| rows.ratio == keys.ratio)
        };
        straight(layer) && layer.index.is_some_and(alike)
    }

    /// Address of the number of the choice before.
    pub(crate) fn number(&self) -> u64 {
        self.words.ptr()
    }

    /// Address of how many blocks of the row's own kernel have left what they have to.
    pub(crate) fn left(&self) -> u64 {
        self.words.ptr() + 4
    }

    /// Address of the number of the choice for the attention, and of which keys are chosen.
    pub(crate) fn chosen(&self) -> u64 {
        self.words.ptr() + 4 * CHOSEN_AT as u64
    }

    /// Address of the heads' weights, each with the number of the choice.
    pub(crate) fn weights(&self) -> u64 {
        self.words.ptr() + 4 * WEIGHTS_AT as u64
    }

    /// Address of the index query, 128 bytes a head.
    pub(crate) fn packed(&self) -> u64 {
        self.words.ptr() + 4 * PACKED_AT as u64
    }
}

/// `Sent` of choose.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Sent {
    packed: u64,
    weights: u64,
    scores: u64,
    number: u64,
    left: u64,
    chosen: u64,
    blocks: u32,
    most: u32,
    factor: f32,
}
const _: () = assert!(size_of::<Sent>() == 64);

/// `Lists` of choose_many.cu.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Lists {
    bests: u64,
    at: u64,
    stride: u32,
}
const _: () = assert!(size_of::<Lists>() == 24);

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
        self.count_read(layer.scored(cfg, keys));
        let mut args = self.latent_args(ws, state, None, layer, true, rows)?;
        args.tiles = self.tiles(layer, true, rows);
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
            let (blocks, view) = (most.div_ceil(CHOOSER_KEYS) + 1, self.view());
            let sent = Sent {
                packed: choice.packed(),
                weights: choice.weights(),
                scores: choice.words.ptr() + 4 * SCORES_AT as u64,
                number: choice.number(),
                left: choice.left(),
                chosen: choice.chosen(),
                blocks: choice.rows_blocks,
                most: most as u32,
                factor,
            };
            if let Some((scorers, stride)) = choice.many(layer, most) {
                let bests = choice.many.ptr();
                let at = bests + 8 * (MANY_SCORERS * MANY_BESTS) as u64;
                let lists = Lists { bests, at, stride: stride as u32 };
                let grid = Grid::new(scorers as u32 + 1, 256);
                let args = [Arg::of(&args), Arg::of(&sent), Arg::of(&lists), picks.into(), Arg::of(&view)];
                return self.launch(kernel!("index_choose_many"), grid, &args);
            }
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
