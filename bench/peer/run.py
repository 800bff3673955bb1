#!/usr/bin/env python3
"""arc against llama.cpp: same file, same threads, same machine, interleaved. Standard library only.

    bench/peer/run.py --arc target/release/arc --llama DEST/build/bin --model FILE.gguf [--reps 5] [--out FILE.json]

DEST is what bench/peer/build_llama_cpp.sh was given. Measures, alternating between the two in every repetition and
swapping who goes first:
  prefill   512 tokens          arc bench --pp 512 --tg 128      llama-bench -p 512 -n 0
  decode    128 tokens                                           llama-bench -p 0 -n 128 -d DEPTH
  streams   16 concurrent       arc serve                        llama-server -np 16        (bench/peer/streams.py)
and prints for each the medians, the spread (largest minus smallest, of the median) and the ratio of the medians,
arc / llama.cpp (for ttft_ms less is better). A difference inside the spread is no difference. --depth is how many
tokens stand in llama.cpp's cache when its decoding starts; arc bench decodes from one token. --only takes a comma
list of the three. Streams answer 64 tokens each, two requests a stream, after one that is not counted.

What it reads from `arc bench --json`: tokens_per_s.median of prefill and decode.
"""

import argparse
import contextlib
import http.client
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STREAMS, STREAM_TOKENS, SERVED = 16, 64, "bench"
RUN_LIMIT_S = 600


def output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S)
    if done.returncode != 0:
        raise SystemExit(f"failed ({done.returncode}): {' '.join(command)}\n{done.stderr[-2000:]}")
    return done.stdout


def arc_bench(args) -> dict[str, float]:
    said = json.loads(output([args.arc, "bench", args.model, "--pp", "512", "--tg", "128", "--reps", "1",
                              "--threads", str(args.threads), "--json"]))
    return {part: said[part]["tokens_per_s"]["median"] for part in ("prefill", "decode")}


def llama_bench(args) -> dict[str, float]:
    base = [f"{args.llama}/llama-bench", "-m", args.model, "-t", str(args.threads), "-r", "1", "-o", "json"]
    prefill = json.loads(output([*base, "-p", "512", "-n", "0"]))
    decode = json.loads(output([*base, "-p", "0", "-n", "128", "-d", str(args.depth)]))
    return {"prefill": prefill[0]["avg_ts"], "decode": decode[0]["avg_ts"]}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextlib.contextmanager
def server(command: list[str], port: int):
    """A server on the loopback address, ready to answer; ended with the block."""
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 120
        while True:
            if child.poll() is not None:
                raise SystemExit(f"ended at once ({child.returncode}): {' '.join(command)}")
            with contextlib.suppress(OSError, http.client.HTTPException):
                conn = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
                conn.request("GET", "/health")
                if conn.getresponse().status == 200:
                    break
            if time.monotonic() > until:
                raise SystemExit(f"not healthy in 120 s: {' '.join(command)}")
            time.sleep(0.1)
        yield
    finally:
        child.terminate()
        try:
            child.wait(20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def streams(args, command: list[str], port: int) -> dict[str, float]:
    load = [sys.executable, str(HERE / "streams.py"), "--port", str(port), "--json", "--model", SERVED, "--ignore-eos",
            "--max-tokens", str(STREAM_TOKENS)]
    with server(command, port):
        output([*load, "--streams", "1", "--first", "1000"])  # warm
        one = json.loads(output([*load, "--streams", "1", "--requests", "2", "--first", "2000"]))
        many = json.loads(output([*load, "--streams", str(STREAMS), "--requests", str(2 * STREAMS)]))
    return {"one_stream": one["total_tok_s"], "streams": many["total_tok_s"], "ttft_ms": many["ttft_ms_median"],
            "short": many["short"]}


def arc_streams(args) -> dict[str, float]:
    port = free_port()
    return streams(args, [args.arc, "serve", args.model, "--threads", str(args.threads), "--port", str(port),
                          "--served-name", SERVED, *args.arc_serve], port)


def llama_streams(args) -> dict[str, float]:
    port = free_port()
    return streams(args, [f"{args.llama}/llama-server", "-m", args.model, "-t", str(args.threads), "-np", str(STREAMS),
                          "-c", str(512 * STREAMS), "--host", "127.0.0.1", "--port", str(port)], port)


def machine() -> dict:
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        cpu = next(line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    return {"cpu": cpu, "cores": os.cpu_count(), "load": [round(v, 2) for v in os.getloadavg()],
            "kernel": platform.release()}


def version(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return (done.stdout + done.stderr).strip().splitlines()[0] if done.returncode == 0 else "unknown"


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--arc", default="target/release/arc")
    p.add_argument("--llama", required=True, help="folder of the llama.cpp binaries")
    p.add_argument("--model", required=True)
    p.add_argument("--threads", type=int, default=os.cpu_count())
    p.add_argument("--reps", type=int, default=5)
    p.add_argument("--depth", type=int, default=0)
    p.add_argument("--only", default="prefill,decode,streams")
    p.add_argument("--arc-serve", nargs=argparse.REMAINDER, default=[], help="more flags for arc serve; last")
    p.add_argument("--out")
    args = p.parse_args()
    only = args.only.split(",")
    kinds = []
    if "prefill" in only or "decode" in only:
        kinds.append({"arc": arc_bench, "llama.cpp": llama_bench})
    if "streams" in only:
        kinds.append({"arc": arc_streams, "llama.cpp": llama_streams})
    before = machine()
    seen: dict[str, dict[str, list[float]]] = {"arc": {}, "llama.cpp": {}}
    for pair in kinds:
        for rep in range(args.reps):
            order = list(pair) if rep % 2 == 0 else list(pair)[::-1]
            for side in order:
                for name, value in pair[side](args).items():
                    seen[side].setdefault(name, []).append(value)
                print(f"rep {rep + 1}: {side}: " + ", ".join(f"{k} {v[-1]:.1f}" for k, v in seen[side].items()),
                      file=sys.stderr)
    report = {"model": Path(args.model).name, "threads": args.threads, "reps": args.reps, "depth": args.depth,
              # Folders are left out: a committed result says nothing of the disk it was made on.
              "command": " ".join(["bench/peer/run.py", *(Path(a).name if "/" in a else a for a in sys.argv[1:])]),
              "machine": before, "load_after": [round(v, 2) for v in os.getloadavg()],
              "arc": version([args.arc, "--version"]), "llama.cpp": version([f"{args.llama}/llama-bench", "--version"]),
              "raw": seen, "summary": {}}
    print(f"{'':12} {'arc':>9} {'spread':>7} {'llama.cpp':>10} {'spread':>7} {'ratio':>6}")
    for name in seen["arc"]:
        row = {}
        for side, values in seen.items():
            median = statistics.median(values[name])
            width = max(values[name]) - min(values[name])
            row[side] = {"median": median, "spread": width / median if median else 0.0}
        a, b = row["arc"], row["llama.cpp"]
        row["ratio"] = a["median"] / b["median"] if b["median"] else None
        report["summary"][name] = row
        ratio = f"{row['ratio']:6.2f}" if row["ratio"] is not None else "     -"
        print(f"{name:12} {a['median']:9.1f} {a['spread']:7.1%} {b['median']:10.1f} {b['spread']:7.1%} {ratio}")
    if args.out:
        Path(args.out).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
