"""Logits and greedy tokens of a GGUF from llama.cpp, by explicit token ids (through llama-cpp-python)."""

import ctypes

import llama_cpp
import numpy as np


class LlamaCpp:
    """One model, one sequence; single-token decoding after the prompt, `n_threads` threads."""

    def __init__(self, path: str, n_ctx: int = 2048, n_threads: int = 2, f32_cache: bool = False):
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        mp = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), mp)
        if not self.model:
            raise ValueError(f"llama.cpp does not load {path}")
        cp = llama_cpp.llama_context_default_params()
        cp.n_ctx = cp.n_batch = cp.n_ubatch = n_ctx
        cp.n_threads = cp.n_threads_batch = n_threads
        if f32_cache:
            cp.type_k = cp.type_v = llama_cpp.GGML_TYPE_F32
            cp.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.ctx = llama_cpp.llama_init_from_model(self.model, cp)
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self.vocab = vocab

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        raw = text.encode()
        out = (llama_cpp.llama_token * (len(raw) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), out, len(out), add_special, parse_special)
        if n < 0:
            raise ValueError("prompt does not fit")
        return list(out[:n])

    def logits(self, tokens: list[int], first_pos: int, every: bool) -> np.ndarray:
        """Runs `tokens` from position `first_pos`; logits `[n, vocab]` of all rows, or `[1, vocab]` of the last."""
        if first_pos == 0:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, t in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = t, first_pos + i, 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every or i + 1 == len(tokens)
        rc = llama_cpp.llama_decode(self.ctx, batch)
        if rc != 0:
            raise RuntimeError(f"llama_decode: {rc}")
        rows = range(len(tokens)) if every else [len(tokens) - 1]
        out = [np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.ctx, i), (self.n_vocab,)).copy() for i in rows]
        llama_cpp.llama_batch_free(batch)
        return np.stack(out)

    def greedy(self, prompt: list[int], n: int) -> tuple[list[int], list[int], list[float]]:
        """`n` greedy tokens (stop tokens do not stop), the runner-up of each and its distance in logits."""
        row = self.logits(prompt, 0, every=False)[0]
        tokens, seconds, gaps = [], [], []
        for i in range(n):
            second, first = (int(t) for t in np.argpartition(row, -2)[-2:])
            tokens.append(first)
            seconds.append(second)
            gaps.append(float(row[first] - row[second]))
            if i + 1 < n:
                row = self.logits(tokens[-1:], len(prompt) + i, every=False)[0]
        return tokens, seconds, gaps
