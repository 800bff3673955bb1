//! DeepSeek-V4's attention on the GPU: what stands between the products.
//!
//! `attn_latent` leaves its result twice: as the contract has it, and with the rotation undone, which is what the first
//! output projection reads, where its inputs stand. So the inverse rotation costs no launch.

use crate::cuda::{Arg, Cuda, CudaBuf, Grid, args, kernel};
use crate::error::{DeviceError, Result};
use crate::ops::compress::Compressor;
use crate::ops::hc;
use crate::ops::index::MAX_INDEX_DIM;
use crate::ops::index::cuda::{Came, Choice};
use crate::ops::latent::{LatentConfig, MAX_DIM, ROPE_DIM, RowFormat};
use crate::ops::matmul::cuda::{Codes, CudaMatrix, Due, Out, Query, Reads, Source, Then, makes_inputs};
use crate::ops::quant::{INDEX_DIM, Inputs};
use crate::ops_v4::{CompressorWeights, IndexWeights, LatentLayer, LatentState, LatentWeights, LatentWork, PoolState};
use crate::{MemoryClass, ModelShape, Norm};

/// Rows of a split: the kernel's `kRows`.
const SPLIT_ROWS: usize = 80;
/// Threads of a block of `latent_rows`, and blocks that unpack the list, or all that is chosen among.
const ROWS_THREADS: u32 = 256;
const UNPACKERS: u32 = 32;
const MORE_UNPACKERS: u32 = 60;
/// Blocks of `latent_merge` for a group of heads, and their threads.
const MERGERS: u32 = 16;
const MERGE_THREADS: u32 = 128;
/// Rows that there is room for as tiles, those of a context of a million tokens: the kernels' `kTileRows`.
const TILE_ROWS: usize = 8448;
/// Blocks of a row in `latent_rows` in any case, and at most where the index query comes beside it and nothing is unpacked: one more
/// for what a site has put off.
const ROWS_BLOCKS: u32 = 3;
pub(crate) const BESIDE_BLOCKS: u32 = ROWS_BLOCKS + 1;
/// Most blocks of a cluster, and those of one whose blocks take several splits: the kernels' `kMostBlocks` and `kLongBlocks`.
const MOST_CLUSTER: usize = 8;
const LONG_CLUSTER: u32 = 16;
/// Threads of the attention; one more warp brings tiles.
const ATTEND_THREADS: u32 = 512;
const TILES_THREADS: u32 = ATTEND_THREADS + 32;
/// Heads of a block: the kernel's `kHeads`.
const BLOCK_HEADS: usize = 16;
/// Rows of a step up to which every run of a sequence is short: its tokens enter their rings before the attention.
const SHORT_RUN: usize = 9;

/// Deliberately wrong variants, for conformance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mutant {
    /// None.
    #[default]
    None,
    /// Splits follow the step's row count.
    SplitsFollowRows,
    /// Of equal scores the later rows are chosen.
    LaterTies,
    /// The rotation is not undone.
    StillRotated,
    /// Gates go without their position's bias.
    NoBias,
    /// A row too few of the window is read.
    Narrow,
    /// The last group of the second output projection has no block, where both are one launch.
    GroupLeft,
}

/// `PoolArgs` of compress.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct PoolArgs {
    ring: u64,
    rows: u64,
    bias: u64,
    norm: u64,
    ratio: u32,
    overlap: u32,
    dim: u32,
    at: u32,
    ring_len: u32,
    row_bytes: u32,
}
const _: () = assert!(size_of::<PoolArgs>() == 56);

