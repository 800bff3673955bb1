//! Reading DeepSeek-V4's configuration, and refusing one that cannot be true.

use std::path::Path;

use arc_device::ModelShape;
use arc_device::ops::compress::Compressor;
use arc_device::ops::hc::{HcConfig, STREAMS};
use arc_device::ops::index::{IndexConfig, MAX_INDEX_DIM, MAX_TOP};
use arc_device::ops::latent::{LatentConfig, MAX_DIM, ROPE_DIM, RowFormat};
use arc_device::ops::quant::{FP8_INPUT_BLOCK, INDEX_DIM, Inputs};
use arc_device::ops::router::{MAX_CHOSEN, MAX_EXPERTS, RouterConfig};
use arc_device::ops_v4::ExpertConfig;

use crate::load::synthetic::V4Sizes;
use crate::load::{LoadError, ModelFile};
use crate::model::config::bad;

mod gguf;
mod json;

/// Name of the architecture, as `config.json` has it.
pub const NAME: &str = "deepseek_v4";

/// In which arithmetic a model runs: one choice, fixed at load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Numerics {
    /// f32 activations and f32 rows: the closest to the mathematics of the model. Weights in FP4, whose products read
    /// int8 inputs, are kept as BF16, which holds every one of their values.
    Reference,
    /// As `Reference`, with the round trips that the model was trained with: rows through FP8, index rows through
    /// transform and FP4, without BF16 rounding anywhere.
    Simulated {
        /// Also the inputs of linears that the release stores in FP8 or FP4.
        fp8_inputs: bool,
    },
    /// What a server computes on: rows stored in FP8 and BF16, index rows in FP4, int8 inputs of FP8 and integer-coded
    /// weights.
    Serving,
}

impl Numerics {
    /// All of them.
    pub const ALL: [Numerics; 4] = [
        Numerics::Reference,
        Numerics::Simulated { fp8_inputs: false },
        Numerics::Simulated { fp8_inputs: true },
        Numerics::Serving,
    ];

    /// Name for flags and tables.
    pub const fn name(self) -> &'static str {
        match self {
            Numerics::Reference => "reference",
            Numerics::Simulated { fp8_inputs: false } => "simulated",
            Numerics::Simulated { fp8_inputs: true } => "simulated-full",
            Numerics::Serving => "serving",
        }
    }

    /// The numerics of that name.
    pub fn from_name(name: &str) -> Option<Numerics> {
        Numerics::ALL.into_iter().find(|numerics| numerics.name() == name)
    }
}

/// What a layer's attention reads beside its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Nothing.
    Window,
    /// The rows that an indexer chooses of those that pool 4 tokens.
    Sparse,
    /// Every row that pools 128 tokens.
    Heavy,
}

/// Everything that shapes a DeepSeek-V4 model.
#[derive(Clone, Debug, PartialEq)]
pub struct V4Config {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Tokens that the model was made for.
    pub context: usize,
    /// By layer.
    pub layers: Vec<LayerKind>,
    /// Layers whose experts follow from the token alone: the first ones.
    pub hashed_layers: usize,
    /// Width of the query projection between its two matrices.
    pub q_rank: usize,
    /// Latent attention.
    pub attention: LatentConfig,
    /// The indexer of sparse layers.
    pub index: IndexConfig,
    /// Hyper-connections.
    pub hc: HcConfig,
    /// Experts.
    pub experts: ExpertConfig,
    /// Base of the rope frequencies in windowed layers.
    pub rope_base: f64,
    /// Base of those in compressed layers.
    pub compress_rope_base: f64,
    /// How those in compressed layers are stretched.
    pub yarn: Yarn,
    /// Whether the blocks behind the trunk propose several tokens at once (DSpark), as since July 2026. Those are not run.
    pub block_drafts: bool,
    /// Whether the draft block is loaded too; not unless set.
    pub draft: bool,
    /// In which arithmetic it runs: [`Self::set_numerics`].
    numerics: Numerics,
}

/// YaRN's frequency scaling, without its factor on cosine and sine. Source: Peng et al. 2023.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Slow frequencies are divided by it.
    pub factor: f64,
    /// Frequencies that turn more often than this over `original` positions are kept.
    pub beta_fast: f64,
    /// Those that turn less often than this are divided in full.
    pub beta_slow: f64,
    /// Positions before stretching.
    pub original: f64,
}

