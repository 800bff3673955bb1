//! Hyper-connection sites and the head's merge: bits of streams, mixing values and block inputs.

use arc_device::error::Result as DeviceResult;
use arc_device::ops::hc::{HcConfig, MIXES, STREAMS};
use arc_device::ops_v4::{HcHead, HcSite, Incoming, Streams};
use arc_device::step::{Row, StepDelta, row_flags};
use arc_device::{Alloc, Landing, MemoryClass, ModelShape, Norm, Readback, Steps};

use crate::compare::{all, equal_or_nan};
use crate::inputs::Rng;
use crate::suite::{Pair, Suite, Verdict, limits, stage_key};

/// What the streams take in.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Take {
    Embedding,
    Output,
    Nothing,
}

/// Which values meet.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    /// As in a network.
    Usual,
    /// Mixing values of some hundreds: sigmoids of 0 and 1, a matrix of near zeros and ones.
    Extreme,
    /// Streams of zero, no base: every mixing value is the same.
    Flat,
    /// A NaN in one row and an infinity in another.
    Faulty,
    /// Denormals and numbers whose squares overflow.
    Edge,
}

#[derive(Clone)]
struct Inputs {
    dim: usize,
    rows: usize,
    iterations: usize,
    take: Take,
    x: Vec<f32>,
    mixing: Vec<f32>,
    y: Vec<f32>,
    mix: Vec<f32>,
    base: Vec<f32>,
    scale: Vec<f32>,
    weight: Vec<f32>,
}

impl Inputs {
    fn new(dim: usize, rows: usize, iterations: usize, take: Take, values: Values) -> Inputs {
        let mut rng = Rng((dim * 31 + rows * 7 + iterations) as u64);
        let (spread, strength) = match values {
            Values::Extreme => (30.0, 1.0),
            Values::Flat => (0.0, 0.02),
            _ => (1.0, 0.02),
        };
        let scale = if values == Values::Extreme { 40.0 } else { 1.0 };
        let mut inputs = Inputs {
            dim,
            rows,
            iterations,
            take,
            x: rng.values(rows * STREAMS * dim, spread),
            mixing: rng.values(rows * MIXES, 0.5),
            y: rng.values(rows * dim, spread),
            mix: rng.values(MIXES * STREAMS * dim, strength),
            base: if values == Values::Flat { vec![0.0; MIXES] } else { rng.values(MIXES, scale) },
            scale: (0..3).map(|_| scale * (1.0 + 0.5 * rng.unit())).collect(),
            weight: (0..dim).map(|_| 1.0 + 0.5 * rng.unit()).collect(),
        };
        match values {
            Values::Faulty => {
                inputs.x[dim / 2] = f32::NAN;
                inputs.y[dim * (rows - 1)] = f32::INFINITY;
            }
            Values::Edge => {
                for (i, x) in inputs.x.iter_mut().enumerate() {
                    *x *= [1e-40, 1e-20, 1.0, 3e19][(i / dim) % 4];
                }
                inputs.y.iter_mut().for_each(|y| *y *= 1e-41);
            }
            _ => {}
        }
        inputs
    }

    fn config(&self) -> HcConfig {
        HcConfig { dim: self.dim, iterations: self.iterations, eps: 1e-6, norm_eps: 1e-6 }
    }
}

/// What a site leaves.
#[derive(Clone)]
struct Left {
    x: Vec<f32>,
    mixing: Vec<f32>,
    h: Vec<f32>,
}

fn buffer<D: Alloc + Readback>(dev: &mut D, values: &[f32]) -> DeviceResult<D::Buf<f32>> {
    let mut buf = dev.alloc("values", MemoryClass::Workspace, values.len())?;
    dev.write(&mut buf, values)?;
    Ok(buf)
}

fn read<D: Readback>(dev: &mut D, buf: &D::Buf<f32>, len: usize) -> DeviceResult<Vec<f32>> {
    let mut out = vec![0.0; len];
    dev.read(buf, &mut out)?;
    Ok(out)
}

