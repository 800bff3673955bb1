"""Greedy continuations of a real GGUF by three references, written as tests/golden/greedy_NAME.json.

    python3 tests/reference/greedy.py NAME MODEL.gguf          (NAME: smollm2 or gemma3)

For every prompt, from explicit token ids, 64 tokens (stop tokens do not stop):
  f32        transformers on the dequantised weights, f32 throughout (gguf_model.py)
  int8_rows  the same with activations rounded to int8 in front of integer-format matrices (int8_rows.py)
  llama_cpp  llama.cpp, which rounds activations in its own way, f16 KV cache
and for each the chosen tokens, the runner-up (second largest logit) and the gap between the two at each step.
A continuation that leaves another at a step where the gap is small, to the runner-up, is a near-tie; after
that step the two are different texts. What a small gap is, `forced` measures: the f32 continuations are fed to
the other two step by step, and it says at how many steps their argmax is the f32 token, the largest f32 gap at
which it is not, and how far int8 rounding shifts the gap (rms, 99th percentile, largest). For the prompts in
LOGITS the 64 largest f32 logits at the last prompt position are given, with the values of int8_rows at the
same ids and the log-sum-exp of each full row.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from gguf_model import load
from llama_cpp_ref import LlamaCpp
from prompts import prompts

N_NEW, N_TOP = 64, 64
LOGITS = {"prose", "long", "chat-sky"}


@torch.no_grad()
def torch_greedy(model, prompts: list[list[int]]):
    """For each prompt (tokens, runners-up, gaps, logits of the last prompt position).

    All prompts run together, padded on the left with masked positions; each row's own positions count from 0.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache, first, out = None, None, [([], [], []) for _ in prompts]
    for _ in range(N_NEW):
        result = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                       use_cache=True, logits_to_keep=1)
        cache, rows = result.past_key_values, result.logits[:, -1].float()
        first = rows if first is None else first
        top = rows.topk(2)
        for parts, tokens, values in zip(out, top.indices.tolist(), top.values.tolist()):
            for part, value in zip(parts, (*tokens, values[0] - values[1])):
                part.append(value)
        ids = top.indices[:, :1]
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        positions = positions[:, -1:] + 1
    return [(*parts, row) for parts, row in zip(out, first)]


def entry(tokens, seconds, gaps) -> dict:
    return {"tokens": tokens, "runner_up": seconds, "gap": [round(g, 4) for g in gaps]}


@torch.no_grad()
def torch_forced(model, prompt: list[int], tokens: list[int]) -> np.ndarray:
    """Logits `[N_NEW, vocab]` of the steps whose answers were `tokens`."""
    ids = torch.tensor([prompt + tokens[:-1]])
    return model(input_ids=ids, use_cache=False, logits_to_keep=N_NEW).logits[0].float().numpy()


class Forced:
    """How another engine's logits lie at the steps of the f32 continuations, fed with the f32 tokens.

    Unlike free continuations these stay comparable at every step, so they measure an engine's noise: `shift` is
    the change of (logit of the f32 token - logit of the f32 runner-up) against f32.
    """

    def __init__(self):
        self.equal, self.lost, self.shifts = 0, [], []

    def add(self, case: dict, logits: np.ndarray) -> None:
        f32, steps = case["f32"], np.arange(N_NEW)
        tokens, gaps = np.array(f32["tokens"]), np.array(f32["gap"])
        differ = logits.argmax(axis=1) != tokens
        self.equal += int((~differ).sum())
        self.lost += gaps[differ].tolist()
        self.shifts += (logits[steps, tokens] - logits[steps, f32["runner_up"]] - gaps).tolist()

    def summary(self) -> dict:
        shifts = np.abs(self.shifts)
        return {"argmax_equal": self.equal, "of": len(self.shifts), "largest_gap_lost": max(self.lost, default=0.0),
                "shift_rms": round(float(np.sqrt((shifts ** 2).mean())), 4),
                "shift_p99": round(float(np.quantile(shifts, 0.99)), 4),
                "shift_max": round(float(shifts.max()), 4)}


def first_difference(a: list[int], b: list[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)


def main(name: str, path: str) -> None:
    peer = LlamaCpp(path, n_ctx=1024, n_threads=1)
    torch.set_num_threads(1)
    cases = []
    for label, text, special in prompts(name):
        ids = peer.tokenize(text, add_special=True, parse_special=special)
        tokens, seconds, gaps = peer.greedy(ids, N_NEW)
        print("llama.cpp", label, file=sys.stderr)
        cases.append({"label": label, "text": text, "parse_special": special, "prompt": ids,
                      "llama_cpp": entry(tokens, seconds, gaps)})
    forced = {"int8_rows": Forced(), "llama_cpp": Forced()}
    for kind in ("f32", "int8_rows"):
        model = load(path, int8=kind == "int8_rows")
        # Short prompts together, the long one alone.
        short = [c for c in cases if len(c["prompt"]) <= 128]
        for group in (short, [c for c in cases if c not in short]):
            for case, (*rest, row) in zip(group, torch_greedy(model, [c["prompt"] for c in group])):
                case[kind] = entry(*rest)
                if case["label"] in LOGITS:
                    logits = case.setdefault("logits", {"ids": row.topk(N_TOP).indices.tolist()})
                    logits[kind] = [round(v, 4) for v in row[logits["ids"]].tolist()]
                    logits[f"{kind}_lse"] = round(float(torch.logsumexp(row.double(), 0)), 5)
            print(kind, len(group), file=sys.stderr)
        if kind == "int8_rows":
            for case in cases:
                forced[kind].add(case, torch_forced(model, case["prompt"], case["f32"]["tokens"]))
        del model
    for case in cases:
        ids = case["prompt"] + case["f32"]["tokens"][:-1]
        forced["llama_cpp"].add(case, peer.logits(ids, 0, every=True)[-N_NEW:])
    out = Path(__file__).parent.parent / "golden" / f"greedy_{name}.json"
    head = {"model": Path(path).name, "n_new": N_NEW, "forced": {k: f.summary() for k, f in forced.items()}}
    lines = [json.dumps(c, separators=(",", ":"), ensure_ascii=True) for c in cases]
    out.write_text(json.dumps(head)[:-1] + ', "cases": [\n' + ",\n".join(lines) + "\n]}\n")
    for a, b in (("f32", "llama_cpp"), ("f32", "int8_rows"), ("int8_rows", "llama_cpp")):
        splits = [(c["label"], i, c[a]["gap"][i], c[b]["tokens"][i] == c[a]["runner_up"][i])
                  for c in cases if (i := first_difference(c[a]["tokens"], c[b]["tokens"])) is not None]
        equal = len(cases) - len(splits)
        print(f"{name}: {a} against {b}: {equal} of {len(cases)} equal; split at (step, gap, to runner-up):")
        for label, i, gap, second in splits:
            print(f"  {label}: step {i}, gap {gap:.3f}, {second}")
    print(json.dumps(head["forced"]))
    for case in cases:
        if "logits" in case:
            d = np.abs(np.array(case["logits"]["f32"]) - np.array(case["logits"]["int8_rows"]))
            print(f"  {case['label']}: int8 moves the top {N_TOP} logits by up to {d.max():.3f}, mean {d.mean():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
