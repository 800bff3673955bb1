//! Hyper-connection sites on the GPU.

use super::{HcConfig, MIXES, STREAMS};
use crate::cuda::{Arg, Cuda, CudaBuf, Grid, args, kernel};
use crate::error::Result;
use crate::math::SUM_CHUNK;
use crate::ops::matmul::cuda::{Out, Sent, Source, Then};
use crate::ops::quant::Inputs;
use crate::ops_v4::{DraftWeights, HcHead, HcSite, Incoming, Streams};
use crate::{MemoryClass, ModelShape, Norm};

/// Blocks of a row's cluster, one a chunk of the streams.
const CLUSTER: usize = 16;
/// Width of a stream that a cluster takes.
const CLUSTER_DIM: usize = CLUSTER / STREAMS * SUM_CHUNK;
/// Rows that clusters take; more go through two kernels that read the mixing matrix once for several rows. Measured.
const CLUSTER_ROWS: usize = 8;
/// Warps beside the one for the statistic.
const WARPS: u32 = 8;

/// Memory that sites need beside their operands.
#[derive(Default)]
pub(crate) struct Workspace {
    /// `[rows, chunks of the streams, MIXES + 1]`: chunk sums of the mixing values, then of the squares.
    partial: Option<CudaBuf<f32>>,
    /// Mixing values that the last site left scaled.
    pending: Option<Pending>,
}

/// Mixing values whose Sinkhorn iterations a site of few rows has put off. They take as long as the rest of the site, and
/// the site after the next block is the first to read them: whatever runs meanwhile and has a warp to spare does them. Behind
/// a site before attention that is `latent_rows`, behind one before experts the gate.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pending {
    /// Address of `[rows, MIXES]`.
    pub mixing: u64,
    /// Rows.
    pub rows: u32,
    /// As in [`HcConfig`].
    pub iterations: u32,
    /// As in [`HcConfig`].
    pub eps: f32,
}

/// Hands what the last site put off to a kernel of the stage that asks.
pub(crate) fn take_pending(dev: &mut Cuda) -> Option<Pending> {
    dev.hc.pending.take()
}

/// Does what the last site put off and nobody took.
pub(crate) fn settle(dev: &mut Cuda) -> Result<()> {
    let Some(Pending { mixing, rows, iterations, eps }) = dev.hc.pending.take() else { return Ok(()) };
    dev.launch(kernel!("arc_hc_settle"), Grid::new(rows, 32), args![mixing, iterations, eps])
}

impl Workspace {
    /// For the largest step. Only models that gather have streams.
    pub(crate) fn new(dev: &mut Cuda, shape: &ModelShape) -> Result<Workspace> {
        let chunks = STREAMS * shape.hidden / SUM_CHUNK;
        if shape.gathered == 0 || chunks == 0 {
            return Ok(Workspace::default());
        }
        let len = dev.limits.rows * chunks * (MIXES + 1);
        let partial = Some(dev.take("chunk sums", MemoryClass::Workspace, len)?);
        Ok(Workspace { partial, ..Workspace::default() })
    }
}

/// How the rows of a step are shared out.
enum Plan {
    /// One kernel, a cluster a row.
    Cluster,
    /// Two kernels, so many rows a block in the first.
    Rows(u32),
    /// One kernel, a block a row.
    Any,
}

impl Plan {
    fn of(cfg: &HcConfig, rows: usize) -> Plan {
        if cfg.dim == CLUSTER_DIM && rows <= CLUSTER_ROWS {
            return Plan::Cluster;
        }
        if !cfg.dim.is_multiple_of(SUM_CHUNK) {
            return Plan::Any;
        }
        // One wave of blocks where that can be: every block reads the mixing matrix of its columns.
        let blocks = rows * (cfg.dim / SUM_CHUNK);
        Plan::Rows([1, 2, 4].into_iter().find(|&per| blocks / per as usize <= 132).unwrap_or(8))
    }
}

