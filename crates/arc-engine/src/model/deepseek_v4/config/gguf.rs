//! From GGUF metadata. Source of the keys: llama.cpp's and ds4's loaders of `deepseek4` files.

use std::path::{Path, PathBuf};

use arc_device::ops::hc::{HcConfig, STREAMS};
use arc_device::ops::index::IndexConfig;
use arc_device::ops::latent::{LatentConfig, ROPE_DIM};
use arc_device::ops::quant::Inputs;
use arc_device::ops::router::RouterConfig;
use arc_device::ops_v4::ExpertConfig;

use super::{LayerKind, Numerics, V4Config, Yarn, kinds};
use crate::load::LoadError;
use crate::load::gguf::GgufFile;
use crate::model::config::bad;
use crate::model::config::gguf::Keys;

/// Name of the architecture in GGUF.
const ARCH: &str = "deepseek4";

/// `None` for another architecture; else the configuration and the file that it is from.
pub(super) fn read(file: &GgufFile) -> Result<Option<(PathBuf, V4Config)>, LoadError> {
    let meta = file.metadata();
    if meta.get_str("general.architecture")? != ARCH {
        return Ok(None);
    }
    let (keys, path) = (Keys { meta, prefix: ARCH }, meta.path());
    fixed(&keys, path)?;
    let float = |name: &str, default: f32| if keys.has(name) { keys.float(name) } else { Ok(default) };
    let (hidden, eps) = (keys.size("embedding_length")?, keys.float("attention.layer_norm_rms_epsilon")?);
    let dim = keys.size("attention.key_length")?;
    let config = V4Config {
        vocab: file.weights().tensor("token_embd.weight")?.rows(),
        context: keys.size("context_length")?,
        layers: layers(&keys, file, path)?,
        hashed_layers: keys.size("hash_layer_count")?,
        q_rank: keys.size("attention.q_lora_rank")?,
        attention: LatentConfig {
            heads: keys.size("attention.head_count")?,
            dim,
            window: keys.size("attention.sliding_window")?,
            groups: keys.size("attention.output_group_count")?,
            group_out: keys.size("attention.output_lora_rank")?,
            scale: 1.0 / (dim as f32).sqrt(),
            eps,
        },
        index: IndexConfig {
            heads: keys.size("attention.indexer.head_count")?,
            dim: keys.size("attention.indexer.key_length")?,
            top: keys.size("attention.indexer.top_k")?,
        },
        hc: HcConfig {
            dim: hidden,
            iterations: keys.size("hyper_connection.sinkhorn_iterations")?,
            eps: keys.float("hyper_connection.epsilon")?,
            norm_eps: eps,
        },
        experts: ExpertConfig {
            router: RouterConfig {
                experts: keys.size("expert_count")?,
                chosen: keys.size("expert_used_count")?,
                scale: keys.float("expert_weights_scale")?,
            },
            hidden,
            ffn: keys.size("expert_feed_forward_length")?,
            limit: limit(&keys, path)?,
            inputs: Inputs::F32,
        },
        rope_base: f64::from(float("rope.freq_base", 1e4)?),
        compress_rope_base: f64::from(float("attention.compress_rope_freq_base", 1.6e5)?),
        yarn: Yarn {
            factor: f64::from(float("rope.scaling.factor", 16.0)?),
            beta_fast: f64::from(float("rope.scaling.yarn_beta_fast", 32.0)?),
            beta_slow: f64::from(float("rope.scaling.yarn_beta_slow", 1.0)?),
            original: keys.size_or("rope.scaling.original_context_length", 65_536)? as f64,
        },
        // No key that says so is known.
        block_drafts: false,
        draft: false,
        numerics: Numerics::Reference,
    };
    Ok(Some((path.to_owned(), config)))
}

/// Refuses what the stages do not vary.
fn fixed(keys: &Keys<'_>, path: &Path) -> Result<(), LoadError> {
    let values = [
        ("attention.head_count_kv", 1),
        ("rope.dimension_count", ROPE_DIM),
        ("expert_shared_count", 1),
        ("hyper_connection.count", STREAMS),
        ("attention.value_length", keys.size("attention.key_length")?),
    ];
    for (name, only) in values {
        let found = keys.size_or(name, only)?;
        if found != only {
            return Err(bad(path, &keys.key(name), format!("is {found}, supported is {only}")));
        }
    }
    let normed = "expert_weights_norm";
    if keys.has(normed) && !keys.meta.get_bool(&keys.key(normed))? {
        return Err(bad(path, &keys.key(normed), "is false, supported is true".to_owned()));
    }
    let scaling = "rope.scaling.type";
    if keys.meta.get_str(&keys.key(scaling))? != "yarn" {
        return Err(bad(path, &keys.key(scaling), "must be yarn".to_owned()));
    }
    Ok(())
}

/// Where draft blocks are the last of the blocks, they are counted among them.
fn layers(keys: &Keys<'_>, file: &GgufFile, path: &Path) -> Result<Vec<LayerKind>, LoadError> {
    let name = keys.key("attention.compress_ratios");
    let ratios: Vec<i64> = keys.meta.get_i32_array(&name)?.into_iter().map(i64::from).collect();
    let blocks = keys.size("block_count")?;
    let last = format!("blk.{}.nextn.enorm.weight", blocks.saturating_sub(1));
    let drafts = if file.weights().find(&last).is_some() { keys.size("nextn_predict_layers")? } else { 0 };
    kinds(path, &name, &ratios, blocks.saturating_sub(drafts))
}

/// One clamp for every layer, routed and shared.
fn limit(keys: &Keys<'_>, path: &Path) -> Result<f32, LoadError> {
    let name = keys.key("swiglu_clamp_exp");
    let mut limits = keys.meta.get_f32_array(&name)?;
    if keys.has("swiglu_clamp_shexp") {
        limits.extend(keys.meta.get_f32_array(&keys.key("swiglu_clamp_shexp"))?);
    }
    match limits.first() {
        Some(&first) if limits.iter().all(|&limit| limit == first) => Ok(first),
        _ => Err(bad(path, &name, "must be one value in every layer".to_owned())),
    }
}
