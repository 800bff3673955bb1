#!/usr/bin/env python3
"""Load of N concurrent streaming completions on a local OpenAI-compatible server; standard library only.

    bench/peer/streams.py --port 8080 --streams 16 --max-tokens 64 [--requests 32] [--timeout 300] [--json]

Each of N threads sends POST /v1/completions (stream, temperature 0) to 127.0.0.1, one request after the
other, until `requests` have been sent in all (default: one a stream). Prompts differ, so that no server can
answer one from another's cache. Tokens are counted from the server's own `usage` where it sends one (llama-server
and arc do, `stream_options.include_usage`), else one per event with text. An answer that stops early (end of
text) counts with the tokens it has; the report says how many were short. Ends by itself after `timeout` seconds.

Reports total tok/s (all generated tokens / wall time from the first request's start to the last byte), time to
first token (median, largest) and time per later token (median over requests).
"""

import argparse
import http.client
import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass

SUBJECTS = ["a lighthouse", "the desert", "an old violin", "the night train", "a garden in spring", "the river",
            "a lost map", "the mountain", "an empty theatre", "the harbour", "a clockmaker", "the first snow",
            "a market", "the library", "an island", "the last bus"]


@dataclass
class Result:
    tokens: int
    start_s: float
    first_s: float
    end_s: float


def prompt(number: int, words: int) -> str:
    head = f"Story number {number}, about {SUBJECTS[number % len(SUBJECTS)]}. "
    filler = "It was told by many people in many towns and each of them told it differently. "
    return (head + filler * (words // 16 + 1)) if words else head + "It begins like this:"


def complete(port: int, model: str, text: str, max_tokens: int, ignore_eos: bool, deadline: float) -> Result:
    body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}
    if ignore_eos:
        body["ignore_eos"] = True
    start = time.perf_counter()
    conn = http.client.HTTPConnection("127.0.0.1", port, timeout=max(1.0, deadline - start))
    try:
        conn.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = conn.getresponse()
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {reply.read(500).decode(errors='replace')}")
        events, usage, first = 0, None, None
        for line in reply:
            if time.perf_counter() > deadline:
                raise TimeoutError("out of time")
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            event = json.loads(data)
            usage = event.get("usage") or usage
            if any(choice.get("text") for choice in event.get("choices", [])):
                first = first or time.perf_counter()
                events += 1
        end = time.perf_counter()
    finally:
        conn.close()
    tokens = usage["completion_tokens"] if usage else events
    return Result(tokens, start, first or end, end)


def load(args) -> tuple[list[Result], list[str]]:
    results, errors, lock = [], [], threading.Lock()
    numbers = iter(range(args.requests or args.streams))
    deadline = time.perf_counter() + args.timeout

    def worker():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None or time.perf_counter() > deadline:
                return
            try:
                text = prompt(args.first + number, args.prompt_words)
                one = complete(args.port, args.model, text, args.max_tokens, args.ignore_eos, deadline)
                with lock:
                    results.append(one)
            except Exception as e:  # a failed request is a result of the run, not the end of it
                with lock:
                    errors.append(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=worker) for _ in range(args.streams)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results, errors


def summary(results: list[Result], max_tokens: int) -> dict:
    wall = max(r.end_s for r in results) - min(r.start_s for r in results)
    tokens = sum(r.tokens for r in results)
    later = [(r.end_s - r.first_s) / (r.tokens - 1) for r in results if r.tokens > 1]
    ttft = [r.first_s - r.start_s for r in results]
    return {
        "requests": len(results), "tokens": tokens, "short": sum(r.tokens < max_tokens for r in results),
        "wall_s": round(wall, 3), "total_tok_s": round(tokens / wall, 2),
        "ttft_ms_median": round(statistics.median(ttft) * 1e3, 1), "ttft_ms_max": round(max(ttft) * 1e3, 1),
        "tpot_ms_median": round(statistics.median(later) * 1e3, 2) if later else None,
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--streams", type=int, default=16)
    p.add_argument("--requests", type=int, default=0, help="in all; 0: one a stream")
    p.add_argument("--max-tokens", type=int, default=64)
    p.add_argument("--prompt-words", type=int, default=0, help="0: a prompt of about 20 tokens")
    p.add_argument("--first", type=int, default=0, help="number of the first prompt; another number, another prompt")
    p.add_argument("--model", default="default")
    p.add_argument("--ignore-eos", action="store_true", help="ask for answers that do not stop at end of text")
    p.add_argument("--timeout", type=float, default=300.0, help="seconds for the whole run")
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    if not (1 <= args.streams <= 256 and args.requests <= 10_000 and 0 < args.timeout <= 3600):
        p.error("streams 1..256, requests up to 10000, timeout up to 3600 s")
    results, errors = load(args)
    for e in errors[:5]:
        print(f"request failed: {e}", file=sys.stderr)
    if not results:
        return 1
    out = summary(results, args.max_tokens) | {"streams": args.streams, "errors": len(errors)}
    print(json.dumps(out) if args.json else "\n".join(f"{k:16} {v}" for k, v in out.items()))
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