impl V4Config {
    /// Reads and checks it; `None` where the file is of another architecture. Errors name the key.
    pub fn read(file: &ModelFile) -> Result<Option<V4Config>, LoadError> {
        let read = match file {
            ModelFile::Gguf(file) => gguf::read(file)?,
            ModelFile::Safetensors(file) => json::read(file)?,
            ModelFile::Synthetic(model) => Some((file.path().to_owned(), V4Config::of_sizes(&model.sizes))),
        };
        let Some((path, mut config)) = read else { return Ok(None) };
        config.check(&path)?;
        config.set_numerics(Numerics::Serving);
        Ok(Some(config))
    }

    /// Of a model of random weights; what its sizes do not fix is as in the released models.
    fn of_sizes(sizes: &V4Sizes) -> V4Config {
        let eps = 1e-6;
        let kind = |idx: usize| match sizes.layer(idx).ratio {
            0 => LayerKind::Window,
            4 => LayerKind::Sparse,
            _ => LayerKind::Heavy,
        };
        V4Config {
            vocab: sizes.vocab,
            context: sizes.context,
            layers: (0..sizes.n_layers()).map(kind).collect(),
            hashed_layers: sizes.n_hash_layers,
            q_rank: sizes.q_rank,
            attention: LatentConfig {
                heads: sizes.n_heads,
                dim: sizes.head_dim,
                window: sizes.window,
                groups: sizes.o_groups,
                group_out: sizes.o_rank,
                scale: 1.0 / (sizes.head_dim as f32).sqrt(),
                eps,
            },
            index: IndexConfig { heads: sizes.index_heads, dim: sizes.index_dim, top: sizes.index_top },
            hc: HcConfig { dim: sizes.hidden, iterations: 20, eps: 1e-6, norm_eps: eps },
            experts: ExpertConfig {
                router: RouterConfig {
                    experts: sizes.n_experts,
                    chosen: sizes.experts_per_token,
                    scale: sizes.routed_scale,
                },
                hidden: sizes.hidden,
                ffn: sizes.expert_dim,
                limit: sizes.swiglu_limit,
                inputs: Inputs::F32,
            },
            rope_base: 1e4,
            compress_rope_base: 1.6e5,
            yarn: Yarn { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original: 65536.0 },
            block_drafts: false,
            draft: false,
            numerics: Numerics::Reference,
        }
    }

    /// Limits that keep every product far from an overflow, and what the stages assume.
    fn check(&self, path: &Path) -> Result<(), LoadError> {
        let (att, index, experts) = (&self.attention, &self.index, &self.experts);
        let sizes = [
            ("vocab_size", self.vocab, 1 << 23),
            ("max_position_embeddings", self.context, 1 << 24),
            ("hidden_size", experts.hidden, 1 << 17),
            ("num_attention_heads", att.heads, 1 << 10),
            ("head_dim", att.dim, MAX_DIM),
            ("sliding_window", att.window, 1 << 16),
            ("o_groups", att.groups, att.heads),
            ("o_lora_rank", att.group_out, 1 << 16),
            ("q_lora_rank", self.q_rank, 1 << 16),
            ("index_n_heads", index.heads, MAX_INDEX_DIM),
            ("index_head_dim", index.dim, MAX_INDEX_DIM),
            ("index_topk", index.top, MAX_TOP),
            ("hc_sinkhorn_iters", self.hc.iterations, 1 << 10),
            ("n_routed_experts", experts.router.experts, MAX_EXPERTS),
            ("num_experts_per_tok", experts.router.chosen, MAX_CHOSEN.min(experts.router.experts)),
            ("moe_intermediate_size", experts.ffn, 1 << 20),
        ];
        for (what, value, max) in sizes {
            if value == 0 || value > max {
                return Err(bad(path, what, format!("is {value}, must be from 1 to {max}")));
            }
        }
        // Rows are stored in blocks of 64 values beside the rotated ones, index rows in blocks of 32.
        if att.dim <= ROPE_DIM || !att.dim.is_multiple_of(64) {
            return Err(bad(path, "head_dim", format!("is {}, must be a multiple of 64 above {ROPE_DIM}", att.dim)));
        }
        for (what, value) in [("index_n_heads", index.heads), ("index_head_dim", index.dim)] {
            if !value.is_power_of_two() {
                return Err(bad(path, what, format!("is {value}, must be a power of two")));
            }
        }
        if index.dim < ROPE_DIM {
            return Err(bad(path, "index_head_dim", format!("is {}, must be at least {ROPE_DIM}", index.dim)));
        }
        if !att.heads.is_multiple_of(att.groups) {
            let problem = format!("is {}, which does not divide the head count {}", att.groups, att.heads);
            return Err(bad(path, "o_groups", problem));
        }
        if self.hashed_layers > self.layers.len() {
            let problem = format!("is {}, there are {} layers", self.hashed_layers, self.layers.len());
            return Err(bad(path, "num_hash_layers", problem));
        }
        let floats = [
            ("rms_norm_eps", f64::from(att.eps), 0.0),
            ("hc_eps", f64::from(self.hc.eps), 0.0),
            ("routed_scaling_factor", f64::from(experts.router.scale), 0.0),
            ("rope_theta", self.rope_base, 1.0),
            ("compress_rope_theta", self.compress_rope_base, 1.0),
            ("rope_scaling.factor", self.yarn.factor, 1.0),
            ("rope_scaling.beta_slow", self.yarn.beta_slow, f64::MIN_POSITIVE),
            ("rope_scaling.beta_fast", self.yarn.beta_fast, self.yarn.beta_slow),
            ("rope_scaling.original_max_position_embeddings", self.yarn.original, 1.0),
        ];
        for (what, value, least) in floats {
            if !(value.is_finite() && value >= least) {
                return Err(bad(path, what, format!("is {value}, must be finite and at least {least}")));
            }
        }
        // No clamp is a limit of infinity; NaN and what is not above 0 would clamp everything away.
        if experts.limit.is_nan() || experts.limit <= 0.0 {
            return Err(bad(path, "swiglu_limit", format!("is {}, must be above 0", experts.limit)));
        }
        Ok(())
    }

