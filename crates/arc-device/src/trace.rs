//! A device on paper: owns no memory, computes nothing, and writes down every stage of a step with its bytes.
//!
//! Loading a model on it reads headers only and gives the memory table; one step gives the list of stages that a
//! decode step runs on any device. The committed listings (`tests/golden/decode_step_*.txt`) make a stage too many a
//! diff.

mod v4;

use std::fmt::Write;

use crate::count::Counters;
use crate::error::{DeviceError, Fault, Result};
use crate::ops::glu::Activation;
use crate::ops::kv::AttentionConfig;
use crate::ops::matmul::MatrixSource;
use crate::ops::sample::{Declined, SamplerConfig};
use crate::step::{Landed, Limits, StepClocks, StepDelta, StepKey};
use crate::{
    Alloc, Buffers, Element, KvLayer, Landing, MemoryClass, MemoryTable, ModelShape, Norm, Ops, QkvConfig, Steps,
    StreamState,
};

/// The device.
#[derive(Debug)]
pub struct Trace {
    limits: Limits,
    memory: MemoryTable,
    stages: Vec<Stage>,
    /// Tokens that a row of the traced step sees.
    context: usize,
    /// Widest matrix.
    max_cols: usize,
    counters: Counters,
    steps: u64,
}

/// One stage of a traced step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// The stage's name in [`Ops`].
    pub name: &'static str,
    /// Shapes and formats, for a reader.
    pub what: String,
    /// Bytes of weights that it reads.
    pub weight_bytes: u64,
    /// Bytes of KV cache that it reads.
    pub kv_bytes: u64,
}

/// A buffer that is only a length.
#[derive(Debug)]
pub struct TraceBuf {
    len: usize,
}

/// A matrix that is only its parts' formats and shapes.
#[derive(Debug)]
pub struct TraceMatrix {
    rows: usize,
    cols: usize,
    bytes: u64,
    formats: String,
}

impl Trace {
    /// A device for these limits, whose rows will see `context` tokens.
    pub fn new(limits: Limits, context: usize) -> Trace {
        Trace {
            limits,
            memory: MemoryTable::default(),
            stages: Vec::new(),
            context,
            max_cols: 0,
            counters: Counters::default(),
            steps: 0,
        }
    }

    /// What loading allocated.
    pub fn memory(&self) -> &MemoryTable {
        &self.memory
    }

    /// Columns of the widest matrix that was loaded.
    pub fn max_cols(&self) -> usize {
        self.max_cols
    }

    /// The stages since the last call, in order.
    pub fn take_stages(&mut self) -> Vec<Stage> {
        std::mem::take(&mut self.stages)
    }

    fn stage(&mut self, name: &'static str, what: String, weight_bytes: u64, kv_bytes: u64) -> Result<()> {
        self.counters.launches += 1;
        self.counters.weight_bytes += weight_bytes;
        self.stages.push(Stage { name, what, weight_bytes, kv_bytes });
        Ok(())
    }

    fn needs(&self, name: &str, buf: &TraceBuf, len: usize) -> Result<()> {
        if buf.len >= len {
            return Ok(());
        }
        let what = format!("{name} over {len} values in a buffer of {}", buf.len);
        Err(DeviceError::Unsupported { device: "trace", what })
    }
}

/// The stages as a listing: one line each, and a last one with the totals.
pub fn listing(stages: &[Stage]) -> String {
    let mut text = String::new();
    let (mut weights, mut kv) = (0, 0);
    for stage in stages {
        let Stage { name, what, weight_bytes, kv_bytes } = stage;
        writeln!(text, "{name:<18} {weight_bytes:>10} {kv_bytes:>8}  {what}").expect("a String takes any text");
        weights += weight_bytes;
        kv += kv_bytes;
    }
    writeln!(text, "{:<18} {weights:>10} {kv:>8}  {} stages", "total", stages.len()).expect("a String takes any text");
    text
}

impl Buffers for Trace {
    type Buf<T: Element> = TraceBuf;
    type Matrix = TraceMatrix;
}

