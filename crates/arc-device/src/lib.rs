//! Arc's device layer: what a model may ask of a device, and nothing else.
//!
//! Read this file first. Traits divide what a device can do by *who may do it when*:
//!
//! | trait | who | may allocate | may read back or wait |
//! |---|---|---|---|
//! | [`Buffers`] | names the storage types | no | no |
//! | [`Alloc`] | the loader | yes | no |
//! | [`Ops`], [`OpsV4`] | a forward pass | no | no |
//! | [`Steps`], [`Landing`], [`DeviceLoop`] | the runner and the burst driver | [`Landing::stage`], for a sequence that starts | no ([`Landing::poll`] never blocks) |
//! | [`Readback`] | tests and tools | no | yes |
//!
//! A forward pass is written once, generic over `D: Ops`. It cannot name [`Alloc`] or [`Readback`], so a step cannot
//! allocate, read back or wait. Whatever changes between steps (positions, tokens, block tables, sampler parameters)
//! lives in device state ([`step`]), never in an argument, so a step can be recorded and replayed as it stands.
//!
//! Devices: [`cpu::Cpu`] and [`cuda::Cuda`] compute; [`trace::Trace`] owns no memory and writes down every stage with its bytes.
//!
//! # Arithmetic
//!
//! Every op says in its contract which of three promises it keeps:
//!
//! - **exact**: the same bits on every device;
//! - **invariant**: on one device, a row's bits depend only on that row's own inputs, not on the other rows, the chunk
//!   cut, the number of threads, or the instruction set;
//! - **bounded**: devices agree within a stated error.
//!
//! Every op is at least invariant. [`ops::matmul`] states the order of the integer-coded products.

pub mod count;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod format;
pub mod map;
pub mod math;
pub mod memory;
pub mod ops;
pub mod ops_v4;
pub mod rng;
pub mod simd;
pub mod step;
pub mod trace;

use crate::count::Counters;
use crate::error::{Fault, Result};
pub use crate::memory::{MemoryClass, MemoryTable};
use crate::ops::glu::Activation;
use crate::ops::kv::{AttentionConfig, Rope};
use crate::ops::matmul::MatrixSource;
use crate::ops::sample::{Declined, SamplerConfig};
use crate::ops_v4::OpsV4;
use crate::step::{Landed, StepClocks, StepDelta, StepKey};

/// A plain value that a buffer can hold.
///
/// # Safety
/// Zero bytes are a value of the type, and its alignment is at most 64: buffers come zeroed, on a cache-line border.
pub unsafe trait Element: Copy + Default + Send + Sync + std::fmt::Debug + 'static {
    /// Name for tables and traces.
    const DTYPE: &'static str;
}

macro_rules! elements {
    ($($t:ty => $name:literal),*) => { $(
        // SAFETY: a number of at most four bytes, of which zero is one.
        unsafe impl Element for $t {
            const DTYPE: &'static str = $name;
        }
    )* };
}
elements!(f32 => "f32", u32 => "u32", i32 => "i32", u16 => "u16", i8 => "i8", u8 => "u8");

/// The storage types of a device.
pub trait Buffers: Sized {
    /// A vector of elements in device memory. `u16` holds the bits of an f16.
    type Buf<T: Element>;
    /// A 2-D weight `[out, in]` in its stored format, in the device's own layout.
    type Matrix;
}

/// Load time only.
pub trait Alloc: Buffers {
    /// Whether values are looked at. Where not, none need be read or made: sizes are all that counts.
    const READS_VALUES: bool = true;

