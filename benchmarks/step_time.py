"""Time per step of THOR divided by that of SGD: ordinary steps, and steps that refresh every layer.

    python benchmarks/step_time.py                    # ResNet-50, 224 pixels, batch 8
    python benchmarks/step_time.py --model small-resnet --pixels 28 --batch 128    # the network of fashion_mnist.py

Three trainings (SGD; THOR between refreshes; THOR with a refresh of all layers in every step) take turns step by step,
so a change in the speed of the machine affects all of them alike. The result is the median of the ratios within a
round. The steps are not taken by the loop of the application, because it finishes one training before it starts the
next.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from torch import nn
from torch.nn import functional

from torch_thor import THOR
from torch_thor.bench import describe, median_ratio, take_turns, training_step, write_json
from torch_thor.training.models.library import build_model

RESULTS = Path(__file__).parent / "results"
SMALL = "small-resnet"
NEVER = 10**9


def optimizers(split_dim: int | None) -> dict[str, Callable[[nn.Module], torch.optim.Optimizer]]:
    """Return the trainings that take turns."""
    return {
        "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9, weight_decay=5e-4),
        "thor ordinary": lambda model: THOR(
            model, lr=1e-5, weight_decay=5e-4, split_dim=split_dim, update_interval=NEVER
        ),
        "thor refresh": lambda model: THOR(
            model, lr=1e-5, weight_decay=5e-4, split_dim=split_dim, update_interval=1, trace_thresholds=(0.0, 0.0)
        ),
    }


def main() -> None:
    """Time the steps, print a table and write the raw seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help=f"any torchvision model, or {SMALL}")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--split-dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="default: results/step_time_MODEL.json")
    options = parser.parse_args()
    out = options.out or RESULTS / f"step_time_{options.model}.json"

    torch.manual_seed(0)
    channels, classes = (1, 10) if options.model == SMALL else (3, 1000)
    images = torch.randn(options.batch, channels, options.pixels, options.pixels)
    labels = torch.randint(0, classes, (options.batch,))
    steps, built = {}, {}
    for name, build in optimizers(options.split_dim).items():
        if options.model == SMALL:
            model = build_model(SMALL, channels, classes).to(memory_format=torch.channels_last)  # as the recipe has it
        else:
            model = torchvision.models.get_model(options.model)
        built[name] = build(model)
        steps[name] = training_step(lambda model=model: functional.cross_entropy(model(images), labels), built[name])
    seconds = take_turns(steps, options.rounds)  # the warm-up is a refresh for both trainings with THOR
    refreshes = {name: min(c.refreshes for c in o.curvature.values()) for name, o in built.items() if name != "sgd"}
    assert refreshes == {"thor ordinary": 1, "thor refresh": options.rounds + 1}, refreshes

    ratios = {name: median_ratio(times, seconds["sgd"]) for name, times in seconds.items()}
    print(f"{options.model}, {options.pixels} pixels, batch {options.batch}, {options.rounds} rounds")
    for name, times in seconds.items():
        print(f"  {name:<14} median {statistics.median(times):7.3f} s   {ratios[name]:5.3f} x SGD's step")
    result = {
        "machine": describe(),
        "settings": {key: value for key, value in vars(options).items() if key != "out"},
        "ratio_to_sgd": ratios,
        "seconds": seconds,
    }
    write_json(out, result, indent=1)


if __name__ == "__main__":
    main()
