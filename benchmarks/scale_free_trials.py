"""What was tried to reach tuned SGD's final figure in half of its steps: runs in tuning seeds alone.

    python benchmarks/scale_free_trials.py            # what is missing of the raw data, then a line a trial
    python benchmarks/scale_free_trials.py --table    # the lines alone

Four seeds on the classifier, whose figure differs by half a point from seed to seed, one on the other tasks; none of
them is a seed of scale_free.py's report. `constants` are set in the modules of the scale-free step for the run.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from contenders import THOR_DAMPING, make
from tasks import TASKS, Batch, Task, train
from torch_thor import THOR
from torch_thor.optim import spectral, thor

OUT = Path(__file__).parent / "results" / "scale_free_half_trials.json"
SEEDS = {"classifier": (10, 11, 12, 13), "autoencoder": (10,), "language": (10,)}
CALIBRATION = 8  # batches whose statistics an averaged network's batch norms take

SCHEDULES: dict[str, Callable[[float], float]] = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: 0.5 * (1 + math.cos(math.pi * t)),
    "power 2": lambda t: (1 - t) ** 2,
    "power 4": lambda t: (1 - t) ** 4,
    "warm-up 0.1, linear": lambda t: min(1.0, (t + 1e-9) / 0.1) * (1 - t),
}


def trial(task: str, optimizer: str, lr: float, share: float, **changes: Any) -> dict[str, Any]:
    """Describe a trial.

    Args:
        task: key of ``TASKS``.
        optimizer: key of ``contenders.CONTENDERS``, or ``"thor"``.
        lr: learning rate.
        share: length of run and schedule as a share of the task's.
        **changes: ``momentum``; ``options`` of THOR; ``constants`` of the scale-free step; ``schedule``; ``average``,
            the decay of a running average of the weights, at which the figure is then taken; ``calibrate``, whether
            batch norms take the statistics of the last batches before the figure is taken.

    Returns:
        What the raw data says of it.
    """
    return {"task": task, "optimizer": optimizer, "lr": lr, "share": share, **changes}


def half(lr: float, momentum: float, **changes: Any) -> dict[str, Any]:
    """Describe a trial of THOR on the classifier with half of the steps.

    Args:
        lr: learning rate.
        momentum: momentum.
        **changes: see :func:`trial`.

    Returns:
        What the raw data says of it.
    """
    return trial("classifier", "thor", lr, 0.5, momentum=momentum, **changes)


TRIALS = [
    *(trial("classifier", "sgd", lr, 1.0, momentum=0.9) for lr in (0.1, 0.2, 0.4)),
    trial("classifier", "sgd", 0.2, 1.0, momentum=0.8),
    *(trial("classifier", "muon", lr, 0.5, momentum=mu) for mu in (0.95, 0.8) for lr in (0.04, 0.08)),
    *(trial("classifier", "soap", lr, 0.5, momentum=0.95) for lr in (0.016, 0.032)),
    *(half(lr, 0.95) for lr in (0.04, 0.08)),
    *(half(lr, 0.9) for lr in (0.04, 0.08)),
    *(half(lr, 0.8) for lr in (0.04, 0.06, 0.08, 0.16)),
    half(0.04, 0.7),
    half(0.08, 0.6),
    half(0.04, 0.95, constants={"ADAMW_SHARE": 1.0}),
    *(half(lr, 0.95, constants={"_ROUNDS": 3}) for lr in (0.04, 0.08)),
    half(0.04, 0.95, options={"update_interval": 2, "factor_decay": 0.9}),
    half(0.04, 0.95, options={"skip": ["head"]}),
    half(0.04, 0.95, constants={"ROOT": 2}),
    half(0.04, 0.95, options={"damping": 0.001}),
    half(0.04, 0.95, options={"weight_decay": 0.5}),
    half(0.04, 0.95, schedule="cosine"),
    half(0.08, 0.95, schedule="power 2"),
    half(0.08, 0.95, schedule="warm-up 0.1, linear"),
    half(0.08, 0.8, constants={"ROOT": 2}),
    *(half(0.08, 0.8, constants={"ADAMW_SHARE": share}) for share in (1.0, 0.25)),
    half(0.06, 0.8, options={"update_interval": 3, "factor_decay": 0.8}),
    half(0.06, 0.8, schedule="cosine"),
    half(0.06, 0.8, calibrate=True),
    half(0.08, 0.8, average=0.9),
    trial("classifier", "thor", 0.08, 1.0, momentum=0.8),
    *(trial("classifier", "thor", 0.08, 1.0, momentum=0.8, schedule=s) for s in ("power 2", "power 4")),
    trial("classifier", "thor", 0.08, 1.0, momentum=0.8, average=0.9),
    *(
        trial(task, "thor", lr, 1.0, momentum=mu)
        for task in ("autoencoder", "language")
        for lr, mu in ((0.04, 0.95), (0.04, 0.9), (0.04, 0.8), (0.06, 0.8), (0.08, 0.8))
    ),
    trial("language", "thor", 0.08, 1.0, momentum=0.8, constants={"ADAMW_SHARE": 0.25}),
]


def averaged(task: Task, decay: float | None) -> tuple[Task, Callable[[nn.Module, torch.optim.Optimizer], None]]:
    """Take the figure at a running average of the weights, batch norms calibrated to it.

    Args:
        task: what is trained.
        decay: of the average; None for the weights themselves.

    Returns:
        The task with that figure, and what to call with the network and its optimizer.
    """
    mean: list[torch.Tensor] = []
    recent: list[Batch] = []
    taken = 0

    def batches(seed: int) -> Iterator[Batch]:
        for batch in task.batches(seed):
            recent.append(batch)
            del recent[:-CALIBRATION]
            yield batch

    def follow(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        weights = list(model.parameters())
        mean.extend(p.detach().clone() for p in weights)

        def add(*_: Any) -> None:
            nonlocal taken
            taken += 1
            weight = 1.0 if decay is None else 1 - min(decay, taken / (taken + 10))
            with torch.no_grad():
                for average, p in zip(mean, weights, strict=True):
                    average.lerp_(p, weight)

        optimizer.register_step_post_hook(add)

    def evaluate(model: nn.Module) -> float:
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
        usual = [m.momentum for m in norms]
        for p, average in zip(model.parameters(), mean, strict=True):
            p.copy_(average)
        for m in norms:
            m.reset_running_stats()
            m.momentum = None  # the mean over all batches
        model.train()
        for inputs, _ in recent:
            model(inputs)
        model.eval()
        figure = task.evaluate(model)
        model.load_state_dict(kept)
        for m, momentum in zip(norms, usual, strict=True):
            m.momentum = momentum
        return figure

    return replace(task, batches=batches, evaluate=evaluate), follow


def run(setting: dict[str, Any], seed: int) -> dict[str, Any]:
    """Train once.

    Args:
        setting: from :func:`trial`.
        seed: seed.

    Returns:
        Evaluations and failure.
    """
    task, follow = TASKS[setting["task"]], None
    if "average" in setting or "calibrate" in setting:
        task, follow = averaged(task, setting.get("average"))

    def build(model: nn.Module) -> torch.optim.Optimizer:
        lr, momentum = setting["lr"], setting["momentum"]
        if setting["optimizer"] == "thor":
            options = {"damping": THOR_DAMPING, "weight_decay": 0.01, **setting.get("options", {})}
            optimizer: torch.optim.Optimizer = THOR(model, lr=lr, momentum=momentum, scaling="spectral", **options)
        else:
            optimizer = make(setting["optimizer"], model, lr, None, momentum)
        if follow is not None:
            follow(model, optimizer)
        return optimizer

    kept = [
        (module, name, getattr(module, name))
        for module in (spectral, thor)
        for name in setting.get("constants", {})
        if hasattr(module, name)
    ]
    for module, name, _ in kept:
        setattr(module, name, setting["constants"][name])
    try:
        outcome = train(task, seed, build, setting["share"], SCHEDULES[setting.get("schedule", "linear")])
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
    return {key: outcome[key] for key in ("evaluations", "failure")}


def main() -> None:
    """Run what is missing, write it, and print a line a trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="the lines alone, from the raw data")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(OUT.read_text()) if OUT.exists() else []
    for setting in TRIALS:
        finals = []
        for seed in SEEDS[setting["task"]]:
            found = next((row for row in rows if row["trial"] == setting and row["seed"] == seed), None)
            if found is None and not options.table:
                found = {"trial": setting, "seed": seed, **run(setting, seed)}
                rows.append(found)
                OUT.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            if found is not None:
                finals.append(found["evaluations"][-1][1])
        if finals:
            print(f"{statistics.mean(finals):8.4f} ({', '.join(f'{f:.4f}' for f in finals)})  {setting}", flush=True)


if __name__ == "__main__":
    main()