/// `LatentArgs` of latent.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct LatentArgs {
    q: u64,
    kv: u64,
    index_q: u64,
    low: u64,
    pool: u64,
    window: u64,
    rope: u64,
    kv_norm: u64,
    sinks: u64,
    picks: u64,
    out: u64,
    turned: u64,
    codes: [u64; 3],
    parts: u64,
    rows: PoolArgs,
    keys: PoolArgs,
    heads: u32,
    dim: u32,
    q_rank: u32,
    ring: u32,
    window_len: u32,
    index_heads: u32,
    index_dim: u32,
    pool_dim: u32,
    row_format: u32,
    key_format: u32,
    row_bytes: u32,
    top: u32,
    n_rows: u32,
    most_splits: u32,
    mutant: u32,
    eps: f32,
    scale: f32,
    apart: u32,
    sent: u64,
    sent_q: u64,
    counts: u64,
    /// Where the list of one row stands for the attention; 0: nowhere.
    pub tiles: u64,
    left: u64,
    chosen: u64,
    sent_codes: u64,
    due: u32,
}
const _: () = assert!(size_of::<LatentArgs>() == 376);

/// Memory of latent attention.
#[derive(Default)]
pub(crate) struct Workspace {
    /// What the attention of one row may read, as it reads it: BF16 rows of `dim + 8` numbers.
    tiles: Option<CudaBuf<u16>>,
    /// What the product before the last `latent_rows` sends.
    due: Option<Due>,
    /// `[heads * dim / 32]` blocks of int8 as the attention of one row sends them, three words of 16 bytes each.
    sent_codes: Option<CudaBuf<u32>>,
    /// Where the last attention has sent them, and the address of their number.
    heads: Option<(u64, u64)>,
    /// Blocks of the last attention, each of which has a multiprocessor until what comes next can begin.
    attending: u32,
    /// Clusters of `latent_attend_long` that there can be at once.
    long_clusters: u32,
    /// What one row's choice among keys needs.
    pub choice: Option<Choice>,
    /// Which wrong variant runs.
    pub mutant: Mutant,
}

impl Workspace {
    /// For a model that gathers heads; none for others.
    pub(crate) fn new(dev: &mut Cuda, shape: &ModelShape) -> Result<Workspace> {
        if shape.gathered == 0 {
            return Ok(Workspace::default());
        }
        let tiles = dev.take("unpacked rows", MemoryClass::Workspace, TILE_ROWS * (MAX_DIM + 8))?;
        let choice = Choice::new(dev)?;
        let sent_codes = dev.take("heads as sent", MemoryClass::Workspace, 12 * shape.gathered.div_ceil(32))?;
        // A device that has no such clusters says so by an error.
        let long_clusters = dev.resident_clusters(kernel!("latent_attend_long"), long_grid(1)).unwrap_or(0);
        let (tiles, sent_codes, choice) = (Some(tiles), Some(sent_codes), Some(choice));
        Ok(Workspace { tiles, sent_codes, choice, long_clusters, ..Workspace::default() })
    }
}

/// The number that latent.cuh has for a format.
fn format_code(format: RowFormat) -> u32 {
    match format {
        RowFormat::F32 => 0,
        RowFormat::RoundedFp8 => 1,
        RowFormat::Fp8 => 2,
        RowFormat::RoundedFp4 => 3,
        RowFormat::Fp4 => 4,
    }
}

/// One compressor; `weights` are read by `latent_rows` only.
fn pool_args(
    shape: Compressor,
    state: &PoolState<Cuda>,
    weights: Option<&CompressorWeights<Cuda>>,
    at: usize,
    format: RowFormat,
) -> PoolArgs {
    PoolArgs {
        ring: state.ring.ptr(),
        rows: state.rows.ptr(),
        bias: weights.map_or(0, |weights| weights.bias.ptr()),
        norm: weights.map_or(0, |weights| weights.norm.ptr()),
        ratio: shape.ratio as u32,
        overlap: shape.overlap as u32,
        dim: shape.dim as u32,
        at: at as u32,
        ring_len: shape.ring() as u32,
        row_bytes: format.row_bytes(shape.dim) as u32,
    }
}

fn unsupported(what: String) -> DeviceError {
    DeviceError::Unsupported { device: "cuda", what }
}

