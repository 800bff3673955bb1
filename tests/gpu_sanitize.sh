#!/usr/bin/env bash
# Runs on a GPU machine, in a folder that tests/gpu_bundle.sh made: cases of the conformance suite under compute-sanitizer.
# Logs go to results/. Each run has a limit of seconds; one that does not end within it has failed.
#
#     ./sanitize [TOOL...]                  memcheck, racecheck and initcheck by default
#
# memcheck costs little, so it has all cases but those of SKIPPED (on an H200 872 of them in 145 s). The others have the cases of
# FEW, one or two for each kind of kernel, the longest first. initcheck has them in 7 s. racecheck looks at every load and store of
# shared memory, which takes seconds to three minutes a case, so that each has a process of its own, six side by side (200 s). All
# have whole steps of the tiny model, which take racecheck 150 s.
#
# racecheck does not see all that orders memory: who waits at a barrier comes behind what the arriving threads did, but not behind
# what these had waited for; and who waits for its cluster, having arrived before, is not let go on before all have come there. So
# it has a build of the kernels in which all lanes arrive, and the cluster waits where it arrives (barrier.cuh, cluster.cuh). Without,
# everything that passes through a ring is reported. And it lets nobody pass a `__syncthreads` of a block some of whose warps have
# left: a kernel that has such warps does not end, unless the others have a barrier of their own (`sync_threads`).
#
# What the tools do not see. All memory of a device is zeroed when it is taken, which initcheck counts as written: it can name
# copies and staging, but no stage that reads what no stage wrote. racecheck looks at shared memory only: words of global memory
# for which blocks wait are relaxed accesses by design, and it has nothing to say about them. But it slows warps down, so that a word
# of global memory which one warp writes before another has read it may show as a case that fails now and then: arc-conformance
# --repeat 30 under the tool says how often.
set -uo pipefail
cd "$(dirname "$0")"
mkdir -p results
sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
[ -n "$sanitizer" ] || { echo "compute-sanitizer is not on this machine"; exit 2; }

# Left out: a kernel that traps is a finding by itself; a sweep over all f32; products and contexts that take seconds without a
# tool, and whose kernels smaller cases have.
SKIPPED=(faults/ quant/e4m3 "600 rows" "2048 rows" "of 300 learned" "4096x2048/2 of 16" "4096x2048/2 of 8" /far "70001 tokens")
FEW=(
    "chain/one row's choice/of Flash, 512 at 2051" "chain/one row of Flash/heavy, 100095 of 131072 around"
    "chain/one row's choice/8196 tokens" "chain/one row of Flash/heavy, 126 of 2048 around"
    "chain/one row's choice/16 of 100 at 399" "chain/one row through attention/pool 2 x 128" "layers/smollm2/one layer"
    "moe/one launch/scores choose" "moe/1024x1024/6 of 32 learned/9 rows" "moe/1024x256/6 of 32 learned/3 rows"
    "hc/head/4096/1 rows" "hc/site/4096/1 rows/Output/Usual/20" "hc/site/4096/9 rows/Output/Usual" "hc/site/96/5 rows"
    kv/9x3x64/Halves/1 kv/9x3x64/Halves/2 kv/9x3x64/Halves/4
    "matmul/q8_0/35x512" "matmul/q4_k/35x512" "matmul/f16/35x512" "matmul/q8_0/blocks alone/1024" "matmul/q8_0/embed"
    latent/flash/sparse/Fp8/0 latent/flash/sparse/Fp8/2 latent/small/heavy/F32/0
    sample/few/129280 sample/two_parts state/tables/0 draft/embed_next/5 draft/draft_in/q8_0/5
)
MODEL=(--model models/deepseek-v4-tiny/native model/native/brief)

# A case that was given another name would not be looked at, and nobody would know.
for part in "${SKIPPED[@]}" "${FEW[@]}" "${MODEL[2]}"; do
    bin/arc-conformance --list "${MODEL[@]:0:2}" "$part" >/dev/null || exit 2
done

fail=0
program=arc-conformance
# NAME of the log, TOOL, seconds, --, arguments of arc-conformance.
run() {
    local name=$1 log=results/${1//[^A-Za-z0-9]/-}.txt tool=$2 limit=$3 began=$SECONDS
    shift 4
    timeout "$limit" "$sanitizer" --tool "$tool" --error-exitcode 3 --destroy-on-device-error kernel --print-limit 500 \
        "bin/$program" --require-gpu "$@" >"$log" 2>&1
    local code=$?
    [ $code = 124 ] && echo "$name: not done within $limit s"
    printf '%-15s exit code %d, %d s: %s\n' "$name" $code $((SECONDS - began)) "$(grep -c '^ok' "$log") cases passed; $(tail -1 "$log")"
    grep ^FAIL "$log"
    # Kinds of findings: where they are, without threads and blocks.
    grep -E '^=========     (at|by|Access|Address)|^========= (Invalid|Error|Race|Uninit)' "$log" | grep -v 'by thread' |
        sed 's/0x[0-9a-f]*/X/g' | sort | uniq -c | sort -rn | head -20
    return $code
}

skips=()
for part in "${SKIPPED[@]}"; do skips+=(--skip "$part"); done
[ $# -gt 0 ] || set -- memcheck racecheck initcheck
for tool; do
    case $tool in
    memcheck)
        run memcheck memcheck 240 -- "${skips[@]}" || fail=1
        run memcheck-model memcheck 30 -- "${MODEL[@]}" || fail=1
        ;;
    racecheck)
        # One launch after the other: what is seen is shared memory, which no two of them have.
        export CUDA_LAUNCH_BLOCKING=1
        program=arc-conformance-sanitized
        run racecheck-model racecheck 300 -- "${MODEL[@]}" &
        for part in "${FEW[@]}"; do
            while [ "$(jobs -rp | wc -l)" -ge 6 ]; do wait -n || fail=1; done
            run "racecheck $part" racecheck 300 -- "$part" &
        done
        while [ -n "$(jobs -p)" ]; do wait -n || fail=1; done
        program=arc-conformance
        unset CUDA_LAUNCH_BLOCKING
        ;;
    initcheck | synccheck) run "$tool" "$tool" 60 -- "${MODEL[@]}" "${FEW[@]}" || fail=1 ;;
    *) echo "unknown tool $tool"; exit 2 ;;
    esac
done
exit $fail
