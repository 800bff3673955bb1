"""Runs the tiny GGUFs of tests/fixtures/tiny in llama.cpp and compares with their goldens.

    python3 tests/reference/check_tiny.py             (needs llama-cpp-python besides requirements.txt)

The goldens come from transformers reading the safetensors folder, so agreement here says that the GGUF
(names, q/k order, norms, metadata) is what its architecture's readers expect. llama.cpp keeps K and V in
f32 here; with an F32 GGUF what remains is summation order, with F16/BF16 its rounding of activations, and with
integer formats its own int8 rounding (f16 scales), which moves logits as much as int8 itself does: there only
the mean difference is judged.
"""

import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from llama_cpp_ref import LlamaCpp

root = Path(__file__).parent.parent / "fixtures" / "tiny"
failed = 0
for folder in sorted(p for p in root.iterdir() if p.is_dir()):
    golden = load_file(folder / "golden.safetensors")
    prompt = golden["prompt"].tolist()
    peer = LlamaCpp(folder / "model.gguf", n_ctx=256, f32_cache=True)
    got = peer.logits(prompt, 0, every=True)
    tokens, _, _ = peer.greedy(prompt, len(golden["greedy"]))
    diff = np.abs(got - golden["logits"])
    line = f"{folder.name:13} against f32: max {diff.max():.5f} mean {diff.mean():.6f}"
    same = int((np.array(tokens) == golden["greedy"]).sum())
    good = same == len(tokens)
    if "logits_int8" in golden:
        diff = np.abs(got - golden["logits_int8"])
        line += f"; against int8: max {diff.max():.5f} mean {diff.mean():.6f}"
        good = diff.mean() < 0.03 * golden["logits_int8"].std()
    failed += not good
    print(f"{line}; greedy {same}/{len(tokens)}{'' if good else '  FAILED'}")
sys.exit(failed)