/// What [`crate::ops_v4::OpsV4::hc_site`] does.
pub(crate) fn site(
    dev: &mut Cuda,
    h: &mut CudaBuf<f32>,
    streams: &mut Streams<Cuda>,
    incoming: Incoming<'_, Cuda>,
    site: &HcSite<Cuda>,
    cfg: &HcConfig,
    norm: Norm<'_, Cuda>,
    rows: usize,
) -> Result<()> {
    let dim = cfg.dim;
    assert!(h.len() >= rows * dim && streams.x.len() >= rows * STREAMS * dim, "streams of {rows} rows of {dim}");
    assert!(streams.mixing.len() >= rows * MIXES && site.mix.len() == MIXES * STREAMS * dim, "mixing values of a site");
    assert!(site.base.len() == MIXES && site.scale.len() == 3 && norm.weight.len() == dim, "vectors of a site");
    settle(dev)?;
    dev.launch_held()?;
    // Nothing was launched behind it.
    let sent = match incoming {
        Incoming::Output(y) if rows == 1 => dev.matmul.sent.filter(|sent| sent.out == y.ptr()),
        _ => None,
    };
    let (incoming, y) = match incoming {
        Incoming::Embedding(e) => (0u32, e.ptr()),
        Incoming::Output(y) => (1, y.ptr()),
        Incoming::Nothing => (2, streams.x.ptr()),
    };
    let (x, mixing, mix) = (streams.x.ptr(), streams.mixing.ptr(), site.mix.ptr());
    let (base, scale, weight) = (site.base.ptr(), site.scale.ptr(), norm.weight.ptr());
    let (n, width, iterations) = (rows as u32, dim as u32, cfg.iterations as u32);
    dev.matmul.leave(h.ptr(), dim, rows, false, None);
    match Plan::of(cfg, rows) {
        Plan::Cluster => {
            dev.hc.pending = Some(Pending { mixing, rows: n, iterations, eps: cfg.eps });
            let codes = dev.matmul.leave(h.ptr(), dim, rows, true, None);
            if let Some(Sent { pairs, number, .. }) = sent {
                let grid = Grid::new(CLUSTER as u32, 32 * WARPS).cluster(CLUSTER as u32);
                let args: &[Arg<'_>] = args![
                    h.ptr(),
                    codes.q,
                    codes.d,
                    codes.sums,
                    x,
                    mixing,
                    mix,
                    base,
                    scale,
                    weight,
                    cfg.eps,
                    cfg.norm_eps,
                    norm.eps,
                    pairs,
                    number
                ];
                return dev.launch(kernel!("arc_hc_site_sent"), grid, args);
            }
            let grid = Grid::new(n * CLUSTER as u32, 32 * (WARPS + 1)).cluster(CLUSTER as u32);
            let args: &[Arg<'_>] = args![
                h.ptr(),
                codes.q,
                codes.d,
                codes.sums,
                x,
                mixing,
                y,
                mix,
                base,
                scale,
                weight,
                incoming,
                cfg.eps,
                cfg.norm_eps,
                norm.eps
            ];
            dev.launch(kernel!("arc_hc_site_cluster"), grid, args)
        }
        Plan::Rows(per) => {
            let partial = partial(dev, rows * STREAMS * dim / SUM_CHUNK * (MIXES + 1));
            let kernel = match per {
                1 => kernel!("arc_hc_site_mix_1"),
                2 => kernel!("arc_hc_site_mix_2"),
                4 => kernel!("arc_hc_site_mix_4"),
                _ => kernel!("arc_hc_site_mix_8"),
            };
            let shared = per * (4 * STREAMS * SUM_CHUNK) as u32;
            let grid = Grid::xy(width / SUM_CHUNK as u32, n.div_ceil(per), 32 * WARPS).shared(shared);
            dev.launch(kernel, grid, args![partial, x, mixing, y, mix, width, incoming, n])?;
            let grid = Grid::new(n, 32 * (WARPS + 1)).shared(4 * width);
            let args: &[Arg<'_>] = args![
                h.ptr(),
                x,
                mixing,
                partial,
                base,
                scale,
                weight,
                width,
                iterations,
                cfg.eps,
                cfg.norm_eps,
                norm.eps
            ];
            dev.launch(kernel!("arc_hc_site_rows"), grid, args)
        }
        Plan::Any => {
            let grid = Grid::new(n, 32 * WARPS).shared((4 * STREAMS * dim) as u32);
            let args: &[Arg<'_>] = args![
                h.ptr(),
                x,
                mixing,
                y,
                mix,
                base,
                scale,
                weight,
                width,
                incoming,
                iterations,
                cfg.eps,
                cfg.norm_eps,
                norm.eps
            ];
            dev.launch(kernel!("arc_hc_site_any"), grid, args)
        }
    }
}

