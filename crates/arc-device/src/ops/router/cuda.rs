//! The gate on the GPU: scores, choice, and the step's assignments.

use super::{MAX_CHOSEN, MAX_EXPERTS};
use crate::cuda::{Arg, Cuda, CudaBuf, Grid, Kernel, args, kernel};
use crate::error::Result;
use crate::math::SUM_CHUNK;
use crate::ops::hc;
use crate::ops_v4::{ExpertConfig, ExpertWeights, ExpertWork, RouterWeights};
use crate::{MemoryClass, ModelShape};

/// Rows that one kernel takes from scores to assignments, and experts of which it can choose.
const FEW_ROWS: usize = 8;
const FEW_EXPERTS: usize = 256;
/// Experts of which the kernel of one row's experts can choose, and warps of its blocks that have a chunk of one's row each.
pub(crate) const ONE_EXPERTS: usize = FEW_EXPERTS;
pub(crate) const ONE_WARPS: usize = 16;
/// Rows of a tile of scores.
const TILE_ROWS: usize = 16;
/// Rows from which tiles have 32 experts instead of 8. Measured.
const WIDE_ROWS: usize = 128;
const THREADS: u32 = 256;

/// Memory that the gate needs beside its operands.
#[derive(Default)]
pub(crate) struct Workspace {
    /// `[rows, experts]`.
    scores: Option<CudaBuf<f32>>,
    /// Scores of few rows on their way, `[FEW_ROWS, FEW_EXPERTS]`; 0 between launches.
    posts: Option<CudaBuf<u32>>,
    /// Those of one row in the kernel of its experts, each with the number of its launch.
    numbered: Option<CudaBuf<u32>>,
}

/// A step's gate: `Gate` of one.cuh.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Gate {
    h: u64,
    gate: u64,
    table: u64,
    bias: u64,
    posts: u64,
    ids: u64,
    weights: u64,
    order: u64,
    bounds: u64,
    infos: u64,
    mixing: u64,
    experts: u32,
    chosen: u32,
    chunks: u32,
    scale: f32,
    iterations: u32,
    eps: f32,
}
const _: () = assert!(size_of::<Gate>() == 112);

impl Workspace {
    /// For the largest step and the most experts. Only models that gather have experts.
    pub(crate) fn new(dev: &mut Cuda, shape: &ModelShape) -> Result<Workspace> {
        if shape.gathered == 0 {
            return Ok(Workspace::default());
        }
        let len = dev.limits.rows * MAX_EXPERTS;
        Ok(Workspace {
            scores: Some(dev.take("scores", MemoryClass::Workspace, len)?),
            posts: Some(dev.take("scores", MemoryClass::Workspace, FEW_ROWS * FEW_EXPERTS)?),
            numbered: Some(dev.take("scores", MemoryClass::Workspace, 2 * ONE_EXPERTS)?),
        })
    }
}

/// The kernel that does it all for few rows, and the experts of its blocks.
fn few(hidden: usize, experts: usize, rows: usize) -> Option<(Kernel, u32)> {
    match hidden / SUM_CHUNK {
        _ if rows > FEW_ROWS || experts > FEW_EXPERTS || !hidden.is_multiple_of(SUM_CHUNK) => None,
        1 => Some((kernel!("arc_router_few_1"), 8)),
        2 => Some((kernel!("arc_router_few_2"), 4)),
        4 => Some((kernel!("arc_router_few_4"), 2)),
        _ => None,
    }
}

/// Addresses of the table that chooses, or of what is added to scores.
fn choice(w: &ExpertWeights<Cuda>) -> (u64, u64) {
    match &w.router {
        RouterWeights::Hashed(table) => (table.ptr(), 0),
        RouterWeights::Learned(bias) => (0, bias.ptr()),
    }
}

fn check(ws: &ExpertWork<Cuda>, h: &CudaBuf<f32>, w: &ExpertWeights<Cuda>, cfg: &ExpertConfig, rows: usize) {
    let (hidden, experts, chosen) = (cfg.hidden, cfg.router.experts, cfg.router.chosen);
    assert!(experts <= MAX_EXPERTS && chosen <= MAX_CHOSEN.min(experts), "{chosen} of {experts} experts");
    assert!(w.gate.len() == experts * hidden && h.len() >= rows * hidden, "a gate of {experts} x {hidden}");
    assert!(ws.ids.len() >= rows * chosen && ws.weights.len() >= rows * chosen, "choices of {rows} rows");
    assert!(ws.order.len() >= rows * chosen && ws.bounds.len() > experts, "assignments of {rows} rows");
}

