//! DeepSeek-V4's attention: rows, rings, pooled rows and choices have the CPU's bits; what heads read is bounded.

use std::ops::Range;

use arc_device::cuda::Cuda;
use arc_device::error::Fault;
use arc_device::format::Format;
use arc_device::ops::compress::Compressor;
use arc_device::ops::index::{FAULT, IndexConfig};
use arc_device::ops::latent::cuda::Mutant;
use arc_device::ops::latent::{LatentConfig, ROPE_DIM, RowFormat};
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::ops::quant::Inputs;
use arc_device::ops_v4::{
    CompressorWeights, IndexWeights, LatentLayer, LatentState, LatentWeights, LatentWork, OpsV4, PoolState, PoolWeights,
};
use arc_device::step::{BLOCK_TOKENS, CtxClass, Limits, Part, StepKey};
use arc_device::{Alloc, Landing, MemoryClass, ModelShape, Readback, Steps};

use crate::compare::{all, equal, equal_bits, within};
use crate::inputs::Rng;
use crate::moe;
use crate::rows::{Run, context, delta};
use crate::suite::{Suite, Verdict};

const HIDDEN: usize = 256;
const Q_RANK: usize = 128;

/// What a case fixes.
#[derive(Debug, Clone)]
struct Case {
    att: LatentConfig,
    rows: Option<Compressor>,
    index: Option<(IndexConfig, Compressor)>,
    row_format: RowFormat,
    key_format: RowFormat,
    /// Of the first output projection.
    out_a: Format,
    runs: Vec<Run>,
    ctx: CtxClass,
    /// Some scores are NaN.
    faulty: bool,
    /// The step runs in two parts.
    parts: bool,
}

impl Case {
    fn rows(&self) -> usize {
        self.runs.iter().map(|run| run.rows).sum()
    }

    /// Positions that every sequence has room for.
    fn context(&self) -> usize {
        context(&self.runs)
    }

    fn limits(&self) -> Limits {
        let (slots, context, rows) = (self.runs.len(), self.context(), self.rows());
        Limits { slots, rows, heads: rows, context, blocks: slots * context / BLOCK_TOKENS, ring: 4 }
    }

    /// Whether rows may see more than an indexer chooses.
    fn select(&self) -> bool {
        let most = self.ctx.limit() as usize;
        self.index.is_some_and(|(index, keys)| most / keys.ratio > index.top)
    }

    /// Positions of the table's rows; `None` where inert.
    fn positions(&self) -> impl Iterator<Item = Option<usize>> + '_ {
        self.runs.iter().flat_map(|run| (0..run.rows).map(|i| run.live.then_some(run.pos + i)))
    }
}

/// What a device left.
struct Left {
    kv: Vec<f32>,
    index_q: Vec<f32>,
    picks: Vec<u32>,
    out: Vec<f32>,
    grouped: Vec<f32>,
    window: Vec<u8>,
    pools: Vec<(Vec<f32>, Vec<u8>)>,
    /// Bytes that were read of window and pools.
    kv_bytes: u64,
}

/// Stored rows with plain numbers in them.
pub(crate) fn stored(rng: &mut Rng, format: RowFormat, dim: usize, rows: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(rows * format.row_bytes(dim));
    for row in 0..rows {
        match format {
            RowFormat::F32 | RowFormat::RoundedFp8 | RowFormat::RoundedFp4 => {
                for _ in 0..dim {
                    bytes.extend(((rng.next() >> 40) as f32 / (1 << 23) as f32 - 1.0).to_le_bytes());
                }
            }
            RowFormat::Fp8 => {
                let nope = dim - ROPE_DIM;
                bytes.extend((0..nope).map(|_| rng.next() as u8).map(|b| if b & 0x7f == 0x7f { b ^ 1 } else { b }));
                for _ in 0..ROPE_DIM {
                    bytes.extend((((rng.next() as u16) & 0x807f) | 0x3f00).to_le_bytes());
                }
                bytes.extend((0..nope / 64).map(|_| 119 + rng.below(3) as u8));
                bytes.resize((row + 1) * format.row_bytes(dim), 0);
            }
            RowFormat::Fp4 => {
                let zeros = row % 11 == 3;
                bytes.extend((0..dim / 2).map(|i| if zeros && i / 16 == row % 4 { 0 } else { rng.next() as u8 }));
                // A few rows whose blocks span more than their sum can hold exactly.
                let wide = if row % 13 == 5 { 20 } else { 3 };
                bytes.extend((0..dim / 32).map(|_| 120 + rng.below(wide) as u8));
            }
        }
    }
    bytes
}