/// One site, and two more that take the input of the one before as output: the mixing values are read too. Or the head.
fn run<D: Steps + Alloc + Readback + Landing>(dev: &mut D, inputs: &Inputs, head: bool) -> DeviceResult<Vec<Left>> {
    let (rows, dim, cfg) = (inputs.rows, inputs.dim, inputs.config());
    let row = Row { flags: row_flags::PADDING | row_flags::HEAD, ..Row::default() };
    dev.stage(&StepDelta { rows: Some(vec![row; rows]), ..StepDelta::default() })?;
    let mut streams = Streams { x: buffer(dev, &inputs.x)?, mixing: buffer(dev, &inputs.mixing)? };
    let (y, mut h) = (buffer(dev, &inputs.y)?, buffer(dev, &vec![7.0; rows * dim])?);
    let weight = buffer(dev, &inputs.weight)?;
    let norm = Norm { weight: &weight, eps: 1e-5 };
    let mut left = Vec::new();
    if head {
        let n = STREAMS * STREAMS * dim;
        let site = HcHead {
            mix: buffer(dev, &inputs.mix[..n])?,
            base: buffer(dev, &inputs.base[..STREAMS])?,
            scale: buffer(dev, &inputs.scale[..1])?,
        };
        dev.step(stage_key(rows), &mut |dev| dev.hc_head(&mut h, &mut streams, &y, &site, &cfg, rows))?;
    } else {
        let site = HcSite {
            mix: buffer(dev, &inputs.mix)?,
            base: buffer(dev, &inputs.base)?,
            scale: buffer(dev, &inputs.scale)?,
        };
        dev.step(stage_key(rows), &mut |dev| {
            let incoming = match inputs.take {
                Take::Embedding => Incoming::Embedding(&y),
                Take::Output => Incoming::Output(&y),
                Take::Nothing => Incoming::Nothing,
            };
            dev.hc_site(&mut h, &mut streams, incoming, &site, &cfg, norm, rows)
        })?;
        left.push(of(dev, &streams, &h, rows, dim)?);
        // The second site may put off what the third needs of its mixing values.
        let mut other = buffer(dev, &vec![7.0; rows * dim])?;
        dev.step(stage_key(rows), &mut |dev| {
            dev.hc_site(&mut other, &mut streams, Incoming::Output(&h), &site, &cfg, norm, rows)?;
            dev.hc_site(&mut h, &mut streams, Incoming::Output(&other), &site, &cfg, norm, rows)
        })?;
    }
    left.push(of(dev, &streams, &h, rows, dim)?);
    Ok(left)
}

fn of<D: Readback>(dev: &mut D, streams: &Streams<D>, h: &D::Buf<f32>, rows: usize, dim: usize) -> DeviceResult<Left> {
    Ok(Left {
        x: read(dev, &streams.x, rows * STREAMS * dim)?,
        mixing: read(dev, &streams.mixing, rows * MIXES)?,
        h: read(dev, h, rows * dim)?,
    })
}

fn pair(suite: &Suite, dim: usize, rows: usize) -> Pair {
    let mut pair = suite.pair(limits(rows, 32));
    pair.finish(&model(dim));
    pair
}

fn model(hidden: usize) -> ModelShape {
    ModelShape { vocab: 64, hidden, post_norms: false, gathered: hidden }
}

fn compare(want: &[Left], got: &[Left]) -> Verdict {
    let parts = want.iter().zip(got).flat_map(|(want, got)| {
        [("x", &want.x, &got.x), ("mixing", &want.mixing, &got.mixing), ("h", &want.h, &got.h)]
    });
    all(parts.map(|(name, want, got)| equal_or_nan(want, got).map_err(|why| format!("{name}: {why}"))))
}

fn both(suite: &Suite, inputs: &Inputs, head: bool) -> Result<[Vec<Left>; 2], String> {
    let mut pair = pair(suite, inputs.dim, inputs.rows);
    let want = run(&mut pair.cpu, inputs, head).map_err(|error| error.to_string())?;
    let got = run(&mut pair.gpu, inputs, head).map_err(|error| error.to_string())?;
    Ok([want, got])
}

