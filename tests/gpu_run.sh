#!/usr/bin/env bash
# Runs on a GPU machine, in a folder that tests/gpu_bundle.sh made: conformance, whole models, benchmarks, and a table of
# what came out. Logs and JSON go to results/.
#
#     ./run [FILTER...]                     conformance cases whose names contain a FILTER; all by default
set -uo pipefail
cd "$(dirname "$0")"
mkdir -p results
fail=0
row() { printf '%-40s %s\n' "$1" "$2" | tee -a results/table.txt; }
: >results/table.txt
: >results/commands.txt

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee results/gpu.txt

# NAME, then arguments of arc-conformance.
conformance() {
    local name=$1
    shift
    bin/arc-conformance --require-gpu "$@" >"results/$name.txt" 2>&1 || fail=1
    row "$name" "$(tail -1 "results/$name.txt")"
    grep ^FAIL "results/$name.txt"
}

models=()
for model in models/*.gguf models/*/native; do [ -e "$model" ] && models+=(--model "$model"); done
conformance conformance "${models[@]}" "$@"
# The widths of DeepSeek-V4-Flash, a layer of each kind: both devices run the whole of it.
[ $# -gt 0 ] || conformance slice --model synthetic:deepseek-v4-slice,experts=16,vocab=8192 devices greedy

bin/arc-conformance --require-gpu --perf "$@" >results/perf.txt 2>&1 || fail=1
row "times of kernels" "$(tail -1 results/perf.txt)"

# NAME, then arguments of arc bench.
bench() {
    local name=$1
    shift
    echo "$name: arc bench --device cuda --json $*" >>results/commands.txt
    if ! bin/arc bench --device cuda --json "$@" >"results/$name.json" 2>"results/$name.log"; then
        row "$name" "failed: $(tail -1 "results/$name.log")"
        fail=1
        return
    fi
    row "$name" "$(python3 -c '
import json, sys
report = json.load(open(sys.argv[1]))
rate = lambda part: report[part]["tokens_per_s"]["median"]
told = ["%s %.0f tok/s" % (part, rate(part)) for part in ("prefill", "decode") if part in report]
if mixed := report.get("mixed"):
    gaps = ["%.2f/%.2f" % (mixed[part]["p50"], mixed[part]["p99"]) for part in ("quiet_ms", "entering_ms")]
    told = ["ms to the next token, p50/p99: %s, %s while a prompt enters" % tuple(gaps)]
    told.append("its first token after %.1f ms" % mixed["ttft_ms"]["median"])
    told.append("%.0f steps waited, at most %.0f" % (mixed["waited_steps"]["median"], mixed["waited_steps"]["max"]))
print(", ".join(told))' \
        "results/$name.json")"
}

for model in models/*.gguf; do
    [ -e "$model" ] || continue
    for batch in 1 2 4 8 64 256; do
        name="$(basename "$model" .gguf)-b$batch"
        bench "$name" "$model" --batch $batch --pp 128 --tg 256 --reps 3
        case $batch in 2 | 4) continue ;; esac
        bench "$name-host" "$model" --batch $batch --pp 128 --tg 256 --reps 3 --sample-on host
        bench "$name-eager" "$model" --batch $batch --pp 128 --tg 256 --reps 3 --capture off
        bench "$name-step" "$model" --batch $batch --pp 128 --tg 256 --reps 3 --device-loop off
    done
    for burst in 8 32; do
        bench "$(basename "$model" .gguf)-burst$burst" "$model" --mixed --batch 64 --pp 1024 --tg 512 --reps 5 --burst $burst
    done
done

# 284 B parameters in 84 GB, made on the GPU.
if [ "$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits | head -1)" -gt 100000 ]; then
    flash() {
        local name=$1
        shift
        bench "flash-$name" synthetic:deepseek-v4-flash --speculate off "$@"
    }
    flash b1 --context 4096 --max-rows 4 --pp 32 --tg 256 --reps 3
    for batch in 2 4 8 64 256; do
        flash b$batch --context 4096 --max-rows $batch --batch $batch --pp 8 --tg 32 --reps 2
    done
    flash prefill --context 8192 --pp 4096 --tg 0 --reps 3
    flash prefill-1k --context 8192 --pp 1000 --tg 0 --reps 3
    # What a step costs that also checks drafts, whose own making is part of it.
    for drafts in 1 2 3; do
        bench flash-drafts-$drafts synthetic:deepseek-v4-flash --speculate $drafts --context 4096 --max-rows 8 --pp 0 --tg 64 \
            --reps 2
    done
    flash entering --mixed --batch 8 --context 34000 --pp 32000 --tg 1600 --reps 1 --warm-up 0
    # A context of 128 k that was read.
    flash read-128k --context 130000 --pp 128000 --tg 64 --reps 1 --warm-up 0 --together
    # The device's memory while 2,600 tokens come.
    while sleep 0.5; do nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits; done >results/memory.txt &
    watch=$!
    flash long --context 4096 --max-rows 4 --pp 0 --tg 2600 --reps 1 --warm-up 0
    kill $watch
    row "MiB in use while they come" "$(tail -15 results/memory.txt | head -13 | sort -u | paste -sd ' ')"
    # The same logits at every loading, and however the prompt is cut.
    echo 11 4711 99 12345 7 800 31337 2 5 60000 17 3 9 1 44 128 100000 5 6 7 8 9 10 11 >results/ids
    for run in 1.a 1.b 3.a 4.a 4.b; do
        bin/arc eval logits synthetic:deepseek-v4-flash --ids results/ids --chunk ${run%.*} --out results/logits-$run \
            --device cuda --speculate off --context 4096 --max-rows 4 2>"results/logits-$run.log" || fail=1
    done
    different=$(md5sum results/logits-*.[ab] | cut -d' ' -f1 | sort -u | wc -l)
    row "logits of 5 runs" "$([ "$different" = 1 ] && echo alike || echo "$different kinds")"
    [ "$different" = 1 ] || fail=1
    rm -f results/logits-*.[ab]
    for depth in 512 1000 1900 3900 32000 128000 512000; do
        flash depth-$depth --context $((depth + 500)) --max-rows 4 --pp 0 --tg 64 --reps 2 --depth $depth
    done
fi
exit $fail