/// Random Q8_0 of the size of a matrix.
fn weights(rng: &mut Rng, rows: usize, cols: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(rows * cols / 32 * 34);
    for _ in 0..rows * cols / 32 {
        // 2^-9, as f16.
        bytes.extend(0x1800u16.to_le_bytes());
        bytes.extend((0..4).flat_map(|_| rng.next().to_le_bytes()));
    }
    bytes
}

fn parts<'a>(bytes: &'a [Vec<u8>], cols: usize) -> Vec<MatrixSource<'a>> {
    let source = |bytes: &'a Vec<u8>| MatrixSource {
        format: Format::Q8_0,
        rows: bytes.len() / 34 * 32 / cols,
        cols,
        bytes: Bytes::Stored(bytes),
    };
    bytes.iter().map(source).collect()
}

/// A layer's weights, state and workspace on a device, for some rows of the case's table, which are staged; then `body`.
fn with_layer<D: OpsV4 + Alloc + Landing + Readback + Steps, T>(
    dev: &mut D,
    case: &Case,
    part: Range<usize>,
    body: impl FnOnce(
        &mut D,
        &mut LatentWork<D>,
        &mut LatentState<D>,
        &LatentWeights<D>,
        &LatentLayer<'_, D>,
    ) -> Result<T, String>,
) -> Result<T, String> {
    let (att, rows, mut rng) = (case.att, part.len(), Rng(11));
    // Inputs of all rows are drawn, so that a row has its own whichever others run.
    let inputs =
        |rng: &mut Rng, dim: usize| rng.values(case.rows() * dim, 1.0)[part.start * dim..part.end * dim].to_vec();
    let blocks = case.limits().blocks;
    let slots = case.runs.len();
    let near_one = |rng: &mut Rng, n: usize| (0..n).map(|_| 1.0 + 0.2 * rng.normal()).collect::<Vec<f32>>();
    let matrix = |dev: &mut D, rng: &mut Rng, n_parts: usize, rows: usize, cols: usize| {
        let bytes: Vec<Vec<u8>> = (0..n_parts).map(|_| weights(rng, rows, cols)).collect();
        dev.matrix("test", &parts(&bytes, cols)).map_err(text)
    };
    let compressor = |dev: &mut D, rng: &mut Rng, shape: Compressor| {
        let bias = dev.vector("bias", &rng.values(shape.ratio * shape.width(), 1.0)).map_err(text)?;
        let norm = dev.vector("norm", &near_one(rng, shape.dim)).map_err(text)?;
        Ok::<_, String>(CompressorWeights { bias, norm })
    };
    let pool = match case.rows {
        None => None,
        Some(shape) => {
            let rows_w = compressor(dev, &mut rng, shape)?;
            let index = match case.index {
                None => None,
                Some((index, keys)) => {
                    let q_b = matrix(dev, &mut rng, 1, index.heads * index.dim, Q_RANK)?;
                    Some(IndexWeights { q_b, keys: compressor(dev, &mut rng, keys)? })
                }
            };
            Some(PoolWeights { matrix: matrix(dev, &mut rng, 1, 32, HIDDEN)?, rows: rows_w, index })
        }
    };
    let w = LatentWeights {
        low: matrix(dev, &mut rng, 1, Q_RANK + att.dim, HIDDEN)?,
        q_norm: dev.vector("q_norm", &near_one(&mut rng, Q_RANK)).map_err(text)?,
        q_b: matrix(dev, &mut rng, 1, att.q_dim(), Q_RANK)?,
        kv_norm: dev.vector("kv_norm", &near_one(&mut rng, att.dim)).map_err(text)?,
        sinks: dev.vector("sinks", &rng.values(att.heads, 2.0)).map_err(text)?,
        pool,
        out_a: match case.out_a {
            Format::Q8_0 => matrix(dev, &mut rng, att.groups, att.group_out, att.q_dim() / att.groups)?,
            other => moe::matrix(dev, other, att.groups, att.group_out, att.q_dim() / att.groups).map_err(text)?,
        },
        out_b: matrix(dev, &mut rng, 1, 32, att.groups * att.group_out)?,
    };
    let angles: Vec<f32> = (0..case.context() * ROPE_DIM / 2)
        .flat_map(|i| {
            let angle = (i / (ROPE_DIM / 2)) as f32 * 0.9f32.powi((i % (ROPE_DIM / 2)) as i32);
            [angle.cos(), angle.sin()]
        })
        .collect();
    let rope_table = dev.vector("rope", &angles).map_err(text)?;
    let layer = LatentLayer {
        attention: att,
        q_rank: Q_RANK,
        rows: case.rows,
        index: case.index,
        row_format: case.row_format,
        key_format: case.key_format,
        inputs: Inputs::Int8,
        rope_table: &rope_table,
    };
    let index_q = case.index.map_or(1, |(index, _)| index.heads * index.dim);
    let top = case.index.map_or(1, |(index, _)| index.top);
    let f32s = |dev: &mut D, values: &[f32]| {
        let mut buf = dev.alloc::<f32>("test", MemoryClass::Workspace, values.len()).map_err(text)?;
        dev.write(&mut buf, values).map_err(text)?;
        Ok::<_, String>(buf)
    };
    let bytes = |dev: &mut D, values: &[u8]| {
        let mut buf = dev.alloc::<u8>("test", MemoryClass::State, values.len()).map_err(text)?;
        dev.write(&mut buf, values).map_err(text)?;
        Ok::<_, String>(buf)
    };
    let mut ws = LatentWork {
        low: f32s(dev, &inputs(&mut rng, Q_RANK + att.dim))?,
        pool: f32s(dev, &inputs(&mut rng, layer.pool_dim().max(1)))?,
        q: f32s(dev, &vec![f32::NAN; rows * att.q_dim()])?,
        kv: f32s(dev, &vec![f32::NAN; rows * att.dim])?,
        index_q: f32s(dev, &vec![f32::NAN; rows * index_q])?,
        picks: dev.alloc("picks", MemoryClass::Workspace, rows * top).map_err(text)?,
        out: f32s(dev, &vec![f32::NAN; rows * att.q_dim()])?,
        grouped: f32s(dev, &vec![f32::NAN; rows * att.groups * att.group_out])?,
    };
    if case.faulty {
        // The weights of the index heads are last in a row.
        let (dim, mut pool) = (layer.pool_dim(), vec![0.0; rows * layer.pool_dim()]);
        dev.read(&ws.pool, &mut pool).map_err(text)?;
        pool[dim - 1] = f32::NAN;
        dev.write(&mut ws.pool, &pool).map_err(text)?;
    }
    let pool_state = |dev: &mut D, rng: &mut Rng, shape: Compressor, format: RowFormat| {
        Ok::<_, String>(PoolState {
            ring: f32s(dev, &rng.values(shape.ring_elements(slots), 1.0))?,
            rows: bytes(dev, &stored(rng, format, shape.dim, blocks * shape.rows_per_block()))?,
        })
    };
    let mut state = LatentState {
        window: bytes(dev, &stored(&mut rng, case.row_format, att.dim, slots * att.ring()))?,
        rows: case.rows.map(|shape| pool_state(dev, &mut rng, shape, case.row_format)).transpose()?,
        keys: case.index.map(|(_, shape)| pool_state(dev, &mut rng, shape, case.key_format)).transpose()?,
    };
    dev.finish(&ModelShape { vocab: 100, hidden: HIDDEN, post_norms: false, gathered: att.q_dim() }).map_err(text)?;
    let mut staged = delta(&case.runs, case.context());
    staged.rows = staged.rows.map(|table| table[part].to_vec());
    dev.stage(&staged).map_err(text)?;
    body(dev, &mut ws, &mut state, &w, &layer)
}