/// What a kernel over few rows needs to choose, and to do what the site before has put off.
pub(crate) fn gate(
    dev: &mut Cuda,
    ws: &ExpertWork<Cuda>,
    h: &CudaBuf<f32>,
    w: &ExpertWeights<Cuda>,
    cfg: &ExpertConfig,
    rows: usize,
) -> Gate {
    check(ws, h, w, cfg, rows);
    let (table, bias) = choice(w);
    let pending = hc::cuda::take_pending(dev);
    assert!(pending.is_none_or(|pending| pending.rows as usize == rows), "a site and a gate over different rows");
    let (mixing, iterations, eps) = pending.map_or((0, 0, 0.0), |p| (p.mixing, p.iterations, p.eps));
    let posts = dev.router.numbered.as_ref().expect("`finish` was told that the model gathers").ptr();
    Gate {
        h: h.ptr(),
        gate: w.gate.ptr(),
        table,
        bias,
        posts,
        ids: ws.ids.ptr(),
        weights: ws.weights.ptr(),
        order: ws.order.ptr(),
        bounds: ws.bounds.ptr(),
        infos: dev.view().infos(),
        mixing,
        experts: cfg.router.experts as u32,
        chosen: cfg.router.chosen as u32,
        chunks: (cfg.hidden / SUM_CHUNK) as u32,
        scale: cfg.router.scale,
        iterations,
        eps,
    }
}

/// Chooses experts of few rows by a kernel of its own.
pub(crate) fn choose_few(dev: &mut Cuda, gate: &Gate, rows: usize) -> Result<()> {
    let hidden = gate.chunks as usize * SUM_CHUNK;
    let (kernel, per) = few(hidden, gate.experts as usize, rows).expect("few rows of few chunks");
    let Gate { h, gate: from, table, bias, ids, weights, order, bounds, infos, mixing, .. } = *gate;
    let Gate { experts, chosen, scale, iterations, eps, .. } = *gate;
    let blocks = experts.div_ceil(per) + 1 + u32::from(mixing != 0);
    let posts = dev.router.posts.as_ref().expect("`finish` was told that the model gathers").ptr();
    let n = rows as u32;
    #[rustfmt::skip]
    let args: &[Arg<'_>] = args![
        ids, weights, order, bounds, posts, h, from, table, bias, infos, experts, chosen, scale, n, mixing, iterations, eps,
    ];
    dev.launch(kernel, Grid::new(blocks, THREADS), args)
}

/// Chooses experts and sorts assignments: `ws.ids`, `ws.weights`, `ws.order`, `ws.bounds`. `h`: `[rows, hidden]`.
pub(crate) fn choose(
    dev: &mut Cuda,
    ws: &mut ExpertWork<Cuda>,
    h: &CudaBuf<f32>,
    w: &ExpertWeights<Cuda>,
    cfg: &ExpertConfig,
    rows: usize,
) -> Result<()> {
    let (hidden, experts, chosen) = (cfg.hidden, cfg.router.experts, cfg.router.chosen);
    if few(hidden, experts, rows).is_some() {
        let gate = gate(dev, ws, h, w, cfg, rows);
        return choose_few(dev, &gate, rows);
    }
    check(ws, h, w, cfg, rows);
    let (table, bias) = choice(w);
    let scores = dev.router.scores.as_ref().expect("`finish` was told that the model gathers");
    assert!(scores.len() >= rows * experts, "{rows} rows of scores");
    let scores = scores.ptr();
    let (ids, weights, order, bounds) = (ws.ids.ptr(), ws.weights.ptr(), ws.order.ptr(), ws.bounds.ptr());
    let (h, gate, infos, scale) = (h.ptr(), w.gate.ptr(), dev.view().infos(), cfg.router.scale);
    let (n, width, of, most) = (rows as u32, hidden as u32, experts as u32, chosen as u32);
    if hidden.is_multiple_of(SUM_CHUNK) {
        let (kernel, wide, threads) = match rows >= WIDE_ROWS {
            true => (kernel!("arc_router_scores_32"), 32, 2 * THREADS),
            false => (kernel!("arc_router_scores_8"), 8, THREADS),
        };
        let shared = 4 * (SUM_CHUNK * (TILE_ROWS + wide)) as u32;
        let grid = Grid::xy(of.div_ceil(wide as u32), n.div_ceil(TILE_ROWS as u32), threads).shared(shared);
        dev.launch(kernel, grid, args![scores, h, gate, width, of, n])?;
    } else {
        let grid = Grid::xy(of.div_ceil(THREADS / 32), n, THREADS);
        dev.launch(kernel!("arc_router_scores_any"), grid, args![scores, h, gate, width, of])?;
    }
    let grid = Grid::new(n.div_ceil(THREADS / 32), THREADS);
    let args = args![ids, weights, scores, table, bias, infos, of, most, scale, n];
    dev.launch(kernel!("arc_router_choose"), grid, args)?;
    let grid = Grid::new(1, 1024).shared(32 * 4 * of);
    dev.launch(kernel!("arc_moe_assign"), grid, args![order, bounds, ids, infos, n, most, of])
}
