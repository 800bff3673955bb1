#!/usr/bin/env bash
# Everything that a GPU machine without Rust needs, in one folder: stripped binaries with their kernels, small models,
# fixtures, and the script that runs there.
#
#     tests/gpu_bundle.sh [FOLDER]          then, on the GPU machine, in FOLDER:   ./run
set -euo pipefail
cd "$(dirname "$0")/.."
to=${1:-target/gpu}
mkdir -p "$to/bin" "$to/models"
cargo build --release --locked -p arc -p arc-conformance
for program in arc arc-conformance; do
    strip -o "$to/bin/$program" "${CARGO_TARGET_DIR:-target}/release/$program"
done
# Kernels as compute-sanitizer can follow them; a folder of its own, or each build would compile all of them again.
sanitized=${CARGO_TARGET_DIR:-target}/sanitized
ARC_CUDA_SANITIZE=1 CARGO_TARGET_DIR=$sanitized cargo build --release --locked -p arc-conformance
strip -o "$to/bin/arc-conformance-sanitized" "$sanitized/release/arc-conformance"
ARC_CACHE_DIR="$to" "$to/bin/arc" pull smollm2-135m
cp -r tests/fixtures/deepseek-v4-tiny "$to/models/"
cp tests/fixtures/ppl.txt "$to/"
cp tests/gpu_run.sh "$to/run"
cp tests/gpu_sanitize.sh "$to/sanitize"
du -sh "$to"
