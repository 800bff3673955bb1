//! From a model file to a running engine: described first, which reads headers only, then started.

mod room;
mod tokenizer;

use room::Need;
pub use room::NoRoom;

use std::{
    env,
    ffi::OsString,
    path::{Path, PathBuf},
    sync::Arc,
    time::Instant,
};

use arc_device::{
    Alloc, DeviceLoop, MemoryClass, Readback, Steps,
    cpu::Cpu,
    cuda::{Cuda, CudaOptions},
    step::{BLOCK_TOKENS, CtxClass, Limits, MAX_DRAFTS, Part, StepKey},
};
use arc_engine::{
    engine::{self, EngineConfig, EngineHandle, SampleOn as EngineSampleOn, Speculate, Switches},
    load::{LoadError, ModelFile},
    model::{Model, ModelConfig, Plan, deepseek_v4::Numerics},
    runner::Runner,
    scheduler::buckets::Buckets,
};

use crate::{
    config::{AutoOff, Config, Device, EffortProfile, SampleOn},
    model_text::{ChatMessage, ModelText, PromptError, Role},
    text::{TemplateError, Tokenizer, TokenizerError, deepseek_v4::Profile},
};

/// Context where neither the model nor the user wants less.
pub const CONTEXT_DEFAULT: u32 = 8192;

/// Contexts' worth of KV cache that many slots share, where the user names no number.
const SHARED_CONTEXTS: usize = 4;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The model file.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A file beside the model.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A folder of safetensors without a tokenizer, which can be described but not talked to.
    #[error(
        "{}: no tokenizer.json in this folder, without which no text can be read or written: put the model's there \
         (arc bench, arc eval logits and arc inspect do without)",
        folder.display()
    )]
    NoTokenizer {
        /// The folder.
        folder: PathBuf,
    },
    /// A model of random weights is asked for text.
    #[error(
        "{name}: a model of random weights has no tokenizer and knows no text: measure it with arc bench or arc eval \
         logits, look at it with arc inspect, or name a model with a tokenizer"
    )]
    Random {
        /// Its name.
        name: String,
    },
    /// The tokenizer in the model file.
    #[error("{}: {source}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: TokenizerError,
    },
    /// The tokenizer and the weights do not belong together.
    #[error("{}: the tokenizer has {tokens} tokens, but the model's vocabulary has {vocab}", path.display())]
    VocabMismatch {
        /// The file.
        path: PathBuf,
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// The chat template does not come to an end on a one-word conversation.
    #[error("{}: the chat template does not end; the model cannot be trusted", path.display())]
    EndlessTemplate {
        /// The file or folder.
        path: PathBuf,
    },
    /// The device has no room for the model.
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    /// The seed that tests make a kernel trap with.
    #[error("{TRAP_SEED} is {0:?}, must be a seed")]
    TrapSeed(String),
    /// The context that was asked for is more than the model has.
    #[error("context is {asked}, but the model was made for {model}")]
    Context {
        /// The setting.
        asked: u32,
        /// The model's.
        model: usize,
    },
    /// Arithmetic that the architecture does not have.
    #[error("{arch} has serving numerics only, not {asked}: leave the setting `numerics` out")]
    Numerics {
        /// The architecture.
        arch: &'static str,
        /// What was asked for.
        asked: &'static str,
    },
    /// The engine did not start.
    #[error("{0}")]
    Start(String),
}

impl OpenError {
    fn tokenizer(path: &Path, source: TokenizerError) -> OpenError {
        OpenError::Tokenizer { path: path.to_owned(), source }
    }
}

/// What a command needs where the user names nothing.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    /// Sequences that run at once.
    pub slots: u32,
    /// Rows of a step that go through the output head; `None`: as many as decoding needs.
    pub heads: Option<u32>,
    /// Whether the KV cache begins with random rows: for measurements.
    pub random_rows: bool,
}

impl Sizes {
    /// For this many sequences that answer.
    pub fn slots(slots: u32) -> Sizes {
        Sizes { slots, heads: None, random_rows: false }
    }
}

/// A model whose headers have been read and checked, and of which nothing is loaded.
pub struct Described {
    /// The file or folder.
    pub path: PathBuf,
    /// Tensors and metadata.
    pub file: Arc<ModelFile>,
    /// What the model is.
    pub config: ModelConfig,
}

impl Described {
    /// Reads headers. Errors: what is wrong with them.
    pub fn read(path: &Path) -> Result<Described, OpenError> {
        let file = ModelFile::open(path)?;
        let config = ModelConfig::read(&file)?;
        Ok(Described { path: path.to_owned(), file: Arc::new(file), config })
    }

