"""Makes the tiny random checkpoints of tests/fixtures/tiny and their goldens.

    python3 tests/reference/make_tiny.py [OUT]          (OUT: tests/fixtures/tiny beside this folder)

Each checkpoint is written twice, as a folder of safetensors (config.json, tokenizer.json) and as one GGUF,
**with the same weight values to the last bit**: every matrix is drawn on a grid that its GGUF format and its
safetensors dtype both hold exactly (per 32 values an integer code times a power of two). So one golden
serves both files, and what differs between the two in an engine is the loader or the format, nothing else.

golden.safetensors of each model:
  prompt        i32 [40]         token ids, no BOS added
  logits        f32 [40, vocab]  transformers, f32, CPU, at every position of the prompt
  greedy        i32 [24]         greedy continuation (no stop token), greedy_gap f32 [24]: top-1 minus top-2
  logits_int8, greedy_int8, greedy_int8_gap
                                 the same with int8 activations (see int8_rows.py) in front of each matrix
                                 that the GGUF stores in an integer format; only where there are such
Prompts are drawn until the smallest gap of both continuations exceeds MIN_GAP, so greedy tokens are no
near-ties and must be equal. With int8 activations, one value rounded to the other side moves every later
logit (by up to 0.5 here), so for those goldens no value of the prompt or its continuation lies within
MIN_MARGIN of a rounding tie, in units of one code: an engine that follows int8_rows.py agrees to about 1e-3.
"""

import json
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file as save_np
from safetensors.torch import save_file as save_torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from int8_rows import use_int8_rows

N_PROMPT, N_GREEDY, MIN_GAP = 40, 24, 0.03
MIN_MARGIN = 1e-4
VOCAB = 320
INTEGER = {Q.Q8_0: 127, Q.Q4_1: 15}


@dataclass
class Tiny:
    """One checkpoint: `config` is its config.json, `types` the GGUF type of matrices whose name ends so."""

    name: str
    arch: str
    config: dict
    types: dict[str, Q]
    st_dtype: torch.dtype
    seed: int
    pre: str = "llama-bpe"
    shards: int = 1
    extra: dict = field(default_factory=dict)

    def type_of(self, gguf_name: str) -> Q:
        for suffix, t in self.types.items():
            if gguf_name.endswith(suffix):
                return t
        raise KeyError(gguf_name)


def base(model_type, arch_class, **more):
    return {
        "architectures": [arch_class], "model_type": model_type, "vocab_size": VOCAB, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "tie_word_embeddings": True, "bos_token_id": VOCAB - 3, "eos_token_id": VOCAB - 1, **more,
    }


