//! Rope, append and attention on the GPU: the CPU's operations in the CPU's order, so the same bits.
//!
//! Attention of a row is cut at its fixed splits only where that gives multiprocessors something to do. Who takes a split,
//! and how many rows, heads and blocks there are, changes nothing in a row's result.

use crate::cuda::{Cuda, CudaBuf, Grid, args, kernel};
use crate::error::{DeviceError, Result};
use crate::ops::kv::cpu::{SPLIT_TILES, partial_len};
use crate::ops::kv::{AttentionConfig, MAX_HEAD_DIM, RopeStyle};
use crate::step::{BLOCK_TOKENS, CtxClass};
use crate::{KvLayer, MemoryClass, QkvConfig};

/// Keys of a split.
const SPLIT_KEYS: usize = SPLIT_TILES * BLOCK_TOKENS;
/// f32 values for the parts of cut rows, of this family and of latent attention. Rows that would need more are not cut.
const PARTS: usize = 1 << 24;
/// Blocks that take parts of one another's rows, at most.
const TICKETS: usize = 1 << 12;
/// Rows of a step from which on the runs among them are taken by tiles.
const TILED_ROWS: usize = 32;
/// The kernels' `kTileQueries`.
const TILE_QUERIES: usize = 64;

/// Memory of cut rows.
#[derive(Default)]
pub(crate) struct Workspace {
    /// `[PARTS]`.
    pub parts: Option<CudaBuf<f32>>,
    /// `[TICKETS]`, zero between launches.
    tickets: Option<CudaBuf<u32>>,
}

impl Workspace {
    /// The same for every model.
    pub(crate) fn new(dev: &mut Cuda) -> Result<Workspace> {
        Ok(Workspace {
            parts: Some(dev.take("attention partials", MemoryClass::Workspace, PARTS)?),
            tickets: Some(dev.take("attention partials", MemoryClass::Workspace, TICKETS)?),
        })
    }
}

/// How one launch of `kv_attend` is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cut {
    /// Heads of a block.
    heads: usize,
    /// Blocks of the splits of a row.
    splits: usize,
    /// Whether they are a cluster.
    cluster: bool,
    /// Whether values are brought while keys are looked at.
    spread: bool,
}

/// Values of a head's output that a thread takes.
fn thread_values(head_dim: usize) -> usize {
    if head_dim <= 64 || !head_dim.is_multiple_of(4) { 2 } else { 4 }
}

/// Splits that a row can have.
fn most_splits(cfg: &AttentionConfig, ctx: CtxClass, context: usize) -> usize {
    let keys = context.min(ctx.limit() as usize).max(1);
    let all = keys.div_ceil(SPLIT_KEYS);
    // A window may begin and end inside a split.
    cfg.window.map_or(all, |window| all.min((window as usize).saturating_sub(1) / SPLIT_KEYS + 2))
}

/// For `rows` rows on a device of `processors` multiprocessors.
fn cut(cfg: &AttentionConfig, rows: usize, most_splits: usize, processors: usize) -> Cut {
    let group = cfg.n_heads / cfg.n_kv_heads;
    let fits = |heads: usize| heads * cfg.head_dim <= 256 * thread_values(cfg.head_dim);
    let blocks = |heads: usize| rows * cfg.n_kv_heads * group.div_ceil(heads);
    // Few heads a block end sooner; many read keys and values less often. A cluster needs its blocks' multiprocessors
    // side by side, so not all of them can be counted on.
    let most = (1..=group.min(4)).rev().find(|&heads| fits(heads)).unwrap_or(1);
    let heads = (1..=most).find(|&heads| blocks(heads) * most_splits <= processors * 3 / 4).unwrap_or(most);
    let own = blocks(heads);
    let room = own * heads * most_splits * partial_len(cfg.head_dim) <= PARTS && own <= TICKETS;
    let clusters = most_splits.next_power_of_two();
    let cluster = most_splits <= 8 && own * clusters <= 2 * processors;
    let splits = if most_splits == 1 || own >= processors {
        1
    } else if cluster {
        clusters
    } else if room {
        most_splits.min((4 * processors).div_ceil(own))
    } else {
        1
    };
    let spread = cfg.head_dim <= 192 && own * splits <= processors;
    Cut { heads, splits, cluster: cluster && splits > 1, spread }
}

impl Cuda {
    /// Multiprocessors, as kernels are cut for.
    fn processors(&self) -> usize {
        self.multiprocessors() as usize
    }

