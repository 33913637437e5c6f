r"""Variation of the crossing of ResNet-50's curves if only the times are measured again.

    torch-thor split-dim resnet50 --device cpu --out runs/split && cp runs/split/split_dim.json \
        benchmarks/results/split_dim/resnet50.json
    python benchmarks/split_dim_repeats.py

The spectral losses are those of the first command, because they do not change. The times of the candidates up to 256
are measured again.
"""

import json
from pathlib import Path

import torch
import torchvision

from torch_thor.bench import write_json
from torch_thor.split.choice import choose
from torch_thor.split.observe import Observer

FOLDER = Path(__file__).parent / "results" / "split_dim"
CANDIDATES, RUNS = 6, 6


def main() -> None:
    """Measure, print and write."""
    stored = json.loads((FOLDER / "resnet50.json").read_text())
    split_dims = stored["candidates"][:CANDIDATES]
    losses = {
        name: {key: tuple(values[:CANDIDATES]) for key, values in factors.items()}
        for name, factors in stored["losses"].items()
    }
    layers = Observer(torchvision.models.resnet50(), torch.device("cpu")).layers
    runs = []
    for _ in range(RUNS):
        choice = choose(layers, losses, split_dims)
        runs.append({"crossing": choice.crossing, "split_dim": choice.split_dim, "seconds": choice.seconds})
        print(runs[-1])
    result = {"candidates": split_dims, "device": choice.device, "torch": torch.__version__, "runs": runs}
    write_json(FOLDER / "resnet50_repeats.json", result, indent=1)


if __name__ == "__main__":
    main()