# config.json comes in two dialects, and both are found in the field: flat `rope_theta` (older) and
# `rope_parameters` (transformers 5). The set has both on purpose.
MODELS = [
    Tiny("llama", "llama",
         base("llama", "LlamaForCausalLM", num_attention_heads=2, num_key_value_heads=1, rope_theta=10000.0,
              torch_dtype="float16"),
         {"weight": Q.F32}, torch.float16, seed=11),
    Tiny("llama-untied", "llama",
         base("llama", "LlamaForCausalLM", head_dim=32, tie_word_embeddings=False,
              rope_parameters={"rope_type": "default", "rope_theta": 100000.0}),
         {"token_embd.weight": Q.F16, "output.weight": Q.Q8_0, "weight": Q.Q4_1}, torch.bfloat16, seed=12),
    Tiny("qwen2", "qwen2",
         base("qwen2", "Qwen2ForCausalLM", num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-6,
              rope_theta=1000000.0, torch_dtype="float16", use_sliding_window=False, sliding_window=256,
              max_window_layers=2),
         {"weight": Q.F16}, torch.float16, seed=13, pre="qwen2", shards=2),
    Tiny("qwen3", "qwen3",
         base("qwen3", "Qwen3ForCausalLM", head_dim=32, rms_norm_eps=1e-6, attention_bias=False,
              rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, sliding_window=None,
              use_sliding_window=False, max_window_layers=2),
         {"weight": Q.Q8_0}, torch.bfloat16, seed=14, pre="qwen2"),
    # Seven layers: five local, one global, one local, as the real models have them; the window of 16 is
    # shorter than the prompt.
    Tiny("gemma3", "gemma3",
         base("gemma3_text", "Gemma3ForCausalLM", num_hidden_layers=7, num_attention_heads=2,
              num_key_value_heads=1, head_dim=32, intermediate_size=64, query_pre_attn_scalar=32,
              rms_norm_eps=1e-6, hidden_activation="gelu_pytorch_tanh", sliding_window=16, rope_theta=1000000.0,
              rope_local_base_freq=10000.0, _sliding_window_pattern=6, attention_bias=False,
              attn_logit_softcapping=None, final_logit_softcapping=None, rope_scaling=None,
              layer_types=["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]),
         {"weight": Q.BF16}, torch.bfloat16, seed=15),
]
MODELS[-1].config.pop("hidden_act")


# --- weights ----------------------------------------------------------------------------------------------

# Size of an embedding against what a layer adds (about 1): large enough that the token matters. Gemma multiplies
# by sqrt(hidden_size) = 8.
EMBED_GAIN = {"llama": 0.4, "qwen2": 0.4, "qwen3": 0.4, "gemma3": 0.4}


def draw_matrix(rng, rows: int, cols: int, qtype: Q, gain: float) -> np.ndarray:
    """`[rows, cols]` on the grid of `qtype`: each 32 values are integers times one power of two."""
    groups = rng.standard_normal((rows, cols // 32, 32))
    if qtype == Q.Q4_1:
        # Codes 0..15 with minimum -8d: both ends present, so that the quantiser finds exactly this d and m.
        codes = np.clip(np.round(groups * 4.5), -8, 7)
        codes[..., 0], codes[..., 1] = -8, 7
        unit = 2.0 ** np.round(np.log2(gain / 4.5) + rng.uniform(-1, 1, groups.shape[:2]))
    else:
        codes = np.clip(np.round(groups * 45), -127, 127)
        codes[..., 0] = 127 * np.sign(rng.standard_normal(groups.shape[:2]))
        unit = 2.0 ** np.round(np.log2(gain / 45) + rng.uniform(-1, 1, groups.shape[:2]))
    for g in codes.reshape(-1, 32):
        rng.shuffle(g)
    return (codes * unit[..., None]).reshape(rows, cols).astype(np.float32)


def draw_weights(tiny: Tiny, model) -> dict[str, np.ndarray]:
    """Values of every parameter of `model`, by its own name."""
    rng = np.random.default_rng(tiny.seed)
    out = {}
    for name, p in model.named_parameters():
        if p.dim() == 2:
            gain = EMBED_GAIN[tiny.arch] if "embed_tokens" in name else 1.0 / np.sqrt(p.shape[1])
            if "lm_head" in name:
                gain = 3.0 / np.sqrt(p.shape[1])
            out[name] = draw_matrix(rng, *p.shape, tiny.type_of(gguf_name(tiny, name)), gain)
        else:
            # Norms and biases: odd multiples of 1/64. Multiples, so that every float dtype holds them; odd, so
            # that `x / amax * 127` of a normed embedding (an integer times such a weight) is practically
            # never an exact tie, which the last bit of the norm would then decide.
            mean = 0.0 if name.endswith("bias") or tiny.arch == "gemma3" else 1.0
            if tiny.arch == "gemma3" and ".post_" in name:
                mean = -0.5  # what a layer adds is scaled by 1 + weight, and there are fourteen such sums
            if name == "model.norm.weight":
                # Random signs: a tied head would otherwise mostly answer with the token it was given.
                mean = rng.choice([-2.5, 0.5] if tiny.arch == "gemma3" else [-1.0, 1.0], p.shape)
            odd = 2 * np.round(rng.uniform(-16, 15, p.shape)) + 1
            out[name] = (mean + odd / 64).astype(np.float32)
    return out


# --- GGUF -------------------------------------------------------------------------------------------------

LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
# Gemma 3 has four norms a layer, and its post_attention_layernorm is a different one from Llama's.
LAYER_GEMMA = LAYER | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(tiny: Tiny, name: str) -> str:
    """GGUF name of a transformers parameter, `model.layers.0.mlp.up_proj.weight` -> `blk.0.ffn_up.weight`."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    table = LAYER_GEMMA if tiny.arch == "gemma3" else LAYER
    for theirs, ours in table.items():
        if rest.startswith(theirs):
            return f"blk.{layer}.{ours}{rest[len(theirs):]}"
    raise KeyError(name)


def permute(w: np.ndarray, n_heads: int) -> np.ndarray:
    """Row order of Llama q and k in GGUF: within a head, rotary pairs (i, i + d/2) become neighbours."""
    return w.reshape(n_heads, 2, w.shape[0] // n_heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def write_gguf(tiny: Tiny, config, weights, vocab, merges, path: Path) -> None:
    c = tiny.config
    w = gguf.GGUFWriter(path, tiny.arch)
    w.add_name(f"tiny random {tiny.name}")
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c.get("rope_theta") or c["rope_parameters"]["rope_theta"])
    if "head_dim" in c:
        w.add_key_length(c["head_dim"])
        w.add_value_length(c["head_dim"])
    if tiny.arch == "llama":
        w.add_vocab_size(VOCAB)
        w.add_rope_dimension_count(c.get("head_dim", c["hidden_size"] // c["num_attention_heads"]))
    if tiny.arch == "gemma3":
        w.add_sliding_window(c["sliding_window"])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(tiny.pre)
    w.add_token_list(vocab)
    w.add_token_types([gguf.TokenType.CONTROL if t.startswith("<|") else gguf.TokenType.NORMAL for t in vocab])
    w.add_token_merges([" ".join(m) for m in merges])
    w.add_bos_token_id(c["bos_token_id"])
    w.add_eos_token_id(c["eos_token_id"])
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)
    for name, value in weights.items():
        target = gguf_name(tiny, name)
        if tiny.arch == "llama" and target.endswith(("attn_q.weight", "attn_k.weight")):
            value = permute(value, c["num_attention_heads" if "attn_q" in target else "num_key_value_heads"])
        if tiny.arch == "gemma3" and "norm" in target:
            value = value + 1.0  # Gemma scales by 1 + weight; GGUF stores the sum
        qtype = tiny.type_of(target) if value.ndim == 2 else Q.F32
        data = gguf.quants.quantize(value, qtype)
        assert np.array_equal(gguf.quants.dequantize(data, qtype).reshape(value.shape), value), target
        w.add_tensor(target, data, raw_dtype=qtype)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


# --- tokenizer --------------------------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
def pre_split(digits: str) -> str:
    """The pre-tokenizer expression of Llama 3 and Qwen 2, which differ in how digits are grouped."""
    return (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
            + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


PRE = {"llama-bpe": pre_split(r"\p{N}{1,3}"), "qwen2": pre_split(r"\p{N}")}
MERGES = [tuple(pair.split("+")) for pair in (
    "Ġ+t h+e Ġ+a i+n Ġt+he e+r o+n Ġ+Ġ r+e Ġa+n Ġan+d o+u in+g a+t e+s Ċ+Ċ Ġ+w o+r").split()]


def make_vocab() -> tuple[list[str], list[tuple[str, str]]]:
    """256 byte tokens, one token a merge, unused filler, three control tokens at the end: VOCAB in all."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in MERGES]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    filler = [f"[unused{i}]" for i in range(VOCAB - len(tokens) - len(special))]
    return tokens + filler + special, MERGES


def write_tokenizer(tiny: Tiny, vocab, merges, folder: Path) -> None:
    tok = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocab)}, merges=merges))
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRE[tiny.pre]), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens([t for t in vocab if t.startswith("<|")])
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"add_bos_token": False, "bos_token": vocab[-3], "eos_token": vocab[-1], "chat_template": CHAT_TEMPLATE},
        indent=1) + "\n")