/// The stages from `attn_q_kv` to `attn_out_a` on one device.
fn run<D: OpsV4 + Alloc + Landing + Readback + Steps>(
    dev: &mut D,
    case: &Case,
    part: Range<usize>,
) -> Result<Left, String> {
    let rows = part.len();
    with_layer(dev, case, part, |dev, ws, state, w, layer| {
        let (select, key) = (case.select(), StepKey::new(rows as u32, 256, case.ctx, Part::Whole));
        let mut stages = |dev: &mut D| {
            dev.attn_q_kv(ws, state, w, layer, select, rows)?;
            if select {
                dev.index_select(ws, state, layer, rows)?;
            }
            dev.attn_latent(ws, state, w, layer, select, rows)?;
            dev.attn_out_a(ws, w, layer, rows)
        };
        let step = if case.parts {
            dev.step(StepKey { part: Part::Forward, ..key }, &mut stages).map_err(text)?;
            dev.step(StepKey { part: Part::Sample, ..key }, &mut |dev| dev.commit(rows, 0))
        } else {
            dev.step(key, &mut |dev| stages(dev).and_then(|()| dev.commit(rows, 0)))
        };
        let mut left = read_all(dev, case, rows, ws, state)?;
        left.kv_bytes = dev.clocks(step.map_err(text)?).kv_bytes;
        Ok(left)
    })
}

