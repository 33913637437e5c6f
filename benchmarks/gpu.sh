#!/usr/bin/env bash
# Everything that only a GPU can show, in at most ten minutes: bash benchmarks/gpu.sh [OUTPUT FOLDER]
# Needs an NVIDIA GPU and a Python (PYTHON=...) with torch >= 2.9 and torchvision; downloads nothing, installs nothing.
# Checks THOR on the device against the float64 reference of the tests, times ResNet-50 (224 pixels, batch 256,
# bfloat16, channels_last) with SGD, AdamW, Muon and THOR and ThorMuon, eager and compiled, batched Cholesky against
# eigendecomposition and the polar factors of ThorMuon, and chooses ResNet-50's split dimension. Prints a table and writes gpu.md and gpu.json.
# DEVICE=cpu runs a miniature of the whole, to test the script itself.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${1:-$root/benchmarks/results/gpu}
device=${DEVICE:-cuda}
export PYTHONPATH=$root/src PYTHONUNBUFFERED=1
mkdir -p "$out"
exec timeout 590 "${PYTHON:-python3}" "$root/benchmarks/gpu.py" --device "$device" --out "$out"
