//! From the `config.json` of the released checkpoints.

use std::path::PathBuf;

use arc_device::ops::hc::{HcConfig, STREAMS};
use arc_device::ops::index::IndexConfig;
use arc_device::ops::latent::{LatentConfig, ROPE_DIM};
use arc_device::ops::quant::Inputs;
use arc_device::ops::router::RouterConfig;
use arc_device::ops_v4::ExpertConfig;
use serde_json::Value;

use super::{LayerKind, NAME, Numerics, V4Config, Yarn, kinds};
use crate::load::LoadError;
use crate::load::safetensors::SafetensorsFile;
use crate::model::config::bad;
use crate::model::config::json::{Fields, open};

/// `None` for another architecture; else the configuration and the file that it is from.
pub(super) fn read(file: &SafetensorsFile) -> Result<Option<(PathBuf, V4Config)>, LoadError> {
    let (path, map) = open(file)?;
    let fields = Fields { path: &path, map: &map };
    if fields.kind()? != NAME {
        return Ok(None);
    }
    let config = config(&fields)?;
    Ok(Some((path, config)))
}

fn config(fields: &Fields<'_>) -> Result<V4Config, LoadError> {
    let fixed =
        [("num_key_value_heads", 1), ("qk_rope_head_dim", ROPE_DIM), ("n_shared_experts", 1), ("hc_mult", STREAMS)];
    for (name, only) in fixed {
        let found = fields.size(name)?;
        if found != only {
            return Err(bad(fields.path, name, format!("is {found}, supported is {only}")));
        }
    }
    for (name, only) in [("scoring_func", "sqrtsoftplus"), ("topk_method", "noaux_tc"), ("hidden_act", "silu")] {
        if let Some(found) = fields.get(name).filter(|found| found.as_str() != Some(only)) {
            return Err(bad(fields.path, name, format!("is {found}, supported is {only:?}")));
        }
    }
    for (name, only) in [("norm_topk_prob", true), ("tie_word_embeddings", false), ("attention_bias", false)] {
        if fields.bool_or(name, only)? != only {
            return Err(bad(fields.path, name, format!("is {}, supported is {only}", !only)));
        }
    }
    let (hidden, eps) = (fields.size("hidden_size")?, fields.float_or("rms_norm_eps", 1e-6)? as f32);
    let dim = fields.size("head_dim")?;
    Ok(V4Config {
        vocab: fields.size("vocab_size")?,
        context: fields.size("max_position_embeddings")?,
        layers: layers(fields)?,
        hashed_layers: fields.size("num_hash_layers")?,
        q_rank: fields.size("q_lora_rank")?,
        attention: LatentConfig {
            heads: fields.size("num_attention_heads")?,
            dim,
            window: fields.size("sliding_window")?,
            groups: fields.size("o_groups")?,
            group_out: fields.size("o_lora_rank")?,
            scale: 1.0 / (dim as f32).sqrt(),
            eps,
        },
        index: IndexConfig {
            heads: fields.size("index_n_heads")?,
            dim: fields.size("index_head_dim")?,
            top: fields.size("index_topk")?,
        },
        hc: HcConfig {
            dim: hidden,
            iterations: fields.size("hc_sinkhorn_iters")?,
            eps: fields.float_or("hc_eps", 1e-6)? as f32,
            norm_eps: eps,
        },
        experts: ExpertConfig {
            router: RouterConfig {
                experts: fields.size("n_routed_experts")?,
                chosen: fields.size("num_experts_per_tok")?,
                scale: fields.float_or("routed_scaling_factor", 1.0)? as f32,
            },
            hidden,
            ffn: fields.size("moe_intermediate_size")?,
            limit: fields.float_or("swiglu_limit", f64::INFINITY)? as f32,
            inputs: Inputs::F32,
        },
        rope_base: fields.float_or("rope_theta", 1e4)?,
        compress_rope_base: fields.float_or("compress_rope_theta", 1.6e5)?,
        yarn: yarn(fields)?,
        block_drafts: fields.get("dspark_block_size").is_some(),
        draft: false,
        numerics: Numerics::Reference,
    })
}

fn layers(fields: &Fields<'_>) -> Result<Vec<LayerKind>, LoadError> {
    let name = "compress_ratios";
    let value = fields.get(name).ok_or_else(|| fields.missing(name))?;
    let ratios = value.as_array().ok_or_else(|| fields.wrong(name, "an array", value))?;
    let number = |value: &Value| value.as_i64().ok_or_else(|| fields.wrong(name, "an array of integers", value));
    let ratios = ratios.iter().map(number).collect::<Result<Vec<_>, _>>()?;
    kinds(fields.path, name, &ratios, fields.size("num_hidden_layers")?)
}

fn yarn(fields: &Fields<'_>) -> Result<Yarn, LoadError> {
    let scaling = fields.object("rope_scaling")?.ok_or_else(|| fields.missing("rope_scaling"))?;
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type")).and_then(Value::as_str);
    if kind != Some("yarn") {
        let problem = format!("has the type {:?}, supported is \"yarn\"", kind.unwrap_or(""));
        return Err(bad(fields.path, "rope_scaling", problem));
    }
    Ok(Yarn {
        factor: scaling.float_or("factor", 16.0)?,
        beta_fast: scaling.float_or("beta_fast", 32.0)?,
        beta_slow: scaling.float_or("beta_slow", 1.0)?,
        original: scaling.float_or("original_max_position_embeddings", 65536.0)?,
    })
}
