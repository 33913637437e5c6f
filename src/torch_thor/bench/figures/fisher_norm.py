"""The F-norm of each layer's Fisher block during training, with a growing interval (Chen et al. 2021, section 3.2).

Every refresh takes new factors, which are not split, so the norm is that of T · (A ⊗ G). The norm of a Kronecker
product is the product of the norms, ‖T · A ⊗ G‖_F = T · ‖A‖_F · ‖G‖_F. The factors are those of one mini-batch, so
every change from one refresh to the next includes their noise.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from torch_thor import THOR, intervals
from torch_thor.bench import markdown
from torch_thor.bench.drawing import draw_band, note, save
from torch_thor.bench.figures import paper
from torch_thor.bench.figures.figure import Figure, Options, recipe_of, write_title
from torch_thor.bench.figures.measuring import recipe_settings, train_run
from torch_thor.bench.figures.raw import RawData
from torch_thor.curvature import Decision
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training import Observer, Point, Run
from torch_thor.training.errors import UserError, require

SEEDS = (0,)
INTERVAL = {"first": 2, "factor": 1.1}  # of intervals.Geometric, which ends at one refresh an epoch
FEWEST = 3  # the smallest number of refreshes, which gives two changes

Factors = tuple[float, list[Tensor], list[Tensor]]  # T, then A and G of each group


def factors_of(layer: LayerCurvature) -> Factors:
    """Return the factors of a layer that are in use, in float64."""
    a, g = ([m.double() for m in (f if isinstance(f, list) else [f])] for f in layer.factors() if f is not None)
    return layer.rows_per_term, a, g


def inner_product(one: Factors, other: Factors) -> float:
    """Return ⟨T A ⊗ G, T' A' ⊗ G'⟩_F = T T' ⟨A, A'⟩ ⟨G, G'⟩, summed over groups, without forming the products."""
    parts = [
        (a * a_other).sum() * (g * g_other).sum() for a, g, a_other, g_other in zip(*one[1:], *other[1:], strict=True)
    ]
    return one[0] * other[0] * float(torch.stack(parts).sum())


def fisher_norm(factors: Factors) -> float:
    """Return ‖F‖_F."""
    return math.sqrt(inner_product(factors, factors))


def relative_distance(now: Factors, before: Factors) -> float | None:
    """Return ‖F_now − F_before‖_F / ‖F_before‖_F."""
    norm = inner_product(before, before)
    square = inner_product(now, now) + norm - 2 * inner_product(now, before)
    return math.sqrt(max(0.0, square) / norm) if norm else None


class Norms(Observer):
    """Records the norm of each layer's block at each refresh, and its distance from that of the previous refresh."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.steps: list[int] = []
        self.norms: list[list[float]] = []
        self.distances: list[list[float | None]] = []
        self._before: dict[str, Factors] = {}

    def step(self, run: Run, point: Point) -> None:
        """Record norms and distances after a refresh."""
        if not point.events:
            return
        failed = [event.layer for event in point.events if event.decision is Decision.FAILED]
        if failed:
            raise UserError(
                f"step {run.step}: the factors of {', '.join(failed)} cannot be inverted, so its steps are not THOR's: "
                "raise damping, in a recipe of your own"
            )
        assert isinstance(run.optimizer, CurvatureOptimizer)
        now = {name: factors_of(layer) for name, layer in run.optimizer.curvature.items()}
        self.layers = list(now)
        self.steps.append(run.step)
        self.norms.append([fisher_norm(factors) for factors in now.values()])
        before = self._before
        self.distances.append(
            [relative_distance(factors, before[name]) if name in before else None for name, factors in now.items()]
        )
        self._before = now

    def columns(self) -> dict[str, Any]:
        """Return the recorded values."""
        return {"layers": self.layers, "step": self.steps, "norm": self.norms, "distance": self.distances}


def settings(options: Options, device: str) -> dict[str, Any]:
    """Return the settings of the figure."""
    recipe = recipe_settings(recipe_of(options, ["thor"]), ["thor"])
    recipe["optimizers"]["thor"].update(trace_thresholds="thor_nt", split_dim=None, factor_decay=0.0)
    del recipe["optimizers"]["thor"]["update_interval"]
    interval = {**INTERVAL, "last": "one epoch"}
    return {"recipe": recipe, "device": device, "seeds": options.seeds or SEEDS, "update_interval": interval}