    /// The stage `qkv_rope_append`.
    pub(crate) fn kv_append(
        &mut self,
        qkv: &mut CudaBuf<f32>,
        kv: &mut KvLayer<Cuda>,
        cfg: &QkvConfig<'_, Cuda>,
        rows: usize,
    ) -> Result<()> {
        let att = &cfg.attention;
        let heads = att.n_heads + 2 * att.n_kv_heads;
        assert!(att.head_dim <= MAX_HEAD_DIM && qkv.len() >= rows * att.qkv_dim(), "{att:?}, {rows} rows");
        let norm = |norm: Option<crate::Norm<'_, Cuda>>| norm.map_or((0, 0.0), |norm| (norm.weight.ptr(), norm.eps));
        let ((q_norm, q_eps), (k_norm, k_eps)) = (norm(cfg.q_norm), norm(cfg.k_norm));
        let adjacent = u32::from(cfg.rope.style == RopeStyle::Adjacent);
        let view = self.view();
        self.launch(
            kernel!("kv_append"),
            Grid::xy(heads.div_ceil(4) as u32, rows as u32, 128),
            args![
                qkv.ptr(),
                kv.k.ptr(),
                kv.v.ptr(),
                cfg.rope_table.ptr(),
                q_norm,
                k_norm,
                q_eps,
                k_eps,
                att.n_heads as u32,
                att.n_kv_heads as u32,
                att.head_dim as u32,
                cfg.rope.dim as u32,
                adjacent,
                &view
            ],
        )
    }

    /// The stage `attention`.
    pub(crate) fn kv_attend(
        &mut self,
        out: &mut CudaBuf<f32>,
        qkv: &CudaBuf<f32>,
        kv: &KvLayer<Cuda>,
        cfg: &AttentionConfig,
        rows: usize,
    ) -> Result<()> {
        if cfg.head_dim > MAX_HEAD_DIM || !cfg.head_dim.is_multiple_of(2) {
            let what = format!("attention with heads of {} values", cfg.head_dim);
            return Err(DeviceError::Unsupported { device: "cuda", what });
        }
        assert!(out.len() >= rows * cfg.n_heads * cfg.head_dim && qkv.len() >= rows * cfg.qkv_dim(), "{rows} rows");
        self.count_read(cfg.read());
        let most = most_splits(cfg, self.ctx, self.limits.context);
        let cut = cut(cfg, rows, most, self.processors());
        let tiled = rows >= TILED_ROWS;
        let (view, dim) = (self.view(), cfg.head_dim);
        let (heads, kv_heads, window) = (cfg.n_heads as u32, cfg.n_kv_heads as u32, cfg.window.unwrap_or(0));
        let group = cfg.n_heads / cfg.n_kv_heads;
        let workspace = (&self.kv.parts, &self.kv.tickets);
        let (Some(parts), Some(tickets)) = workspace else { panic!("`finish` makes room for parts") };
        let parts = if cut.splits == 1 || cut.cluster { 0 } else { parts.ptr() };
        let tickets = tickets.ptr();
        let attend = match (cut.heads, thread_values(dim)) {
            (1, 2) => kernel!("kv_attend_1x2"),
            (2, 2) => kernel!("kv_attend_2x2"),
            (3, 2) => kernel!("kv_attend_3x2"),
            (4, 2) => kernel!("kv_attend_4x2"),
            (1, _) => kernel!("kv_attend_1x4"),
            (2, _) => kernel!("kv_attend_2x4"),
            (3, _) => kernel!("kv_attend_3x4"),
            _ => kernel!("kv_attend_4x4"),
        };
        // Where tiles take most rows, blocks look at several: most of them find nothing to do.
        let deep = if tiled { rows.min(256) } else { rows };
        let groups = cfg.n_kv_heads * group.div_ceil(cut.heads);
        let grid = Grid {
            blocks: [cut.splits as u32, groups as u32, deep as u32],
            threads: 256,
            shared: attend_bytes(cut, dim),
            cluster: if cut.cluster { cut.splits as u32 } else { 0 },
        };
        self.launch(
            attend,
            grid,
            args![
                out.ptr(),
                qkv.ptr(),
                kv.k.ptr(),
                kv.v.ptr(),
                parts,
                tickets,
                rows as u32,
                heads,
                kv_heads,
                dim as u32,
                cfg.scale,
                window,
                most as u32,
                u32::from(cut.spread),
                u32::from(tiled),
                &view
            ],
        )?;
        if !tiled {
            return Ok(());
        }
        let by_rows = match dim {
            0..=64 => kernel!("kv_attend_rows_64"),
            65..=128 => kernel!("kv_attend_rows_128"),
            _ => kernel!("kv_attend_rows_256"),
        };
        let tile_rows = (TILE_QUERIES / group).max(1);
        let grid = Grid::xy(kv_heads, rows.div_ceil(tile_rows) as u32, 256).shared(rows_bytes(dim));
        self.launch(
            by_rows,
            grid,
            args![
                out.ptr(),
                qkv.ptr(),
                kv.k.ptr(),
                kv.v.ptr(),
                rows as u32,
                heads,
                kv_heads,
                dim as u32,
                cfg.scale,
                window,
                &view
            ],
        )
    }
}