    /// Chooses the arithmetic, before loading. Errors: the model has no such choice.
    pub fn set_numerics(&mut self, numerics: Numerics) -> Result<(), OpenError> {
        match &mut self.config {
            ModelConfig::DeepseekV4(config) => config.set_numerics(numerics),
            ModelConfig::Decoder(_) if numerics == Numerics::Serving => {}
            ModelConfig::Decoder(_) => {
                return Err(OpenError::Numerics { arch: self.config.arch(), asked: numerics.name() });
            }
        }
        Ok(())
    }

    /// The tokenizer, checked against the vocabulary of the weights.
    pub fn tokenizer(&self) -> Result<Tokenizer, OpenError> {
        let tokenizer = tokenizer::read(&self.file)?;
        let (tokens, vocab) = (tokenizer.n_vocab(), self.config.shape().vocab);
        // Weights may have rows to spare (a padded vocabulary); a token without a row cannot be.
        if tokens > vocab {
            return Err(OpenError::VocabMismatch { path: self.path.clone(), tokens, vocab });
        }
        Ok(tokenizer)
    }

    /// The model as these settings load it: with its draft block, if it has one and tokens are speculated on.
    pub fn to_load(&self, config: &Config) -> ModelConfig {
        let mut model = self.config.clone();
        if config.speculate != AutoOff::Off {
            model.load_draft_block(&self.file);
        }
        model
    }

    /// How many drafts a step may make for a sequence, beside none; ascending.
    fn drafts(&self, config: &Config) -> Vec<u32> {
        match (config.speculate, self.to_load(config)) {
            (AutoOff::Value(n), ModelConfig::DeepseekV4(v4)) if v4.draft => vec![n],
            (AutoOff::Auto, ModelConfig::DeepseekV4(v4)) if v4.draft => (1..=MAX_DRAFTS as u32).collect(),
            _ => Vec::new(),
        }
    }

    /// Sizes that the settings and the model come to. `sizes` are the command's own where the user names none.
    pub fn limits(&self, config: &Config, sizes: Sizes) -> Result<Limits, OpenError> {
        let model = self.config.context();
        let context = match config.context.value() {
            Some(asked) if asked as usize > model => return Err(OpenError::Context { asked, model }),
            Some(asked) => asked as usize,
            None => model.min(CONTEXT_DEFAULT as usize),
        };
        let slots = config.slots.value().unwrap_or(sizes.slots) as usize;
        let drafts = self.drafts(config).last().map_or(0, |&n| n as usize);
        let decoding = (slots * (1 + drafts)).max(2 * slots).max(8);
        let heads = config.heads.value().or(sizes.heads).map_or(decoding, |n| n as usize);
        let per_context = Limits::blocks_for(context);
        let blocks = match config.kv_tokens.value() {
            Some(tokens) => Limits::blocks_for(tokens as usize),
            None => per_context * slots.min(SHARED_CONTEXTS),
        };
        let rows = config.max_rows.value().unwrap_or(match config.device {
            Device::Cpu => 512,
            // Each expert's weights are decoded for more rows at once.
            Device::Cuda => 2048,
        }) as usize;
        Ok(Limits { slots, rows, heads: heads.min(rows), context, blocks, ring: 2 * config.burst as usize + 2 })
    }

    /// Memory and stages, from headers alone.
    pub fn plan(&self, config: &Config, sizes: Sizes) -> Result<Plan, OpenError> {
        let limits = self.limits(config, sizes)?;
        Ok(Plan::new(&self.file, &self.to_load(config), &limits, threads(config), limits.context)?)
    }

    /// The model's own name, or its file's.
    pub fn title(&self) -> String {
        let stem = || self.path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
        match &*self.file {
            ModelFile::Gguf(file) => file.metadata().get_str("general.name").map_or_else(|_| stem(), str::to_owned),
            ModelFile::Safetensors(_) => stem(),
            ModelFile::Synthetic(model) => model.name.clone(),
        }
    }

    /// The format that holds most bytes of the weights, as `q4_1`.
    pub fn main_format(&self) -> String {
        let mut bytes = std::collections::BTreeMap::<&str, u64>::new();
        for tensor in self.file.contents() {
            *bytes.entry(tensor.type_name).or_default() += tensor.n_bytes;
        }
        bytes.into_iter().max_by_key(|(_, n)| *n).map_or_else(String::new, |(name, _)| name.to_lowercase())
    }

    /// Parameters in all tensors.
    pub fn parameters(&self) -> u64 {
        let count = |dims: &[usize]| dims.iter().map(|d| *d as u64).product::<u64>();
        self.file.contents().iter().map(|t| count(&t.shape)).sum()
    }
}