/// What the kernels take for granted of a layer.
fn check(layer: &LatentLayer<'_, Cuda>) -> Result<()> {
    let LatentConfig { dim, .. } = layer.attention;
    if !dim.is_multiple_of(16) || !(ROPE_DIM..=MAX_DIM).contains(&dim) {
        return Err(unsupported(format!("latent attention over rows of {dim} values")));
    }
    let fp8 = matches!(layer.row_format, RowFormat::Fp8 | RowFormat::RoundedFp8);
    if fp8 && !(dim - ROPE_DIM).is_multiple_of(64) {
        return Err(unsupported(format!("rows of {dim} values as FP8")));
    }
    let fp4 = matches!(layer.key_format, RowFormat::Fp4 | RowFormat::RoundedFp4);
    match layer.index {
        Some((index, _)) if fp4 && index.dim != INDEX_DIM => {
            Err(unsupported(format!("index rows of {} values as FP4", index.dim)))
        }
        // Rows of the workspace are read four values at a time.
        Some((index, keys)) if index.heads % 4 != 0 || keys.dim % 4 != 0 => {
            Err(unsupported(format!("an indexer of {} heads", index.heads)))
        }
        _ => Ok(()),
    }
}

impl Cuda {
    /// Whether the kernels run as one of the wrong variants. For conformance.
    pub fn set_mutant(&mut self, mutant: Mutant) {
        self.latent.mutant = mutant;
    }

    /// Longest context of the step.
    pub(crate) fn tokens(&self) -> usize {
        self.limits.context.min(self.ctx.limit() as usize)
    }

    /// What all kernels of a layer are told. `select`: whether an indexer runs in this step.
    pub(crate) fn latent_args(
        &self,
        ws: &LatentWork<Cuda>,
        state: &LatentState<Cuda>,
        w: Option<&LatentWeights<Cuda>>,
        layer: &LatentLayer<'_, Cuda>,
        select: bool,
        rows: usize,
    ) -> Result<LatentArgs> {
        check(layer)?;
        let att = layer.attention;
        let pool = w.and_then(|w| w.pool.as_ref());
        let index = layer.index.filter(|_| select).map(|(index, _)| index);
        let mut rows_pool = layer.rows.zip(state.rows.as_ref()).map_or(PoolArgs::default(), |(shape, state)| {
            pool_args(shape, state, pool.map(|pool| &pool.rows), 0, layer.row_format)
        });
        let keys_pool = layer.index.zip(state.keys.as_ref()).map_or(PoolArgs::default(), |((_, shape), state)| {
            let weights = pool.and_then(|pool| pool.index.as_ref()).map(|index| &index.keys);
            pool_args(shape, state, weights, layer.keys_at(), layer.key_format)
        });
        if self.latent.mutant == Mutant::NoBias {
            rows_pool.bias = 0;
        }
        Ok(LatentArgs {
            q: ws.q.ptr(),
            kv: ws.kv.ptr(),
            index_q: ws.index_q.ptr(),
            low: ws.low.ptr(),
            pool: ws.pool.ptr(),
            window: state.window.ptr(),
            rope: layer.rope_table.ptr(),
            kv_norm: w.map_or(0, |w| w.kv_norm.ptr()),
            sinks: w.map_or(0, |w| w.sinks.ptr()),
            picks: ws.picks.ptr(),
            out: ws.out.ptr(),
            turned: self.matmul.floats(rows * att.q_dim()),
            codes: [0; 3],
            parts: self.kv.parts.as_ref().map_or(0, CudaBuf::ptr),
            rows: rows_pool,
            keys: keys_pool,
            heads: att.heads as u32,
            dim: att.dim as u32,
            q_rank: layer.q_rank as u32,
            ring: att.ring() as u32,
            window_len: att.window as u32 - u32::from(self.latent.mutant == Mutant::Narrow),
            index_heads: index.map_or(0, |index| index.heads as u32),
            index_dim: index.map_or(0, |index| index.dim as u32),
            pool_dim: layer.pool_dim() as u32,
            row_format: format_code(layer.row_format),
            key_format: format_code(layer.key_format),
            row_bytes: layer.row_format.row_bytes(att.dim) as u32,
            top: index.map_or(0, |index| index.top as u32),
            n_rows: rows as u32,
            most_splits: 0,
            mutant: self.latent.mutant as u32,
            eps: att.eps,
            scale: att.scale,
            apart: 0,
            sent: 0,
            sent_q: 0,
            counts: 0,
            tiles: 0,
            left: 0,
            chosen: 0,
            sent_codes: 0,
            due: 0,
        })
    }

