//! The dense decoder: Llama, Qwen2, Qwen3 and Gemma 3 by configuration.
//!
//! ```text
//! x = embed(token) * embed_scale
//! for each layer:                        layers, of these stages:
//!     q, k, v = W_qkv norm(x) + b        norm_matmul
//!     rope, append                       qkv_rope_append
//!     a = attention(q, cache)            attention
//!     x += post_norm(W_o a)              matmul_residual
//!     m = act(W_gate h) * W_up h         norm_gate_up_glu, h = norm(x)
//!     x += post_norm(W_down m)           matmul_residual
//! logits = W_head norm(x)                head
//! ```

use arc_device::error::Result;
use arc_device::ops::matmul::{Bytes, MatrixSource};
use arc_device::step::{Limits, Part, StepKey};
use arc_device::{Alloc, Buffers, DenseLayer, DenseRows, KvLayer, MemoryClass, Norm, Ops, QkvConfig};

use super::config::{DecoderConfig, RopeTable, bad};
use super::names::{Names, Which};
use crate::load::{LoadError, ModelFile, TensorRef, Weights};

/// One layer's weights.
struct Layer<D: Buffers> {
    attn_norm: D::Buf<f32>,
    /// Queries, keys and values, `[(n_heads + 2 n_kv_heads) * head_dim, hidden]`.
    qkv: D::Matrix,
    qkv_bias: Option<D::Buf<f32>>,
    q_norm: Option<D::Buf<f32>>,
    k_norm: Option<D::Buf<f32>>,
    /// `[hidden, n_heads * head_dim]`.
    attn_out: D::Matrix,
    attn_post_norm: Option<D::Buf<f32>>,
    ffn_norm: D::Buf<f32>,
    /// Gate over up, `[2 * ffn, hidden]`.
    gate_up: D::Matrix,
    /// `[hidden, ffn]`.
    down: D::Matrix,
    ffn_post_norm: Option<D::Buf<f32>>,
}

/// Scratch of a step, one field a stage, for the largest step.
struct Workspace<D: Buffers> {
    /// The residual stream, `[rows, hidden]`.
    x: D::Buf<f32>,
    /// `[rows, qkv_dim]`.
    qkv: D::Buf<f32>,
    /// `[rows, n_heads * head_dim]`.
    attention: D::Buf<f32>,
    /// `[rows, ffn]`.
    ffn: D::Buf<f32>,
    /// `[heads, vocab]`.
    logits: D::Buf<f32>,
}

/// A dense decoder on a device.
pub struct Decoder<D: Buffers> {
    config: DecoderConfig,
    /// `[vocab, hidden]`; the output head too where `head` is `None`.
    embed: D::Matrix,
    layers: Vec<Layer<D>>,
    norm: D::Buf<f32>,
    head: Option<D::Matrix>,
    /// By [`RopeTable`] of the configuration.
    rope: Vec<D::Buf<f32>>,
    kv: Vec<KvLayer<D>>,
    ws: Workspace<D>,
}

impl<D: Ops> Decoder<D> {
    /// One step over the device's row table, up to its draws.
    pub fn draw(&mut self, dev: &mut D, key: StepKey) -> Result<()> {
        let (rows, heads) = (key.rows as usize, key.heads as usize);
        if key.part != Part::Sample {
            self.forward(dev, rows, heads)?;
        }
        if key.part != Part::Forward {
            dev.sample(&mut self.ws.logits, heads)?;
        }
        Ok(())
    }