/// What [`crate::ops_v4::OpsV4::hc_head`] does, for every row.
pub(crate) fn head(
    dev: &mut Cuda,
    out: &mut CudaBuf<f32>,
    streams: &mut Streams<Cuda>,
    y: &CudaBuf<f32>,
    head: &HcHead<Cuda>,
    cfg: &HcConfig,
    rows: usize,
) -> Result<()> {
    let dim = cfg.dim;
    assert!(out.len() >= rows * dim && y.len() >= rows * dim, "{rows} rows of {dim}");
    assert!(streams.x.len() >= rows * STREAMS * dim && streams.mixing.len() >= rows * MIXES, "streams of {rows} rows");
    assert!(head.mix.len() == STREAMS * STREAMS * dim && head.base.len() == STREAMS, "weights of a head");
    settle(dev)?;
    let (x, mixing, mix) = (streams.x.ptr(), streams.mixing.ptr(), head.mix.ptr());
    let (base, scale) = (head.base.ptr(), head.scale.ptr());
    let (n, width) = (rows as u32, dim as u32);
    dev.matmul.leave(out.ptr(), dim, rows, false, None);
    match Plan::of(cfg, rows) {
        Plan::Cluster => {
            let grid = Grid::new(n * CLUSTER as u32, 32 * (WARPS + 1)).cluster(CLUSTER as u32);
            let args = args![out.ptr(), x, mixing, y.ptr(), mix, base, scale, cfg.eps, cfg.norm_eps];
            dev.launch(kernel!("arc_hc_head_cluster"), grid, args)
        }
        Plan::Rows(_) => {
            let partial = partial(dev, rows * STREAMS * dim / SUM_CHUNK * (MIXES + 1));
            let shared = 4 * (4 * STREAMS * SUM_CHUNK) as u32;
            let grid = Grid::xy(width / SUM_CHUNK as u32, n.div_ceil(4), 32 * WARPS).shared(shared);
            dev.launch(kernel!("arc_hc_head_mix"), grid, args![partial, x, mixing, y.ptr(), mix, width, n])?;
            let args = args![out.ptr(), x, partial, base, scale, width, cfg.eps, cfg.norm_eps];
            dev.launch(kernel!("arc_hc_head_rows"), Grid::new(n, 32 * WARPS), args)
        }
        Plan::Any => {
            let grid = Grid::new(n, 32 * WARPS).shared((4 * STREAMS * dim) as u32);
            let args = args![out.ptr(), x, mixing, y.ptr(), mix, base, scale, width, cfg.eps, cfg.norm_eps];
            dev.launch(kernel!("arc_hc_head_any"), grid, args)
        }
    }
}

/// What [`crate::ops_v4::OpsV4::draft_in`] does.
pub(crate) fn draft(
    dev: &mut Cuda,
    streams: &mut Streams<Cuda>,
    e: &CudaBuf<f32>,
    w: &DraftWeights<Cuda>,
    cfg: &HcConfig,
    inputs: Inputs,
    rows: usize,
) -> Result<()> {
    let dim = cfg.dim;
    assert!(streams.x.len() >= rows * STREAMS * dim && e.len() >= rows * dim, "{rows} rows of {dim}");
    let norm = |weight| Norm { weight, eps: cfg.norm_eps };
    let from = Source::of(&streams.x, dim).normed(norm(&w.stream_norm)).rounded(inputs);
    dev.prepare_for(&w.stream, from, STREAMS * rows)?;
    let x = streams.x.ptr();
    dev.product(&w.stream, Out { at: x, stride: dim, then: Then::Store }, STREAMS * rows)?;
    dev.prepare_for(&w.embed, Source::of(e, dim).normed(norm(&w.embed_norm)).rounded(inputs), rows)?;
    (0..STREAMS).try_for_each(|k| {
        let out = Out { at: x + (4 * k * dim) as u64, stride: STREAMS * dim, then: Then::Add };
        dev.product(&w.embed, out, rows)
    })
}

/// Where chunk sums go.
fn partial(dev: &Cuda, len: usize) -> u64 {
    let partial = dev.hc.partial.as_ref().expect("`finish` was told that the model gathers");
    assert!(partial.len() >= len, "{len} chunk sums, room for {}", partial.len());
    partial.ptr()
}