    /// `len` zeroed elements. Errors: `OutOfMemory`.
    fn alloc<T: Element>(&mut self, name: &'static str, class: MemoryClass, len: usize) -> Result<Self::Buf<T>>;

    /// A vector weight with these values. Errors: `OutOfMemory`.
    fn vector(&mut self, name: &str, values: &[f32]) -> Result<Self::Buf<f32>>;

    /// A table of ids with these values. Errors: `OutOfMemory`.
    fn ids(&mut self, name: &str, values: &[u32]) -> Result<Self::Buf<u32>>;

    /// One matrix from parts stacked along `out`; parts may differ in format but not in `in`. The values and the bytes
    /// a block are the source's; the layout is the device's. Errors: `MatrixSize`, `OutOfMemory`.
    fn matrix(&mut self, name: &str, parts: &[MatrixSource<'_>]) -> Result<Self::Matrix>;

    /// Everything is loaded: sizes what the device itself needs of workspace. Nothing is allocated afterwards.
    fn finish(&mut self, shape: &ModelShape) -> Result<()>;
}

/// What a device must know of a model beyond its buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Whether a product is normed before it joins the residual.
    pub post_norms: bool,
    /// Values that a stage gathers of one row before a product, where that may be more than a matrix has columns: the
    /// heads of every group, or a copy for every chosen expert. 0 otherwise.
    pub gathered: usize,
}

/// Root-mean-square norm as a prologue: `x[c] * rsqrt(mean(x^2) + eps) * weight[c]`. Source: Zhang & Sennrich 2019.
#[derive(Debug)]
pub struct Norm<'a, D: Buffers> {
    /// `[dim]` f32.
    pub weight: &'a D::Buf<f32>,
    /// Added to the mean square.
    pub eps: f32,
}

impl<D: Buffers> Clone for Norm<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<D: Buffers> Copy for Norm<'_, D> {}

/// Keys and values of one layer, in blocks of [`step::BLOCK_TOKENS`] positions.
#[derive(Debug)]
pub struct KvLayer<D: Buffers> {
    /// `[blocks, n_kv_heads, head_dim, BLOCK_TOKENS]` f16: a tile of keys is read position-wise, without transposing.
    pub k: D::Buf<u16>,
    /// `[blocks, n_kv_heads, BLOCK_TOKENS, head_dim]` f16.
    pub v: D::Buf<u16>,
}

/// The parts of `qkv_rope_append` that a layer fixes.
#[derive(Debug)]
pub struct QkvConfig<'a, D: Buffers> {
    /// Heads, scale, window.
    pub attention: AttentionConfig,
    /// Which values of a head rotate, and how they pair.
    pub rope: Rope,
    /// `[context, rope.dim / 2, 2]` f32: cosine and sine by position.
    pub rope_table: &'a D::Buf<f32>,
    /// Norm over each query head before rope (Qwen3, Gemma 3).
    pub q_norm: Option<Norm<'a, D>>,
    /// Norm over each key head before rope.
    pub k_norm: Option<Norm<'a, D>>,
}

/// One layer of a dense decoder, for [`Ops::layers`].
pub struct DenseLayer<'a, D: Buffers> {
    /// In front of the attention.
    pub attn_norm: Norm<'a, D>,
    /// Queries, keys and values, `[(n_heads + 2 n_kv_heads) * head_dim, hidden]`.
    pub qkv: &'a D::Matrix,
    /// `[qkv.out]`.
    pub qkv_bias: Option<&'a D::Buf<f32>>,
    /// Heads, rope, head norms.
    pub heads: QkvConfig<'a, D>,
    /// Its keys and values.
    pub kv: &'a mut KvLayer<D>,
    /// `[hidden, n_heads * head_dim]`.
    pub attn_out: &'a D::Matrix,
    /// Over what the attention adds.
    pub attn_post_norm: Option<Norm<'a, D>>,
    /// In front of the units.
    pub ffn_norm: Norm<'a, D>,
    /// Gate over up, `[2 * ffn, hidden]`.
    pub gate_up: &'a D::Matrix,
    /// The gate's.
    pub act: Activation,
    /// `[hidden, ffn]`.
    pub down: &'a D::Matrix,
    /// Over what the units add.
    pub ffn_post_norm: Option<Norm<'a, D>>,
}

/// What the layers of a dense decoder work on.
pub struct DenseRows<'a, D: Buffers> {
    /// The residual stream, `[rows, hidden]`.
    pub x: &'a mut D::Buf<f32>,
    /// Scratch, `[rows, qkv.out]`.
    pub qkv: &'a mut D::Buf<f32>,
    /// Scratch, `[rows, n_heads * head_dim]`.
    pub attention: &'a mut D::Buf<f32>,
    /// Scratch, `[rows, ffn]`.
    pub ffn: &'a mut D::Buf<f32>,
}

