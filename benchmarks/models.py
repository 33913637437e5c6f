"""THOR's defaults on forty-two models of other projects.

What is measured is coverage, loss after twelve steps, and time per step.

    python -m benchmarks models                    # about ten minutes

Models and data are those of zoo.py, and of zoo_more.py, of which the time is not
measured; one thread is used. Losses: twelve steps with AdamW(1e-3), ``THOR(model)`` and
``ThorMuon(model)``, from the same weights, on one batch and on a fresh batch in each step, with
five seeds; the result is the median of the means of the last three. Time per step: forward pass,
backward pass and optimizer, in turns; the result is the median over rounds of the ratio to SGD's
step in the same round, with a refresh of every layer in every step, or of none after the first
step. The loops are those of a user who changes nothing for THOR, which is not told of loss terms
and padding.
"""

import math
import statistics
import warnings
from typing import Any

import torch

from benchmarks import zoo, zoo_more
from benchmarks.runner.markdown import table as markdown
from benchmarks.runner.timing import median_ratio, take_turns, training_step
from torch_thor import THOR, ThorMuon

zoo.SUBJECTS |= zoo_more.MORE

SEEDS, STEPS, ROUNDS = (0, 1, 2, 3, 4), 12, 7
OURS: dict[str, type[THOR] | type[ThorMuon]] = {"thor": THOR, "thor-muon": ThorMuon}
LENGTHS = {"ordinary": 10**9, "refresh": 1}  # update_interval


def jobs(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """List all models."""
    return [{"model": name, "alone": True} for name in zoo.SUBJECTS]


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Measure all of a model."""
    torch.set_num_threads(1)
    name = job["model"]
    # tests/models/test_defaults.py has which there are
    with warnings.catch_warnings(action="ignore"):
        return {
            "coverage": coverage(name),
            "losses": losses(name, fresh=False),
            "fresh": losses(name, fresh=True),
            "ratios": {} if name in zoo_more.MORE else ratios(name),
        }


def optimizers(job: dict[str, Any]) -> list[str]:
    """Name ours, each of which trains every model."""
    return [kind.__name__ for kind in OURS.values()]


def coverage(name: str) -> dict[str, Any]:
    """Return the number of parameters that are trained, and the share that is preconditioned."""
    result: dict[str, Any] = {}
    for key, kind in OURS.items():
        entries = [e for e in kind(zoo.build(name).model).coverage() if e.trained]
        result["parameters"] = sum(math.prod(e.shape) for e in entries)
        result[key] = (
            sum(math.prod(e.shape) for e in entries if e.preconditioned) / result["parameters"]
        )
    return result


def losses(name: str, *, fresh: bool) -> dict[str, list[list[float]]]:
    """Train from the same weights, and return two losses of each seed by optimizer.

    They are the first loss, and the mean of the last three.
    """
    result: dict[str, list[list[float]]] = {key: [] for key in ("adamw", *OURS)}
    for seed in SEEDS:
        for key, runs in result.items():
            subject = zoo.build(name, seed)
            if key == "adamw":
                optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                    subject.model.parameters(), lr=1e-3
                )
            else:
                optimizer = OURS[key](subject.model)
            found = zoo.train(subject, optimizer, STEPS, seed, fresh=fresh)
            runs.append([found[0], statistics.fmean(found[-3:])])
    return result


def ratios(name: str) -> dict[str, float]:
    """Time whole steps, in turns, over those of SGD."""
    steps, optimizers = {}, dict[str, torch.optim.Optimizer]()
    for key in ("sgd", *(f"{ours} {length}" for length in LENGTHS for ours in OURS)):
        subject = zoo.build(name)
        if key == "sgd":
            optimizers[key] = torch.optim.SGD(subject.model.parameters(), lr=1e-5, momentum=0.9)
        else:
            ours, _, length = key.partition(" ")
            optimizers[key] = OURS[ours](subject.model, lr=1e-5, update_interval=LENGTHS[length])
            for group in optimizers[key].param_groups:  # every refresh of THOR takes new factors
                if "trace_thresholds" in group:
                    group["trace_thresholds"] = (0.0, 0.0)
        steps[key] = training_step(subject.loss, optimizers[key])
    times = take_turns(steps, ROUNDS)
    for key, optimizer in optimizers.items():
        if isinstance(optimizer, THOR | ThorMuon):
            done = max(layer.refreshes for layer in optimizer.curvature.values())
            assert done == (1 if key.endswith("ordinary") else ROUNDS + 1), (key, done)
    return {
        key: round(median_ratio(own, times["sgd"]), 3) for key, own in times.items() if key != "sgd"
    }


def table(rows: dict[str, Any]) -> str:
    """Return a line for each model, in the zoo's order."""
    heads = (
        "model", "parameters", "preconditioned by THOR, ThorMuon", "loss, first",
        "one batch, AdamW(1e-3)", "… THOR",
        "… ThorMuon", "fresh batches, AdamW(1e-3)", "… THOR", "… ThorMuon",
        "THOR's step over SGD's: ordinary, refresh",
        "… ThorMuon's",
    )  # fmt: skip
    lines = []
    for row in rows.values():
        covered, times = row["coverage"], row["ratios"]
        cells = [
            row["job"]["model"],
            f"{covered['parameters']:,}",
            ", ".join(f"{covered[key]:.1%}" for key in OURS),
        ]
        cells.append(_number(statistics.median(first for first, _ in row["losses"]["adamw"])))
        for kind in ("losses", "fresh"):
            cells += [
                _number(statistics.median(last for _, last in runs)) for runs in row[kind].values()
            ]
        cells += [
            ", ".join(f"{times[f'{key} {length}']:.2f}" for length in LENGTHS if times)
            for key in OURS
        ]
        lines.append(cells)
    order = list(zoo.SUBJECTS)
    return markdown(heads, sorted(lines, key=lambda cells: order.index(cells[0])))


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"
