//! Stages behind one another: what a kernel leaves for the products that follow, the bits of a stage by itself do not show.

use arc_device::error::Result as DeviceResult;
use arc_device::format::Format;
use arc_device::ops::hc::{HcConfig, MIXES, STREAMS};
use arc_device::ops::latent::{LatentConfig, RowFormat};
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::ops::quant::Inputs;
use arc_device::ops::synthetic::SyntheticRows;
use arc_device::ops_v4::{
    CompressorWeights, HcSite, Incoming, LatentLayer, LatentState, LatentWeights, LatentWork, OpsV4, PoolWeights,
    Streams,
};
use arc_device::{Alloc, Landing, MemoryClass, ModelShape, Norm, Readback, Steps};

use crate::compare::{all, equal_or_nan, within};
use crate::inputs::Rng;
use crate::moe::{matrix, table};
use crate::suite::{Suite, limits, stage_key};

/// Width that a cluster takes by itself.
const DIM: usize = 4096;
const LOW: usize = 96;
const POOL: usize = 40;
/// Added to the norm's mean square, which is near 1.
const EPS: f32 = 1e-2;

/// Kernels behind one another, as a step has them.
pub fn cases(suite: &mut Suite) {
    inputs(suite);
    followed(suite);
}

/// A site, then the first products of attention, which read what it left. Of int8 weights exact, of floats near.
fn inputs(suite: &mut Suite) {
    for rows in [1, 2, 8, 9] {
        for pool in [Format::F16, Format::Q8_0] {
            suite.case(&format!("chain/site and attention's inputs/{}/{rows} rows", pool.name()), |suite| {
                let mut pair = suite.pair(limits(rows, 32));
                let want = run(&mut pair.cpu, rows, pool, EPS).map_err(|error| error.to_string())?;
                let got = run(&mut pair.gpu, rows, pool, EPS).map_err(|error| error.to_string())?;
                all([
                    equal_or_nan(&want[0], &got[0]),
                    match pool {
                        Format::F16 => within(&want[1], &got[1], 1e-4, 1e-4),
                        _ => equal_or_nan(&want[1], &got[1]),
                    },
                ])
            });
        }
        suite.mutant(&format!("chain/another norm before attention/{rows} rows"), |suite| {
            let mut pair = suite.pair(limits(rows, 32));
            let want = run(&mut pair.cpu, rows, Format::F16, EPS).map_err(|error| error.to_string())?;
            let got = run(&mut pair.gpu, rows, Format::F16, 2.0 * EPS).map_err(|error| error.to_string())?;
            equal_or_nan(&want[0], &got[0])
        });
    }
}

fn site<D: OpsV4 + Alloc>(dev: &mut D, rng: &mut Rng) -> DeviceResult<HcSite<D>> {
    Ok(HcSite {
        mix: dev.vector("mix", &rng.values(MIXES * STREAMS * DIM, 0.02))?,
        base: dev.vector("base", &rng.values(MIXES, 1.0))?,
        scale: dev.vector("scale", &[1.0, 0.8, 1.5])?,
    })
}

/// The output of the stages before a site, `[rows, DIM]`, and the streams that it joins.
fn output_and_streams<D: OpsV4 + Alloc + Readback>(
    dev: &mut D,
    rng: &mut Rng,
    rows: usize,
) -> DeviceResult<(D::Buf<f32>, Streams<D>)> {
    let mut made = |len, std| {
        let mut buf = dev.alloc::<f32>("test", MemoryClass::Workspace, len)?;
        dev.write(&mut buf, &rng.values(len, std))?;
        DeviceResult::Ok(buf)
    };
    let y = made(rows * DIM, 1.0)?;
    Ok((y, Streams { x: made(rows * STREAMS * DIM, 1.0)?, mixing: made(rows * MIXES, 0.5)? }))
}