impl<D: Ops> DenseLayer<'_, D> {
    /// The layer by its stages.
    pub fn run(self, dev: &mut D, on: &mut DenseRows<'_, D>, rows: usize) -> Result<()> {
        dev.norm_matmul(on.qkv, on.x, self.attn_norm, self.qkv, self.qkv_bias, rows)?;
        dev.qkv_rope_append(on.qkv, self.kv, &self.heads, rows)?;
        dev.attention(on.attention, on.qkv, self.kv, &self.heads.attention, rows)?;
        dev.matmul_residual(on.x, on.attention, self.attn_out, self.attn_post_norm, rows)?;
        dev.norm_gate_up_glu(on.ffn, on.x, self.ffn_norm, self.gate_up, self.act, rows)?;
        dev.matmul_residual(on.x, on.ffn, self.down, self.ffn_post_norm, rows)
    }
}

/// Model stages. None allocates, reads back, or waits.
///
/// Convention: `out` first, then inputs, weights, configuration, rows. Activations are `[rows, dim]` f32, rows in the
/// order of the step's row table; buffers may be longer than the step needs. `rows` counts padding rows too.
pub trait Ops: Buffers {
    /// `out[r] = table[token(r)] * scale`. Exact. `out`: `[rows, dim]`; `table`: `[vocab, dim]`.
    fn embed(&mut self, out: &mut Self::Buf<f32>, table: &Self::Matrix, scale: f32, rows: usize) -> Result<()>;

    /// `out[r] = w * norm(x[r]) + bias`. `x`: `[rows, in]`; `out`: `[rows, w.out]`; `bias`: `[w.out]`.
    /// Exact for integer-coded formats, otherwise invariant.
    fn norm_matmul(
        &mut self,
        out: &mut Self::Buf<f32>,
        x: &Self::Buf<f32>,
        norm: Norm<'_, Self>,
        w: &Self::Matrix,
        bias: Option<&Self::Buf<f32>>,
        rows: usize,
    ) -> Result<()>;

    /// Head norms, rope on queries (in place) and keys, and append of keys and values as f16. Exact.
    /// `qkv`: `[rows, (n_heads + 2 n_kv_heads) * head_dim]`, queries, then keys, then values.
    fn qkv_rope_append(
        &mut self,
        qkv: &mut Self::Buf<f32>,
        kv: &mut KvLayer<Self>,
        cfg: &QkvConfig<'_, Self>,
        rows: usize,
    ) -> Result<()>;

    /// Softmax attention of each row over the keys at positions `<=` its own (and inside the window). Exact.
    /// `out`: `[rows, n_heads * head_dim]`; `qkv` as above.
    fn attention(
        &mut self,
        out: &mut Self::Buf<f32>,
        qkv: &Self::Buf<f32>,
        kv: &KvLayer<Self>,
        cfg: &AttentionConfig,
        rows: usize,
    ) -> Result<()>;

    /// `residual[r] += post_norm(w * x[r])`. Exact for integer-coded formats, otherwise invariant.
    fn matmul_residual(
        &mut self,
        residual: &mut Self::Buf<f32>,
        x: &Self::Buf<f32>,
        w: &Self::Matrix,
        post_norm: Option<Norm<'_, Self>>,
        rows: usize,
    ) -> Result<()>;

    /// `out[r] = act(gate * h) * (up * h)`, `h = norm(x[r])`; `w` stacks gate over up. `out`: `[rows, w.out / 2]`.
    /// Exact for integer-coded formats, otherwise invariant.
    fn norm_gate_up_glu(
        &mut self,
        out: &mut Self::Buf<f32>,
        x: &Self::Buf<f32>,
        norm: Norm<'_, Self>,
        w: &Self::Matrix,
        act: Activation,
        rows: usize,
    ) -> Result<()>;

    /// Layers of a dense decoder, one after the other: what their stages make of `on.x`, `[rows, hidden]`. What is left in
    /// scratch is nobody's matter.
    fn layers<'a>(
        &mut self,
        on: &mut DenseRows<'_, Self>,
        layers: &mut dyn Iterator<Item = DenseLayer<'a, Self>>,
        rows: usize,
    ) -> Result<()>
    where
        Self: 'a,
    {
        for layer in layers {
            layer.run(self, on, rows)?;
        }
        Ok(())
    }

    /// Gathers the head rows of the table and computes their logits. `logits`: `[heads, vocab]`; `x`: `[rows, dim]`.
    /// `softcap`: logits become `softcap * tanh(logits / softcap)`.
    fn head(
        &mut self,
        logits: &mut Self::Buf<f32>,
        x: &Self::Buf<f32>,
        norm: Norm<'_, Self>,
        w: &Self::Matrix,
        softcap: Option<f32>,
        heads: usize,
    ) -> Result<()>;

    /// Draws or scores every head row, into the step's ring entry, and settles which draws count ([`step`]). Exact. May
    /// overwrite `logits`.
    fn sample(&mut self, logits: &mut Self::Buf<f32>, heads: usize) -> Result<()>;

    /// Publishes the step: moves every slot's position past its rows, those that do not count aside, decides stop and
    /// length, advances the head.
    fn commit(&mut self, rows: usize, heads: usize) -> Result<()>;
}

