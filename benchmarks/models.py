"""THOR's defaults on sixteen models of other projects: coverage, loss after twelve steps, time per step.

    python benchmarks/models.py                    # all models, then the table
    python benchmarks/models.py --models vae bert  # some of them; the results of the others are kept
    python benchmarks/models.py --table            # writes the table from the raw data only, also into docs/

Models and data are those of tests/models/zoo.py; one thread is used. Losses: twelve steps with AdamW(1e-3),
``THOR(model)`` and ``ThorMuon(model)``, from the same weights, on one batch and on a fresh batch in
each step, with five seeds; the result is the median of the means of the last three losses.

Time per step: forward pass, backward pass and optimizer. The trainings take turns step by step, so a change in the
speed of the machine affects all of them alike. The result is the median over rounds of the ratio to SGD's step in the
same round. For the time of a refresh step, every layer is refreshed in every step; for that of an ordinary step, no
layer is refreshed after the first step.

The loops are those of a user who changes nothing for THOR (``zoo.train``, and steps that take turns). They are not
the loop of the application, which tells THOR the number of loss terms and the padding of each batch. Here THOR
determines both by itself.
"""

import importlib.util
import math
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from torch_thor import THOR, ThorMuon
from torch_thor.bench import Folder, describe, markdown, median_ratio, script, take_turns, training_step, write_tables
from torch_thor.files import write_text

ROOT = Path(__file__).parents[1]
STORE = Folder(ROOT / "benchmarks" / "results" / "models")
PAGE = ROOT / "docs" / "measurements" / "models.md"
MARKS = ("<!-- table -->\n", "<!-- end of table -->\n")
SEEDS = (0, 1, 2, 3, 4)
STEPS = 12
NEVER = 10**9
SETTINGS: dict[str, type[THOR] | type[ThorMuon]] = {"plain": THOR, "spectral": ThorMuon}  # names in the raw data
LENGTHS = {"ordinary": NEVER, "refresh": 1}  # update_interval


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
        The number of parameters that are trained, and the share, with THOR (`plain`) and ThorMuon (`spectral`).
    """
    result: dict[str, Any] = {}
    for setting, kind in SETTINGS.items():
        entries = [e for e in kind(zoo.build(name).model).coverage() if e.trained]
        result["parameters"] = sum(math.prod(e.shape) for e in entries)
        result[setting] = sum(math.prod(e.shape) for e in entries if e.preconditioned) / result["parameters"]
    return result


def losses(name: str, *, fresh: bool) -> dict[str, list[list[float]]]:
    """Train from the same weights with each optimizer.

    Args:
        name: key of the zoo.
        fresh: whether each step has a batch of its own.

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
                optimizer = SETTINGS[key](subject.model)
            runs.append(zoo.train(subject, optimizer, STEPS, seed, fresh=fresh))
    return result


def seconds(name: str, rounds: int) -> dict[str, list[float]]:
    """Time whole steps, in turns.

    Args:
        name: key of the zoo.
        rounds: how many, after one that is not counted.

    Returns:
        Seconds a step, by training.
    """
    steps, optimizers = {}, {}
    for key in ("sgd", *(f"{setting} {length}" for length in LENGTHS for setting in SETTINGS)):
        subject = zoo.build(name)
        if key == "sgd":
            optimizers[key] = torch.optim.SGD(subject.model.parameters(), lr=1e-5, momentum=0.9)
        else:
            setting, _, length = key.partition(" ")
            optimizers[key] = SETTINGS[setting](subject.model, lr=1e-5, update_interval=LENGTHS[length])
            for group in optimizers[key].param_groups:  # every refresh takes new factors
                group["trace_thresholds"] = (0.0, 0.0)
        steps[key] = training_step(subject.loss, optimizers[key])
    result = take_turns(steps, rounds)
    for key, optimizer in optimizers.items():
        if isinstance(optimizer, THOR | ThorMuon):
            done = max(layer.refreshes for layer in optimizer.curvature.values())
            assert done == (1 if key.endswith("ordinary") else rounds + 1), (key, done)
    return result


@dataclass(frozen=True)
class Measurement:
    """All that is measured of a model.

    Args:
        model: key of the zoo.
        rounds: of the timing.
    """

    model: str
    rounds: int

    @property
    def key(self) -> str:
        """Name of its raw data."""
        return self.model

    def run(self) -> dict[str, Any]:
        """Measure.

        Returns:
            The raw data.
        """
        with warnings.catch_warnings(action="ignore"):  # tests/models/test_defaults.py has which there are
            return {
                "machine": describe(),
                "coverage": coverage(self.model),
                "losses": losses(self.model, fresh=False),
                "fresh": losses(self.model, fresh=True),
                "seconds": seconds(self.model, self.rounds),
            }


def row(name: str) -> list[str]:
    """Return a line of the table.

    Args:
        name: key of the zoo.

    Returns:
        Its cells.
    """
    result = STORE.read(name)
    covered = result["coverage"]
    cells = [name, f"{covered['parameters']:,}", *(f"{covered[setting]:.1%}" for setting in SETTINGS)]
    cells.append(_number(statistics.median(run[0] for run in result["losses"]["adamw"])))
    for kind in ("losses", "fresh"):
        cells += [_number(statistics.median(sum(run[-3:]) / 3 for run in runs)) for runs in result[kind].values()]
    times = result["seconds"]
    for setting in SETTINGS:
        ratios = (median_ratio(times[f"{setting} {length}"], times["sgd"]) for length in LENGTHS)
        cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
    return cells


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2g}" if value < 0.1 else f"{value:.2f}"


def table() -> str:
    """Return the result as Markdown, models in the zoo's order; those that were not measured are left out.

    Returns:
        The table.
    """
    columns = (
        "model", "parameters", "preconditioned", "… scale-free", "loss, first", "one batch, AdamW(1e-3)",
        "… THOR", "… scale-free", "fresh batches, AdamW(1e-3)", "… THOR", "… scale-free",
        "step over SGD's: ordinary, refresh", "… scale-free",
    )  # fmt: skip
    return markdown.table(columns, [row(name) for name in zoo.SUBJECTS if STORE.holds(name)])


def fill_page(text: str) -> None:
    """Put the table into its page.

    Args:
        text: the table.
    """
    before, _, rest = PAGE.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    write_text(PAGE, f"{before}{MARKS[0]}\n{text}\n\n{MARKS[1]}{after}")


def main() -> None:
    """Measure, print the table and put it into the documentation."""
    parser = script.parser(__doc__, workers=1)  # step times
    parser.add_argument("--models", nargs="+", choices=list(zoo.SUBJECTS), default=list(zoo.SUBJECTS))
    parser.add_argument("--rounds", type=int, default=7, help="of the timing, after one that is not counted")
    options = parser.parse_args()
    if not options.table:
        jobs = [Measurement(name, options.rounds) for name in options.models]
        script.measure(STORE, [lambda: jobs], options.workers, anew=True)
    text = table()
    write_tables(STORE.folder, text)
    fill_page(text)
    print(f"{text}\n")


if __name__ == "__main__":
    main()