fn run<D: OpsV4 + Alloc + Landing + Readback + Steps>(
    dev: &mut D,
    rows: usize,
    pool: Format,
    eps: f32,
) -> DeviceResult<[Vec<f32>; 2]> {
    let mut rng = Rng(31);
    let class = MemoryClass::Workspace;
    let site = site(dev, &mut rng)?;
    let weight = dev.vector("norm", &rng.values(DIM, 1.0))?;
    let one = |dev: &mut D| dev.vector("one", &[1.0]);
    let compressor = CompressorWeights { bias: one(dev)?, norm: one(dev)? };
    let w = LatentWeights {
        low: matrix(dev, Format::Q8_0, 1, LOW, DIM)?,
        q_norm: one(dev)?,
        q_b: matrix(dev, Format::Q8_0, 1, 32, 32)?,
        kv_norm: one(dev)?,
        sinks: one(dev)?,
        pool: Some(PoolWeights { matrix: matrix(dev, pool, 2, POOL, DIM)?, rows: compressor, index: None }),
        out_a: matrix(dev, Format::Q8_0, 1, 32, 32)?,
        out_b: matrix(dev, Format::Q8_0, 1, 32, 32)?,
    };
    let rope_table = one(dev)?;
    let layer = LatentLayer {
        attention: LatentConfig { heads: 1, dim: 64, window: 32, groups: 1, group_out: 32, scale: 1.0, eps: 1e-6 },
        q_rank: LOW - 64,
        rows: None,
        index: None,
        row_format: RowFormat::Fp8,
        key_format: RowFormat::Fp4,
        inputs: Inputs::Int8,
        rope_table: &rope_table,
    };
    let floats = |dev: &mut D, len| dev.alloc::<f32>("test", class, len);
    let mut ws = LatentWork {
        low: floats(dev, rows * LOW)?,
        pool: floats(dev, rows * 2 * POOL)?,
        q: floats(dev, rows * 64)?,
        kv: floats(dev, rows * 64)?,
        index_q: floats(dev, 1)?,
        picks: dev.alloc("picks", class, 1)?,
        out: floats(dev, rows * 64)?,
        grouped: floats(dev, rows * 32)?,
    };
    let (y, mut streams) = output_and_streams(dev, &mut rng, rows)?;
    let mut h = floats(dev, rows * DIM)?;
    dev.finish(&ModelShape { vocab: 64, hidden: DIM, post_norms: false, gathered: STREAMS * DIM })?;
    dev.stage(&table(rows))?;
    let cfg = HcConfig { dim: DIM, iterations: 20, eps: 1e-6, norm_eps: 1e-6 };
    dev.step(stage_key(rows), &mut |dev| {
        let norm = Norm { weight: &weight, eps };
        dev.hc_site(&mut h, &mut streams, Incoming::Output(&y), &site, &cfg, norm, rows)?;
        dev.attn_in(&mut ws, &h, &w, &layer, rows)
    })?;
    let (mut low, mut pool) = (vec![0.0; rows * LOW], vec![0.0; rows * 2 * POOL]);
    dev.read(&ws.low, &mut low)?;
    dev.read(&ws.pool, &mut pool)?;
    Ok([low, pool])
}

/// Rank of the queries that a product behind their norm takes along.
const RANK: usize = 1024;
/// Attention whose output projections are of whole tiles.
const HEADS: LatentConfig =
    LatentConfig { heads: 32, dim: 64, window: 32, groups: 2, group_out: 512, scale: 0.125, eps: 1e-6 };

/// What the stages of attention leave.
struct Attention {
    low: Vec<f32>,
    pool: Vec<f32>,
    q: Vec<f32>,
    grouped: Vec<f32>,
    y: Vec<f32>,
    /// `grouped` and `y` again, from steps that have one stage each.
    alone: [Vec<f32>; 2],
}