# --- safetensors ------------------------------------------------------------------------------------------

def write_folder(tiny: Tiny, weights, vocab, merges, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(tiny.config, indent=1) + "\n")
    write_tokenizer(tiny, vocab, merges, folder)
    tensors = {}
    for name, value in weights.items():
        t = torch.from_numpy(value).to(tiny.st_dtype)
        assert torch.equal(t.float(), torch.from_numpy(value)), name
        tensors[name] = t
    if tiny.shards == 1:
        save_torch(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names, where = sorted(tensors), {}
    for i in range(tiny.shards):
        file = f"model-{i + 1:05}-of-{tiny.shards:05}.safetensors"
        part = names[i * len(names) // tiny.shards:(i + 1) * len(names) // tiny.shards]
        save_torch({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        where |= {n: file for n in part}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


# --- goldens ----------------------------------------------------------------------------------------------

@torch.no_grad()
def greedy(model, prompt: list[int]) -> tuple[list[int], list[float], torch.Tensor]:
    """Greedy tokens, the gap of each, and the logits of the prompt; every step recomputes all positions."""
    first, tokens, gaps = None, [], []
    for _ in range(N_GREEDY):
        logits = model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0].float()
        first = logits if first is None else first
        top = logits[-1].topk(2)
        tokens.append(int(top.indices[0]))
        gaps.append(float(top.values[0] - top.values[1]))
    return tokens, gaps, first


def load_model(folder: Path):
    """The safetensors folder through transformers, in f32: config.json is tested as a stranger reads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def candidates(rng, rounded, margins: list):
    """Random prompts, by their hundreds; with int8 activations only such as come near no rounding tie."""
    while True:
        prompts = rng.integers(0, VOCAB - 3, (256, N_PROMPT))
        keep = range(len(prompts))
        if rounded:
            margins.clear()
            rounded(input_ids=torch.from_numpy(prompts), use_cache=False)
            keep = torch.stack(margins).amin(dim=(0, 2)).gt(MIN_MARGIN).nonzero()[:, 0].tolist()
        yield from (prompts[i].tolist() for i in keep)


def make(tiny: Tiny, out: Path) -> None:
    folder = out / tiny.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny.config))
    config = AutoConfig.from_pretrained(folder)
    weights = draw_weights(tiny, AutoModelForCausalLM.from_config(config))
    vocab, merges = make_vocab()
    write_folder(tiny, weights, vocab, merges, folder)
    write_gguf(tiny, config, weights, vocab, merges, folder / "model.gguf")

    matrices = {n: tiny.type_of(gguf_name(tiny, n)) for n, v in weights.items() if v.ndim == 2}
    integer = {n.removesuffix(".weight") for n, t in matrices.items() if t in INTEGER and "embed" not in n}
    if config.tie_word_embeddings and matrices["model.embed_tokens.weight"] in INTEGER:
        integer.add("lm_head")
    plain = load_model(folder)
    rounded, margins = None, []
    if integer:
        rounded = load_model(folder)
        use_int8_rows(rounded, integer, margins)
    rng = np.random.default_rng(tiny.seed + 1000)
    for tries, prompt in enumerate(candidates(rng, rounded, margins), 1):
        tokens, gaps, logits = greedy(plain, prompt)
        golden = {"prompt": np.array(prompt, np.int32), "logits": logits.numpy(),
                  "greedy": np.array(tokens, np.int32), "greedy_gap": np.array(gaps, np.float32)}
        if min(gaps) < MIN_GAP or len(set(tokens)) < 8:
            continue
        if rounded:
            margins.clear()
            tokens, gaps, logits = greedy(rounded, prompt)
            golden |= {"logits_int8": logits.numpy(), "greedy_int8": np.array(tokens, np.int32),
                       "greedy_int8_gap": np.array(gaps, np.float32)}
            if min(gaps) < MIN_GAP or min(float(m.min()) for m in margins) < MIN_MARGIN:
                continue
        break
    save_np(golden, folder / "golden.safetensors", metadata={"model": tiny.name})
    std = golden["logits"].std()
    line = f"{tiny.name:13} logits std {std:.2f}, smallest gap {golden['greedy_gap'].min():.3f} (prompt {tries})"
    if rounded:
        diff = np.abs(golden["logits"] - golden["logits_int8"]).max()
        same = (golden["greedy"] == golden["greedy_int8"]).sum()
        line += f", int8 moves logits by up to {diff:.3f}, {same}/{N_GREEDY} tokens equal"
    print(line)


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "fixtures" / "tiny"
    torch.manual_seed(0)
    for tiny in MODELS:
        make(tiny, out)
    total = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    print(f"{total / 1e6:.2f} MB in {out}")