    /// Makes inputs that two matrices read, of rows rounded for either.
    fn prepare_both(&mut self, a: &CudaMatrix, b: &CudaMatrix, from: Source, rows: usize) -> Result<()> {
        let (a, b) = (a.reads(), b.reads());
        self.prepare(Reads { codes: a.codes || b.codes, floats: a.floats || b.floats }, from, rows)
    }

    /// The stage `attn_in`.
    pub(crate) fn latent_in(
        &mut self,
        ws: &mut LatentWork<Cuda>,
        h: &CudaBuf<f32>,
        w: &LatentWeights<Cuda>,
        layer: &LatentLayer<'_, Cuda>,
        rows: usize,
    ) -> Result<()> {
        let source = Source::of(h, w.low.cols);
        let low = (&w.low, source.rounded(layer.inputs), stored(&ws.low, &w.low));
        let Some(pool) = &w.pool else { return self.hold(|dev| dev.product_of(low.0, low.1, low.2, rows)) };
        // Compressors and index weights read what is not rounded.
        let pool = (&pool.matrix, source, stored(&ws.pool, &pool.matrix));
        self.hold(|dev| dev.product_both(low, pool, rows))
    }

    /// The stage `attn_q_kv`.
    pub(crate) fn latent_q_kv(
        &mut self,
        ws: &mut LatentWork<Cuda>,
        state: &mut LatentState<Cuda>,
        w: &LatentWeights<Cuda>,
        layer: &LatentLayer<'_, Cuda>,
        select: bool,
        rows: usize,
    ) -> Result<()> {
        let att = layer.attention;
        let norm = Norm { weight: &w.q_norm, eps: att.eps };
        let source = Source { stride: layer.q_rank + att.dim, ..Source::of(&ws.low, layer.q_rank) }.normed(norm);
        let index = w.pool.as_ref().and_then(|pool| pool.index.as_ref()).filter(|_| select && layer.index.is_some());
        let query = index.and_then(|index| self.query(ws, index, layer));
        let plain = rows == 1 && index.is_none() == query.is_none() && rounding(layer.inputs, &w.q_b) == Inputs::F32;
        let pool = w.pool.as_ref().map(|pool| &pool.matrix);
        let norm = Norm { weight: &w.q_norm, eps: att.eps };
        let came = match query {
            None => Came::Early,
            Some(query) => {
                if query.weights.is_some() {
                    Came::Beside
                } else {
                    Came::Late
                }
            }
        };
        // Whatever may fail does so here: what is sent is waited for by number, so its takers have to come.
        let args = self.latent_args(ws, state, Some(w), layer, select, rows)?;
        let pending = hc::cuda::take_pending(self);
        let (mixing, iterations, eps) = pending.map_or((0, 0, 0.0), |p| (p.mixing, p.iterations, p.eps));
        assert!(pending.is_none_or(|pending| pending.rows == rows as u32), "a site and rows of another step");
        let followed = plain && self.follow_normed((&w.low, pool), &ws.low, norm, &w.q_b, &ws.q, query)?;
        let came = if followed { came } else { Came::Early };
        // The last product is that of the queries: `latent_rows` runs beside it.
        let q = stored(&ws.q, &w.q_b);
        let alike = |index: &&IndexWeights<Cuda>| rounding(layer.inputs, &index.q_b) == rounding(layer.inputs, &w.q_b);
        if followed {
            // All queries came with `attn_in`.
        } else if let Some(index) = index.filter(|index| alike(index) && !makes_inputs(rows)) {
            self.prepare_both(&w.q_b, &index.q_b, source.rounded(rounding(layer.inputs, &w.q_b)), rows)?;
            self.product(&index.q_b, stored(&ws.index_q, &index.q_b), rows)?;
            self.late(|dev| dev.product(&w.q_b, q, rows))?;
        } else {
            if let Some(index) = index {
                let out = stored(&ws.index_q, &index.q_b);
                self.product_of(&index.q_b, source.rounded(layer.inputs), out, rows)?;
            }
            self.late(|dev| dev.product_of(&w.q_b, source.rounded(layer.inputs), q, rows))?;
        }
        self.latent.due = self.matmul.due.take();
        let (due, counts, sent) = self.latent.due.map_or((0, 0, 0), |due| (due.blocks, due.counts, due.first));
        let tokens = self.tokens();
        if let Some(choice) = &mut self.latent.choice {
            choice.in_tiles = came == Came::Beside && usual(&att) && choice.few(layer, tokens);
        }
        let tiles = self.tiles(layer, select, rows);
        let left = self.latent.choice.as_ref().filter(|_| came == Came::Beside).map_or(0, Choice::left);
        let args = LatentArgs { due, counts, sent, tiles, left, ..args };
        let view = self.view();
        // The product before has turned the index query if it has made it.
        let heads = if followed { 0 } else { args.index_heads.div_ceil(ROWS_THREADS / 32) };
        let more = match tiles {
            0 => heads,
            _ if left != 0 => MORE_UNPACKERS,
            // Four rows a warp.
            _ => (listed(layer, tokens) as u32 / (4 * ROWS_THREADS / 32)).clamp(UNPACKERS, MORE_UNPACKERS),
        };
        let blocks = ROWS_BLOCKS + more + u32::from(pending.is_some());
        assert!(left == 0 || tiles != 0 || blocks <= BESIDE_BLOCKS, "{blocks} blocks beside a choice");
        if let Some(choice) = &mut self.latent.choice {
            (choice.came, choice.rows_blocks) = (came, blocks);
        }
        let grid = Grid::xy(blocks, rows as u32, ROWS_THREADS);
        let args = args![Arg::of(&args), Arg::of(&view), mixing, iterations, eps];
        self.launch(kernel!("latent_rows"), grid, args)
    }

