//! From the `config.json` beside safetensors. Source of the fields: the transformers library's configurations.

use std::io::Read;
use std::path::{Path, PathBuf};

use arc_device::ops::glu::Activation;
use serde_json::{Map, Value};

use super::{Arch, DecoderConfig, GEMMA3_LOCAL_BASE, GEMMA3_PATTERN, LAYERS_MAX, RopeTable, bad, base_config};
use crate::load::safetensors::SafetensorsFile;
use crate::load::{LoadError, open_regular};

/// The longest `config.json`, in bytes.
const CONFIG_MAX: u64 = 1 << 20;

/// A configuration with the path that messages name.
pub(in crate::model) struct Fields<'a> {
    pub path: &'a Path,
    pub map: &'a Map<String, Value>,
}

impl Fields<'_> {
    pub fn get(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// What the configuration calls its architecture.
    pub fn kind(&self) -> Result<&str, LoadError> {
        self.get("model_type").and_then(Value::as_str).ok_or_else(|| self.missing("model_type"))
    }

    pub fn missing(&self, name: &str) -> LoadError {
        LoadError::MissingMetadata { path: self.path.to_owned(), key: name.to_owned() }
    }

    pub fn wrong(&self, name: &str, wanted: &'static str, found: &Value) -> LoadError {
        let mut found = found.to_string();
        found.truncate(found.floor_char_boundary(60));
        LoadError::WrongType { path: self.path.to_owned(), key: name.to_owned(), wanted, found }
    }

    pub fn size(&self, name: &str) -> Result<usize, LoadError> {
        let value = self.get(name).ok_or_else(|| self.missing(name))?;
        let size = value.as_u64().and_then(|size| u32::try_from(size).ok());
        size.map(|size| size as usize).ok_or_else(|| self.wrong(name, "an integer that fits in u32", value))
    }

    pub fn size_or(&self, name: &str, default: usize) -> Result<usize, LoadError> {
        if self.get(name).is_some() { self.size(name) } else { Ok(default) }
    }

    pub fn float_or(&self, name: &str, default: f64) -> Result<f64, LoadError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_f64().ok_or_else(|| self.wrong(name, "a number", value))
    }

    pub fn bool_or(&self, name: &str, default: bool) -> Result<bool, LoadError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        value.as_bool().ok_or_else(|| self.wrong(name, "true or false", value))
    }

    pub fn object(&self, name: &str) -> Result<Option<Fields<'_>>, LoadError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let map = value.as_object().ok_or_else(|| self.wrong(name, "an object", value))?;
        Ok(Some(Fields { path: self.path, map }))
    }
}

/// Reads `config.json` in the folder of the weights.
pub(in crate::model) fn open(file: &SafetensorsFile) -> Result<(PathBuf, Map<String, Value>), LoadError> {
    let path = file.folder().join("config.json");
    let mut text = Vec::new();
    let read = open_regular(&path).and_then(|file| file.take(CONFIG_MAX + 1).read_to_end(&mut text));
    match read {
        Err(source) => return Err(LoadError::Open { path, source }),
        Ok(len) if len as u64 > CONFIG_MAX => {
            return Err(bad(&path, "the file", format!("is longer than {CONFIG_MAX} bytes")));
        }
        Ok(_) => {}
    }
    match serde_json::from_slice(&text) {
        Ok(Value::Object(map)) => Ok((path, map)),
        Ok(_) => Err(bad(&path, "the file", "is no JSON object".to_owned())),
        Err(problem) => Err(bad(&path, "the file", format!("is no JSON: {problem}"))),
    }
}

pub(super) fn read(file: &SafetensorsFile) -> Result<DecoderConfig, LoadError> {
    let (path, map) = open(file)?;
    let fields = Fields { path: &path, map: &map };
    let kind = fields.kind()?;
    let arch = Arch::from_name(&path, if kind == "gemma3_text" { "gemma3" } else { kind })?;
    let mut config = base_config(arch);
    config.hidden = fields.size("hidden_size")?;
    config.n_layers = fields.size("num_hidden_layers")?;
    config.n_heads = fields.size("num_attention_heads")?;
    config.n_kv_heads = fields.size_or("num_key_value_heads", config.n_heads)?;
    config.ffn = fields.size("intermediate_size")?;
    config.context = fields.size("max_position_embeddings")?;
    config.vocab = fields.size("vocab_size")?;
    config.eps = fields.float_or("rms_norm_eps", 1e-6)? as f32;
    config.head_dim = match fields.size_or("head_dim", 0)? {
        0 => config.hidden.checked_div(config.n_heads).unwrap_or(0),
        head_dim => head_dim,
    };
    config.rope.dim = config.head_dim;
    config.attn_scale = 1.0 / (fields.float_or("query_pre_attn_scalar", config.head_dim as f64)? as f32).sqrt();
    config.tied = fields.bool_or("tie_word_embeddings", arch == Arch::Gemma3)?;
    config.windowed = vec![false; config.n_layers.min(LAYERS_MAX)];
    if arch == Arch::Gemma3 {
        config.embed_scale = (config.hidden as f32).sqrt();
        config.window = Some(fields.size("sliding_window")? as u32);
        windows(&fields, &mut config)?;
        if fields.get("final_logit_softcapping").is_some() {
            config.softcap = Some(fields.float_or("final_logit_softcapping", 0.0)? as f32);
        }
    } else if fields.bool_or("use_sliding_window", false)? {
        return Err(bad(&path, "use_sliding_window", format!("is not supported for {}", arch.name())));
    }
    for name in ["attention_bias", "mlp_bias"] {
        if fields.bool_or(name, false)? {
            return Err(bad(&path, name, format!("is not supported for {}", arch.name())));
        }
    }
    if fields.get("attn_logit_softcapping").is_some() {
        return Err(bad(&path, "attn_logit_softcapping", format!("is not supported for {}", arch.name())));
    }
    let (name, known) = match config.act {
        Activation::Silu => ("hidden_act", "silu"),
        Activation::GeluTanh => ("hidden_activation", "gelu_pytorch_tanh"),
    };
    if let Some(value) = fields.get(name).filter(|value| value.as_str() != Some(known)) {
        return Err(fields.wrong(name, known, value));
    }
    config.rope_tables = rope_tables(&fields, &config)?;
    Ok(config)
}