def jobs(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the runs of the figure."""
    return [{"seed": seed} for seed in settings["seeds"]]


def measure(settings: Mapping[str, Any], job: Mapping[str, Any], console: Console) -> dict[str, Any]:
    """Train once and record the norms."""
    norms, seed = Norms(), job["seed"]
    first, factor = settings["update_interval"]["first"], settings["update_interval"]["factor"]

    def grow(run: Run) -> None:
        assert isinstance(run.optimizer, THOR)
        for group in run.optimizer.param_groups:
            group["update_interval"] = intervals.Geometric(first, max(first, run.task.steps_per_epoch), factor)

    words = [f"seed={seed}"]
    label = f"thor, seed {seed}"
    trained = train_run(settings, "thor", words, console, label=label, observers=[norms], prepare=grow)
    require(
        len(norms.steps) >= FEWEST,
        f"{trained.run.step} steps with {len(norms.steps)} refreshes show no change: give more --epochs",
    )
    return {"norms": norms.columns(), **trained.plain()}


def norm_changes(norms: Sequence[float]) -> list[float]:
    """Return the relative change of a norm from each refresh to the next."""
    return [abs(now - before) / before if before else math.nan for before, now in itertools.pairwise(norms)]


def table(raw: RawData) -> str:
    """Return a table of the norms at both ends of the training, and of their changes, for the first seed."""
    run = raw.runs[0]
    norms, steps = run["norms"], run["norms"]["step"]
    total = len(run["steps"]["step"])
    heads = (
        "layer",
        f"F-norm at step {steps[0]}",
        f"at step {steps[-1]}",
        "largest over smallest, in the first tenth of the steps",
        "in the last half",
        "from refresh to refresh, median: relative change of the norm",
        "relative distance of the block",
    )
    rows = []
    for place, layer in enumerate(norms["layers"]):
        own = [at[place] for at in norms["norm"]]
        moved = [at[place] for at in norms["distance"][1:] if at[place] is not None]
        early = _range([norm for norm, step in zip(own, steps, strict=True) if step <= total / 10])
        late = _range([norm for norm, step in zip(own, steps, strict=True) if step > total / 2])
        change, distance = (statistics.median(values) if values else math.nan for values in (norm_changes(own), moved))
        rows.append((layer, f"{own[0]:.3g}", f"{own[-1]:.3g}", early, late, f"{change:.0%}", f"{distance:.0%}"))
    between = f"{steps[1] - steps[0]} steps at first, {steps[-1] - steps[-2]} at last"
    text = markdown.table(heads, rows)
    return "\n".join([text, "", f"{len(steps)} refreshes, {between}.", "", f"Theirs: {paper.NORM_NOTE}."])


def _range(norms: Sequence[float]) -> str:
    return f"{max(norms) / min(norms):.1f}" if norms and min(norms) else "-"


def draw(raw: RawData, path: Path) -> None:
    """Draw norms, their changes and the interval over the steps: the mean over seeds with the range behind it."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure as Picture  # imported here because it is slow to import

    picture = Picture(figsize=(10, 9), layout="constrained")
    above, middle, below = picture.subplots(3, 1, sharex=True, height_ratios=[3, 3, 1.4])
    all_norms = [run["norms"] for run in raw.runs]
    layers, steps = all_norms[0]["layers"], all_norms[0]["step"]
    for place, layer in enumerate(layers):
        series = [[at[place] for at in norms["norm"]] for norms in all_norms]
        colour = colormaps["viridis"](place / max(1, len(layers) - 1))
        draw_band(above, steps, series, label=layer, colour=colour)
        draw_band(middle, steps[1:], [norm_changes(own) for own in series], label=layer, colour=colour)
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    below.step(steps[:-1], gaps, where="post", color="#333333")
    above.set(yscale="log", ylabel="$\\|F\\|_F = T\\,\\|A\\|_F\\,\\|G\\|_F$, fresh factors")
    middle.set(yscale="log", ylabel="relative change of the norm\nsince the refresh before")
    below.set(ylabel="steps to the\nnext refresh", xlabel="step", xscale="log")
    for axes in (above, middle, below):
        axes.grid(alpha=0.3)
    above.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    write_title(picture, raw, "unsplit factors, every layer refreshed")
    note(picture, f"Theirs, another task: {paper.NORM_NOTE}")
    save(picture, path)


FISHER_NORM = Figure(
    about="F-norm of every layer's Fisher block over training, with a growing interval between refreshes",
    takes=("data", "epochs", "eval_interval", "seeds"),
    settings=settings,
    jobs=jobs,
    measure=measure,
    draw=draw,
    table=table,
)
