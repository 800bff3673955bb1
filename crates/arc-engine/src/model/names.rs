//! What the tensors of a decoder are called, in GGUF and in safetensors.

use super::config::Arch;
use crate::load::ModelFile;

/// A tensor's role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Embed,
    AttnNorm,
    Q,
    K,
    V,
    QBias,
    KBias,
    VBias,
    QNorm,
    KNorm,
    AttnOut,
    AttnPostNorm,
    FfnNorm,
    Gate,
    Up,
    Down,
    FfnPostNorm,
    Norm,
    Head,
}

/// A naming scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    Gguf,
    /// Hugging Face's, with whether norms stand around the feed-forward block (Gemma 3), which moves the meaning of
    /// `post_attention_layernorm`.
    Safetensors {
        sandwich: bool,
    },
}

impl Names {
    pub fn of(file: &ModelFile) -> Names {
        match file {
            ModelFile::Gguf(_) | ModelFile::Synthetic(_) => Names::Gguf,
            ModelFile::Safetensors(file) => {
                let sandwich = file.weights().find("model.layers.0.pre_feedforward_layernorm.weight").is_some();
                Names::Safetensors { sandwich }
            }
        }
    }

    /// Name of a tensor; `layer` is ignored where it has none.
    pub fn tensor(self, which: Which, layer: usize) -> String {
        match self {
            Names::Gguf => match which {
                Which::Embed => "token_embd.weight".into(),
                Which::Norm => "output_norm.weight".into(),
                Which::Head => "output.weight".into(),
                _ => format!("blk.{layer}.{}", gguf_suffix(which)),
            },
            Names::Safetensors { sandwich } => match which {
                Which::Embed => "model.embed_tokens.weight".into(),
                Which::Norm => "model.norm.weight".into(),
                Which::Head => "lm_head.weight".into(),
                _ => format!("model.layers.{layer}.{}", safetensors_suffix(which, sandwich)),
            },
        }
    }

    /// Whether the file stores `weight - 1` for a norm. GGUF converters add the 1 already.
    pub fn norms_are_offsets(self, arch: Arch) -> bool {
        arch == Arch::Gemma3 && self != Names::Gguf
    }
}

fn gguf_suffix(which: Which) -> &'static str {
    match which {
        Which::AttnNorm => "attn_norm.weight",
        Which::Q => "attn_q.weight",
        Which::K => "attn_k.weight",
        Which::V => "attn_v.weight",
        Which::QBias => "attn_q.bias",
        Which::KBias => "attn_k.bias",
        Which::VBias => "attn_v.bias",
        Which::QNorm => "attn_q_norm.weight",
        Which::KNorm => "attn_k_norm.weight",
        Which::AttnOut => "attn_output.weight",
        Which::AttnPostNorm => "post_attention_norm.weight",
        Which::FfnNorm => "ffn_norm.weight",
        Which::Gate => "ffn_gate.weight",
        Which::Up => "ffn_up.weight",
        Which::Down => "ffn_down.weight",
        Which::FfnPostNorm => "post_ffw_norm.weight",
        Which::Embed | Which::Norm | Which::Head => unreachable!("{which:?} belongs to no layer"),
    }
}

fn safetensors_suffix(which: Which, sandwich: bool) -> &'static str {
    match which {
        Which::AttnNorm => "input_layernorm.weight",
        Which::Q => "self_attn.q_proj.weight",
        Which::K => "self_attn.k_proj.weight",
        Which::V => "self_attn.v_proj.weight",
        Which::QBias => "self_attn.q_proj.bias",
        Which::KBias => "self_attn.k_proj.bias",
        Which::VBias => "self_attn.v_proj.bias",
        Which::QNorm => "self_attn.q_norm.weight",
        Which::KNorm => "self_attn.k_norm.weight",
        Which::AttnOut => "self_attn.o_proj.weight",
        Which::AttnPostNorm => "post_attention_layernorm.weight",
        Which::FfnNorm if sandwich => "pre_feedforward_layernorm.weight",
        Which::FfnNorm => "post_attention_layernorm.weight",
        Which::Gate => "mlp.gate_proj.weight",
        Which::Up => "mlp.up_proj.weight",
        Which::Down => "mlp.down_proj.weight",
        Which::FfnPostNorm => "post_feedforward_layernorm.weight",
        Which::Embed | Which::Norm | Which::Head => unreachable!("{which:?} belongs to no layer"),
    }
}