/// A model that runs.
pub struct Running {
    /// The way to the engine.
    pub engine: EngineHandle,
    /// Tokenizer and template.
    pub text: Arc<ModelText>,
}

/// Loads a described model, for steps that the caller runs itself: of any number of rows.
pub fn load(described: &Described, config: &Config, limits: &Limits) -> Result<Box<dyn DeviceLoop>, OpenError> {
    warn_of_idle(described, config);
    let (file, model) = (&described.file, &described.config);
    let need = Need::new(&Plan::new(file, model, limits, threads(config), limits.context)?, config);
    Ok(match config.device {
        Device::Cpu => {
            need.fits_machine()?;
            Box::new(on(Cpu::new(threads(config), *limits), file, model, limits, false)?)
        }
        // Any number of rows is more than can be recorded.
        Device::Cuda => {
            let options = CudaOptions { capture: false, ..cuda_options(config)? };
            let gpu = Cuda::new(options, *limits).map_err(LoadError::from)?;
            need.fits(gpu.device_memory().0)?;
            Box::new(on(gpu, file, model, limits, false)?)
        }
    })
}

/// A model on its device.
fn on<D: Steps + Alloc + Readback>(
    mut device: D,
    file: &ModelFile,
    model: &ModelConfig,
    limits: &Limits,
    random_rows: bool,
) -> Result<Runner<D>, LoadError> {
    let mut model = Model::load(&mut device, file, model, limits)?;
    if random_rows {
        model.fill_rows(&mut device, limits)?;
    }
    Ok(Runner::new(device, model))
}

fn cuda_options(config: &Config) -> Result<CudaOptions, OpenError> {
    Ok(CudaOptions {
        ordinal: config.gpu as usize,
        capture: config.capture.is_on(),
        late: true,
        blame: config.blame.is_on(),
        verify: config.verify_replay.is_on(),
        trap_seed: trap_seed(env::var_os(TRAP_SEED))?,
    })
}

/// For tests of faults: a request of this seed ends the process.
const TRAP_SEED: &str = "ARC_CUDA_TRAP_SEED";

fn trap_seed(set: Option<OsString>) -> Result<Option<u64>, OpenError> {
    let Some(text) = set else { return Ok(None) };
    let text = text.to_string_lossy();
    let seed = text.parse().map_err(|_| OpenError::TrapSeed(text.into_owned()))?;
    tracing::warn!(seed, "{TRAP_SEED} is set: a request of this seed ends the process");
    Ok(Some(seed))
}

/// Says which settings were changed and change nothing: nobody should compare a switch with itself.
fn warn_of_idle(described: &Described, config: &Config) {
    let (capture, verify) = (config.capture.is_on(), config.verify_replay.is_on());
    let on_cpu = config.device == Device::Cpu;
    for (name, changed, why) in [
        ("gpu", on_cpu && config.gpu != 0, "the model runs on the CPU"),
        ("capture", on_cpu && !capture, "the CPU records nothing"),
        ("verify_replay", verify && (on_cpu || !capture), "nothing is recorded"),
        ("blame", on_cpu && config.blame.is_on(), "the model runs on the CPU"),
        (
            "effort_profile",
            config.effort_profile != EffortProfile::Auto && !matches!(described.config, ModelConfig::DeepseekV4(_)),
            "only DeepSeek-V4 is asked for reasoning",
        ),
    ] {
        if changed {
            tracing::warn!("the setting `{name}` changes nothing: {why}");
        }
    }
}

/// Loads a described model and starts its engine, for tokens in and tokens out.
pub fn start_engine(described: &Described, config: &Config, sizes: Sizes) -> Result<EngineHandle, OpenError> {
    warn_of_idle(described, config);
    let limits = described.limits(config, sizes)?;
    let vocab = u32::try_from(described.config.shape().vocab).unwrap_or(u32::MAX);
    let (file, model, set_up) = (described.file.clone(), described.to_load(config), engine_config(config, &limits));
    let need = Need::new(&described.plan(config, sizes)?, config);
    let started = match config.device {
        Device::Cpu => {
            need.fits_machine()?;
            let threads = threads(config);
            let cpu = move || Ok(on(Cpu::new(threads, limits), &file, &model, &limits, sizes.random_rows)?);
            engine::spawn(set_up, limits, vocab, cpu)
        }
        Device::Cuda => {
            let options = cuda_options(config)?;
            let mut keys = set_up.buckets.keys(&limits, &described.drafts(config));
            let (steps, verify_all) = (keys.len(), config.verify_replay.is_on());
            engine::spawn(set_up, limits, vocab, move || {
                let gpu = Cuda::new(options, limits).map_err(LoadError::from)?;
                let free = gpu.device_memory().0;
                need.fits(free)?;
                let mut runner = on(gpu, &file, &model, &limits, sizes.random_rows)?;
                let loaded = runner.device().device_memory().0;
                if options.capture {
                    let began = Instant::now();
                    runner.warm_up(&keys).map_err(LoadError::from)?;
                    let recorded = began.elapsed();
                    let one_row = |key: &StepKey| (key.rows, key.ctx, key.part) == (1, CtxClass::Short, Part::Whole);
                    keys.retain(|key| verify_all || one_row(key));
                    runner.verify_replay(&keys, &limits, vocab).map_err(LoadError::from)?;
                    let compared = began.elapsed() - recorded;
                    tracing::info!(steps, ?recorded, verified = keys.len(), ?compared, "steps are recorded");
                }
                tell_memory(runner.device(), free.saturating_sub(loaded), loaded);
                Ok::<_, OpenError>(runner)
            })
        }
    };
    started.map_err(|e| OpenError::Start(e.to_string()))
}

