"""Perplexity of a GGUF on tests/fixtures/ppl.txt by two references, written as tests/golden/ppl_NAME.json.

    python3 tests/reference/ppl.py NAME MODEL.gguf LLAMA_PERPLEXITY      (the llama-perplexity binary)

The protocol, which is llama-perplexity's with `-c 512` and is repeated in the JSON:
  1. the text is the file less one final newline; special-token text is not special; BOS is put in front only
     if the model's metadata asks for it (SmolLM2: no);
  2. the ids are cut into chunks of 512 from the first on; the remainder is left out;
  3. every chunk is run alone from position 0; where the metadata asks for BOS, it replaces the chunk's first id;
  4. in each chunk the logits at positions 256 .. 510 are scored on the ids at 257 .. 511: 255 scores a chunk;
  5. perplexity = exp(sum of -ln softmax(logits)[id] / number of scores), the sum in f64.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import torch

from gguf_model import load
from llama_cpp_ref import LlamaCpp

N_CTX = 512
HERE = Path(__file__).parent
TEXT = HERE.parent / "fixtures" / "ppl.txt"


@torch.no_grad()
def running_ppl(model, tokens: list[int]) -> list[float]:
    """Perplexity after each chunk, over all chunks so far."""
    nll, count, out = 0.0, 0, []
    for start in range(0, len(tokens) - N_CTX + 1, N_CTX):
        ids = torch.tensor(tokens[start:start + N_CTX])
        logits = model(input_ids=ids[None], use_cache=False).logits[0, N_CTX // 2:-1]
        logp = torch.log_softmax(logits.double(), dim=-1)
        nll -= float(logp.gather(1, ids[N_CTX // 2 + 1:, None]).sum())
        count += N_CTX - 1 - N_CTX // 2
        out.append(round(math.exp(nll / count), 4))
        print(f"chunk {len(out)}: {out[-1]:.4f}", file=sys.stderr)
    return out


def main(name: str, path: str, binary: str) -> None:
    text = TEXT.read_text()
    peer = LlamaCpp(path, n_ctx=N_CTX)
    tokens = peer.tokenize(text.removesuffix("\n"), add_special=True, parse_special=False)
    command = [binary, "-m", path, "-f", str(TEXT), "-c", str(N_CTX), "-t", "2"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    said = run.stdout + run.stderr
    chunks = [float(v) for v in re.findall(r"\[\d+\](\d+\.\d+),", said)]
    final = re.search(r"Final estimate: PPL = (\d+\.\d+) \+/- (\d+\.\d+)", said)
    n_chunks = len(tokens) // N_CTX
    assert len(chunks) == n_chunks, (len(chunks), n_chunks)
    plain = running_ppl(load(path), tokens)
    int8 = running_ppl(load(path, int8=True), tokens)
    golden = {
        "text": "tests/fixtures/ppl.txt",
        "model": Path(path).name,
        "command": f"llama-perplexity -m {Path(path).name} -f tests/fixtures/ppl.txt -c {N_CTX} -t 2",
        "protocol": __doc__.split("in the JSON:\n", 1)[1],
        "n_ctx": N_CTX, "n_tokens": len(tokens), "n_chunks": n_chunks,
        "n_scored": n_chunks * (N_CTX - 1 - N_CTX // 2),
        "llama_cpp": {"ppl": float(final[1]), "stderr": float(final[2])},
        "f32": {"ppl": plain[-1]},
        "int8_rows": {"ppl": int8[-1]},
        "running_ppl": {"llama_cpp": chunks, "f32": plain, "int8_rows": int8},
        "tokens": tokens,
    }
    out = HERE.parent / "golden" / f"ppl_{name}.json"
    rows = [f" {json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in golden.items()]
    out.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    print(f"{name}: llama.cpp {final[1]}, f32 {plain[-1]:.4f}, int8 rows {int8[-1]:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
