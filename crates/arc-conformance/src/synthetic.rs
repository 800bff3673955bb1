//! Rows of random weights: made by the GPU where it keeps them, they are those that the host makes.

use arc_device::error::Result as DeviceResult;
use arc_device::format::Format;
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::ops::synthetic::{SyntheticRows, tensor_key};
use arc_device::{Alloc, Landing, MemoryClass, ModelShape, Readback, Steps};

use crate::compare::equal_bits;
use crate::moe::{VOCAB, table};
use crate::suite::{Suite, Verdict, limits, stage_key};

const ROWS: usize = 64;

/// Every format that has such rows, in widths of one block and of many.
pub fn cases(suite: &mut Suite) {
    for format in Format::ALL.into_iter().filter(|&format| SyntheticRows::has(format)) {
        for cols in [256, 1024, 7168] {
            let name = format!("synthetic/{}/{cols}", format.name());
            suite.case(&name, |suite| check(suite, format, cols, 3));
            suite.mutant(&name, |suite| check(suite, format, cols, 4));
        }
    }
}

/// Rows of a table of two parts that begin at some row of their tensor, as embeddings. `seed`: the GPU's; the CPU's is 3.
fn check(suite: &Suite, format: Format, cols: usize, seed: u64) -> Verdict {
    let mut pair = suite.pair(limits(ROWS, 32));
    let want = rows(&mut pair.cpu, format, cols, 3).map_err(|error| error.to_string())?;
    let got = rows(&mut pair.gpu, format, cols, seed).map_err(|error| error.to_string())?;
    equal_bits(&want, &got)
}

fn rows<D: Steps + Alloc + Readback + Landing>(
    dev: &mut D,
    format: Format,
    cols: usize,
    seed: u64,
) -> DeviceResult<Vec<f32>> {
    let mean = if format.block_len() == 1 { 0.7 } else { 0.0 };
    let made = SyntheticRows { seed: seed << 33, tensor: tensor_key("table"), first_row: 1_000_000, mean, std: 0.3 };
    let part =
        |first: usize, rows: usize| MatrixSource { format, rows, cols, bytes: Bytes::Synthetic(made.skip(first)) };
    let embedding = dev.matrix("table", &[part(0, 24), part(24, VOCAB - 24)])?;
    let mut out = dev.alloc("out", MemoryClass::Workspace, ROWS * cols)?;
    dev.finish(&ModelShape { vocab: VOCAB, hidden: cols, post_norms: false, gathered: 0 })?;
    dev.stage(&table(ROWS))?;
    dev.step(stage_key(ROWS), &mut |dev| dev.embed(&mut out, &embedding, 1.0, ROWS))?;
    let mut values = vec![0.0; ROWS * cols];
    dev.read(&out, &mut values)?;
    Ok(values)
}