    /// What a device must know.
    pub fn shape(&self) -> ModelShape {
        let ExpertConfig { router, hidden, ffn, .. } = self.experts;
        let gathered = [self.attention.q_dim(), STREAMS * hidden, router.chosen * hidden, (router.chosen + 1) * ffn];
        let gathered = gathered.into_iter().max().unwrap_or(0);
        ModelShape { vocab: self.vocab, hidden, post_norms: false, gathered }
    }

    /// In which arithmetic it runs; `serving` unless set.
    pub fn numerics(&self) -> Numerics {
        self.numerics
    }

    /// Chooses the arithmetic, before loading.
    pub fn set_numerics(&mut self, numerics: Numerics) {
        self.numerics = numerics;
        self.experts.inputs = match numerics {
            Numerics::Reference | Numerics::Simulated { fp8_inputs: false } => Inputs::F32,
            Numerics::Simulated { fp8_inputs: true } => Inputs::Fp8,
            Numerics::Serving => Inputs::Int8,
        };
    }

    /// What the chosen arithmetic asks of the sizes.
    pub(super) fn check_numerics(&self, path: &Path) -> Result<(), LoadError> {
        let name = self.numerics.name();
        if self.numerics != Numerics::Reference && self.index.dim != INDEX_DIM {
            let problem = format!("is {}, must be {INDEX_DIM} in {name} numerics", self.index.dim);
            return Err(bad(path, "index_head_dim", problem));
        }
        let att = &self.attention;
        let inputs = [
            ("hidden_size", self.hc.dim),
            ("q_lora_rank", self.q_rank),
            ("moe_intermediate_size", self.experts.ffn),
            ("o_groups * o_lora_rank", att.groups * att.group_out),
        ];
        for (what, cols) in inputs {
            if self.experts.inputs == Inputs::Fp8 && !cols.is_multiple_of(FP8_INPUT_BLOCK) {
                let problem = format!("is {cols}, must be a multiple of {FP8_INPUT_BLOCK} in {name} numerics");
                return Err(bad(path, what, problem));
            }
        }
        Ok(())
    }

    /// How rows of recent and compressed tokens are kept.
    pub fn row_format(&self) -> RowFormat {
        match self.numerics {
            Numerics::Reference => RowFormat::F32,
            Numerics::Simulated { .. } => RowFormat::RoundedFp8,
            Numerics::Serving => RowFormat::Fp8,
        }
    }

    /// How index rows are kept.
    pub fn key_format(&self) -> RowFormat {
        match self.numerics {
            Numerics::Reference => RowFormat::F32,
            Numerics::Simulated { .. } => RowFormat::RoundedFp4,
            Numerics::Serving => RowFormat::Fp4,
        }
    }

