//! What a draft block reads: embeddings of the tokens that follow, and streams made of them.

use arc_device::error::Result as DeviceResult;
use arc_device::format::Format;
use arc_device::ops::hc::{HcConfig, STREAMS};
use arc_device::ops::quant::Inputs;
use arc_device::ops_v4::{DraftWeights, OpsV4, Streams};
use arc_device::step::{Row, StepDelta, row_flags};
use arc_device::{Alloc, Landing, MemoryClass, ModelShape, Readback, Steps};

use crate::compare::{equal_bits, within};
use crate::inputs::Rng;
use crate::moe::{self, VOCAB};
use crate::rows::{self, Run};
use crate::suite::{Suite, Verdict, limits, stage_key};

/// Both stages, over few rows and many.
pub fn cases(suite: &mut Suite) {
    for rows in [1, 5, 64, 250] {
        suite.case(&format!("draft/embed_next/{rows}"), |suite| embed_next(suite, rows, 0));
        for (format, inputs) in [(Format::Q8_0, Inputs::Int8), (Format::Fp8, Inputs::Fp8), (Format::Bf16, Inputs::F32)]
        {
            let name = format!("draft/draft_in/{}/{rows}", format.name());
            suite.case(&name, |suite| draft_in(suite, format, inputs, rows));
        }
    }
    suite.mutant("draft/embed_next", |suite| embed_next(suite, 64, 1));
}

/// Runs of rows of one sequence, whose last is followed by a token that the table names, by none, or by one out of range.
/// `skew`: what the GPU's table adds to it.
fn embed_next(suite: &Suite, n: usize, skew: u32) -> Verdict {
    const DIM: usize = 1024;
    fn left<D: Steps + Alloc + Readback + Landing>(dev: &mut D, table: &StepDelta, n: usize) -> DeviceResult<Vec<f32>> {
        let embedding = moe::matrix(dev, Format::Q8_0, 1, VOCAB, DIM)?;
        let mut out = dev.alloc("out", MemoryClass::Workspace, n * DIM)?;
        dev.finish(&ModelShape { vocab: VOCAB, hidden: DIM, post_norms: false, gathered: DIM })?;
        dev.stage(table)?;
        dev.step(stage_key(n), &mut |dev| dev.embed_next(&mut out, &embedding, n))?;
        let mut values = vec![0.0; n * DIM];
        dev.read(&out, &mut values)?;
        Ok(values)
    }
    let mut rng = Rng(n as u64);
    let mut runs = Vec::new();
    let mut left_rows = n;
    while left_rows > 0 {
        let rows = (1 + rng.below(7)).min(left_rows);
        runs.push(Run { pos: rng.below(20), rows, live: rng.below(5) > 0 });
        left_rows -= rows;
    }
    let mut table = rows::delta(&runs, 32);
    for row in table.rows.iter_mut().flatten() {
        row.token = rng.below(VOCAB) as u32;
        // Only of the last row of a run it is looked at.
        row.target = [rng.below(VOCAB) as u32, VOCAB as u32, u32::MAX][rng.below(8).saturating_sub(5)];
    }
    let mut pair = suite.pair(limits(n, 32));
    let want = left(&mut pair.cpu, &table, n).map_err(|error| error.to_string())?;
    for row in table.rows.iter_mut().flatten() {
        row.target = row.target.saturating_add(skew);
    }
    let got = left(&mut pair.gpu, &table, n).map_err(|error| error.to_string())?;
    equal_bits(&want, &got)
}

fn draft_in(suite: &Suite, format: Format, inputs: Inputs, rows: usize) -> Verdict {
    const DIM: usize = 1024;
    fn left<D: OpsV4 + Steps + Alloc + Readback + Landing>(
        dev: &mut D,
        format: Format,
        inputs: Inputs,
        rows: usize,
    ) -> DeviceResult<Vec<f32>> {
        let mut rng = Rng(rows as u64);
        let mut norm =
            |dev: &mut D| dev.vector("norm", &rng.values(DIM, 0.2).iter().map(|x| 1.0 + x).collect::<Vec<_>>());
        let weights = DraftWeights {
            embed_norm: norm(dev)?,
            stream_norm: norm(dev)?,
            embed: moe::matrix(dev, format, 1, DIM, DIM)?,
            stream: moe::matrix(dev, format, 1, DIM, DIM)?,
        };
        let mut buffer = |dev: &mut D, len: usize| -> DeviceResult<D::Buf<f32>> {
            let mut buf = dev.alloc("values", MemoryClass::Workspace, len)?;
            dev.write(&mut buf, &rng.values(len, 1.0))?;
            Ok(buf)
        };
        let mut streams = Streams { x: buffer(dev, rows * STREAMS * DIM)?, mixing: buffer(dev, rows * 32)? };
        let e = buffer(dev, rows * DIM)?;
        dev.finish(&ModelShape { vocab: VOCAB, hidden: DIM, post_norms: false, gathered: STREAMS * DIM })?;
        let padding = Row { flags: row_flags::PADDING, ..Row::default() };
        dev.stage(&StepDelta { rows: Some(vec![padding; rows]), ..StepDelta::default() })?;
        let cfg = HcConfig { dim: DIM, iterations: 1, eps: 1e-6, norm_eps: 1e-6 };
        dev.step(stage_key(rows), &mut |dev| dev.draft_in(&mut streams, &e, &weights, &cfg, inputs, rows))?;
        let mut values = vec![0.0; rows * STREAMS * DIM];
        dev.read(&streams.x, &mut values)?;
        Ok(values)
    }
    let mut pair = suite.pair(limits(rows, 32));
    let want = left(&mut pair.cpu, format, inputs, rows).map_err(|error| error.to_string())?;
    let got = left(&mut pair.gpu, format, inputs, rows).map_err(|error| error.to_string())?;
    if format == Format::Q8_0 { equal_bits(&want, &got) } else { within(&want, &got, 1e-4, 1e-4) }
}
