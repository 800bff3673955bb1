#!/usr/bin/env bash
# Runs on a GPU machine, in a folder that tests/gpu_bundle.sh made: conformance, whole models, benchmarks, and a table of
# what came out. Logs and JSON go to results/.
#
#     ./run [FILTER...]                     conformance cases whose names contain a FILTER; all by default
set -uo pipefail
cd "$(dirname "$0")"
mkdir -p results
fail=0
row() { printf '%-28s %s\n' "$1" "$2" | tee -a results/table.txt; }
: >results/table.txt

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | tee results/gpu.txt

models=()
for model in models/*.gguf; do [ -e "$model" ] && models+=(--model "$model"); done
bin/arc-conformance --require-gpu "${models[@]}" "$@" >results/conformance.txt 2>&1 || fail=1
row conformance "$(tail -1 results/conformance.txt)"
grep ^FAIL results/conformance.txt

bin/arc-conformance --require-gpu --perf "$@" >results/perf.txt 2>&1 || fail=1
row perf "$(tail -1 results/perf.txt)"

for model in models/*.gguf; do
    [ -e "$model" ] || continue
    for batch in 1 8 64 256; do
        for switch in "" "--sample-on host" "--capture off" "--device-loop off"; do
            name="$(basename "$model" .gguf)-b$batch$(echo "$switch" | tr -d ' -')"
            # shellcheck disable=SC2086
            if bin/arc bench "$model" --device cuda --batch $batch --pp 128 --tg 256 --reps 3 $switch --json \
                >"results/$name.json" 2>"results/$name.log"; then
                row "$name" "$(python3 -c 'import json,sys; b=json.load(open(sys.argv[1])); print(b.get("summary", b))' \
                    "results/$name.json" | cut -c1-160)"
            else
                row "$name" "failed: $(tail -1 "results/$name.log")"
                fail=1
            fi
        done
    done
done
exit $fail