/// Which layers of Gemma 3 are windowed: by name, or by the pattern.
fn windows(fields: &Fields<'_>, config: &mut DecoderConfig) -> Result<(), LoadError> {
    let Some(types) = fields.get("layer_types") else {
        let pattern = fields.size_or("sliding_window_pattern", GEMMA3_PATTERN)?.max(1);
        config.windowed.iter_mut().enumerate().for_each(|(i, on)| *on = (i + 1) % pattern != 0);
        return Ok(());
    };
    let names = types.as_array().ok_or_else(|| fields.wrong("layer_types", "an array", types))?;
    if names.len() != config.n_layers {
        let problem = format!("names {} layers, num_hidden_layers is {}", names.len(), config.n_layers);
        return Err(bad(fields.path, "layer_types", problem));
    }
    for (on, name) in config.windowed.iter_mut().zip(names) {
        *on = match name.as_str() {
            Some("sliding_attention") => true,
            Some("full_attention") => false,
            _ => return Err(fields.wrong("layer_types", "sliding_attention or full_attention", name)),
        };
    }
    Ok(())
}

fn rope_tables(fields: &Fields<'_>, config: &DecoderConfig) -> Result<Vec<RopeTable>, LoadError> {
    let gemma = config.arch == Arch::Gemma3;
    let parameters = fields.object("rope_parameters")?;
    let of_kind = |kind| parameters.as_ref().map_or(Ok(None), |parameters| parameters.object(kind));
    // transformers 5 writes the parameters of Gemma 3 by kind of layer.
    let (full, sliding) = (of_kind("full_attention")?, of_kind("sliding_attention")?);
    let scaling = fields.object("rope_scaling")?;
    let base = fields.float_or("rope_theta", if gemma { 1e6 } else { 1e4 })?;
    let base = parameters.as_ref().map_or(Ok(base), |parameters| parameters.float_or("rope_theta", base))?;
    let mut tables = vec![rope_table(scaling.as_ref().or(full.as_ref()).or(parameters.as_ref()), base, config)?];
    if gemma {
        let base = fields.float_or("rope_local_base_freq", GEMMA3_LOCAL_BASE)?;
        tables.push(rope_table(sliding.as_ref(), base, config)?);
    }
    Ok(tables)
}

/// One set of frequencies from its parameters, whose `rope_theta` goes before `base`.
fn rope_table(parameters: Option<&Fields<'_>>, base: f64, config: &DecoderConfig) -> Result<RopeTable, LoadError> {
    let mut table = RopeTable { base, scale: 1.0, factors: Vec::new() };
    let Some(parameters) = parameters else { return Ok(table) };
    table.base = parameters.float_or("rope_theta", base)?;
    let kind = parameters.get("rope_type").or_else(|| parameters.get("type")).and_then(Value::as_str);
    match kind.unwrap_or("default") {
        "default" => {}
        "linear" => table.scale = parameters.float_or("factor", 1.0)?,
        "llama3" => table.factors = llama3_factors(parameters, table.base, config.rope.dim)?,
        other => {
            let problem = format!("is {other:?}, supported are default, linear and llama3");
            return Err(bad(parameters.path, "rope type", problem));
        }
    }
    Ok(table)
}

/// Llama 3.1's frequency scaling: long wavelengths are slowed by `factor`, short ones kept, those between blended.
fn llama3_factors(scaling: &Fields<'_>, base: f64, dim: usize) -> Result<Vec<f32>, LoadError> {
    let factor = scaling.float_or("factor", 8.0)?;
    let low = scaling.float_or("low_freq_factor", 1.0)?;
    let high = scaling.float_or("high_freq_factor", 4.0)?;
    let old = scaling.float_or("original_max_position_embeddings", 8192.0)?;
    if !(factor >= 1.0 && low > 0.0 && high > low && old >= 1.0) {
        return Err(bad(scaling.path, "llama3 rope scaling", "has factors out of order".to_owned()));
    }
    let of = |i: usize| {
        let wavelength = std::f64::consts::TAU * base.powf(2.0 * i as f64 / dim as f64);
        if wavelength < old / high {
            return 1.0;
        }
        if wavelength > old / low {
            return factor as f32;
        }
        let smooth = (old / wavelength - low) / (high - low);
        (1.0 / ((1.0 - smooth) / factor + smooth)) as f32
    };
    // A head longer than any real one is refused by the check that follows; do not allocate for it here.
    Ok((0..dim.min(1 << 10) / 2).map(of).collect())
}
