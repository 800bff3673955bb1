//! Stages behind one another: what a kernel leaves for the products that follow, the bits of a stage by itself do not show.

use arc_device::error::Result as DeviceResult;
use arc_device::format::Format;
use arc_device::ops::hc::{HcConfig, MIXES, STREAMS};
use arc_device::ops::latent::{LatentConfig, RowFormat};
use arc_device::ops::quant::Inputs;
use arc_device::ops_v4::{
    CompressorWeights, HcSite, Incoming, LatentLayer, LatentWeights, LatentWork, OpsV4, PoolWeights, Streams,
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

/// A site, then the first products of attention, which read what it left. Of int8 weights exact, of floats near.
pub fn cases(suite: &mut Suite) {
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

fn run<D: OpsV4 + Alloc + Landing + Readback + Steps>(
    dev: &mut D,
    rows: usize,
    pool: Format,
    eps: f32,
) -> DeviceResult<[Vec<f32>; 2]> {
    let mut rng = Rng(31);
    let class = MemoryClass::Workspace;
    let site = HcSite {
        mix: dev.vector("mix", &rng.values(MIXES * STREAMS * DIM, 0.02))?,
        base: dev.vector("base", &rng.values(MIXES, 1.0))?,
        scale: dev.vector("scale", &[1.0, 0.8, 1.5])?,
    };
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
    let (mut y, mut h) = (floats(dev, rows * DIM)?, floats(dev, rows * DIM)?);
    let mut streams = Streams { x: floats(dev, rows * STREAMS * DIM)?, mixing: floats(dev, rows * MIXES)? };
    dev.write(&mut y, &rng.values(rows * DIM, 1.0))?;
    dev.write(&mut streams.x, &rng.values(rows * STREAMS * DIM, 1.0))?;
    dev.write(&mut streams.mixing, &rng.values(rows * MIXES, 0.5))?;
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
