"""A GGUF (llama or gemma3) as a transformers model in f32: every tensor dequantised by the gguf package.

The result is the file's own weights in f32 arithmetic throughout, f32 KV cache included: the value that an
engine approximates. With `int8=True` the linear layers see activations rounded as in int8_rows.py.
"""

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from int8_rows import use_int8_rows

FLOAT = {"F32", "F16", "BF16"}
LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "ffn_norm": "post_attention_layernorm",
}
LAYER_GEMMA = LAYER | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def unpermute(w: np.ndarray, n_heads: int) -> np.ndarray:
    """GGUF's row order of Llama q and k (rotary pairs beside each other) back to transformers' (halves)."""
    return w.reshape(n_heads, w.shape[0] // n_heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def load(path: str, int8: bool = False):
    reader = gguf.GGUFReader(path)
    meta = {name: f for name, f in reader.fields.items()}

    def get(key, default=None):
        return meta[key].contents() if key in meta else default

    arch = get("general.architecture")
    n_heads, n_kv_heads = get(f"{arch}.attention.head_count"), get(f"{arch}.attention.head_count_kv")
    hidden = get(f"{arch}.embedding_length")
    common = dict(
        vocab_size=len(meta["tokenizer.ggml.tokens"].data), hidden_size=hidden,
        intermediate_size=get(f"{arch}.feed_forward_length"), num_hidden_layers=get(f"{arch}.block_count"),
        num_attention_heads=n_heads, num_key_value_heads=n_kv_heads,
        max_position_embeddings=get(f"{arch}.context_length"),
        rms_norm_eps=get(f"{arch}.attention.layer_norm_rms_epsilon"),
        head_dim=get(f"{arch}.attention.key_length", hidden // n_heads),
        tie_word_embeddings=not any(t.name == "output.weight" for t in reader.tensors),
    )
    theta = get(f"{arch}.rope.freq_base", 10000.0)
    if arch == "llama":
        config = AutoConfig.for_model("llama", rope_parameters={"rope_type": "default", "rope_theta": theta}, **common)
    elif arch == "gemma3":
        config = AutoConfig.for_model(
            "gemma3_text", query_pre_attn_scalar=common["head_dim"],
            sliding_window=get("gemma3.attention.sliding_window"),
            rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": theta},
                             "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}, **common)
    else:
        raise ValueError(f"no mapping for architecture {arch}")

    state, integer = {}, set()
    for t in reader.tensors:
        value = gguf.quants.dequantize(t.data, t.tensor_type).reshape([int(n) for n in reversed(t.shape)])
        stem, kind = t.name.rsplit(".", 1)
        if stem.startswith("blk."):
            _, layer, stem = stem.split(".")
            name = f"model.layers.{layer}.{(LAYER_GEMMA if arch == 'gemma3' else LAYER)[stem]}"
        else:
            name = TOP[stem]
        if arch == "llama" and stem in ("attn_q", "attn_k"):
            value = unpermute(value, n_heads if stem == "attn_q" else n_kv_heads)
        if arch == "gemma3" and "norm" in stem:
            value = value - 1.0
        if value.ndim == 2 and t.tensor_type.name not in FLOAT:
            integer.add(name)
        state[f"{name}.{kind}"] = torch.from_numpy(np.array(value, dtype=np.float32))

    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    assert set(missing) <= tied and not unexpected, (missing, unexpected)
    model.tie_weights()
    if "model.embed_tokens" in integer:
        integer.remove("model.embed_tokens")
        if config.tie_word_embeddings:
            integer.add("lm_head")
    if int8:
        use_int8_rows(model, integer)
    return model