impl Alloc for Trace {
    const READS_VALUES: bool = false;

    fn alloc<T: Element>(&mut self, name: &'static str, class: MemoryClass, len: usize) -> Result<TraceBuf> {
        self.memory.add(name, class, (len as u64).saturating_mul(size_of::<T>() as u64));
        Ok(TraceBuf { len })
    }

    fn vector(&mut self, name: &str, values: &[f32]) -> Result<TraceBuf> {
        self.memory.add(name, MemoryClass::Weights, 4 * values.len() as u64);
        Ok(TraceBuf { len: values.len() })
    }

    fn ids(&mut self, name: &str, values: &[u32]) -> Result<TraceBuf> {
        self.memory.add(name, MemoryClass::Weights, 4 * values.len() as u64);
        Ok(TraceBuf { len: values.len() })
    }

    fn matrix(&mut self, name: &str, parts: &[MatrixSource<'_>]) -> Result<TraceMatrix> {
        let mut matrix = TraceMatrix { rows: 0, cols: 0, bytes: 0, formats: String::new() };
        for part in parts {
            part.check(name)?;
            matrix.rows += part.rows;
            matrix.cols = part.cols;
            matrix.bytes += part.n_bytes().unwrap_or(0) as u64;
            let format = part.format.name();
            if !matrix.formats.split('+').any(|known| known == format) {
                matrix.formats.push_str(if matrix.formats.is_empty() { "" } else { "+" });
                matrix.formats.push_str(format);
            }
        }
        self.max_cols = self.max_cols.max(matrix.cols);
        self.memory.add("matrices", MemoryClass::Weights, matrix.bytes);
        Ok(matrix)
    }

    fn finish(&mut self, _shape: &ModelShape) -> Result<()> {
        Ok(())
    }
}

fn shape(w: &TraceMatrix) -> String {
    format!("{}x{} {}", w.rows, w.cols, w.formats)
}

impl Ops for Trace {
    fn embed(&mut self, out: &mut TraceBuf, table: &TraceMatrix, _scale: f32, rows: usize) -> Result<()> {
        self.needs("embed", out, rows * table.cols)?;
        let row_bytes = table.bytes / table.rows.max(1) as u64;
        self.stage("embed", shape(table), row_bytes * rows as u64, 0)
    }

    fn norm_matmul(
        &mut self,
        out: &mut TraceBuf,
        x: &TraceBuf,
        norm: Norm<'_, Self>,
        w: &TraceMatrix,
        bias: Option<&TraceBuf>,
        rows: usize,
    ) -> Result<()> {
        self.needs("norm_matmul", out, rows * w.rows)?;
        self.needs("norm_matmul", x, rows * w.cols)?;
        self.needs("norm_matmul", norm.weight, w.cols)?;
        let what = shape(w) + if bias.is_some() { ", bias" } else { "" };
        self.stage("norm_matmul", what, w.bytes, 0)
    }

    fn qkv_rope_append(
        &mut self,
        qkv: &mut TraceBuf,
        _kv: &mut KvLayer<Self>,
        cfg: &QkvConfig<'_, Self>,
        rows: usize,
    ) -> Result<()> {
        self.needs("qkv_rope_append", qkv, rows * cfg.attention.qkv_dim())?;
        self.needs("qkv_rope_append", cfg.rope_table, self.limits.context * cfg.rope.dim)?;
        let att = &cfg.attention;
        let norms = if cfg.q_norm.is_some() { ", head norms" } else { "" };
        let what = format!("{}+2x{} heads of {}{norms}", att.n_heads, att.n_kv_heads, att.head_dim);
        self.stage("qkv_rope_append", what, 0, 0)
    }

