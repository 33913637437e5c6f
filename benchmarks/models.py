"""THOR's defaults on sixteen models that nobody here wrote: coverage, loss after twelve steps, step time.

    python benchmarks/models.py                    # all models, then the table
    python benchmarks/models.py --models vae bert  # some of them; the others keep the figures that they have
    python benchmarks/models.py --table            # the table alone, from the raw data, also into docs/models.md

Models and data are those of tests/models/zoo.py, in one thread. Losses: twelve steps on one batch with AdamW(1e-3),
``THOR(model)`` and ``THOR(model, scaling="spectral")``, from the same weights, in three seeds; the figure is the
median. Step time: forward, backward and optimizer. The trainings take turns step by step, so that a machine whose speed
drifts slows them alike; the figure is the median over rounds of the ratio to SGD's step in the same round. Refreshing
trainings refresh every layer in every step, ordinary ones never after the first.
"""

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from machine import describe

from torch_thor import THOR

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "models"
PAGE = ROOT / "docs" / "models.md"
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
SEEDS = (0, 1, 2)
STEPS = 12
NEVER = 10**9
SETTINGS: dict[str, dict[str, Any]] = {"plain": {}, "spectral": {"scaling": "spectral"}}
LENGTHS = {"ordinary": {"update_interval": NEVER}, "refresh": {"update_interval": 1, "trace_thresholds": (0.0, 0.0)}}


def load_zoo() -> ModuleType:
    """Return tests/models/zoo.py, which stands in no package."""
    spec = importlib.util.spec_from_file_location("zoo", ROOT / "tests" / "models" / "zoo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


zoo = load_zoo()


def coverage(name: str) -> dict[str, Any]:
    """Return what share of a model is preconditioned.

    Args:
        name: key of the zoo.

    Returns:
        The number of parameters that are trained, and the share, plain and scale-free.
    """
    result: dict[str, Any] = {}
    for setting, options in SETTINGS.items():
        entries = [e for e in THOR(zoo.build(name).model, **options).coverage() if e.trained]
        result["parameters"] = sum(math.prod(e.shape) for e in entries)
        result[setting] = sum(math.prod(e.shape) for e in entries if e.preconditioned) / result["parameters"]
    return result


def losses(name: str) -> dict[str, list[list[float]]]:
    """Train from the same weights with each optimizer.

    Args:
        name: key of the zoo.

    Returns:
        By optimizer, the losses of each seed: before the first step, …, after the last.
    """
    result: dict[str, list[list[float]]] = {"adamw": [], **{setting: [] for setting in SETTINGS}}
    for seed in SEEDS:
        for key, runs in result.items():
            subject = zoo.build(name, seed)
            if key == "adamw":
                optimizer: torch.optim.Optimizer = torch.optim.AdamW(subject.model.parameters(), lr=1e-3)
            else:
                optimizer = THOR(subject.model, **SETTINGS[key])
            runs.append(zoo.train(subject, optimizer, STEPS, seed))
    return result


def seconds(name: str, rounds: int) -> dict[str, list[float]]:
    """Time whole steps, in turns.

    Args:
        name: key of the zoo.
        rounds: how many, after one that is not counted.

    Returns:
        Seconds a step, by training.
    """
    trainings = {}
    for key in ("sgd", *(f"{setting} {length}" for length in LENGTHS for setting in SETTINGS)):
        subject = zoo.build(name)
        if key == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(subject.model.parameters(), lr=1e-5, momentum=0.9)
        else:
            setting, _, length = key.partition(" ")
            optimizer = THOR(subject.model, lr=1e-5, **SETTINGS[setting], **LENGTHS[length])
        trainings[key] = (subject, optimizer)
    result: dict[str, list[float]] = {key: [] for key in trainings}
    for turn in range(rounds + 1):
        for key, (subject, optimizer) in trainings.items():
            started = time.perf_counter()
            subject.loss().backward()
            optimizer.step()
            optimizer.zero_grad()
            if turn:
                result[key].append(time.perf_counter() - started)
    for key, (_, optimizer) in trainings.items():
        if isinstance(optimizer, THOR):
            done = max(layer.refreshes for layer in optimizer.curvature.values())
            assert done == (1 if key.endswith("ordinary") else rounds + 1), (key, done)
    return result


def measure(name: str, rounds: int) -> None:
    """Measure a model and write the raw data.

    Args:
        name: key of the zoo.
        rounds: of the timing.
    """
    began = time.perf_counter()
    with warnings.catch_warnings(action="ignore"):  # tests/models/test_defaults.py has which there are
        result = {
            "machine": describe(threads=1),
            "coverage": coverage(name),
            "losses": losses(name),
            "seconds": seconds(name, rounds),
        }
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result) + "\n")
    print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


def row(name: str, result: dict[str, Any]) -> str:
    """Return a line of the table.

    Args:
        name: key of the zoo.
        result: its raw data.

    Returns:
        Markdown.
    """
    covered = result["coverage"]
    cells = [name, f"{covered['parameters']:,}", *(f"{covered[setting]:.1%}" for setting in SETTINGS)]
    cells.append(_number(statistics.median(run[0] for run in result["losses"]["adamw"])))
    cells += [_number(statistics.median(run[-1] for run in runs)) for runs in result["losses"].values()]
    times = result["seconds"]
    for setting in SETTINGS:
        pairs = (zip(times[f"{setting} {length}"], times["sgd"], strict=True) for length in LENGTHS)
        cells.append(", ".join(f"{statistics.median(t / s for t, s in pair):.2f}" for pair in pairs))
    return f"| {' | '.join(cells)} |"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def table() -> str:
    """Return the result as Markdown, models in the zoo's order; those that were not measured are left out.

    Returns:
        The table.
    """
    found = {name: RESULTS / f"{name}.json" for name in zoo.SUBJECTS}
    columns = (
        "model", "parameters", "preconditioned", "… scale-free", "loss, first", "… after 12 steps, AdamW(1e-3)",
        "… THOR", "… scale-free", "step over SGD's: ordinary, refresh", "… scale-free",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [row(name, json.loads(file.read_text())) for name, file in found.items() if file.exists()]
    return "\n".join(lines) + "\n"


def fill_page(text: str) -> None:
    """Put the table into its page.

    Args:
        text: the table.
    """
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    PAGE.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}")


def main() -> None:
    """Measure, print the table and put it into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(zoo.SUBJECTS), default=list(zoo.SUBJECTS))
    parser.add_argument("--rounds", type=int, default=7, help="of the timing, after one that is not counted")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in () if options.table else options.models:
        measure(name, options.rounds)
    text = table()
    (RESULTS / "table.md").write_text(text)
    fill_page(text)
    print(text)


if __name__ == "__main__":
    main()