/// Dynamic shared memory of `kv_attend`: queries, weights, a part, keys, values.
fn attend_bytes(cut: Cut, head_dim: usize) -> u32 {
    let split = head_dim * SPLIT_KEYS * 2;
    let queries = head_dim.next_multiple_of(4) + SPLIT_KEYS + partial_len(head_dim).next_multiple_of(4);
    (4 * cut.heads * queries + if cut.spread { 2 * split } else { split }) as u32
}

/// Dynamic shared memory of `kv_attend_rows`: queries, weights of eight warps, keys, values.
fn rows_bytes(head_dim: usize) -> u32 {
    let tile = head_dim * BLOCK_TOKENS * 2;
    let values = if head_dim <= 128 { 4 * tile } else { 0 };
    (4 * (head_dim * (TILE_QUERIES + 4) + 8 * 1152) + 4 * (tile + 64) + values) as u32
}

#[cfg(test)]
mod tests {
    use super::{attend_bytes, cut, most_splits, rows_bytes};
    use crate::ops::kv::{AttentionConfig, MAX_HEAD_DIM};
    use crate::step::CtxClass;

    fn config(n_heads: usize, n_kv_heads: usize, head_dim: usize, window: Option<u32>) -> AttentionConfig {
        AttentionConfig { n_heads, n_kv_heads, head_dim, scale: 1.0, window }
    }

    #[test]
    fn windows_bound_the_splits() {
        let all = config(8, 8, 64, None);
        assert_eq!(most_splits(&all, CtxClass::Short, 100_000), 8);
        assert_eq!(most_splits(&all, CtxClass::Short, 300), 2);
        assert_eq!(most_splits(&all, CtxClass::Long, 100_000), 391);
        for (window, splits) in [(1, 2), (256, 2), (257, 3), (512, 3)] {
            assert_eq!(most_splits(&config(8, 8, 64, Some(window)), CtxClass::Long, 100_000), splits, "{window}");
            // The most that a window touches, wherever it ends.
            let touched = (0..2000u32).map(|pos| pos / 256 - (pos + 1).saturating_sub(window) / 256 + 1).max();
            assert!(touched.is_some_and(|touched| touched as usize <= splits));
        }
    }

    /// Every shape that a model may have fits a block's threads and shared memory, at every row count.
    #[test]
    fn every_shape_fits() {
        let mut fitted = 0;
        for head_dim in (2..=MAX_HEAD_DIM).step_by(2) {
            assert!(rows_bytes(head_dim) <= 227 << 10, "{head_dim}");
            for (heads, kv_heads) in [(1, 1), (9, 3), (32, 8), (64, 1), (7, 1), (40, 8)] {
                for rows in [1, 2, 16, 64, 256, 2048] {
                    for ctx in [CtxClass::Short, CtxClass::Medium, CtxClass::Long] {
                        let cfg = config(heads, kv_heads, head_dim, None);
                        let most = most_splits(&cfg, ctx, 1 << 20);
                        let cut = cut(&cfg, rows, most, 132);
                        // Static shared memory of the kernel: the tables of its merge.
                        assert!(attend_bytes(cut, head_dim) + 12_752 <= 227 << 10, "{cut:?} {head_dim}");
                        assert!(cut.heads <= heads / kv_heads && cut.heads * head_dim <= 1024);
                        assert!(!cut.cluster || cut.splits >= most && cut.splits <= 8);
                        fitted += 1;
                    }
                }
            }
        }
        assert!(fitted > 10_000);
    }
}