    /// The index query of a layer, where it may come with the queries of the attention.
    fn query<'a>(
        &self,
        ws: &LatentWork<Cuda>,
        index: &'a IndexWeights<Cuda>,
        layer: &LatentLayer<'_, Cuda>,
    ) -> Option<Query<'a>> {
        let (cfg, _) = layer.index?;
        let stored = layer.key_format == RowFormat::Fp4 && cfg.heads <= MAX_INDEX_DIM && cfg.dim == INDEX_DIM;
        let choice =
            self.latent.choice.as_ref().filter(|_| stored && rounding(layer.inputs, &index.q_b) == Inputs::F32)?;
        let weights = choice.fits(layer, self.tokens()).then(|| (choice.weights(), choice.number()));
        let rope = layer.rope_table.ptr();
        Some(Query { w: &index.q_b, out: ws.index_q.ptr(), packed: choice.packed(), rope, weights })
    }

    /// Splits of a query's list, at most, and the blocks that share them.
    fn splits(&self, layer: &LatentLayer<'_, Cuda>, select: bool, rows: usize) -> (usize, Blocks) {
        let att = layer.attention;
        let most = most_splits(layer, select, self.tokens());
        // The variant has more of them: as few as 16 rows a split.
        let most = if self.latent.mutant == Mutant::SplitsFollowRows { 5 * most } else { most };
        let room = self.kv.parts.as_ref().map_or(0, CudaBuf::len);
        let blocks = match blocks(rows * att.heads.div_ceil(BLOCK_HEADS), most, self.multiprocessors() as usize) {
            Blocks::Apart(_) if rows * att.heads * most * (att.dim + 2) > room => Blocks::Cluster(1),
            blocks => blocks,
        };
        (most, blocks)
    }

    /// Where all rows stand that the attention of one row may read, 0 where each of its blocks finds rows by itself: they are the
    /// same for all heads, and known before the queries.
    pub(crate) fn tiles(&self, layer: &LatentLayer<'_, Cuda>, select: bool, rows: usize) -> u64 {
        let chooses = select && layer.index.is_some();
        let reads = match self.splits(layer, select, rows).1 {
            Blocks::Cluster(1) => false,
            Blocks::Cluster(_) => !chooses || self.latent.choice.as_ref().is_some_and(|choice| choice.in_tiles),
            Blocks::Apart(_) => {
                let groups = layer.attention.heads.div_ceil(BLOCK_HEADS) as u32;
                !chooses && usual(&layer.attention) && groups <= self.latent.long_clusters
            }
        };
        let fits = listed(layer, self.tokens()) + SPLIT_ROWS <= TILE_ROWS;
        match &self.latent.tiles {
            Some(tiles) if rows == 1 && layer.row_format == RowFormat::Fp8 && reads && fits => tiles.ptr(),
            _ => 0,
        }
    }

    /// The stage `attn_latent`.
    pub(crate) fn latent_attend(
        &mut self,
        ws: &mut LatentWork<Cuda>,
        state: &mut LatentState<Cuda>,
        w: &LatentWeights<Cuda>,
        layer: &LatentLayer<'_, Cuda>,
        select: bool,
        rows: usize,
    ) -> Result<()> {
        let att = layer.attention;
        layer.attended(select).for_each(|read| self.count_read(read));
        let (most_splits, blocks) = self.splits(layer, select, rows);
        let groups = att.heads.div_ceil(BLOCK_HEADS);
        let (counts, sent_q) = self.latent.due.take().map_or((0, 0), |due| (due.counts, due.second));
        let tiles = self.tiles(layer, select, rows);
        let args = self.latent_args(ws, state, Some(w), layer, select, rows)?;
        let in_tiles = self.latent.choice.as_ref().filter(|choice| tiles != 0 && choice.in_tiles);
        let chosen = in_tiles.map_or(0, Choice::chosen);
        let mut args = LatentArgs { most_splits: most_splits as u32, counts, sent_q, tiles, chosen, ..args };
        // The first output projection's inputs are made on the way, if they are int8 of plain values.
        let codes = att.dim.is_multiple_of(32)
            && w.out_a.reads() == Reads { codes: true, floats: false }
            && rounding(out_a_inputs(layer), &w.out_a) == Inputs::F32;
        let Codes { q, d, sums } = self.matmul.leave_parts(args.turned, w.out_a.cols, rows, att.groups, codes);
        if q != 0 {
            (args.codes, args.turned) = ([q, d, sums], 0);
        }
        let view = self.view();
        let sends = sent_q != 0 && usual(&att) && layer.row_format == RowFormat::Fp8;
        let usual = tiles != 0 && sends;
        let (n, apart) = match blocks {
            Blocks::Cluster(n) => (n as u32, false),
            Blocks::Apart(_) if usual => (LONG_CLUSTER, false),
            Blocks::Apart(n) => (n as u32, true),
        };
        args.apart = apart.into();
        let clusters = n > 1 && !apart;
        self.latent.heads = None;
        if let Some(sent) = self.latent.sent_codes.as_ref().filter(|_| clusters && sends && q != 0) {
            args.sent_codes = sent.ptr();
            self.latent.heads = Some((sent.ptr(), counts + 12));
        }
        let attend = match layer.row_format {
            RowFormat::Fp8 if usual && n == LONG_CLUSTER => kernel!("latent_attend_long"),
            RowFormat::Fp8 if usual => kernel!("latent_attend_tiles"),
            RowFormat::Fp8 if att.dim == MAX_DIM => kernel!("latent_attend_512"),
            RowFormat::Fp8 => kernel!("latent_attend_packed"),
            _ => kernel!("latent_attend_f32"),
        };
        // Beside those that merge there is room.
        self.latent.attending = if apart { 0 } else { n * (groups * rows) as u32 };
        let grid = Grid {
            blocks: [n, groups as u32, rows as u32],
            threads: if usual { TILES_THREADS } else { ATTEND_THREADS },
            shared: attend_bytes(att.dim),
            cluster: if clusters { n } else { 0 },
        };
        self.launch(attend, grid, &[Arg::of(&args), Arg::of(&view)])?;
        if apart {
            let blocks = [MERGERS, groups as u32, rows as u32];
            let grid = Grid { blocks, threads: MERGE_THREADS, shared: 0, cluster: 0 };
            self.launch(kernel!("latent_merge"), grid, &[Arg::of(&args), Arg::of(&view)])?;
        }
        if rows > SHORT_RUN {
            self.launch(kernel!("latent_rings"), Grid::xy(3, rows as u32, 128), &[Arg::of(&args), Arg::of(&view)])?;
        }
        Ok(())
    }

    /// The stage `attn_out_a`: of what the last `attn_latent` left.
    pub(crate) fn latent_out_a(
        &mut self,
        ws: &mut LatentWork<Cuda>,
        w: &LatentWeights<Cuda>,
        layer: &LatentLayer<'_, Cuda>,
        rows: usize,
    ) -> Result<()> {
        let (att, cols) = (layer.attention, w.out_a.cols);
        let turned = self.matmul.floats(rows * att.q_dim());
        let source = Source { x: turned, ..Source::of(&ws.out, cols) }.rounded(out_a_inputs(layer));
        let out = Out { at: ws.grouped.ptr(), stride: att.groups * att.group_out, then: Then::Store };
        let leave = rounding(layer.inputs, &w.out_b) == Inputs::F32 && !w.out_b.reads().floats;
        self.hold(|dev| dev.product_parts(&w.out_a, source, out, rows, leave))
    }

    /// The stage `attn_out_b`.
    pub(crate) fn latent_out_b(
        &mut self,
        out: &CudaBuf<f32>,
        ws: &LatentWork<Cuda>,
        w: &LatentWeights<Cuda>,
        layer: &LatentLayer<'_, Cuda>,
        rows: usize,
    ) -> Result<()> {
        let plain = rows == 1 && rounding(layer.inputs, &w.out_b) == Inputs::F32;
        let heads = self.latent.heads.take();
        if plain && self.follow(&w.out_a, &ws.grouped, &w.out_b, out, heads, self.latent.attending)? {
            return Ok(());
        }
        let source = Source::of(&ws.grouped, w.out_b.cols).rounded(layer.inputs);
        self.product_of(&w.out_b, source, stored(out, &w.out_b), rows)
    }
}