fn text(error: arc_device::error::DeviceError) -> String {
    error.to_string()
}

fn read_all<D: Readback>(
    dev: &mut D,
    case: &Case,
    rows: usize,
    ws: &LatentWork<D>,
    state: &LatentState<D>,
) -> Result<Left, String> {
    let (att, slots, blocks) = (case.att, case.runs.len(), case.limits().blocks);
    let index_q = case.index.map_or(0, |(index, _)| if case.select() { index.heads * index.dim } else { 0 });
    let top = case.index.map_or(1, |(index, _)| index.top);
    let read = |dev: &mut D, buf: &D::Buf<f32>, n: usize| {
        let mut out = vec![0.0; n];
        dev.read(buf, &mut out).map_err(text)?;
        Ok::<_, String>(out)
    };
    let read_bytes = |dev: &mut D, buf: &D::Buf<u8>, n: usize| {
        let mut out = vec![0; n];
        dev.read(buf, &mut out).map_err(text)?;
        Ok::<_, String>(out)
    };
    let mut picks = vec![0; rows * top];
    dev.read(&ws.picks, &mut picks).map_err(text)?;
    let mut pools = Vec::new();
    let shapes = [case.rows.zip(Some(case.row_format)), case.index.map(|(_, shape)| (shape, case.key_format))];
    for (shape, state) in shapes.into_iter().zip([&state.rows, &state.keys]) {
        if let (Some((shape, format)), Some(state)) = (shape, state) {
            let n = blocks * shape.rows_per_block() * format.row_bytes(shape.dim);
            pools.push((read(dev, &state.ring, shape.ring_elements(slots))?, read_bytes(dev, &state.rows, n)?));
        }
    }
    Ok(Left {
        kv: read(dev, &ws.kv, rows * att.dim)?,
        index_q: read(dev, &ws.index_q, rows * index_q)?,
        picks,
        out: read(dev, &ws.out, rows * att.q_dim())?,
        grouped: read(dev, &ws.grouped, rows * att.groups * att.group_out)?,
        window: read_bytes(dev, &state.window, slots * att.ring() * case.row_format.row_bytes(att.dim))?,
        pools,
        kv_bytes: 0,
    })
}

/// The choices of the rows that choose.
fn chosen(case: &Case, picks: &[u32]) -> Vec<u32> {
    let Some((index, keys)) = case.index.filter(|_| case.select()) else { return Vec::new() };
    let mut kept = Vec::new();
    for (r, pos) in case.positions().enumerate() {
        if pos.is_some_and(|pos| keys.visible(pos as u32) > index.top) {
            let row = &picks[r * index.top..(r + 1) * index.top];
            kept.extend_from_slice(if row[0] == FAULT { &row[..1] } else { row });
        }
    }
    kept
}

/// Values of live rows, `dim` a row: what an inert row's product leaves is nobody's matter.
fn live(case: &Case, values: &[f32], dim: usize) -> Vec<f32> {
    let rows = values.chunks(dim).zip(case.positions());
    rows.filter(|(_, pos)| pos.is_some()).flat_map(|(row, _)| row.iter().copied()).collect()
}

