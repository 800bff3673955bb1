//! Routed experts on the GPU: stages over the gate and the products of [`matmul`](crate::ops::matmul).

use crate::cuda::{Cuda, CudaBuf};
use crate::error::Result;
use crate::ops::matmul::cuda::{AllExperts, Assigned, Out, Source, Then, Units};
use crate::ops::router;
use crate::ops_v4::{ExpertConfig, ExpertWeights, ExpertWork};
use crate::{MemoryClass, ModelShape};

/// Memory that experts need beside their operands.
#[derive(Default)]
pub(crate) struct Workspace {
    /// `[rows * chosen, hidden]`: what every assignment adds to its row.
    products: Option<CudaBuf<f32>>,
    /// The address of the shared expert's units, which the next `up` computes along, behind the gate.
    due: Option<u64>,
}

impl Workspace {
    /// For the largest step. Only models that gather have experts.
    pub(crate) fn new(dev: &mut Cuda, shape: &ModelShape) -> Result<Workspace> {
        if shape.gathered == 0 {
            return Ok(Workspace::default());
        }
        let len = dev.limits.rows * shape.gathered;
        Ok(Workspace { products: Some(dev.take("experts' products", MemoryClass::Workspace, len)?), due: None })
    }
}

/// What [`crate::ops_v4::OpsV4::ffn_in`] does.
pub(crate) fn ffn_in(
    dev: &mut Cuda,
    ws: &mut ExpertWork<Cuda>,
    h: &CudaBuf<f32>,
    w: &ExpertWeights<Cuda>,
    cfg: &ExpertConfig,
    rows: usize,
) -> Result<()> {
    assert!(ws.shared.len() >= rows * cfg.ffn, "units of {rows} rows");
    dev.counters.weight_bytes += 4 * w.gate.len() as u64;
    dev.forget_shared_units(ws.shared.ptr());
    let from = Source::of(h, cfg.hidden).rounded(cfg.inputs);
    let along = dev.takes_all(&all(w), from, &assigned(ws, cfg, rows))?;
    dev.moe.due = along.then_some(ws.shared.ptr());
    if along {
        return Ok(());
    }
    router::cuda::choose(dev, ws, h, w, cfg, rows)?;
    let out = Out { at: ws.shared.ptr(), stride: cfg.ffn, then: Then::ClampedSilu { limit: cfg.limit } };
    dev.product_of(&w.shared_up, from, out, rows)
}

/// What [`crate::ops_v4::OpsV4::experts_up`] does.
pub(crate) fn up(
    dev: &mut Cuda,
    ws: &mut ExpertWork<Cuda>,
    h: &CudaBuf<f32>,
    w: &ExpertWeights<Cuda>,
    cfg: &ExpertConfig,
    rows: usize,
) -> Result<()> {
    assert!(ws.mid.len() >= rows * cfg.router.chosen * cfg.ffn, "units of {rows} rows");
    let from = Source::of(h, cfg.hidden).rounded(cfg.inputs);
    let to = assigned(ws, cfg, rows);
    let due = dev.moe.due.take().filter(|at| *at == ws.shared.ptr());
    let units = Units {
        limit: cfg.limit,
        mid: ws.mid.ptr(),
        by_assignment: products(dev, cfg, rows),
        down: &w.down,
        next: Source::of(&ws.mid, cfg.ffn).rounded(cfg.inputs),
        shared: (&w.shared_down, Source::of(&ws.shared, cfg.ffn).rounded(cfg.inputs)),
        all: due.map(|at| (router::cuda::gate(dev, ws, h, w, cfg, rows), all(w), at)),
    };
    if dev.experts_up(&w.up, from, &units, &to)? {
        return Ok(());
    }
    assert!(due.is_none(), "the shared expert's units are nobody's");
    let out = Out { at: ws.mid.ptr(), stride: cfg.ffn, then: Then::ClampedSilu { limit: cfg.limit } };
    dev.prepare_for(&w.up, from, rows)?;
    dev.product_experts(&w.up, out, &Assigned { by_row: true, by_place: false, ..to })
}

/// What [`crate::ops_v4::OpsV4::experts_down`] does.
pub(crate) fn down(
    dev: &mut Cuda,
    out: &mut CudaBuf<f32>,
    ws: &ExpertWork<Cuda>,
    w: &ExpertWeights<Cuda>,
    cfg: &ExpertConfig,
    rows: usize,
) -> Result<()> {
    let (hidden, ffn, chosen) = (cfg.hidden, cfg.ffn, cfg.router.chosen);
    assert!(out.len() >= rows * hidden, "sums of {rows} rows");
    let to = assigned(ws, cfg, rows);
    let units = Source::of(&ws.shared, ffn).rounded(cfg.inputs);
    match dev.experts_down(&w.down, (&w.shared_down, units), out.ptr(), ws.mid.ptr(), &to)? {
        Some(true) => return Ok(()),
        Some(false) => {
            return dev.product_of(&w.shared_down, units, Out { at: out.ptr(), stride: hidden, then: Then::Add }, rows);
        }
        None => {}
    }
    let products = products(dev, cfg, rows);
    // Assignments of rows that are not live are nobody's: there may be fewer than rows * chosen.
    let count = ws.bounds.ptr() + 4 * cfg.router.experts as u64;
    let from = Source { count: Some(count), ..Source::of(&ws.mid, ffn).rounded(cfg.inputs) };
    let each = Out { at: products, stride: hidden, then: Then::Store };
    dev.prepare_for(&w.down, from, rows * chosen)?;
    dev.product_experts(&w.down, each, &Assigned { by_row: false, by_place: true, ..to })?;
    dev.product_of(
        &w.shared_down,
        units,
        Out { at: out.ptr(), stride: hidden, then: Then::Routed { products, chosen } },
        rows,
    )
}

fn all(w: &ExpertWeights<Cuda>) -> AllExperts<'_> {
    AllExperts { up: &w.up, down: &w.down, shared_up: &w.shared_up, shared_down: &w.shared_down }
}

/// Room for what every assignment adds to its row.
fn products(dev: &Cuda, cfg: &ExpertConfig, rows: usize) -> u64 {
    let products = dev.moe.products.as_ref().expect("`finish` was told that the model gathers");
    let len = rows * cfg.router.chosen * cfg.hidden.max(cfg.ffn);
    assert!(products.len() >= len, "products of {rows} rows");
    products.ptr()
}

fn assigned(ws: &ExpertWork<Cuda>, cfg: &ExpertConfig, rows: usize) -> Assigned {
    Assigned {
        ids: ws.ids.ptr(),
        order: ws.order.ptr(),
        bounds: ws.bounds.ptr(),
        weights: ws.weights.ptr(),
        experts: cfg.router.experts,
        chosen: cfg.router.chosen,
        rows,
        by_row: true,
        by_place: false,
    }
}