/// Rows of outputs side by side.
fn stored(out: &CudaBuf<f32>, w: &CudaMatrix) -> Out {
    Out { at: out.ptr(), stride: w.rows, then: Then::Store }
}

/// How the inputs of `out_a` are rounded: the released kernels do not round what it reads.
fn out_a_inputs(layer: &LatentLayer<'_, Cuda>) -> Inputs {
    if layer.inputs == Inputs::Fp8 { Inputs::F32 } else { layer.inputs }
}

/// How a matrix's inputs are rounded before they are made: integer-coded weights have a rounding of their own.
fn rounding(inputs: Inputs, w: &CudaMatrix) -> Inputs {
    match inputs {
        Inputs::Int8 if !w.is_fp8() => Inputs::F32,
        inputs => inputs,
    }
}

/// Whether `latent_attend_tiles` can have these heads.
fn usual(attention: &LatentConfig) -> bool {
    attention.dim == MAX_DIM && attention.heads.is_multiple_of(BLOCK_HEADS)
}

/// Rows that a query may read, at most, where none are chosen.
fn listed(layer: &LatentLayer<'_, Cuda>, tokens: usize) -> usize {
    layer.attention.window + layer.rows.map_or(0, |rows| tokens / rows.ratio)
}

/// Splits of the longest list that a query can have.
fn most_splits(layer: &LatentLayer<'_, Cuda>, select: bool, tokens: usize) -> usize {
    let visible = layer.rows.map_or(0, |rows| tokens / rows.ratio);
    let top = layer.index.filter(|_| select).map_or(usize::MAX, |(index, _)| index.top);
    (layer.attention.window.min(tokens) + visible.min(top)).div_ceil(SPLIT_ROWS).max(1)
}

