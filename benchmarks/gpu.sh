#!/usr/bin/env bash
# Everything that only a GPU can show, in at most ten minutes: bash benchmarks/gpu.sh [OUTPUT FOLDER]
# Needs an NVIDIA GPU and a Python (PYTHON=...) with torch >= 2.9, torchvision and transformers; downloads nothing.
# What else it finds in the checkout it uses: wheels of missing packages (pydantic and what it needs, pytorch-optimizer) in build/wheels,
# and for the two studies on others' code
# build/airbench/airbench94_muon.py (KellerJordan/cifar10-airbench), build/cifar10 (benchmarks/gpu/airbench.py says of what),
# build/nanogpt/model.py and train_shakespeare_char.py (karpathy/nanoGPT) and build/shakespeare/input.txt (karpathy/char-rnn).
# Writes benchmarks/results/gpu.jsonl and gpu.md, and copies both to the folder; the next call goes on.
set -euo pipefail
out=${1:+$(realpath -m "$1")}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if compgen -G "build/wheels/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --upgrade --target build/site build/wheels/*.whl
fi
export PYTHONPATH=$PWD:$PWD/src:$PWD/build/site${PYTHONPATH:+:$PYTHONPATH}  # torch_thor need not be installed
code=0
timeout 560 "$python" -u -m benchmarks gpu || code=$?
"$python" -m benchmarks gpu --table
if [ -n "$out" ]; then
    mkdir -p "$out"
    cp benchmarks/results/gpu.jsonl benchmarks/results/gpu.md "$out"
fi
exit "$code"
