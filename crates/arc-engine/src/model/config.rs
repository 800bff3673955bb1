//! Reading a dense decoder's configuration, and refusing one that cannot be true.

use std::path::Path;

use arc_device::ops::glu::Activation;
use arc_device::ops::kv::{AttentionConfig, MAX_GROUP, MAX_HEAD_DIM, Rope, RopeStyle};

use crate::load::{LoadError, ModelFile};

pub(super) mod gguf;
pub(super) mod json;

/// Architectures that [`super::decoder::Decoder`] covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arch {
    /// Llama 2 and 3, SmolLM2, and what else converts to `llama`.
    Llama,
    /// Qwen2 and Qwen2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen3: norms over query and key heads.
    Qwen3,
    /// Gemma 3: head norms, norms around both blocks, a sliding window on five layers of six.
    Gemma3,
}

impl Arch {
    /// All of them.
    pub const ALL: [Arch; 4] = [Arch::Llama, Arch::Qwen2, Arch::Qwen3, Arch::Gemma3];

    /// Name in GGUF.
    pub fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
            Arch::Gemma3 => "gemma3",
        }
    }

    fn from_name(path: &Path, name: &str) -> Result<Arch, LoadError> {
        Arch::ALL.into_iter().find(|arch| arch.name() == name).ok_or_else(|| LoadError::UnknownArchitecture {
            path: path.to_owned(),
            found: name.to_owned(),
            known: Arch::ALL.map(Arch::name).join(", ") + ", deepseek4 and deepseek_v4",
        })
    }
}

/// One set of rope frequencies.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// Base of the geometric series.
    pub base: f64,
    /// Positions are divided by it (linear scaling); 1 without.
    pub scale: f64,
    /// Divides frequency `i` (Llama 3's scaling); empty without.
    pub factors: Vec<f32>,
}

impl RopeTable {
    /// `[context, dim / 2, 2]`: cosine and sine of `pos / scale * base^(-2 i / dim) / factor[i]`, computed in f64.
    pub fn values(&self, dim: usize, context: usize) -> Vec<f32> {
        let frequencies: Vec<f64> = (0..dim / 2)
            .map(|i| {
                let factor = self.factors.get(i).map_or(1.0, |&factor| f64::from(factor));
                self.base.powf(-2.0 * i as f64 / dim as f64) / self.scale / factor
            })
            .collect();
        let mut values = Vec::with_capacity(context * dim);
        for pos in 0..context {
            for frequency in &frequencies {
                let (sin, cos) = (pos as f64 * frequency).sin_cos();
                values.extend([cos as f32, sin as f32]);
            }
        }
        values
    }
}

/// Everything that shapes a dense decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderConfig {
    /// Which one.
    pub arch: Arch,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads.
    pub n_kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
    /// Width of the feed-forward block.
    pub ffn: usize,
    /// Tokens that the model was made for.
    pub context: usize,
    /// Added to the mean square of every norm.
    pub eps: f32,
    /// Which values rotate.
    pub rope: Rope,
    /// Frequencies: of layers that see everything, then, where they differ, of windowed layers.
    pub rope_tables: Vec<RopeTable>,
    /// Keys that a windowed layer sees, its own included.
    pub window: Option<u32>,
    /// By layer: whether it is windowed.
    pub windowed: Vec<bool>,
    /// Multiplies every attention score.
    pub attn_scale: f32,
    /// The gate's activation.
    pub act: Activation,
    /// Multiplies every embedding.
    pub embed_scale: f32,
    /// Norms over query and key heads.
    pub head_norms: bool,
    /// Norms on the outputs of both blocks.
    pub post_norms: bool,
    /// Biases on queries, keys and values.
    pub qkv_bias: bool,
    /// The output head is the embedding.
    pub tied: bool,
    /// Logits become `softcap * tanh(logits / softcap)`.
    pub softcap: Option<f32>,
}

impl DecoderConfig {
    /// Reads and checks it. Errors name the key.
    pub fn read(file: &ModelFile) -> Result<DecoderConfig, LoadError> {
        let config = match file {
            ModelFile::Gguf(gguf) => gguf::read(gguf)?,
            ModelFile::Safetensors(safetensors) => json::read(safetensors)?,
            ModelFile::Synthetic(_) => {
                return Err(bad(file.path(), "the name", "is of no model of this architecture".to_owned()));
            }
        };
        config.check(file.path())?;
        Ok(config)
    }

    /// Attention of one layer.
    pub fn attention(&self, layer: usize) -> AttentionConfig {
        AttentionConfig {
            n_heads: self.n_heads,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            scale: self.attn_scale,
            window: self.window.filter(|_| self.windowed[layer]),
        }
    }

