//! From GGUF metadata. Source of the keys: the GGUF specification.

use arc_device::ops::kv::RopeStyle;

use super::{
    Arch, DecoderConfig, GEMMA3_27B_LAYERS, GEMMA3_LOCAL_BASE, GEMMA3_PATTERN, LAYERS_MAX, RopeTable, bad, base_config,
};
use crate::load::LoadError;
use crate::load::gguf::{GgufFile, Metadata};

/// Metadata under the architecture's own prefix.
pub(in crate::model) struct Keys<'a> {
    pub meta: Metadata<'a>,
    pub prefix: &'static str,
}

impl Keys<'_> {
    pub fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub fn size(&self, name: &str) -> Result<usize, LoadError> {
        self.meta.get_u32(&self.key(name)).map(|value| value as usize)
    }

    pub fn size_or(&self, name: &str, default: usize) -> Result<usize, LoadError> {
        if self.has(name) { self.size(name) } else { Ok(default) }
    }

    pub fn float(&self, name: &str) -> Result<f32, LoadError> {
        self.meta.get_f32(&self.key(name))
    }

    pub fn has(&self, name: &str) -> bool {
        self.meta.get(&self.key(name)).is_some()
    }
}

pub(super) fn read(file: &GgufFile) -> Result<DecoderConfig, LoadError> {
    let meta = file.metadata();
    let path = meta.path();
    let arch = Arch::from_name(path, meta.get_str("general.architecture")?)?;
    let keys = Keys { meta: file.metadata(), prefix: arch.name() };
    let weights = file.weights();
    let mut config = base_config(arch);
    config.hidden = keys.size("embedding_length")?;
    config.n_layers = keys.size("block_count")?;
    config.n_heads = keys.size("attention.head_count")?;
    config.n_kv_heads = keys.size_or("attention.head_count_kv", config.n_heads)?;
    config.ffn = keys.size("feed_forward_length")?;
    config.context = keys.size("context_length")?;
    config.eps = keys.float("attention.layer_norm_rms_epsilon")?;
    config.vocab = weights.tensor("token_embd.weight")?.rows();
    config.head_dim = match keys.size_or("attention.key_length", 0)? {
        0 => config.hidden.checked_div(config.n_heads).unwrap_or(0),
        length => length,
    };
    if keys.size_or("attention.value_length", config.head_dim)? != config.head_dim {
        return Err(bad(path, "attention.value_length", "differs from attention.key_length".to_owned()));
    }
    config.rope.dim = keys.size_or("rope.dimension_count", config.head_dim)?;
    if arch == Arch::Llama {
        // Converters reorder the rows of Llama's queries and keys so that neighbours rotate together.
        config.rope.style = RopeStyle::Adjacent;
    }
    config.attn_scale = 1.0 / (config.head_dim as f32).sqrt();
    config.tied = weights.find("output.weight").is_none();
    config.rope_tables = rope_tables(file, &keys, arch)?;
    config.windowed = vec![false; config.n_layers.min(LAYERS_MAX)];
    if arch == Arch::Gemma3 {
        config.embed_scale = (config.hidden as f32).sqrt();
        if config.n_layers == GEMMA3_27B_LAYERS {
            // GGUF has no key for it. The other sizes scale by the length of a head.
            config.attn_scale = 1.0 / (config.hidden.checked_div(config.n_heads).unwrap_or(0) as f32).sqrt();
        }
        config.window = Some(keys.size("attention.sliding_window")? as u32);
        config.windowed.iter_mut().enumerate().for_each(|(i, on)| *on = (i + 1) % GEMMA3_PATTERN != 0);
        if keys.has("final_logit_softcapping") {
            config.softcap = Some(keys.float("final_logit_softcapping")?);
        }
    } else if keys.size_or("attention.sliding_window", 0)? != 0 {
        return Err(bad(path, "attention.sliding_window", format!("is not supported for {}", arch.name())));
    }
    Ok(config)
}

fn rope_tables(file: &GgufFile, keys: &Keys<'_>, arch: Arch) -> Result<Vec<RopeTable>, LoadError> {
    let path = keys.meta.path();
    let default = if arch == Arch::Gemma3 { 1e6 } else { 1e4 };
    let base = if keys.has("rope.freq_base") { f64::from(keys.float("rope.freq_base")?) } else { default };
    let mut global = RopeTable { base, scale: 1.0, factors: Vec::new() };
    let scaling = keys.key("rope.scaling.type");
    if keys.meta.get(&scaling).is_some() {
        match keys.meta.get_str(&scaling)? {
            "none" => {}
            "linear" => global.scale = f64::from(keys.float("rope.scaling.factor")?),
            other => return Err(bad(path, &scaling, format!("is {other:?}, supported are none and linear"))),
        }
    }
    let weights = file.weights();
    if weights.find("rope_freqs.weight").is_some() {
        let tensor = weights.tensor("rope_freqs.weight")?;
        if tensor.rows() != 1 || tensor.cols() > 1 << 10 {
            return Err(bad(path, "rope_freqs.weight", "has an impossible shape".to_owned()));
        }
        global.factors = vec![0.0; tensor.cols()];
        tensor.format.decode_row(weights.bytes(&tensor), &mut global.factors);
        if global.factors.iter().any(|factor| !(factor.is_finite() && *factor > 0.0)) {
            return Err(bad(path, "rope_freqs.weight", "holds a factor that is not above 0".to_owned()));
        }
    }
    let mut tables = vec![global];
    if arch == Arch::Gemma3 {
        tables.push(RopeTable { base: GEMMA3_LOCAL_BASE, scale: 1.0, factors: Vec::new() });
    }
    Ok(tables)
}