/// Blocks that share the splits of a row's heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocks {
    /// Of a cluster, at most a split each; or one for all splits.
    Cluster(usize),
    /// So many, whose splits another kernel merges; or a larger cluster in rounds, where one row comes in tiles.
    Apart(usize),
}

/// How `tasks` of 16 heads of a row are shared out.
fn blocks(tasks: usize, most_splits: usize, processors: usize) -> Blocks {
    let cluster = most_splits.next_power_of_two();
    match (processors / tasks).min(most_splits) {
        // A cluster needs multiprocessors side by side, so not all of them can be counted on.
        _ if cluster <= MOST_CLUSTER && tasks * cluster <= processors * 7 / 8 => Blocks::Cluster(cluster),
        // So few would gain less than it costs to merge.
        0..=2 => Blocks::Cluster(1),
        // As many as it takes, where the busiest have no more splits.
        n => Blocks::Apart(most_splits.div_ceil(most_splits.div_ceil(n))),
    }
}

/// `latent_attend_long` of so many groups of heads.
fn long_grid(groups: u32) -> Grid {
    Grid::xy(LONG_CLUSTER, groups, TILES_THREADS).shared(attend_bytes(MAX_DIM)).cluster(LONG_CLUSTER)
}

/// Dynamic shared memory of `latent_attend`: queries in three terms, rows, partial scores, weights in three terms, what a
/// block of a cluster merges.
fn attend_bytes(dim: usize) -> u32 {
    // Room for three terms in either kernel, and for eight blocks.
    let merged = 4 * 8 * BLOCK_HEADS * (4 * dim.div_ceil(4 * 64) * 8 + 8);
    (2 * (3 * BLOCK_HEADS + SPLIT_ROWS) * (dim + 8) + 4 * 8 * BLOCK_HEADS * 88 + 2 * 3 * BLOCK_HEADS * 88 + merged)
        as u32
}