/// A wrong expectation that the comparison must refuse.
fn mutant(suite: &Suite, change: impl Fn(&mut Inputs, bool, &mut Vec<Left>)) -> Verdict {
    let mut inputs = Inputs::new(4096, 3, 3, Take::Output, Values::Usual);
    let mut pair = pair(suite, inputs.dim, inputs.rows);
    let got = run(&mut pair.gpu, &inputs, false).map_err(|error| error.to_string())?;
    change(&mut inputs, true, &mut Vec::new());
    let mut want = run(&mut pair.cpu, &inputs, false).map_err(|error| error.to_string())?;
    change(&mut inputs, false, &mut want);
    // The second site follows from the first, right or wrong.
    compare(&want[..1], &got[..1])
}

fn comb_of(mixing: &mut [f32], change: impl Fn(&mut [f32])) {
    mixing.chunks_exact_mut(MIXES).for_each(|row| change(&mut row[2 * STREAMS..]));
}

fn transpose<T>(matrix: &mut [T]) {
    for j in 0..STREAMS {
        for k in 0..j {
            matrix.swap(STREAMS * j + k, STREAMS * k + j);
        }
    }
}

/// Every plan of the GPU: few rows of the production width, many, and other widths.
pub fn cases(suite: &mut Suite) {
    use Take::{Embedding, Nothing, Output};
    let mut sites = Vec::new();
    for rows in [1, 2, 3, 8, 9, 64, 100, 256] {
        sites.push((4096, rows, 20, Output, Values::Usual));
    }
    for values in [Values::Extreme, Values::Flat, Values::Faulty, Values::Edge] {
        for (dim, rows) in [(4096, 2), (4096, 12), (256, 3)] {
            sites.push((dim, rows, 20, Output, values));
        }
    }
    for take in [Embedding, Nothing] {
        for (dim, rows) in [(4096, 1), (4096, 40), (96, 5)] {
            sites.push((dim, rows, 20, take, Values::Usual));
        }
    }
    for iterations in [1, 2, 3] {
        sites.push((4096, 2, iterations, Output, Values::Usual));
    }
    for dim in [64, 1024, 1025, 2600, 7168] {
        sites.push((dim, 5, 20, Output, Values::Usual));
    }
    for (dim, rows, iterations, take, values) in sites {
        let name = format!("hc/site/{dim}/{rows} rows/{take:?}/{values:?}/{iterations}");
        suite.case(&name, |suite| {
            let inputs = Inputs::new(dim, rows, iterations, take, values);
            let [want, got] = both(suite, &inputs, false)?;
            compare(&want, &got)
        });
    }
    for (dim, rows) in [(4096, 1), (4096, 8), (4096, 21), (7168, 3), (96, 4)] {
        suite.case(&format!("hc/head/{dim}/{rows} rows"), |suite| {
            let [want, got] = both(suite, &Inputs::new(dim, rows, 1, Output, Values::Usual), true)?;
            compare(&want, &got)
        });
    }
    suite.case("hc/site/a row alone and among others", invariant);
    suite.mutant("hc/post without its factor 2", |suite| {
        mutant(suite, |_, before, want| {
            if let ([left, ..], false) = (&mut want[..], before) {
                left.mixing
                    .chunks_exact_mut(MIXES)
                    .for_each(|row| row[STREAMS..2 * STREAMS].iter_mut().for_each(|p| *p *= 0.5));
            }
        })
    });
    suite.mutant("hc/comb transposed", |suite| {
        mutant(suite, |_, before, want| {
            if let ([left, ..], false) = (&mut want[..], before) {
                comb_of(&mut left.mixing, transpose);
            }
        })
    });
    suite.mutant("hc/rows before columns", |suite| {
        mutant(suite, |inputs, before, want| {
            // Transposed raw values are normalised along the other axis first; the result is transposed back.
            let n = STREAMS * inputs.dim;
            let mut rows: Vec<Vec<f32>> = inputs.mix.chunks_exact(n).map(<[f32]>::to_vec).collect();
            transpose(&mut rows[2 * STREAMS..]);
            inputs.mix = rows.concat();
            transpose(&mut inputs.base[2 * STREAMS..]);
            if let ([left, ..], false) = (&mut want[..], before) {
                comb_of(&mut left.mixing, transpose);
            }
        })
    });
    suite.mutant("hc/one iteration less", |suite| {
        mutant(suite, |inputs, before, _| inputs.iterations -= usize::from(before))
    });
    suite.measure("hc/site", perf);
}