/// Running steps of any model: eagerly, or recorded once and replayed.
pub trait Steps: OpsV4 + Landing {
    /// Runs the step of this key and returns its number, counted from 1. A recording device replays what
    /// [`Steps::record`] recorded; a key that warm-up missed is recorded late, and told, or refused.
    fn step(&mut self, key: StepKey, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<u64>;

    /// Records the step of this key without running it, on a device that records.
    fn record(&mut self, _key: StepKey, _body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<()> {
        Ok(())
    }

    /// From now on a recording device replays steps, or runs them eagerly. Returns what was so before; false where nothing
    /// is recorded.
    fn set_replay(&mut self, _on: bool) -> bool {
        false
    }
}

/// How far the device's queue is. There is deliberately no `synchronize`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamState {
    /// Everything enqueued has run.
    Idle,
    /// Work is in flight.
    Busy,
}

/// The host's view of a running device: sends changes in, watches tokens land.
pub trait Landing {
    /// Applies changes before the next enqueued step, after all that are in flight. Never waits.
    fn stage(&mut self, delta: &StepDelta) -> Result<()>;

    /// Why the device does not draw rows with these parameters itself. Rows that it declines are drawn by the host, from
    /// fetched logits, with the same token. Mirrors the device's own dispatch.
    fn declines(&self, sampling: &SamplerConfig) -> Option<Declined>;

    /// Copies the logits of head rows (numbered in table order) of the last step, which ran as
    /// [`step::Part::Forward`], for the host to sample.
    fn fetch_rows(&mut self, heads: &[u32]) -> Result<()>;

    /// Logits of the `idx`-th fetched row, `[vocab]`, once they have arrived.
    fn fetched(&self, idx: usize) -> Option<&[f32]>;

    /// Surfaces sticky errors; never blocks.
    fn poll(&mut self) -> Result<StreamState>;

    /// Steps landed so far.
    fn head(&self) -> u64;

    /// What head row `head_idx` of a landed step left. Valid until the ring laps it.
    fn landed(&self, step: u64, head_idx: usize) -> Landed;

    /// Tells the ring that everything up to `step` was read, so that it may be overwritten.
    fn read_to(&mut self, step: u64);

    /// Device time stamps of a landed step.
    fn clocks(&self, step: u64) -> StepClocks;

    /// The sticky device fault, if there is one.
    fn fault(&self) -> Option<Fault>;

    /// Totals of everything that was counted.
    fn counters(&self) -> Counters;
}

/// What the burst driver sees of a device and its model.
pub trait DeviceLoop: Landing {
    /// Enqueues one step over the staged row table and returns its number, counted from 1. Refuses to lap the ring's
    /// reader. A step in two parts is two calls that return the same number; it lands when its `Sample` part does.
    fn enqueue(&mut self, key: StepKey) -> Result<u64>;

    /// The most drafts that a step can make for a slot, at most [`step::MAX_DRAFTS`]; 0: there is no drafter.
    fn max_drafts(&self) -> u32 {
        0
    }

    /// Whether what a slot holds of a sequence is good up to any of its positions, and not only up to the last: nothing is written
    /// over what an earlier position needs.
    fn rewinds(&self) -> bool {
        false
    }
}

/// Blocking reads. For the loader and tests; never for the decode loop.
pub trait Readback: Buffers {
    /// Copies the first `out.len()` elements.
    fn read<T: Element>(&mut self, buf: &Self::Buf<T>, out: &mut [T]) -> Result<()>;

    /// Overwrites the first `values.len()` elements.
    fn write<T: Element>(&mut self, buf: &mut Self::Buf<T>, values: &[T]) -> Result<()>;
}