/// The memory table beside what the driver says: that loading took `loaded` bytes and left `free`, of which recording took some more.
fn tell_memory(gpu: &Cuda, loaded: u64, free: u64) {
    let of = |class| mib(gpu.memory().class_bytes(class));
    let (weights, state, workspace) = (of(MemoryClass::Weights), of(MemoryClass::State), of(MemoryClass::Workspace));
    let (table, left) = (mib(gpu.memory().total_bytes()), gpu.device_memory().0);
    let (loaded, recorded, left) = (mib(loaded), mib(free.saturating_sub(left)), mib(left));
    tracing::info!(weights, state, workspace, table, loaded, recorded, left, "device memory, MiB");
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Reads a described model's tokenizer and starts its engine.
pub fn start(described: &Described, config: &Config, sizes: Sizes) -> Result<Running, OpenError> {
    let limits = described.limits(config, sizes)?;
    let tokenizer = described.tokenizer()?;
    let context = u32::try_from(limits.context.min(limits.blocks * BLOCK_TOKENS)).unwrap_or(u32::MAX);
    let text = ModelText::new(tokenizer, context).with_profile(profile(&described.config, config.effort_profile));
    // A template that never ends leaves a thread behind that nothing can stop, so it is found before anybody is served.
    // Other refusals may be about this conversation alone.
    let greeting = [ChatMessage::new(Role::User, "hello")];
    if let Err(PromptError::Template(TemplateError::Stuck)) = text.encode_chat(&greeting, None) {
        return Err(OpenError::EndlessTemplate { path: described.path.clone() });
    }
    Ok(Running { engine: start_engine(described, config, sizes)?, text: Arc::new(text) })
}

/// V4-Flash-0731 and later are known by how they draft.
fn profile(model: &ModelConfig, asked: EffortProfile) -> Profile {
    match (asked, model) {
        (EffortProfile::July, _) => Profile::July,
        (EffortProfile::Auto, ModelConfig::DeepseekV4(v4)) if v4.block_drafts => Profile::July,
        (EffortProfile::Auto | EffortProfile::Preview, _) => Profile::Preview,
    }
}

fn engine_config(config: &Config, limits: &Limits) -> EngineConfig {
    EngineConfig {
        queue: config.queue as usize,
        burst: config.burst as usize,
        mixed_step_ms: config.mixed_step_ms.into(),
        default_max_tokens: config.default_max_tokens,
        buckets: match config.device {
            Device::Cpu => Buckets::Exact,
            Device::Cuda => Buckets::recorded(limits.rows as u32),
        },
        switches: Switches {
            device_loop: config.device_loop.is_on(),
            sample_on: match config.sample_on {
                SampleOn::Device => EngineSampleOn::Device,
                SampleOn::Host => EngineSampleOn::Host,
            },
            prefix_cache: config.prefix_cache.is_on(),
        },
        speculate: match config.speculate {
            AutoOff::Auto => Speculate::Auto,
            AutoOff::Off => Speculate::Off,
            AutoOff::Value(n) => Speculate::Fixed(n),
        },
        ..EngineConfig::default()
    }
}

/// Threads of the CPU team: as set, or one for each core that this process may use.
pub fn threads(config: &Config) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    config.threads.value().map_or_else(cores, |n| n as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_that_traps_is_one_or_none() {
        assert_eq!(trap_seed(None).ok(), Some(None));
        assert_eq!(trap_seed(Some("7".into())).ok(), Some(Some(7)));
        let error = trap_seed(Some("seven".into())).expect_err("no seed");
        assert_eq!(error.to_string(), "ARC_CUDA_TRAP_SEED is \"seven\", must be a seed");
    }
}