    /// The attention's compressor in layers of a kind.
    pub fn rows(&self, kind: LayerKind) -> Option<Compressor> {
        let dim = self.attention.dim;
        match kind {
            LayerKind::Window => None,
            LayerKind::Sparse => Some(Compressor { ratio: 4, overlap: 2, dim }),
            LayerKind::Heavy => Some(Compressor { ratio: 128, overlap: 1, dim }),
        }
    }

    /// The indexer's compressor in layers of a kind.
    pub fn keys(&self, kind: LayerKind) -> Option<Compressor> {
        (kind == LayerKind::Sparse).then_some(Compressor { ratio: 4, overlap: 2, dim: self.index.dim })
    }

    /// Bytes of rows that one token adds to the blocks.
    pub fn kv_bytes_per_token(&self) -> usize {
        use arc_device::step::BLOCK_TOKENS;
        let of = |pool: Option<Compressor>, format: RowFormat| {
            pool.map_or(0, |pool| pool.rows_per_block() * format.row_bytes(pool.dim))
        };
        let block = |&kind: &LayerKind| of(self.rows(kind), self.row_format()) + of(self.keys(kind), self.key_format());
        self.layers.iter().map(block).sum::<usize>().div_ceil(BLOCK_TOKENS)
    }

    /// Rope frequencies, `[ROPE_DIM / 2]`, computed in f32 as the model was trained with.
    pub fn frequencies(&self, compressed: bool) -> Vec<f32> {
        let base = if compressed { self.compress_rope_base } else { self.rope_base };
        let plain = (0..ROPE_DIM / 2).map(|i| 1.0 / (base as f32).powf(2.0 * i as f32 / ROPE_DIM as f32));
        if !compressed {
            return plain.collect();
        }
        let yarn = self.yarn;
        let at = |turns: f64| {
            let ratio = yarn.original / (turns * std::f64::consts::TAU);
            ROPE_DIM as f64 * ratio.ln() / (2.0 * base.ln())
        };
        let low = at(yarn.beta_fast).floor().max(0.0);
        let high = at(yarn.beta_slow).ceil().min((ROPE_DIM - 1) as f64);
        let span = if high == low { 0.001 } else { high - low };
        let stretched = |(i, f): (usize, f32)| {
            let ramp = (((i as f64 - low) / span) as f32).clamp(0.0, 1.0);
            f / yarn.factor as f32 * ramp + f * (1.0 - ramp)
        };
        plain.enumerate().map(stretched).collect()
    }

    /// `[context, ROPE_DIM / 2, 2]`: [`rope_row`] of every position.
    pub fn rope_table(&self, compressed: bool, context: usize) -> Vec<f32> {
        let frequencies = self.frequencies(compressed);
        let mut table = Vec::with_capacity(context * ROPE_DIM);
        (0..context).for_each(|pos| table.extend(rope_row(&frequencies, pos)));
        table
    }
}

/// Cosine and sine of `pos * frequency`, the product rounded to f32 as in the published code: near a million the rounding
/// is up to 0.03, and the model was trained with it.
pub fn rope_row(frequencies: &[f32], pos: usize) -> impl Iterator<Item = f32> {
    let angles = frequencies.iter().map(move |frequency| pos as f32 * frequency);
    angles.flat_map(|angle| {
        let (sin, cos) = f64::from(angle).sin_cos();
        [cos as f32, sin as f32]
    })
}

/// Kinds of the trunk's layers by their `ratios`. Entries past `n_layers` belong to draft blocks.
fn kinds(path: &Path, what: &str, ratios: &[i64], n_layers: usize) -> Result<Vec<LayerKind>, LoadError> {
    if n_layers == 0 || n_layers > ratios.len() || ratios.len() > LAYERS_MAX {
        return Err(bad(path, what, format!("has {} entries for {n_layers} layers", ratios.len())));
    }
    let kind = |ratio: &i64| match ratio {
        0 => Ok(LayerKind::Window),
        4 => Ok(LayerKind::Sparse),
        128 => Ok(LayerKind::Heavy),
        _ => Err(bad(path, what, format!("has {ratio}; supported are 0, 4 and 128"))),
    };
    ratios[..n_layers].iter().map(kind).collect()
}

/// The most layers, those of draft blocks included.
const LAYERS_MAX: usize = 1 << 10;