fn compare(case: &Case, want: &Left, got: &Left) -> Verdict {
    let mut verdicts = vec![
        equal(&[want.kv_bytes], &[got.kv_bytes]).map_err(|why| format!("bytes read: {why}")),
        equal_bits(&want.kv, &got.kv).map_err(|why| format!("kv: {why}")),
        equal(&want.window, &got.window).map_err(|why| format!("window: {why}")),
    ];
    if let Some((index, _)) = case.index.filter(|_| case.select()) {
        let dim = index.heads * index.dim;
        let (want, got) = (live(case, &want.index_q, dim), live(case, &got.index_q, dim));
        verdicts.push(equal_bits(&want, &got).map_err(|why| format!("index_q: {why}")));
    }
    for (i, (want, got)) in want.pools.iter().zip(&got.pools).enumerate() {
        verdicts.push(equal_bits(&want.0, &got.0).map_err(|why| format!("ring {i}: {why}")));
        verdicts.push(equal(&want.1, &got.1).map_err(|why| format!("rows {i}: {why}")));
    }
    let (want_picks, got_picks) = (chosen(case, &want.picks), chosen(case, &got.picks));
    verdicts.push(equal(&want_picks, &got_picks).map_err(|why| format!("picks: {why}")));
    // Values are up to a few. A product sees them as int8, where the least difference may be a step of amax / 127. Weights are up to
    // a quarter, those of FP8 up to 7.
    let bound = if case.out_a == Format::Fp8 { 2.0 } else { 1e-2 };
    verdicts.push(within(&want.grouped, &got.grouped, bound, 1e-3).map_err(|why| format!("grouped: {why}")));
    verdicts.push(within(&want.out, &got.out, 1e-4, 1e-4).map_err(|why| format!("out: {why}")));
    all(verdicts)
}

fn same(suite: &Suite, case: &Case, mutant: Mutant) -> Verdict {
    let mut pair = suite.pair(case.limits());
    let want = run(&mut pair.cpu, case, 0..case.rows())?;
    pair.gpu.set_mutant(mutant);
    compare(case, &want, &run(&mut pair.gpu, case, 0..case.rows())?)
}

/// A row has the same bits alone as among the others, and a run in pieces as in one: what heads read, and what the first
/// output projection makes of it, whose inputs the attention leaves as int8.
fn alone(suite: &Suite, case: &Case, mutant: Mutant) -> Verdict {
    let gpu = |part: Range<usize>| {
        let mut gpu: Cuda = suite.pair(case.limits()).gpu;
        gpu.set_mutant(mutant);
        run(&mut gpu, case, part)
    };
    let together = gpu(0..case.rows())?;
    let (dim, grouped, mut first, mut verdicts) =
        (case.att.q_dim(), case.att.groups * case.att.group_out, 0, Vec::new());
    for kept in &case.runs {
        let part = first..first + kept.rows;
        let own = gpu(part.clone())?;
        verdicts.push(equal_bits(&together.out[part.start * dim..part.end * dim], &own.out));
        if kept.live {
            verdicts.push(equal_bits(&together.grouped[part.start * grouped..part.end * grouped], &own.grouped));
        }
        first = part.end;
    }
    all(verdicts)
}

/// Rows that see more keys than the step has room for: the device says so, and what heads read of what was chosen before is no
/// number.
fn past_the_key(suite: &Suite, case: &Case) -> Verdict {
    let mut gpu = suite.gpu(case.limits()).map_err(text)?;
    let left = run(&mut gpu, case, 0..case.rows())?;
    let Some(Fault::Word(word)) = gpu.fault() else { return Err(format!("the fault is {:?}", gpu.fault())) };
    let (dim, mut rows) = (case.att.q_dim(), 0);
    for (r, _) in case.positions().enumerate().filter(|(_, pos)| pos.is_some()) {
        if left.out[r * dim..(r + 1) * dim].iter().any(|x| !x.is_nan()) {
            return Err(format!("row {r} read something"));
        }
        rows += 1;
    }
    Ok(format!("fault word {word:#x}, {rows} rows"))
}

fn sparse(dim: usize) -> Compressor {
    Compressor { ratio: 4, overlap: 2, dim }
}

fn heavy(dim: usize) -> Compressor {
    Compressor { ratio: 128, overlap: 1, dim }
}

fn flash() -> LatentConfig {
    let scale = 512f32.powf(-0.5);
    LatentConfig { heads: 64, dim: 512, window: 128, groups: 8, group_out: 64, scale, eps: 1e-6 }
}

fn small() -> LatentConfig {
    LatentConfig { heads: 6, dim: 128, window: 16, groups: 2, group_out: 32, scale: 0.1, eps: 1e-6 }
}