/// Products of one row that share a launch: those behind the site with the queries', and the output projections.
fn followed(suite: &mut Suite) {
    for pool in [None, Some(1), Some(9)] {
        let name = pool.map_or("none".to_owned(), |groups: usize| format!("2 x {}", 8 * groups));
        suite.case(&format!("chain/one row through attention/pool {name}"), |suite| {
            let mut pair = suite.pair(limits(1, 32));
            let want = attend(&mut pair.cpu, pool, HEADS).map_err(|error| error.to_string())?;
            let got = attend(&mut pair.gpu, pool, HEADS).map_err(|error| error.to_string())?;
            all([
                equal_or_nan(&want.low, &got.low),
                if pool.is_some() { within(&want.pool, &got.pool, 1e-4, 1e-4) } else { Ok(String::new()) },
                equal_or_nan(&want.q, &got.q),
                equal_or_nan(&got.alone[0], &got.grouped),
                equal_or_nan(&got.alone[1], &got.y),
                within(&want.y, &got.y, 2e-2, 2e-2),
            ])
        });
        suite.mutant(&format!("chain/one row behind another norm/pool {name}"), |suite| {
            let mut pair = suite.pair(limits(1, 32));
            let want =
                attend(&mut pair.cpu, pool, LatentConfig { eps: EPS, ..HEADS }).map_err(|error| error.to_string())?;
            let got = attend(&mut pair.gpu, pool, HEADS).map_err(|error| error.to_string())?;
            equal_or_nan(&want.q, &got.q)
        });
        suite.mutant(&format!("chain/one row's outputs of other heads/pool {name}"), |suite| {
            let mut pair = suite.pair(limits(1, 32));
            let want =
                attend(&mut pair.cpu, pool, LatentConfig { scale: 4.0, ..HEADS }).map_err(|error| error.to_string())?;
            let got = attend(&mut pair.gpu, pool, HEADS).map_err(|error| error.to_string())?;
            within(&want.y, &got.y, 2e-2, 2e-2)
        });
    }
}

/// Rows of Q8_0, in parts of different lengths.
fn stacked<D: Alloc>(dev: &mut D, rows: [usize; 2], cols: usize) -> DeviceResult<D::Matrix> {
    let std = 1.5 / (cols as f32).sqrt();
    let made = SyntheticRows { seed: 12, tensor: 1, first_row: 0, mean: 0.0, std };
    let source = |rows, first| {
        let bytes = Bytes::Synthetic(made.skip(first));
        MatrixSource { format: Format::Q8_0, rows, cols, bytes }
    };
    dev.matrix("test", &[source(rows[0], 0), source(rows[1], rows[0])])
}