/// Row 0 of a step has the same bits at every row count.
fn invariant(suite: &Suite) -> Verdict {
    let mut wanted: Option<Vec<Left>> = None;
    for rows in [1, 2, 8, 9, 33, 130, 256] {
        let mut inputs = Inputs::new(4096, rows, 20, Take::Output, Values::Usual);
        let one = Inputs::new(4096, 1, 20, Take::Output, Values::Usual);
        inputs.x[..one.x.len()].copy_from_slice(&one.x);
        inputs.mixing[..one.mixing.len()].copy_from_slice(&one.mixing);
        inputs.y[..one.y.len()].copy_from_slice(&one.y);
        (inputs.mix, inputs.base, inputs.scale, inputs.weight) = (one.mix, one.base, one.scale, one.weight);
        let mut pair = pair(suite, 4096, rows);
        let mut got = run(&mut pair.gpu, &inputs, false).map_err(|error| error.to_string())?;
        for left in &mut got {
            left.x.truncate(STREAMS * 4096);
            left.mixing.truncate(MIXES);
            left.h.truncate(4096);
        }
        compare(wanted.get_or_insert(got.clone()), &got).map_err(|why| format!("{rows} rows: {why}"))?;
    }
    Ok("7 row counts".to_owned())
}

fn perf(suite: &Suite) -> Verdict {
    let mut text = Vec::new();
    for rows in [1, 2, 8, 32, 256, 2048] {
        let mut gpu = suite.gpu(limits(rows, 32)).map_err(|error| error.to_string())?;
        gpu.finish(&model(4096)).map_err(|error| error.to_string())?;
        text.push(format!("{rows} rows: {:.2} us", site_us(&mut gpu, rows).map_err(|error| error.to_string())?));
    }
    Ok(text.join(", "))
}

fn site_us(gpu: &mut arc_device::cuda::Cuda, rows: usize) -> DeviceResult<f64> {
    let inputs = Inputs::new(4096, rows, 20, Take::Output, Values::Usual);
    let row = Row { flags: row_flags::PADDING, ..Row::default() };
    gpu.stage(&StepDelta { rows: Some(vec![row; rows]), ..StepDelta::default() })?;
    let mut streams = Streams { x: buffer(gpu, &inputs.x)?, mixing: buffer(gpu, &inputs.mixing)? };
    let (y, mut h) = (buffer(gpu, &inputs.y)?, buffer(gpu, &inputs.y)?);
    let weight = buffer(gpu, &inputs.weight)?;
    // As many sites as a model has: their matrices come from memory once a step.
    let mut sites = Vec::new();
    for _ in 0..86 {
        let (mix, base) = (buffer(gpu, &inputs.mix)?, buffer(gpu, &inputs.base)?);
        sites.push(HcSite { mix, base, scale: buffer(gpu, &inputs.scale)? });
    }
    let (norm, cfg) = (Norm { weight: &weight, eps: 1e-6 }, inputs.config());
    let us = gpu.bench(stage_key(rows), 1, &mut |dev| {
        use arc_device::ops_v4::OpsV4;
        sites
            .iter()
            .try_for_each(|site| dev.hc_site(&mut h, &mut streams, Incoming::Output(&y), site, &cfg, norm, rows))
    })?;
    Ok(us / sites.len() as f64)
}