    fn attention(
        &mut self,
        out: &mut TraceBuf,
        qkv: &TraceBuf,
        kv: &KvLayer<Self>,
        cfg: &AttentionConfig,
        rows: usize,
    ) -> Result<()> {
        self.needs("attention", out, rows * cfg.n_heads * cfg.head_dim)?;
        self.needs("attention", qkv, rows * cfg.qkv_dim())?;
        self.needs("attention", &kv.k, cfg.kv_elements(self.limits.blocks))?;
        self.needs("attention", &kv.v, cfg.kv_elements(self.limits.blocks))?;
        let keys = cfg.window.map_or(self.context, |window| self.context.min(window as usize));
        let window = cfg.window.map_or(String::new(), |window| format!(", window {window}"));
        let kv_bytes = (rows * keys * cfg.n_kv_heads * cfg.head_dim * 4) as u64;
        self.stage("attention", format!("{} heads of {}{window}", cfg.n_heads, cfg.head_dim), 0, kv_bytes)
    }

    fn matmul_residual(
        &mut self,
        residual: &mut TraceBuf,
        x: &TraceBuf,
        w: &TraceMatrix,
        post_norm: Option<Norm<'_, Self>>,
        rows: usize,
    ) -> Result<()> {
        self.needs("matmul_residual", residual, rows * w.rows)?;
        self.needs("matmul_residual", x, rows * w.cols)?;
        let what = shape(w) + if post_norm.is_some() { ", post norm" } else { "" };
        self.stage("matmul_residual", what, w.bytes, 0)
    }

    fn norm_gate_up_glu(
        &mut self,
        out: &mut TraceBuf,
        x: &TraceBuf,
        norm: Norm<'_, Self>,
        w: &TraceMatrix,
        act: Activation,
        rows: usize,
    ) -> Result<()> {
        self.needs("norm_gate_up_glu", out, rows * w.rows / 2)?;
        self.needs("norm_gate_up_glu", x, rows * w.cols)?;
        self.needs("norm_gate_up_glu", norm.weight, w.cols)?;
        self.stage("norm_gate_up_glu", format!("{}, {act:?}", shape(w)), w.bytes, 0)
    }

    fn head(
        &mut self,
        logits: &mut TraceBuf,
        _x: &TraceBuf,
        norm: Norm<'_, Self>,
        w: &TraceMatrix,
        softcap: Option<f32>,
        heads: usize,
    ) -> Result<()> {
        self.needs("head", logits, heads * w.rows)?;
        self.needs("head", norm.weight, w.cols)?;
        let what = shape(w) + if softcap.is_some() { ", softcap" } else { "" };
        self.stage("head", what, w.bytes, 0)
    }

    fn sample(&mut self, _logits: &mut TraceBuf, heads: usize) -> Result<()> {
        self.stage("sample", format!("{heads} rows"), 0, 0)
    }

    fn commit(&mut self, rows: usize, heads: usize) -> Result<()> {
        self.stage("commit", format!("{rows} rows, {heads} heads"), 0, 0)
    }
}

impl Steps for Trace {
    fn step(&mut self, _key: StepKey, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<u64> {
        body(self)?;
        self.steps += 1;
        Ok(self.steps)
    }
}

/// Nothing lands on paper: an engine over it would wait for ever, so only [`Steps::step`] is of use.
impl Landing for Trace {
    fn stage(&mut self, _delta: &StepDelta) -> Result<()> {
        Ok(())
    }

    fn declines(&self, _sampling: &SamplerConfig) -> Option<Declined> {
        None
    }

    fn fetch_rows(&mut self, _heads: &[u32]) -> Result<()> {
        Ok(())
    }

    fn fetched(&self, _idx: usize) -> Option<&[f32]> {
        None
    }

    fn poll(&mut self) -> Result<StreamState> {
        Ok(StreamState::Idle)
    }

    fn head(&self) -> u64 {
        0
    }

    fn landed(&self, _step: u64, _head_idx: usize) -> Landed {
        Landed::default()
    }

    fn read_to(&mut self, _step: u64) {}

    fn clocks(&self, _step: u64) -> StepClocks {
        StepClocks::default()
    }

    fn fault(&self) -> Option<Fault> {
        None
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}