    fn forward(&mut self, dev: &mut D, rows: usize, heads: usize) -> Result<()> {
        let (config, ws) = (&self.config, &mut self.ws);
        let eps = config.eps;
        dev.embed(&mut ws.x, &self.embed, config.embed_scale, rows)?;
        let rope = &self.rope;
        let mut layers = self.layers.iter().zip(&mut self.kv).enumerate().map(|(i, (l, kv))| DenseLayer {
            attn_norm: Norm { weight: &l.attn_norm, eps },
            qkv: &l.qkv,
            qkv_bias: l.qkv_bias.as_ref(),
            heads: QkvConfig {
                attention: config.attention(i),
                rope: config.rope,
                rope_table: &rope[config.rope_table(i)],
                q_norm: norm(l.q_norm.as_ref(), eps),
                k_norm: norm(l.k_norm.as_ref(), eps),
            },
            kv,
            attn_out: &l.attn_out,
            attn_post_norm: norm(l.attn_post_norm.as_ref(), eps),
            ffn_norm: Norm { weight: &l.ffn_norm, eps },
            gate_up: &l.gate_up,
            act: config.act,
            down: &l.down,
            ffn_post_norm: norm(l.ffn_post_norm.as_ref(), eps),
        });
        let mut on = DenseRows { x: &mut ws.x, qkv: &mut ws.qkv, attention: &mut ws.attention, ffn: &mut ws.ffn };
        dev.layers(&mut on, &mut layers, rows)?;
        let head = self.head.as_ref().unwrap_or(&self.embed);
        dev.head(&mut ws.logits, &ws.x, Norm { weight: &self.norm, eps }, head, config.softcap, heads)
    }
}

fn norm<D: Buffers>(weight: Option<&D::Buf<f32>>, eps: f32) -> Option<Norm<'_, D>> {
    weight.map(|weight| Norm { weight, eps })
}

impl<D: Ops + Alloc> Decoder<D> {
    /// Loads a checked configuration's weights; every tensor's shape is compared with it first.
    pub fn load(
        dev: &mut D,
        file: &ModelFile,
        config: &DecoderConfig,
        limits: &Limits,
    ) -> std::result::Result<Self, LoadError> {
        let no_file = || bad(file.path(), "the weights", "must lie in a file".to_owned());
        let (weights, names) = (file.weights().ok_or_else(no_file)?, Names::of(file));
        let mut loader = Loader { weights, names, config };
        let c = config;
        let (q, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        let embed = loader.matrix(dev, &[(Which::Embed, 0, c.vocab, c.hidden)])?;
        let layers = (0..c.n_layers)
            .map(|i| {
                Ok(Layer {
                    attn_norm: loader.norm(dev, Which::AttnNorm, i, c.hidden)?,
                    qkv: loader.matrix(
                        dev,
                        &[(Which::Q, i, q, c.hidden), (Which::K, i, kv, c.hidden), (Which::V, i, kv, c.hidden)],
                    )?,
                    qkv_bias: c.qkv_bias.then(|| loader.qkv_bias(dev, i)).transpose()?,
                    q_norm: c.head_norms.then(|| loader.norm(dev, Which::QNorm, i, c.head_dim)).transpose()?,
                    k_norm: c.head_norms.then(|| loader.norm(dev, Which::KNorm, i, c.head_dim)).transpose()?,
                    attn_out: loader.matrix(dev, &[(Which::AttnOut, i, c.hidden, q)])?,
                    attn_post_norm: loader.post_norm(dev, Which::AttnPostNorm, i)?,
                    ffn_norm: loader.norm(dev, Which::FfnNorm, i, c.hidden)?,
                    gate_up: loader
                        .matrix(dev, &[(Which::Gate, i, c.ffn, c.hidden), (Which::Up, i, c.ffn, c.hidden)])?,
                    down: loader.matrix(dev, &[(Which::Down, i, c.hidden, c.ffn)])?,
                    ffn_post_norm: loader.post_norm(dev, Which::FfnPostNorm, i)?,
                })
            })
            .collect::<std::result::Result<Vec<_>, LoadError>>()?;
        let norm = loader.norm(dev, Which::Norm, 0, c.hidden)?;
        let head = (!c.tied).then(|| loader.matrix(dev, &[(Which::Head, 0, c.vocab, c.hidden)])).transpose()?;
        let rope = c
            .rope_tables
            .iter()
            .map(|table| dev.vector("rope", &RopeTable::values(table, c.rope.dim, limits.context)))
            .collect::<Result<Vec<_>>>()?;
        let kv = (0..c.n_layers)
            .map(|i| {
                let elements = c.attention(i).kv_elements(limits.blocks);
                let k = dev.alloc("kv cache", MemoryClass::State, elements)?;
                Ok(KvLayer { k, v: dev.alloc("kv cache", MemoryClass::State, elements)? })
            })
            .collect::<Result<Vec<_>>>()?;
        let ws = Workspace {
            x: dev.alloc("residual", MemoryClass::Workspace, limits.rows * c.hidden)?,
            qkv: dev.alloc("qkv", MemoryClass::Workspace, limits.rows * c.attention(0).qkv_dim())?,
            attention: dev.alloc("attention", MemoryClass::Workspace, limits.rows * q)?,
            ffn: dev.alloc("ffn", MemoryClass::Workspace, limits.rows * c.ffn)?,
            logits: dev.alloc("logits", MemoryClass::Workspace, limits.heads * c.vocab)?,
        };
        Ok(Decoder { config: config.clone(), embed, layers, norm, head, rope, kv, ws })
    }
}

/// A tensor that is wanted: which, of which layer, with which shape.
type Wanted = (Which, usize, usize, usize);

struct Loader<'a> {
    weights: &'a Weights,
    names: Names,
    config: &'a DecoderConfig,
}