/// Layers of every kind, formats, and row tables.
pub fn cases(suite: &mut Suite) {
    let index_of = |heads, top| IndexConfig { heads, dim: 128, top };
    let kinds = |dim: usize, heads: usize, top: usize| {
        [
            ("window", None, None),
            ("heavy", Some(heavy(dim)), None),
            ("sparse", Some(sparse(dim)), Some((index_of(heads, top), sparse(128)))),
        ]
    };
    let out_a = Format::Q8_0;
    let formats = [
        (RowFormat::Fp8, RowFormat::Fp4),
        (RowFormat::RoundedFp8, RowFormat::RoundedFp4),
        (RowFormat::F32, RowFormat::F32),
    ];
    for (row_format, key_format) in formats {
        for (size, att, heads, top) in [("small", small(), 8, 16), ("flash", flash(), 64, 512)] {
            for (kind, rows, index) in kinds(att.dim, heads, top) {
                for (table, runs) in tables(size == "flash").into_iter().enumerate() {
                    let ctx = CtxClass::of(runs.iter().map(|run| run.pos + run.rows).max().unwrap_or(0) as u32);
                    let ctx = if size == "small" { CtxClass::Medium } else { ctx };
                    let case = Case {
                        att,
                        rows,
                        index,
                        row_format,
                        key_format,
                        out_a,
                        runs,
                        ctx,
                        faulty: false,
                        parts: false,
                    };
                    suite.case(&format!("latent/{size}/{kind}/{row_format:?}/{table}"), |suite| {
                        same(suite, &case, Mutant::None)
                    });
                }
            }
        }
    }
    for kind in kinds(512, 64, 512) {
        suite.measure(&format!("latent/{}", kind.0), |suite| measure(suite, kind));
    }
    let (kind, rows, index) = kinds(512, 64, 512)[2];
    let (row_format, key_format) = formats[0];
    let runs = tables(true).swap_remove(2);
    let (att, ctx, faulty) = (flash(), CtxClass::Medium, false);
    let case = Case { att, rows, index, row_format, key_format, out_a, runs, ctx, faulty, parts: false };
    suite.case(&format!("latent/{kind}/alone"), |suite| alone(suite, &case, Mutant::None));
    suite.mutant(&format!("latent/{kind}/alone"), |suite| alone(suite, &case, Mutant::SplitsFollowRows));
    let more = Case { runs: tables(true).swap_remove(3), ..case.clone() };
    suite.case(&format!("latent/{kind}/alone of 12"), |suite| alone(suite, &more, Mutant::None));
    // A first output projection that reads what the heads left as it is, and one that rounds it where it stands.
    for out_a in [Format::F16, Format::Fp8] {
        for case in [&case, &more] {
            let case = Case { out_a, ..case.clone() };
            let name = format!("latent/{kind}/{} outputs of {} rows", out_a.name(), case.rows());
            suite.case(&name, |suite| all([same(suite, &case, Mutant::None), alone(suite, &case, Mutant::None)]));
        }
    }
    suite.mutant(&format!("latent/{kind}/rotated"), |suite| same(suite, &case, Mutant::StillRotated));
    suite.mutant(&format!("latent/{kind}/bias"), |suite| same(suite, &case, Mutant::NoBias));
    // More keys than a block picks among by itself, and than one keeps; more splits than a cluster has blocks.
    let at = |pos: usize, ctx| Case { runs: vec![Run { pos, rows: 1, live: true }], ctx, ..case.clone() };
    let wide = at(20_000, CtxClass::Medium);
    suite.case(&format!("latent/{kind}/wide"), |suite| same(suite, &wide, Mutant::None));
    let far = at(70_000, CtxClass::Long);
    suite.case(&format!("latent/{kind}/far"), |suite| same(suite, &far, Mutant::None));
    // More keys than the key of the step has room for: few heads, and heads that meet keys as integers; one row and several.
    for heads in [8, 64] {
        let index = Some((index_of(heads, 16), sparse(128)));
        for runs in [vec![tables(true)[1][0]; 1], tables(true).swap_remove(2)] {
            let runs = runs.into_iter().map(|run| Run { pos: run.pos + 3000, ..run }).collect();
            let past = Case { index, runs, ctx: CtxClass::Short, ..case.clone() };
            let name = format!("latent/{kind}/past the key/{heads} heads, {} rows", past.rows());
            suite.case(&name, |suite| past_the_key(suite, &past));
        }
    }
    let heavy = Case { rows: Some(heavy(512)), index: None, ..far };
    suite.case("latent/heavy/far", |suite| same(suite, &heavy, Mutant::None));
    // What a forward part alone has read, of few rows and of more than a warp takes at a time.
    for case in [&case, &more] {
        let parts = Case { parts: true, ..case.clone() };
        let name = format!("latent/{kind}/in two parts/{} rows", case.rows());
        suite.case(&name, |suite| same(suite, &parts, Mutant::None));
        let mut other = parts.clone();
        other.runs.iter_mut().filter(|run| run.live && run.pos < 128).for_each(|run| run.pos -= 1);
        suite.mutant(&format!("{name} of which one reads less"), |suite| {
            let mut pair = suite.pair(parts.limits());
            let want = run(&mut pair.cpu, &parts, 0..parts.rows())?.kv_bytes;
            let got = run(&mut pair.gpu, &other, 0..other.rows())?.kv_bytes;
            equal(&[want], &[got])
        });
    }
    let faulty = Case { faulty: true, ..case.clone() };
    suite.case(&format!("latent/{kind}/faulty"), |suite| same(suite, &faulty, Mutant::None));
    suite.mutant(&format!("latent/{kind}/window"), |suite| same(suite, &case, Mutant::Narrow));
}