#[cfg(test)]
mod tests {
    use super::{Blocks, SHORT_RUN, attend_bytes, blocks};
    use crate::ops::compress::Compressor;
    use crate::ops::latent::MAX_DIM;

    #[test]
    fn blocks_fit_and_clusters_have_work() {
        assert!(attend_bytes(MAX_DIM) + 3072 <= 227 << 10);
        assert_eq!(
            [blocks(4, 8, 132), blocks(4, 2, 132), blocks(32, 8, 132), blocks(200, 8, 132)],
            [Blocks::Cluster(8), Blocks::Cluster(2), Blocks::Apart(4), Blocks::Cluster(1)]
        );
        assert_eq!([blocks(12, 8, 132), blocks(16, 8, 132)], [Blocks::Cluster(8), Blocks::Apart(8)]);
        assert_eq!([blocks(1, 1, 132), blocks(4, 104, 132)], [Blocks::Cluster(1), Blocks::Apart(26)]);
    }

    /// Rows of a step that is no longer than a short run all enter their rings early.
    #[test]
    fn short_runs_are_short_for_every_ring() {
        for shape in [Compressor { ratio: 4, overlap: 2, dim: 8 }, Compressor { ratio: 128, overlap: 1, dim: 8 }] {
            assert!(SHORT_RUN <= shape.ring() - shape.overlap * shape.ratio + 1);
        }
    }
}
