//! Stages behind one another: what a kernel leaves for the products that follow, the bits of a stage by itself do not show.

use arc_device::cuda::Cuda;
use arc_device::error::{Fault, Result as DeviceResult};
use arc_device::format::Format;
use arc_device::ops::compress::Compressor;
use arc_device::ops::hc::{HcConfig, MIXES, STREAMS};
use arc_device::ops::index::{FAULT, IndexConfig};
use arc_device::ops::latent::cuda::Mutant;
use arc_device::ops::latent::{LatentConfig, RowFormat};
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::ops::quant::Inputs;
use arc_device::ops::synthetic::SyntheticRows;
use arc_device::ops_v4::{
    CompressorWeights, HcSite, Incoming, IndexWeights, LatentLayer, LatentState, LatentWeights, LatentWork, OpsV4,
    PoolState, PoolWeights, Streams,
};
use arc_device::step::{BLOCK_TOKENS, CtxClass, Part, StepDelta, StepKey};
use arc_device::{Alloc, Landing, MemoryClass, ModelShape, Norm, Readback, Steps};

use crate::compare::{all, equal, equal_bits, equal_or_nan, launches, within};
use crate::inputs::Rng;
use crate::latent::stored;
use crate::moe::{matrix, table};
use crate::rows::{Run, delta};
use crate::suite::{Suite, Verdict, limits, stage_key};

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
    chosen(suite);
}