/// Microseconds of a layer's stages, decoding and in chunks.
fn measure(suite: &Suite, kind: (&str, Option<Compressor>, Option<(IndexConfig, Compressor)>)) -> Verdict {
    let mut said = Vec::new();
    for (pos, sequences, rows) in [
        (1000, 1, 1),
        (4000, 1, 1),
        (32_000, 1, 1),
        (130_000, 1, 1),
        (4000, 4, 1),
        (4000, 16, 1),
        (4000, 64, 1),
        (2000, 1, 512),
    ] {
        let case = Case {
            att: flash(),
            rows: kind.1,
            index: kind.2,
            row_format: RowFormat::Fp8,
            key_format: RowFormat::Fp4,
            out_a: Format::Q8_0,
            runs: vec![Run { pos, rows, live: true }; sequences],
            ctx: CtxClass::of(pos as u32 + 512),
            faulty: false,
            parts: false,
        };
        let rows = case.rows();
        let mut gpu = suite.gpu(case.limits()).map_err(text)?;
        let us = with_layer(&mut gpu, &case, 0..rows, |dev, ws, state, w, layer| {
            let (select, repeats) = (case.select(), if rows > 100 { 5 } else { 50 });
            let key = StepKey::new(rows as u32, 256, case.ctx, Part::Forward);
            let q_kv = dev.bench(key, repeats, &mut |dev| dev.attn_q_kv(ws, state, w, layer, select, rows));
            let choose = match select {
                true => dev.bench(key, repeats, &mut |dev| dev.index_select(ws, state, layer, rows)).map_err(text)?,
                false => 0.0,
            };
            let attend = dev.bench(key, repeats, &mut |dev| dev.attn_latent(ws, state, w, layer, select, rows));
            Ok((q_kv.map_err(text)?, choose, attend.map_err(text)?))
        })?;
        said.push(format!("{sequences} x {} at {pos}: {:.2} + {:.2} + {:.2} us", rows / sequences, us.0, us.1, us.2));
    }
    Ok(said.join("; "))
}

/// Decoding rows, chunks that are longer than any ring, both; contexts on either side of what an indexer chooses.
fn tables(flash: bool) -> Vec<Vec<Run>> {
    let decode = |pos: usize| Run { pos, rows: 1, live: true };
    let chunk = |pos: usize, rows: usize| Run { pos, rows, live: true };
    let inert = Run { pos: 0, rows: 1, live: false };
    let mut tables =
        vec![vec![decode(0)], vec![decode(1023)], vec![decode(3071), inert, decode(127), decode(2500), chunk(2300, 3)]];
    if flash {
        // More rows than products take as they come.
        tables.push(vec![decode(3400), chunk(120, 4), decode(60), chunk(2046, 5), decode(900)]);
        tables.push((0..11).map(|i| decode(i * 331 + 7)).collect());
    } else {
        tables.push(vec![chunk(0, 190), decode(700), inert, chunk(511, 12)]);
        tables.push((0..20).map(|i| decode(i * 61 + 3)).collect());
        tables.push(vec![decode(5000), chunk(2047, 40)]);
    }
    tables
}
