#!/usr/bin/env bash
# Builds the peer that bench/peer/run.py measures against: llama.cpp for this machine's CPU.
#
#   bench/peer/build_llama_cpp.sh DEST        binaries come to DEST/build/bin
#
# The source is what the PyPI sdist of llama-cpp-python vendors, fetched with pip by name. Needs Python 3 with
# pip and venv, a C++ compiler, about 1 GB of disk and 10 to 20 minutes on one core. JOBS sets the
# number of compile jobs (default 1: other builds may share the machine). VERSION pins the sdist.
set -euo pipefail

dest=${1:?usage: build_llama_cpp.sh DEST}
version=${VERSION:-0.3.36}
mkdir -p "$dest"
dest=$(cd "$dest" && pwd)

python3 -m venv "$dest/venv"
"$dest/venv/bin/pip" install --quiet cmake ninja
if [ ! -d "$dest/src" ]; then
    "$dest/venv/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$dest/sdist" \
        "llama-cpp-python==$version"
    mkdir -p "$dest/src.part"
    tar -xzf "$dest"/sdist/llama_cpp_python-*.tar.gz -C "$dest/src.part" --strip-components=1
    mv "$dest/src.part" "$dest/src"
fi

export PATH="$dest/venv/bin:$PATH"
cmake -S "$dest/src/vendor/llama.cpp" -B "$dest/build" -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON \
    -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF
nice -n 15 ninja -C "$dest/build" -j "${JOBS:-1}" \
    llama-bench llama-batched-bench llama-completion llama-perplexity llama-server llama-tokenize
echo "built: $dest/build/bin"
