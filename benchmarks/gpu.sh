#!/usr/bin/env bash
# Everything that only a GPU can show, in at most ten minutes: bash benchmarks/gpu.sh [OUTPUT FOLDER]
# Needs an NVIDIA GPU and a Python (PYTHON=...) with torch >= 2.9, torchvision and transformers; downloads nothing.
# What else it finds in the checkout it uses: wheels of missing packages (pydantic and what it needs, pytorch-optimizer) in build/wheels,
# and for the two studies on others' code
# build/airbench/airbench94_muon.py (KellerJordan/cifar10-airbench), build/cifar10 (gpu_cifar10.py says of what),
# build/nanogpt/model.py and train_shakespeare_char.py (karpathy/nanoGPT) and build/shakespeare/input.txt (karpathy/char-rnn).
# Prints tables, and writes gpu.md and gpu.json (gpu.py says what of).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if compgen -G "$root/build/wheels/*.whl" > /dev/null; then
    "$python" -m pip install -q --no-index --no-deps --upgrade --target "$root/build/site" "$root"/build/wheels/*.whl
fi
export PYTHONPATH=$root:$root/src:$root/build/site${PYTHONPATH:+:$PYTHONPATH}  # torch_thor need not be installed
exec timeout 590 "$python" -u -m benchmarks.gpu --out "${1:-$root/build/gpu}"