    /// Index of a layer's rope frequencies.
    pub fn rope_table(&self, layer: usize) -> usize {
        usize::from(self.windowed[layer]).min(self.rope_tables.len() - 1)
    }

    /// Limits that keep every product below far from an overflow, and what the stages assume.
    fn check(&self, path: &Path) -> Result<(), LoadError> {
        let sizes = [
            ("vocabulary size", self.vocab, 1 << 23),
            ("embedding length", self.hidden, 1 << 17),
            ("block count", self.n_layers, LAYERS_MAX),
            ("head count", self.n_heads, 1 << 10),
            ("key head count", self.n_kv_heads, 1 << 10),
            ("head length", self.head_dim, MAX_HEAD_DIM),
            ("feed-forward length", self.ffn, 1 << 20),
            ("context length", self.context, 1 << 24),
        ];
        for (what, value, max) in sizes {
            if value == 0 || value > max {
                return Err(bad(path, what, format!("is {value}, must be from 1 to {max}")));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let problem = format!("is {}, which does not divide the head count {}", self.n_kv_heads, self.n_heads);
            return Err(bad(path, "key head count", problem));
        }
        if self.n_heads / self.n_kv_heads > MAX_GROUP {
            let (heads, kv_heads) = (self.n_heads, self.n_kv_heads);
            let problem = format!("is {heads}, more than {MAX_GROUP} for each of the {kv_heads} key heads");
            return Err(bad(path, "head count", problem));
        }
        if !self.rope.dim.is_multiple_of(2) || self.rope.dim > self.head_dim || self.rope.dim == 0 {
            let problem = format!("is {}, must be even, above 0 and at most {}", self.rope.dim, self.head_dim);
            return Err(bad(path, "rope dimension count", problem));
        }
        for table in &self.rope_tables {
            if !(table.base.is_finite() && table.base > 0.0 && table.scale.is_finite() && table.scale > 0.0) {
                return Err(bad(path, "rope base or scale", "must be finite and above 0".to_owned()));
            }
            if !table.factors.is_empty() && table.factors.len() != self.rope.dim / 2 {
                let problem = format!("are {}, must be {}", table.factors.len(), self.rope.dim / 2);
                return Err(bad(path, "rope factors", problem));
            }
        }
        if !(self.eps.is_finite() && self.eps >= 0.0 && self.attn_scale.is_finite() && self.embed_scale.is_finite()) {
            return Err(bad(path, "norm epsilon or a scale", "must be finite".to_owned()));
        }
        if self.softcap.is_some_and(|cap| !(cap.is_finite() && cap > 0.0)) {
            return Err(bad(path, "final logit softcapping", "must be finite and above 0".to_owned()));
        }
        if self.window == Some(0) {
            return Err(bad(path, "sliding window", "is 0, must be at least 1".to_owned()));
        }
        Ok(())
    }
}

/// The most layers that a model may have.
const LAYERS_MAX: usize = 1 << 10;

pub(super) fn bad(path: &Path, what: &str, problem: String) -> LoadError {
    LoadError::BadConfig { path: path.to_owned(), what: what.to_owned(), problem }
}

/// What an architecture fixes beyond sizes.
fn base_config(arch: Arch) -> DecoderConfig {
    let gemma = arch == Arch::Gemma3;
    DecoderConfig {
        arch,
        vocab: 0,
        hidden: 0,
        n_layers: 0,
        n_heads: 0,
        n_kv_heads: 0,
        head_dim: 0,
        ffn: 0,
        context: 0,
        eps: 0.0,
        rope: Rope { dim: 0, style: RopeStyle::Halves },
        rope_tables: Vec::new(),
        window: None,
        windowed: Vec::new(),
        attn_scale: 0.0,
        act: if gemma { Activation::GeluTanh } else { Activation::Silu },
        embed_scale: 1.0,
        head_norms: matches!(arch, Arch::Qwen3 | Arch::Gemma3),
        post_norms: gemma,
        qkv_bias: arch == Arch::Qwen2,
        tied: false,
        softcap: None,
    }
}

/// Rope base of Gemma 3's windowed layers, where the file does not say. Source: the Gemma 3 report.
const GEMMA3_LOCAL_BASE: f64 = 10_000.0;
/// Every n-th layer of Gemma 3 sees everything. Source: the Gemma 3 report.
const GEMMA3_PATTERN: usize = 6;
/// Layers of Gemma 3 27B, the one size whose scores are scaled by hidden size over query heads. Source: the model's
/// `query_pre_attn_scalar` of 168.
const GEMMA3_27B_LAYERS: usize = 62;