/// A site, then the first products of attention, which read what it left. Of int8 weights exact, of floats near.
fn inputs(suite: &mut Suite) {
    for rows in [1, 2, 4, 8, 9] {
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

/// A layer without compressor and indexer.
fn layer<D: OpsV4>(attention: LatentConfig, q_rank: usize, rope_table: &D::Buf<f32>) -> LatentLayer<'_, D> {
    LatentLayer {
        attention,
        q_rank,
        rows: None,
        index: None,
        row_format: RowFormat::Fp8,
        key_format: RowFormat::Fp4,
        inputs: Inputs::Int8,
        rope_table,
    }
}

/// Workspace of a layer over `rows` rows. `[pool, index_q, picks]`: values of a row.
fn work<D: OpsV4 + Alloc>(
    dev: &mut D,
    layer: &LatentLayer<'_, D>,
    rows: usize,
    [pool, index_q, picks]: [usize; 3],
) -> DeviceResult<LatentWork<D>> {
    let (class, att) = (MemoryClass::Workspace, layer.attention);
    let mut floats = |each: usize| dev.alloc::<f32>("test", class, rows * each);
    Ok(LatentWork {
        low: floats(layer.q_rank + att.dim)?,
        pool: floats(pool)?,
        q: floats(att.q_dim())?,
        kv: floats(att.dim)?,
        index_q: floats(index_q)?,
        out: floats(att.q_dim())?,
        grouped: floats(att.groups * att.group_out)?,
        picks: dev.alloc("picks", class, rows * picks)?,
    })
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
    let attention = LatentConfig { heads: 1, dim: 64, window: 32, groups: 1, group_out: 32, scale: 1.0, eps: 1e-6 };
    let layer = layer(attention, LOW - 64, &rope_table);
    let mut ws = work(dev, &layer, rows, [2 * POOL, 1, 1])?;
    let (y, mut streams) = output_and_streams(dev, &mut rng, rows)?;
    let mut h = dev.alloc::<f32>("test", class, rows * DIM)?;
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

/// Positions of a sequence; the row's completes a compressed row, and sees more rows than a split of the attention has.
const CONTEXT: usize = 256;
const AT: Run = Run { pos: 203, rows: 1, live: true };
/// A compressor whose values and gates are a pool of two parts of so many groups of rows.
const POOLED: Compressor = Compressor { ratio: 4, overlap: 2, dim: HEADS.dim };
const POOLED_GROUPS: usize = 16;

/// What the stages of attention leave.
struct Attention {
    low: Vec<f32>,
    pool: Vec<f32>,
    q: Vec<f32>,
    kv: Vec<f32>,
    /// Rings and compressed rows.
    ring: Vec<f32>,
    stored: [Vec<u8>; 2],
    grouped: Vec<f32>,
    y: Vec<f32>,
    /// `grouped` and `y` again, from steps that have one stage each.
    alone: [Vec<f32>; 2],
    /// What a site behind `y` leaves, twice of other heads: in the same step, and in one of its own.
    sites: [[Vec<f32>; 2]; 2],
    /// What was launched up to the rows of attention, from there to `y`, for `alone`, and for `sites` as they came.
    launched: Vec<Vec<&'static str>>,
}

/// What a GPU launched in its last step.
fn of_gpu(gpu: &Cuda) -> Vec<&'static str> {
    gpu.launched().collect()
}

/// That products share launches where a step has them together, that the site takes outputs as they are sent, and neither
/// where a step has one stage.
fn shared(of: &Attention, together: bool) -> Verdict {
    let (first, follow) = (["arc_matmul_follow_normed"], ["arc_matmul_follow"]);
    let (sent, alone) = (["arc_hc_site_sent"], ["arc_hc_site_cluster"]);
    let [before, heads, parts @ ..] = &of.launched[..] else { return Err("few steps".to_owned()) };
    let [a, b, sites @ ..] = parts else { return Err("few steps".to_owned()) };
    let mut verdicts = vec![
        match together {
            true => launches("arc_matmul_", &first, before),
            false => launches("arc_matmul_follow", &[], before),
        },
        launches("arc_matmul_", &follow, heads),
        launches("arc_matmul_follow", &[], a),
        launches("arc_matmul_follow", &[], b),
    ];
    for site in sites.chunks(3) {
        verdicts.push(launches("arc_matmul_", &follow, &site[0]));
        verdicts.push(launches("arc_hc_site", &sent, &site[0]));
        verdicts.push(launches("arc_matmul_", &follow, &site[1]));
        verdicts.push(launches("arc_hc_site", &alone, &site[2]));
    }
    all(verdicts)
}

/// Products of one row that share a launch: those behind the site with the queries', and the output projections.
fn followed(suite: &mut Suite) {
    for pool in [None, Some(1), Some(9), Some(POOLED_GROUPS)] {
        let name = pool.map_or("none".to_owned(), |groups: usize| format!("2 x {}", 8 * groups));
        suite.case(&format!("chain/one row through attention/pool {name}"), |suite| {
            let mut pair = suite.pair(limits(1, CONTEXT));
            let want = attend(&mut pair.cpu, pool, HEADS, true, |_| Vec::new()).map_err(|error| error.to_string())?;
            let got = attend(&mut pair.gpu, pool, HEADS, true, of_gpu).map_err(|error| error.to_string())?;
            // Nothing is sent from launch to launch.
            let mut other = suite.pair(limits(1, CONTEXT));
            let apart = attend(&mut other.gpu, pool, HEADS, false, of_gpu).map_err(|error| error.to_string())?;
            all([
                shared(&got, true),
                shared(&apart, false),
                equal_or_nan(&want.low, &got.low),
                equal_or_nan(&want.kv, &got.kv),
                equal_or_nan(&apart.pool, &got.pool),
                equal_or_nan(&apart.ring, &got.ring),
                equal(&apart.stored[0], &got.stored[0]),
                equal(&apart.stored[1], &got.stored[1]),
                equal_or_nan(&apart.grouped, &got.grouped),
                equal_or_nan(&apart.y, &got.y),
                // A compressor of the CPU device adds its biases in place: there the rings are compared.
                match pool {
                    None => Ok(String::new()),
                    Some(POOLED_GROUPS) => within(&want.ring, &got.ring, 1e-4, 1e-4),
                    Some(_) => within(&want.pool, &got.pool, 1e-4, 1e-4),
                },
                equal_or_nan(&want.q, &got.q),
                equal_or_nan(&got.alone[0], &got.grouped),
                equal_or_nan(&got.alone[1], &got.y),
                equal_bits(&got.sites[0][1], &got.sites[0][0]),
                equal_bits(&got.sites[1][1], &got.sites[1][0]),
                within(&want.y, &got.y, 2e-2, 2e-2),
            ])
        });
        suite.mutant(&format!("chain/one row behind another norm/pool {name}"), |suite| {
            let mut pair = suite.pair(limits(1, CONTEXT));
            let other = LatentConfig { eps: EPS, ..HEADS };
            let want = attend(&mut pair.cpu, pool, other, true, |_| Vec::new()).map_err(|error| error.to_string())?;
            let got = attend(&mut pair.gpu, pool, HEADS, true, of_gpu).map_err(|error| error.to_string())?;
            equal_or_nan(&want.q, &got.q)
        });
        suite.mutant(&format!("chain/one row's outputs of other heads/pool {name}"), |suite| {
            let mut pair = suite.pair(limits(1, CONTEXT));
            let other = LatentConfig { scale: 4.0, ..HEADS };
            let want = attend(&mut pair.cpu, pool, other, true, |_| Vec::new()).map_err(|error| error.to_string())?;
            let got = attend(&mut pair.gpu, pool, HEADS, true, of_gpu).map_err(|error| error.to_string())?;
            within(&want.y, &got.y, 2e-2, 2e-2)
        });
        suite.mutant(&format!("chain/one row's site behind other outputs/pool {name}"), |suite| {
            let mut pair = suite.pair(limits(1, CONTEXT));
            let got = attend(&mut pair.gpu, pool, HEADS, true, of_gpu).map_err(|error| error.to_string())?;
            equal_bits(&got.sites[0][1], &got.sites[1][0])
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

/// `together`: the stages up to the rows of attention are one step, otherwise two. `launched`: by the last step.
fn attend<D: OpsV4 + Alloc + Landing + Readback + Steps>(
    dev: &mut D,
    pool: Option<usize>,
    attention: LatentConfig,
    together: bool,
    launched: impl Fn(&D) -> Vec<&'static str>,
) -> DeviceResult<Attention> {
    let mut rng = Rng(53);
    let class = MemoryClass::Workspace;
    let site = site(dev, &mut rng)?;
    let weight = dev.vector("norm", &rng.values(DIM, 1.0))?;
    let (low_rows, pool_rows) = (RANK + HEADS.dim, pool.map_or(1, |groups| 8 * groups));
    let compressor = (pool == Some(POOLED_GROUPS)).then_some(POOLED);
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
                rows: CompressorWeights {
                    bias: dev.vector("bias", &rng.values(POOLED.ratio * POOLED.width(), 1.0))?,
                    norm: dev.vector("norm", &rng.values(POOLED.dim, 1.0))?,
                },
                index: None,
            }),
        },
        out_a: matrix(dev, Format::Q8_0, 2, HEADS.group_out, HEADS.q_dim() / 2)?,
        out_b: matrix(dev, Format::Q8_0, 1, DIM, 2 * HEADS.group_out)?,
    };
    let rope_table = dev.vector("rope", &rng.values(CONTEXT * 64, 1.0))?;
    let layer = LatentLayer { rows: compressor, ..layer(attention, RANK, &rope_table) };
    let mut ws = work(dev, &layer, 1, [2 * pool_rows, 1, 1])?;
    let kept = |dev: &mut D, rng: &mut Rng, rows: usize| {
        let bytes = stored(rng, RowFormat::Fp8, HEADS.dim, rows);
        let mut buf = dev.alloc::<u8>("test", MemoryClass::State, bytes.len())?;
        dev.write(&mut buf, &bytes)?;
        DeviceResult::Ok(buf)
    };
    let window = kept(dev, &mut rng, HEADS.ring())?;
    let (ring_len, n_stored) = (POOLED.ring_elements(1), CONTEXT / POOLED.ratio);
    let rows = match compressor {
        None => None,
        Some(_) => {
            let mut ring = dev.alloc::<f32>("test", MemoryClass::State, ring_len)?;
            dev.write(&mut ring, &rng.values(ring_len, 1.0))?;
            Some(PoolState { ring, rows: kept(dev, &mut rng, n_stored)? })
        }
    };
    let mut state = LatentState { window, rows, keys: None };
    let (mut y, mut streams) = output_and_streams(dev, &mut rng, 1)?;
    let mut h = dev.alloc::<f32>("test", class, DIM)?;
    dev.finish(&ModelShape { vocab: 64, hidden: DIM, post_norms: false, gathered: STREAMS * DIM })?;
    dev.stage(&delta(&[AT], CONTEXT))?;
    dev.set_replay(false);
    let cfg = HcConfig { dim: DIM, iterations: 20, eps: 1e-6, norm_eps: 1e-6 };
    dev.step(stage_key(1), &mut |dev| {
        let norm = Norm { weight: &weight, eps: EPS };
        dev.hc_site(&mut h, &mut streams, Incoming::Output(&y), &site, &cfg, norm, 1)?;
        dev.attn_in(&mut ws, &h, &w, &layer, 1)?;
        if together { dev.attn_q_kv(&mut ws, &mut state, &w, &layer, false, 1) } else { Ok(()) }
    })?;
    let mut kernels = vec![launched(dev)];
    if !together {
        dev.step(stage_key(1), &mut |dev| dev.attn_q_kv(&mut ws, &mut state, &w, &layer, false, 1))?;
        kernels[0].extend(launched(dev));
    }
    let read = |dev: &mut D, buf: &D::Buf<f32>, len| {
        let mut values = vec![0.0; len];
        dev.read(buf, &mut values)?;
        DeviceResult::Ok(values)
    };
    let (low, q) = (read(dev, &ws.low, low_rows)?, read(dev, &ws.q, HEADS.q_dim())?);
    let kv = read(dev, &ws.kv, HEADS.dim)?;
    let read_rows = |dev: &mut D, buf: &D::Buf<u8>, rows: usize| {
        let mut bytes = vec![0; rows * RowFormat::Fp8.row_bytes(HEADS.dim)];
        dev.read(buf, &mut bytes)?;
        DeviceResult::Ok(bytes)
    };
    let mut left_rows = [read_rows(dev, &state.window, HEADS.ring())?, Vec::new()];
    let mut ring = Vec::new();
    if let Some(rows) = &state.rows {
        ring = read(dev, &rows.ring, ring_len)?;
        left_rows[1] = read_rows(dev, &rows.rows, n_stored)?;
    }
    let pooled = if pool.is_some() { read(dev, &ws.pool, 2 * pool_rows)? } else { Vec::new() };
    dev.step(stage_key(1), &mut |dev| {
        dev.attn_latent(&mut ws, &mut state, &w, &layer, false, 1)?;
        dev.attn_out_a(&mut ws, &w, &layer, 1)?;
        dev.attn_out_b(&mut y, &ws, &w, &layer, 1)
    })?;
    kernels.push(launched(dev));
    let left = [read(dev, &ws.grouped, 2 * HEADS.group_out)?, read(dev, &y, DIM)?];
    dev.write(&mut ws.grouped, &vec![f32::NAN; 2 * HEADS.group_out])?;
    dev.step(stage_key(1), &mut |dev| {
        dev.attn_latent(&mut ws, &mut state, &w, &layer, false, 1)?;
        dev.attn_out_a(&mut ws, &w, &layer, 1)
    })?;
    kernels.push(launched(dev));
    let grouped_alone = read(dev, &ws.grouped, 2 * HEADS.group_out)?;
    dev.write(&mut y, &vec![f32::NAN; DIM])?;
    dev.step(stage_key(1), &mut |dev| dev.attn_out_b(&mut y, &ws, &w, &layer, 1))?;
    kernels.push(launched(dev));
    let [grouped, y_left] = left;
    let alone = [grouped_alone, read(dev, &y, DIM)?];
    let before = [read(dev, &streams.x, STREAMS * DIM)?, read(dev, &streams.mixing, MIXES)?];
    let mut sites = [const { [const { Vec::new() }; 2] }; 2];
    for (i, left) in sites.iter_mut().enumerate() {
        let scale = attention.scale * (1 + i) as f32;
        let layer = LatentLayer { attention: LatentConfig { scale, ..attention }, ..layer };
        for (together, left) in [true, false].into_iter().zip(left) {
            dev.write(&mut streams.x, &before[0])?;
            dev.write(&mut streams.mixing, &before[1])?;
            let mut stage = |dev: &mut D, products: bool, behind: bool| {
                if products {
                    dev.attn_latent(&mut ws, &mut state, &w, &layer, false, 1)?;
                    dev.attn_out_a(&mut ws, &w, &layer, 1)?;
                    dev.attn_out_b(&mut y, &ws, &w, &layer, 1)?;
                }
                let norm = Norm { weight: &weight, eps: EPS };
                match behind {
                    true => dev.hc_site(&mut h, &mut streams, Incoming::Output(&y), &site, &cfg, norm, 1),
                    false => Ok(()),
                }
            };
            dev.step(stage_key(1), &mut |dev| stage(dev, true, together))?;
            kernels.push(launched(dev));
            if !together {
                dev.step(stage_key(1), &mut |dev| stage(dev, false, true))?;
                kernels.push(launched(dev));
            }
            *left = [read(dev, &h, DIM)?, read(dev, &streams.x, STREAMS * DIM)?, read(dev, &streams.mixing, MIXES)?]
                .concat();
        }
    }
    let launched = kernels;
    Ok(Attention { low, pool: pooled, q, kv, ring, stored: left_rows, grouped, y: y_left, alone, sites, launched })
}

/// One row of a layer, which may choose among keys.
#[derive(Debug, Clone, Copy)]
struct Choice {
    pos: usize,
    /// Tokens of a compressed row, or 0; an indexer chooses among those of 4, where `select` says so.
    ratio: usize,
    select: bool,
    top: usize,
    /// Whether all keys are alike, and whether scores are NaN.
    alike: bool,
    faulty: bool,
    /// Whether between two steps there is one whose row is not live, or one whose key has room for fewer positions.
    idle: bool,
    short: bool,
    /// Positions that there is room for.
    room: usize,
    eps: f32,
    heads: LatentConfig,
}

/// What the stages of a choice leave.
struct Chosen {
    low: Vec<f32>,
    q: Vec<f32>,
    index_q: Vec<f32>,
    picks: Vec<u32>,
    out: Vec<f32>,
    y: Vec<f32>,
    /// Window and compressed rows as they are stored.
    kept: [Vec<u8>; 2],
    launched: Vec<&'static str>,
    /// Blocks of the output projections that begin late.
    late: u32,
}

/// DeepSeek-V4-Flash's attention, whose rows come as tiles.
const FLASH: LatentConfig =
    LatentConfig { heads: 64, dim: 512, window: 128, groups: 8, group_out: 1024, scale: 0.044, eps: 1e-6 };

/// Positions that a choice has room for: among few keys, among many, and of a long context.
const ROOM: usize = 4096;
const WIDE: usize = 32_768;
const LONG: usize = 131_072;
const KEYS: Compressor = Compressor { ratio: 4, overlap: 2, dim: 128 };

/// An index query that shares its launch with the products before and behind it, and a choice beside them, against steps of
/// one stage each: no keys but those that are chosen, few and many of them, of a row that completes one and that does not.
fn chosen(suite: &mut Suite) {
    let at = |pos, top| {
        let (room, heads) = (ROOM, HEADS);
        Choice {
            pos,
            ratio: KEYS.ratio,
            select: true,
            top,
            alike: false,
            faulty: false,
            idle: false,
            room,
            short: false,
            eps: 1e-6,
            heads,
        }
    };
    let wide = |pos| Choice { room: WIDE, ..at(pos, 512) };
    let same = |suite: &Suite, [alone, together]: [Choice; 2], mutant| -> Verdict {
        let run = |choice: Choice, together, mutant| {
            let mut gpu = suite.gpu(limits(1, choice.room)).map_err(|error| error.to_string())?;
            gpu.set_mutant(mutant);
            choose(&mut gpu, choice, together).map_err(|error| error.to_string())
        };
        let (want, got) = (run(alone, false, Mutant::None)?, run(together, true, mutant)?);
        for (want, got) in want.iter().zip(&got) {
            shared_by_one(together, together.room, got)?;
            launches("arc_matmul_follow", &[], &want.launched)?;
            let scored: &[&str] = if alone.select { &["index_score", "index_pick"] } else { &[] };
            launches("index_", scored, &want.launched)?;
            // Heads that are not sent for are merged apart, where those that are have a larger cluster.
            launches("latent_merge", if is_long(alone, alone.room) { &["latent_merge"] } else { &[] }, &want.launched)?;
        }
        all(want.iter().zip(&got).flat_map(|(want, got)| {
            [
                equal_bits(&want.low, &got.low).map_err(|why| format!("low: {why}")),
                equal_bits(&want.q, &got.q).map_err(|why| format!("q: {why}")),
                equal_bits(&want.index_q, &got.index_q).map_err(|why| format!("index_q: {why}")),
                equal(&want.picks, &got.picks).map_err(|why| format!("picks: {why}")),
                equal_bits(&want.out, &got.out).map_err(|why| format!("out: {why}")),
                equal_or_nan(&want.y, &got.y).map_err(|why| format!("y: {why}")),
                equal(&want.kept, &got.kept).map_err(|why| format!("stored rows: {why}")),
            ]
        }))
    };
    // Choices of one more than there are, of a row that completes its last key and that does not; lists that fill their splits and
    // that do not; a window that is not full yet; as many keys as are few.
    let flash = |pos, top| Choice { heads: FLASH, ..at(pos, top) };
    let most = Choice { room: 2 * ROOM, ..flash(8191, 512) };
    for choice in [flash(70, 16), flash(100, 16), flash(2051, 512), flash(2054, 512), flash(4094, 512), most] {
        let name = format!("chain/one row's choice/of Flash, {} at {}", choice.top, choice.pos);
        suite.case(&name, |suite| same(suite, [choice; 2], Mutant::None));
    }
    let many = Choice { room: WIDE, ..flash(20_003, 512) };
    suite.case("chain/one row's choice/of Flash, 512 at 20003", |suite| same(suite, [many; 2], Mutant::None));
    let choice = flash(3999, 512);
    for (name, choice) in [("of Flash", choice), ("of Flash, many", many)] {
        for (how, choice) in [
            ("alike", Choice { alike: true, ..choice }),
            ("around a row that is not live", Choice { idle: true, ..choice }),
            ("with NaN", Choice { faulty: true, ..choice }),
        ] {
            let name = format!("chain/one row's choice/{name} {how}");
            suite.case(&name, |suite| same(suite, [choice; 2], Mutant::None));
        }
    }
    // Layers of which a row reads all that it sees: a window that is not full and one that is; rows that a token completes; as many
    // as an indexer would choose; as many splits as a cluster has blocks, and more; as many as a larger one has, one more, and so many
    // that its blocks take three in turn.
    let all_of = |ratio, pos, room| Choice { ratio, select: false, room, ..flash(pos, 512) };
    let kinds = [
        all_of(0, 70, 2048),
        all_of(0, 1999, 2048),
        all_of(4, 1201, 2048),
        all_of(4, 2047, 2048),
        all_of(128, 126, 2048),
        all_of(128, 2047, 2048),
        all_of(128, 60_031, 65_536),
        all_of(128, 100_095, LONG),
        all_of(128, 147_455, LONG + WIDE),
        all_of(128, 148_607, LONG + WIDE),
        all_of(128, 390_015, 3 * LONG),
    ];
    for choice in kinds {
        let kind =
            ["window", "sparse", "heavy"][[0, 4, 128].iter().position(|&of| of == choice.ratio).expect("one of these")];
        let name = format!("chain/one row of Flash/{kind}, {} of {}", choice.pos, choice.room);
        suite.case(&name, |suite| same(suite, [choice; 2], Mutant::None));
        let idle = Choice { idle: true, ..choice };
        suite.case(&format!("{name} around a row that is not live"), |suite| same(suite, [idle; 2], Mutant::None));
        let next = f32::from_bits(FLASH.scale.to_bits() + 1);
        let other = Choice { heads: LatentConfig { scale: next, ..FLASH }, ..choice };
        suite.mutant(&format!("{name}, another scale"), |suite| {
            only(same(suite, [other, choice], Mutant::None), "out: ")
        });
        // Of a window that is full.
        if choice.pos >= FLASH.window - 1 {
            suite.mutant(&format!("{name}, a narrower window"), |suite| {
                only(same(suite, [choice; 2], Mutant::Narrow), "out: ")
            });
        }
    }
    // The attention alone is another, or what comes of it: all before it is as wanted.
    for (name, choice) in [("few", choice), ("many", many)] {
        let mutant = |suite: &mut Suite, what: &str, of: &str, scale: f32, mutant| {
            let alone = Choice { heads: LatentConfig { scale, ..choice.heads }, ..choice };
            suite.mutant(&format!("chain/one row's choice/of Flash, {name}, {what}"), |suite| {
                only(same(suite, [alone, choice], mutant), of)
            });
        };
        let next = f32::from_bits(FLASH.scale.to_bits() + 1);
        mutant(suite, "another scale", "out: ", next, Mutant::None);
        mutant(suite, "a narrower window", "out: ", FLASH.scale, Mutant::Narrow);
        mutant(suite, "still rotated", "y: ", FLASH.scale, Mutant::StillRotated);
        mutant(suite, "a group left", "y: ", FLASH.scale, Mutant::GroupLeft);
    }
    // As many blocks of the output projections begin late as there are of the attention.
    for (choice, late) in
        [(choice, 32), (flash(3999, 16), 8), (many, 32), (kinds[0], 8), (kinds[6], 32), (kinds[7], 64)]
    {
        let name = format!(
            "chain/one row of Flash/blocks that begin late, {} of {} at {}",
            choice.top, choice.ratio, choice.pos
        );
        suite.case(&name, |suite| {
            let mut gpu = suite.gpu(limits(1, choice.room)).map_err(|error| error.to_string())?;
            let left = choose(&mut gpu, choice, true).map_err(|error| error.to_string())?;
            let late = if gpu.multiprocessors() == 132 { late } else { left[0].late };
            equal(&[late; 3], &left.iter().map(|left| left.late).collect::<Vec<_>>())
        });
    }
    let alike = Choice { alike: true, ..choice };
    suite.mutant("chain/one row's choice/of Flash, later ties", |suite| same(suite, [alike; 2], Mutant::LaterTies));
    for choice in [at(40, 16), at(399, 16), at(402, 16), at(2100, 512), at(3999, 512)] {
        let visible = KEYS.visible(choice.pos as u32);
        let name = format!("chain/one row's choice/{} of {visible} at {}", choice.top, choice.pos);
        suite.case(&name, |suite| same(suite, [choice; 2], Mutant::None));
    }
    let long = Choice { room: LONG, ..at(70_000, 512) };
    // Where few become many, too.
    for choice in [wide(3999), wide(8191), wide(8195), wide(9003), wide(20_002), wide(20_003), long] {
        let name = format!("chain/one row's choice/{} tokens of {}", choice.pos + 1, choice.room);
        suite.case(&name, |suite| same(suite, [choice; 2], Mutant::None));
    }
    let choice = at(3999, 512);
    for (name, choice) in [("few", choice), ("many", wide(9003)), ("more", wide(20_003))] {
        let alike = Choice { alike: true, ..choice };
        suite.case(&format!("chain/one row's choice/of {name} alike"), |suite| same(suite, [alike; 2], Mutant::None));
        suite.mutant(&format!("chain/one row's choice/later ties of {name}"), |suite| {
            same(suite, [alike; 2], Mutant::LaterTies)
        });
        let idle = Choice { idle: true, ..choice };
        suite.case(&format!("chain/one row's choice/of {name} around a row that is not live"), |suite| {
            same(suite, [idle; 2], Mutant::None)
        });
        let faulty = Choice { faulty: true, ..choice };
        suite.case(&format!("chain/one row's choice/of {name} with NaN"), |suite| {
            same(suite, [faulty; 2], Mutant::None)
        });
    }
    // The choice of few and of many; heads that take it from there and that wait for its end; more keys than few are, too.
    let past = [
        ("few", at(3999, 16)),
        ("many", long),
        ("of Flash, few", flash(3999, 16)),
        ("of Flash, more than few are", Choice { room: WIDE, ..flash(20_003, 16) }),
        ("of Flash, many", Choice { room: LONG, ..flash(70_000, 512) }),
    ];
    for (name, choice) in past {
        let name = format!("chain/one row's choice/past the key/{name}");
        suite.case(&name, |suite| past_the_key(suite, Choice { short: true, ..choice }));
        suite.mutant(&name, |suite| past_the_key(suite, choice));
    }
    suite.mutant("chain/one row's choice/another norm", |suite| {
        same(suite, [Choice { eps: EPS, ..choice }, choice], Mutant::None)
    });
    suite.mutant("chain/one row's choice/another position", |suite| {
        same(suite, [Choice { pos: choice.pos - 1, ..choice }, choice], Mutant::None)
    });
}

/// What is wrong, if it is of this kind.
fn only(verdict: Verdict, of: &str) -> Verdict {
    match verdict {
        Err(why) if !why.starts_with(of) => Ok(why),
        verdict => verdict,
    }
}

/// Whether a row may see more splits than a cluster of eight has blocks.
fn is_long(choice: Choice, room: usize) -> bool {
    !choice.select && choice.ratio != 0 && FLASH.window + room / choice.ratio > 640
}

/// That a step of all stages, whose key has room for so many positions, shares launches, and chooses beside its products.
fn shared_by_one(choice: Choice, room: usize, got: &Chosen) -> Verdict {
    let (select, usual) = (choice.select, choice.heads.dim == 512);
    let first = if select { "arc_matmul_follow_indexed" } else { "arc_matmul_follow_normed" };
    // Of many keys another kernel chooses. Where there are more splits than a cluster has blocks, there are larger ones.
    let many = select && room / KEYS.ratio > 2048;
    let long = is_long(choice, room);
    let index: &[&str] = match (select, many) {
        (false, _) => &[],
        (_, false) => &["index_choose"],
        (_, true) => &["index_choose_many"],
    };
    let attention = match usual {
        true if long => "latent_attend_long",
        true if many => "latent_attend_512",
        true => "latent_attend_tiles",
        false => "latent_attend_packed",
    };
    all([
        launches("arc_matmul_", &[first, "arc_matmul_follow"], &got.launched),
        launches("index_", index, &got.launched),
        launches("latent_attend", &[attention], &got.launched),
        launches("latent_merge", &[], &got.launched),
    ])
}

/// Around a step whose key has room for fewer keys than there are: the device says so, what heads read there is no number, and the
/// steps before and behind it leave what they do otherwise.
fn past_the_key(suite: &Suite, choice: Choice) -> Verdict {
    let run = |choice: Choice, together| {
        let mut gpu = suite.gpu(limits(1, choice.room)).map_err(|error| error.to_string())?;
        let left = choose(&mut gpu, choice, together).map_err(|error| error.to_string())?;
        Ok::<_, String>((left, gpu.fault()))
    };
    let (want, _) = run(Choice { short: false, ..choice }, false)?;
    let (got, fault) = run(choice, true)?;
    for i in [0, 2] {
        shared_by_one(choice, choice.room, &got[i])?;
        equal(&want[i].picks, &got[i].picks).map_err(|why| format!("picks of step {i}: {why}"))?;
        equal_bits(&want[i].out, &got[i].out).map_err(|why| format!("out of step {i}: {why}"))?;
        equal_or_nan(&want[i].y, &got[i].y).map_err(|why| format!("y of step {i}: {why}"))?;
    }
    let Some(Fault::Word(word)) = fault else { return Err(format!("the fault is {fault:?}")) };
    shared_by_one(choice, below(choice.room).limit() as usize, &got[1])?;
    match got[1].picks[0] == FAULT && got[1].out.iter().chain(&got[1].y).all(|x| x.is_nan()) {
        true => Ok(format!("fault word {word:#x}")),
        false => Err("something was read".to_owned()),
    }
}

/// The class of a shorter context than that of `room` positions.
fn below(room: usize) -> CtxClass {
    if CtxClass::of(room as u32) == CtxClass::Long { CtxClass::Medium } else { CtxClass::Short }
}

/// Three tokens' worth of stages, each in a step of its own or `together`; what each token left.
fn choose(dev: &mut Cuda, choice: Choice, together: bool) -> DeviceResult<Vec<Chosen>> {
    let mut rng = Rng(71);
    let parts = choice.heads.groups;
    let (class, dim) = (MemoryClass::Workspace, choice.heads.dim);
    let rows = match choice.ratio {
        0 => None,
        128 => Some(Compressor { ratio: 128, overlap: 1, dim }),
        _ => Some(Compressor { dim, ..KEYS }),
    };
    let indexed = choice.ratio == KEYS.ratio;
    let index = IndexConfig { heads: 64, dim: KEYS.dim, top: choice.top };
    let attention = LatentConfig { eps: choice.eps, ..choice.heads };
    let site = site(dev, &mut rng)?;
    let weight = dev.vector("norm", &rng.values(DIM, 1.0))?;
    let compressor = |dev: &mut Cuda, rng: &mut Rng, shape: Compressor| {
        let bias = dev.vector("bias", &rng.values(shape.ratio * shape.width(), 1.0))?;
        DeviceResult::Ok(CompressorWeights { bias, norm: dev.vector("norm", &rng.values(shape.dim, 1.0))? })
    };
    // Few angles, over and over, where there is room for many positions.
    let angles = rng.values(ROOM * 64, 1.0).repeat(choice.room.div_ceil(ROOM));
    let rope_table = dev.vector("rope", &angles)?;
    let layer = LatentLayer { rows, index: indexed.then_some((index, KEYS)), ..layer(attention, RANK, &rope_table) };
    let q_b = matrix(dev, Format::F16, 1, index.heads * index.dim, RANK)?;
    let w = LatentWeights {
        low: stacked(dev, [RANK, choice.heads.dim], DIM)?,
        q_norm: dev.vector("q_norm", &rng.values(RANK, 1.0))?,
        q_b: matrix(dev, Format::Q8_0, 1, choice.heads.q_dim(), RANK)?,
        kv_norm: dev.vector("kv_norm", &rng.values(choice.heads.dim, 1.0))?,
        sinks: dev.vector("sinks", &rng.values(choice.heads.heads, 1.0))?,
        pool: match rows {
            None => None,
            Some(rows) => Some(PoolWeights {
                matrix: matrix(dev, Format::F16, 1, layer.pool_dim(), DIM)?,
                rows: compressor(dev, &mut rng, rows)?,
                index: match indexed {
                    true => Some(IndexWeights { q_b, keys: compressor(dev, &mut rng, KEYS)? }),
                    false => None,
                },
            }),
        },
        out_a: matrix(dev, Format::Q8_0, parts, choice.heads.group_out, choice.heads.q_dim() / parts)?,
        out_b: matrix(dev, Format::Q8_0, 1, DIM, parts * choice.heads.group_out)?,
    };
    let mut ws = work(dev, &layer, 1, [layer.pool_dim().max(1), index.heads * index.dim, choice.top])?;
    let bytes = |dev: &mut Cuda, values: &[u8]| {
        let mut buf = dev.alloc::<u8>("test", MemoryClass::State, values.len())?;
        dev.write(&mut buf, values)?;
        DeviceResult::Ok(buf)
    };
    let pool_state = |dev: &mut Cuda, rng: &mut Rng, shape: Compressor, format: RowFormat| {
        let mut ring = dev.alloc::<f32>("test", MemoryClass::State, shape.ring_elements(1))?;
        dev.write(&mut ring, &rng.values(shape.ring_elements(1), 1.0))?;
        let mut rows = stored(rng, format, shape.dim, choice.room / BLOCK_TOKENS * shape.rows_per_block());
        let one = format.row_bytes(shape.dim);
        if choice.alike && format == RowFormat::Fp4 {
            (one..rows.len()).for_each(|i| rows[i] = rows[i % one]);
        }
        if choice.faulty && format == RowFormat::Fp4 {
            // No number is a scale of a block with this byte.
            rows.chunks_mut(one).step_by(700).for_each(|row| row[one - 1] = u8::MAX);
        }
        DeviceResult::Ok(PoolState { ring, rows: bytes(dev, &rows)? })
    };
    let mut state = LatentState {
        window: bytes(dev, &stored(&mut rng, RowFormat::Fp8, choice.heads.dim, choice.heads.ring()))?,
        rows: rows.map(|rows| pool_state(dev, &mut rng, rows, RowFormat::Fp8)).transpose()?,
        keys: indexed.then(|| pool_state(dev, &mut rng, KEYS, RowFormat::Fp4)).transpose()?,
    };
    let (y, mut streams) = output_and_streams(dev, &mut rng, 1)?;
    let (mut h, mut left_y) = (dev.alloc::<f32>("test", class, DIM)?, dev.alloc::<f32>("test", class, DIM)?);
    let gathered = choice.heads.q_dim().max(STREAMS * DIM);
    dev.finish(&ModelShape { vocab: 64, hidden: DIM, post_norms: false, gathered })?;
    let table = |live| delta(&[Run { pos: choice.pos, rows: 1, live }], choice.room);
    dev.stage(&table(true))?;
    dev.set_replay(false);
    let cfg = HcConfig { dim: DIM, iterations: 20, eps: 1e-6, norm_eps: 1e-6 };
    let mut left = Vec::new();
    for token in 0..3 {
        let live = token != 1 || !choice.idle;
        if choice.idle && token != 0 {
            let rows = table(live).rows;
            dev.stage(&StepDelta { rows, ..StepDelta::default() })?;
        }
        let mut stage = |dev: &mut Cuda, stage: usize| match stage {
            0 => {
                let norm = Norm { weight: &weight, eps: EPS };
                dev.hc_site(&mut h, &mut streams, Incoming::Output(&y), &site, &cfg, norm, 1)
            }
            1 => dev.attn_in(&mut ws, &h, &w, &layer, 1),
            2 => dev.attn_q_kv(&mut ws, &mut state, &w, &layer, choice.select, 1),
            3 if !choice.select => Ok(()),
            3 => dev.index_select(&mut ws, &state, &layer, 1),
            4 => dev.attn_latent(&mut ws, &mut state, &w, &layer, choice.select, 1),
            5 => dev.attn_out_a(&mut ws, &w, &layer, 1),
            _ => dev.attn_out_b(&mut left_y, &ws, &w, &layer, 1),
        };
        let ctx = if choice.short && token == 1 { below(choice.room) } else { CtxClass::of(choice.room as u32) };
        let key = StepKey::new(1, 256, ctx, Part::Forward);
        let mut launched = Vec::new();
        if together {
            dev.step(key, &mut |dev| (0..7).try_for_each(|i| stage(dev, i)))?;
            launched.extend(dev.launched());
        } else {
            // The first output projection reads what the attention leaves within a step.
            for mut stages in [0..1, 1..2, 2..3, 3..4, 4..6, 6..7] {
                dev.step(key, &mut |dev| stages.try_for_each(|i| stage(dev, i)))?;
                launched.extend(dev.launched());
            }
        }
        // What comes of a row that is not live is nobody's matter.
        if !live {
            continue;
        }
        let read = |dev: &mut Cuda, buf, len| {
            let mut values = vec![0.0; len];
            dev.read(buf, &mut values)?;
            DeviceResult::Ok(values)
        };
        let mut picks = vec![0; if choice.select { choice.top } else { 0 }];
        dev.read(&ws.picks, &mut picks)?;
        let queries = if choice.select { index.heads * index.dim } else { 0 };
        let bytes = |dev: &mut Cuda, buf, rows: usize| {
            let mut bytes = vec![0; rows * RowFormat::Fp8.row_bytes(dim)];
            dev.read(buf, &mut bytes)?;
            DeviceResult::Ok(bytes)
        };
        let pooled = match (&state.rows, rows) {
            (Some(state), Some(shape)) => bytes(dev, &state.rows, choice.room / BLOCK_TOKENS * shape.rows_per_block())?,
            _ => Vec::new(),
        };
        let kept = [bytes(dev, &state.window, choice.heads.ring())?, pooled];
        left.push(Chosen {
            low: read(dev, &ws.low, RANK + choice.heads.dim)?,
            q: read(dev, &ws.q, choice.heads.q_dim())?,
            index_q: read(dev, &ws.index_q, queries)?,
            picks,
            out: read(dev, &ws.out, choice.heads.q_dim())?,
            y: read(dev, &left_y, DIM)?,
            kept,
            launched,
            late: dev.late_blocks(),
        });
    }
    Ok(left)
}