fn attend<D: OpsV4 + Alloc + Landing + Readback + Steps>(
    dev: &mut D,
    pool: Option<usize>,
    attention: LatentConfig,
) -> DeviceResult<Attention> {
    let mut rng = Rng(53);
    let class = MemoryClass::Workspace;
    let site = site(dev, &mut rng)?;
    let weight = dev.vector("norm", &rng.values(DIM, 1.0))?;
    let one = |dev: &mut D| dev.vector("one", &[1.0]);
    let (low_rows, pool_rows) = (RANK + HEADS.dim, pool.map_or(1, |groups| 8 * groups));
    let w = LatentWeights {
        low: stacked(dev, [RANK, HEADS.dim], DIM)?,
        q_norm: dev.vector("q_norm", &rng.values(RANK, 1.0))?,
        q_b: matrix(dev, Format::Q8_0, 1, HEADS.q_dim(), RANK)?,
        kv_norm: dev.vector("kv_norm", &rng.values(HEADS.dim, 1.0))?,
        sinks: dev.vector("sinks", &rng.values(HEADS.heads, 1.0))?,
        pool: match pool {
            None => None,
            Some(_) => Some(PoolWeights {
                matrix: matrix(dev, Format::F16, 2, pool_rows, DIM)?,
                rows: CompressorWeights { bias: one(dev)?, norm: one(dev)? },
                index: None,
            }),
        },
        out_a: matrix(dev, Format::Q8_0, 2, HEADS.group_out, HEADS.q_dim() / 2)?,
        out_b: matrix(dev, Format::Q8_0, 1, DIM, 2 * HEADS.group_out)?,
    };
    let rope_table = dev.vector("rope", &rng.values(32 * 64, 1.0))?;
    let layer = LatentLayer {
        attention,
        q_rank: RANK,
        rows: None,
        index: None,
        row_format: RowFormat::Fp8,
        key_format: RowFormat::Fp4,
        inputs: Inputs::Int8,
        rope_table: &rope_table,
    };
    let floats = |dev: &mut D, len| dev.alloc::<f32>("test", class, len);
    let mut ws = LatentWork {
        low: floats(dev, low_rows)?,
        pool: floats(dev, 2 * pool_rows)?,
        q: floats(dev, HEADS.q_dim())?,
        kv: floats(dev, HEADS.dim)?,
        index_q: floats(dev, 1)?,
        picks: dev.alloc("picks", class, 1)?,
        out: floats(dev, HEADS.q_dim())?,
        grouped: floats(dev, 2 * HEADS.group_out)?,
    };
    let row_bytes = RowFormat::Fp8.row_bytes(HEADS.dim);
    let window = dev.alloc::<u8>("test", MemoryClass::State, HEADS.ring() * row_bytes)?;
    let mut state = LatentState { window, rows: None, keys: None };
    let (mut y, mut streams) = output_and_streams(dev, &mut rng, 1)?;
    let mut h = floats(dev, DIM)?;
    dev.finish(&ModelShape { vocab: 64, hidden: DIM, post_norms: false, gathered: STREAMS * DIM })?;
    dev.stage(&table(1))?;
    dev.set_replay(false);
    let cfg = HcConfig { dim: DIM, iterations: 20, eps: 1e-6, norm_eps: 1e-6 };
    dev.step(stage_key(1), &mut |dev| {
        let norm = Norm { weight: &weight, eps: EPS };
        dev.hc_site(&mut h, &mut streams, Incoming::Output(&y), &site, &cfg, norm, 1)?;
        dev.attn_in(&mut ws, &h, &w, &layer, 1)?;
        dev.attn_q_kv(&mut ws, &mut state, &w, &layer, false, 1)
    })?;
    let read = |dev: &mut D, buf: &D::Buf<f32>, len| {
        let mut values = vec![0.0; len];
        dev.read(buf, &mut values)?;
        DeviceResult::Ok(values)
    };
    let (low, q) = (read(dev, &ws.low, low_rows)?, read(dev, &ws.q, HEADS.q_dim())?);
    let pooled = if pool.is_some() { read(dev, &ws.pool, 2 * pool_rows)? } else { Vec::new() };
    dev.step(stage_key(1), &mut |dev| {
        dev.attn_latent(&mut ws, &mut state, &w, &layer, false, 1)?;
        dev.attn_out_a(&mut ws, &w, &layer, 1)?;
        dev.attn_out_b(&mut y, &ws, &w, &layer, 1)
    })?;
    let left = [read(dev, &ws.grouped, 2 * HEADS.group_out)?, read(dev, &y, DIM)?];
    dev.write(&mut ws.grouped, &vec![f32::NAN; 2 * HEADS.group_out])?;
    dev.step(stage_key(1), &mut |dev| {
        dev.attn_latent(&mut ws, &mut state, &w, &layer, false, 1)?;
        dev.attn_out_a(&mut ws, &w, &layer, 1)
    })?;
    let grouped_alone = read(dev, &ws.grouped, 2 * HEADS.group_out)?;
    dev.write(&mut y, &vec![f32::NAN; DIM])?;
    dev.step(stage_key(1), &mut |dev| dev.attn_out_b(&mut y, &ws, &w, &layer, 1))?;
    let [grouped, y_left] = left;
    Ok(Attention { low, pool: pooled, q, grouped, y: y_left, alone: [grouped_alone, read(dev, &y, DIM)?] })
}