impl Loader<'_> {
    fn matrix<D: Alloc>(&mut self, dev: &mut D, parts: &[Wanted]) -> std::result::Result<D::Matrix, LoadError> {
        let tensors = parts
            .iter()
            .map(|&(which, layer, rows, cols)| {
                self.weights.tensor_of_shape(&self.names.tensor(which, layer), &[rows, cols])
            })
            .collect::<std::result::Result<Vec<TensorRef>, LoadError>>()?;
        let sources: Vec<MatrixSource<'_>> = tensors
            .iter()
            .map(|tensor| MatrixSource {
                format: tensor.format,
                rows: tensor.rows(),
                cols: tensor.cols(),
                bytes: Bytes::Stored(self.weights.bytes(tensor)),
            })
            .collect();
        let matrix = dev.matrix(&self.names.tensor(parts[0].0, parts[0].1), &sources)?;
        tensors.iter().for_each(|tensor| self.weights.release(tensor));
        Ok(matrix)
    }

    fn values(&self, which: Which, layer: usize, len: usize) -> std::result::Result<Vec<f32>, LoadError> {
        let tensor = self.weights.tensor_of_shape(&self.names.tensor(which, layer), &[len])?;
        let mut values = vec![0.0; len];
        tensor.format.decode_row(self.weights.bytes(&tensor), &mut values);
        Ok(values)
    }

    fn norm<D: Alloc>(
        &self,
        dev: &mut D,
        which: Which,
        layer: usize,
        len: usize,
    ) -> std::result::Result<D::Buf<f32>, LoadError> {
        let mut values = self.values(which, layer, len)?;
        if self.names.norms_are_offsets(self.config.arch) {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        Ok(dev.vector("norm", &values)?)
    }

    fn post_norm<D: Alloc>(
        &self,
        dev: &mut D,
        which: Which,
        layer: usize,
    ) -> std::result::Result<Option<D::Buf<f32>>, LoadError> {
        self.config.post_norms.then(|| self.norm(dev, which, layer, self.config.hidden)).transpose()
    }

    fn qkv_bias<D: Alloc>(&self, dev: &mut D, layer: usize) -> std::result::Result<D::Buf<f32>, LoadError> {
        let (q, kv) = (self.config.n_heads * self.config.head_dim, self.config.n_kv_heads * self.config.head_dim);
        let mut bias = self.values(Which::QBias, layer, q)?;
        bias.extend(self.values(Which::KBias, layer, kv)?);
        bias.extend(self.values(Which::VBias, layer, kv)?);
        Ok(dev.vector("qkv bias", &bias)?)
    }
}
