#!/bin/sh
# Unpacks a CUDA compiler into target/cuda, from Python packages: no toolkit, no driver, no root.
set -eu
cd "$(dirname "$0")/.."
to=target/cuda
[ -x "$to/nvidia/cu13/bin/nvcc" ] && exit 0
mkdir -p "$to"
python3 -m pip install --quiet --disable-pip-version-check --no-deps --target "$to" \
    'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*' \
    'nvidia-nvvm==13.0.*'
chmod +x "$to"/nvidia/cu13/bin/* "$to"/nvidia/cu13/nvvm/bin/* 2>/dev/null || true
"$to/nvidia/cu13/bin/nvcc" --version | tail -1
# The next build looks for it again.
touch crates/arc-device/build.rs
