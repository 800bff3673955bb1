//! Architectures. A new one is a file here and an arm of [`Model`]; it needs no scheduler and no runner.

pub mod config;
pub mod decoder;
pub mod deepseek_v4;
mod names;

use arc_device::cpu::Cpu;
use arc_device::error::Result;
use arc_device::ops_v4::OpsV4;
use arc_device::step::{CtxClass, Limits, Part, StepKey};
use arc_device::trace::{Stage, Trace};
use arc_device::{Alloc, Buffers, MemoryTable, ModelShape, Readback, Steps};

use crate::drafter::{Drafter, OwnBlock};
use crate::load::{LoadError, ModelFile};
use config::DecoderConfig;
use decoder::Decoder;
use deepseek_v4::{DeepseekV4, V4Config};

/// A loaded model: weights, state and workspace on a device.
#[allow(clippy::large_enum_variant, reason = "there is one of it")]
pub enum Model<D: Buffers> {
    /// Llama, Qwen2, Qwen3 and Gemma 3.
    Decoder(Decoder<D>),
    /// DeepSeek-V4: Flash and Pro.
    DeepseekV4(DeepseekV4<D>),
}

/// What a model is, read from its file before anything is loaded.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelConfig {
    /// Llama, Qwen2, Qwen3 and Gemma 3.
    Decoder(DecoderConfig),
    /// DeepSeek-V4: Flash and Pro.
    DeepseekV4(V4Config),
}

impl ModelConfig {
    /// Reads the configuration. Errors name the key that is missing or does not fit.
    pub fn read(file: &ModelFile) -> std::result::Result<ModelConfig, LoadError> {
        match V4Config::read(file)? {
            Some(config) => Ok(ModelConfig::DeepseekV4(config)),
            None => DecoderConfig::read(file).map(ModelConfig::Decoder),
        }
    }

    /// Name of the architecture.
    pub fn arch(&self) -> &'static str {
        match self {
            ModelConfig::Decoder(config) => config.arch.name(),
            ModelConfig::DeepseekV4(_) => deepseek_v4::NAME,
        }
    }

    /// Tokens that the model was made for.
    pub fn context(&self) -> usize {
        match self {
            ModelConfig::Decoder(config) => config.context,
            ModelConfig::DeepseekV4(config) => config.context,
        }
    }

    /// What a device must know.
    pub fn shape(&self) -> ModelShape {
        match self {
            ModelConfig::Decoder(config) => {
                let DecoderConfig { vocab, hidden, post_norms, .. } = *config;
                ModelShape { vocab, hidden, post_norms, gathered: 0 }
            }
            ModelConfig::DeepseekV4(config) => config.shape(),
        }
    }

    /// Has the draft block loaded too, if this file has one. Says whether it has.
    pub fn load_draft_block(&mut self, file: &ModelFile) -> bool {
        match self {
            ModelConfig::Decoder(_) => false,
            ModelConfig::DeepseekV4(config) => {
                config.draft = config.has_draft_block(file);
                config.draft
            }
        }
    }

    /// Bytes of KV cache that one token takes.
    pub fn kv_bytes_per_token(&self) -> usize {
        match self {
            ModelConfig::Decoder(config) => config.n_layers * 2 * 2 * config.n_kv_heads * config.head_dim,
            ModelConfig::DeepseekV4(config) => config.kv_bytes_per_token(),
        }
    }
}

impl<D: OpsV4 + Alloc> Model<D> {
    /// Loads weights and allocates state and workspace. The source's pages are released as they are copied.
    pub fn load(
        dev: &mut D,
        file: &ModelFile,
        config: &ModelConfig,
        limits: &Limits,
    ) -> std::result::Result<Self, LoadError> {
        let model = match config {
            ModelConfig::Decoder(config) => Model::Decoder(Decoder::load(dev, file, config, limits)?),
            ModelConfig::DeepseekV4(config) => Model::DeepseekV4(DeepseekV4::load(dev, file, config, limits)?),
        };
        dev.finish(&config.shape())?;
        Ok(model)
    }
}

impl<D: Readback> Model<D> {
    /// Random rows of KV cache where the model has such to give; otherwise it stays zero. For measurements.
    pub fn fill_rows(&mut self, dev: &mut D, limits: &Limits) -> std::result::Result<(), LoadError> {
        match self {
            Model::Decoder(_) => {}
            Model::DeepseekV4(model) => model.fill_rows(dev, limits)?,
        }
        Ok(())
    }
}

/// What loading would allocate on the CPU, and the stages of one decode step: from headers, before anything is loaded.
pub struct Plan {
    /// Every buffer, by name and class.
    pub memory: MemoryTable,
    /// The stages of a step of one row that sees `context` tokens.
    pub decode_step: Vec<Stage>,
    /// The stages of a step that verifies as many drafts and makes as many; empty for a model that drafts nothing.
    pub speculating_step: Vec<Stage>,
}

/// Drafts of [`Plan::speculating_step`].
pub const PLANNED_DRAFTS: u32 = 2;

impl Plan {
    /// Plans a model. Errors: those of loading.
    pub fn new(
        file: &ModelFile,
        config: &ModelConfig,
        limits: &Limits,
        threads: usize,
        context: usize,
    ) -> std::result::Result<Plan, LoadError> {
        let mut dev = Trace::new(*limits, context);
        let mut model = Model::load(&mut dev, file, config, limits)?;
        let key = StepKey::new(1, 1, CtxClass::of(context as u32), Part::Whole);
        dev.step(key, &mut |dev| model.step(dev, key))?;
        let decode_step = dev.take_stages();
        let verified = PLANNED_DRAFTS + 1;
        if model.can_draft() && verified as usize <= limits.rows.min(limits.heads) {
            let key = StepKey { rows: verified, heads: verified, ..key }.drafting(PLANNED_DRAFTS, 1);
            dev.step(key, &mut |dev| model.step(dev, key))?;
        }
        let speculating_step = dev.take_stages();
        let mut memory = dev.memory().clone();
        memory.extend(&Cpu::own_memory(limits, &config.shape(), dev.max_cols(), threads));
        Ok(Plan { memory, decode_step, speculating_step })
    }
}

impl<D: OpsV4> Model<D> {
    /// One step over the device's row table, with its own draft block where the key asks for drafts.
    pub fn step(&mut self, dev: &mut D, key: StepKey) -> Result<()> {
        self.step_with(&mut OwnBlock, dev, key)
    }

    /// One step, with somebody else's drafts where the key asks for some.
    pub fn step_with(&mut self, drafter: &mut dyn Drafter<D>, dev: &mut D, key: StepKey) -> Result<()> {
        match self {
            Model::Decoder(decoder) => decoder.draw(dev, key)?,
            Model::DeepseekV4(model) => model.draw(dev, key)?,
        }
        if key.part == Part::Forward {
            return Ok(());
        }
        if key.drafts > 0 {
            drafter.draft(self, dev, key)?;
        }
        dev.commit(key.rows as usize, key.heads as usize)
    }

    /// See [`arc_device::DeviceLoop::rewinds`]: windows and the rings of compressors are written over.
    pub fn rewinds(&self) -> bool {
        matches!(self, Model::Decoder(_))
    }

    /// Whether it was loaded with a draft block.
    pub fn can_draft(&self) -> bool {
        match self {
            Model::Decoder(_) => false,
            Model::DeepseekV4(model) => model.can_draft(),
        }
    }
}
