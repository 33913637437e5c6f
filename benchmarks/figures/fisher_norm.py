"""The F-norm of each layer's Fisher block during training, with a growing interval.

See Chen et al. 2021, section 3.2.

Every refresh takes new factors, which are not split, so the block is T · (A ⊗ G), and its norm is T
· ‖A‖_F · ‖G‖_F. The factors are those of one mini-batch, so every change from one refresh to the
next includes their noise.
"""

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.figures import training
from benchmarks.figures.training import (
    FASHION,
    Options,
    Row,
    jobs_of,
    measured,
    short,
    words_of,
)
from benchmarks.runner import markdown
from benchmarks.runner.drawing import draw_band, label_in_full, marker, save
from torch_thor.curvature import Decision
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.errors import require
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training.loop import Observer, Point, Run

ABOUT = (
    "F-norm of every layer's Fisher block over training, with a growing interval between refreshes"
)
TAKES = ("data", "epochs", "eval_interval", "seeds")
QUICK = ("eval_interval=468",)
# up to an epoch of Fashion-MNIST
INTERVAL = {"kind": "geometric", "first": 2, "last": 468, "factor": 1.1}
WORDS = (
    "trace_thresholds=thor_nt",
    "split_dim=null",
    "factor_decay=0",
    f"update_interval={json.dumps(INTERVAL)}",
)
FEWEST = 3  # refreshes, which give two changes
THEIRS = (
    "Theirs, not ours, and another task: for ResNet-50 on ImageNet the F-norm changes fast early "
    "and is stable later."
)

Factors = tuple[float, list[Tensor], list[Tensor]]  # T, then A and G of each group


def factors_of(layer: LayerCurvature) -> Factors:
    """Return the factors of a layer that are in use, in float64."""
    a, g = (
        [m.double() for m in (f if isinstance(f, list) else [f])]
        for f in layer.factors()
        if f is not None
    )
    return layer.rows_per_term, a, g


def inner_product(one: Factors, other: Factors) -> float:
    """Return ⟨T A ⊗ G, T' A' ⊗ G'⟩_F, summed over groups, without forming the products.

    It is T T' ⟨A, A'⟩ ⟨G, G'⟩.
    """
    groups = zip(*one[1:], *other[1:], strict=True)
    return (
        one[0] * other[0] * sum(float((a * a2).sum() * (g * g2).sum()) for a, g, a2, g2 in groups)
    )


def relative_distance(now: Factors, before: Factors) -> float | None:
    """Return ‖F_now − F_before‖_F / ‖F_before‖_F."""
    norm = inner_product(before, before)
    square = inner_product(now, now) + norm - 2 * inner_product(now, before)
    return math.sqrt(max(0.0, square) / norm) if norm else None


class Norms(Observer):
    """An observer that records the norm of each layer's block at each refresh.

    It also records the distance of the block from that of the previous refresh.
    """

    def __init__(self) -> None:
        self.columns: dict[str, list[Any]] = {"layers": [], "step": [], "norm": [], "distance": []}
        self._before: dict[str, Factors] = {}

    def step(self, run: Run, point: Point) -> None:
        """Record norms and distances after a refresh."""
        if not point.events:
            return
        failed = ", ".join(
            event.layer for event in point.events if event.decision is Decision.FAILED
        )
        remedy = "so its steps are not THOR's: raise damping, in a recipe of your own"
        require(
            not failed, f"step {run.step}: the factors of {failed} cannot be inverted, {remedy}"
        )
        assert isinstance(run.optimizer, CurvatureOptimizer)
        now = {name: factors_of(layer) for name, layer in run.optimizer.curvature.items()}
        moved = [
            relative_distance(own, self._before[name]) if self._before else None
            for name, own in now.items()
        ]
        self.columns["layers"], self._before = list(now), now
        self.columns["step"].append(run.step)
        self.columns["norm"].append(
            [short(math.sqrt(inner_product(own, own))) for own in now.values()]
        )
        self.columns["distance"].append([None if one is None else short(one) for one in moved])


def jobs(options: Options, device: str) -> list[Row]:
    """List the trainings."""
    return jobs_of(words_of(options, FASHION, QUICK), options, device, [({}, "thor", WORDS)])


optimizers = training.optimizers


def run(job: Row) -> Row:
    """Train once and record the norms."""
    norms = Norms()
    found = measured(job, norms)
    require(found["failure"] is None, str(found["failure"]))
    few = (
        f"{found['steps']} steps with {found['refresh_steps']} refreshes show no change: give more "
        "--epochs"
    )
    require(found["refresh_steps"] >= FEWEST, few)
    return {**found, "norms": norms.columns}


def table(rows: Sequence[Row]) -> str:
    """Return the changes of each layer with the first seed, and the ranges over all seeds."""
    norms, lines = rows[0]["norms"], []
    steps = norms["step"]
    heads = (
        "layer", f"F-norm at step {steps[0]}", f"at step {steps[-1]}",
        "largest over smallest, in the first tenth of the steps", "in the last half",
        "from refresh to refresh, median: relative distance of the block",
    )  # fmt: skip
    for place, layer in enumerate(norms["layers"]):
        early, late, moved = changes(rows[0], place)
        first, last = norms["norm"][0][place], norms["norm"][-1][place]
        lines.append((
            layer, f"{first:.3g}", f"{last:.3g}",
            *("-" if ratio is None else f"{ratio:.1f}" for ratio in (early, late)),
            "-" if moved is None else f"{moved:.0%}",
        ))  # fmt: skip
    between = f"{steps[1] - steps[0]} steps at first, {steps[-1] - steps[-2]} at last"
    text = f"{len(steps)} refreshes, {between}. {over_seeds(rows)}"
    return f"{markdown.table(heads, lines)}\n\n{text}\n\n{THEIRS}"


def changes(row: Row, place: int) -> tuple[float | None, float | None, float | None]:
    """Return by how much a layer changes.

    These are the largest over the smallest norm in the first tenth and in the last half of the
    steps, and the median of the distances from refresh to refresh.
    """
    norms, total = row["norms"], row["steps"]
    columns = zip(norms["step"], norms["norm"], strict=True)
    own = [(step, at[place]) for step, at in columns]
    parts = [
        [norm for step, norm in own if low < step <= high]
        for low, high in ((0, total / 10), (total / 2, total))
    ]
    early, late = (max(part) / min(part) if part and min(part) else None for part in parts)
    moved = [at[place] for at in norms["distance"] if at[place] is not None]
    return early, late, statistics.median(moved) if moved else None


def over_seeds(rows: Sequence[Row]) -> str:
    """Say between which values the changes of all layers are, with all seeds."""
    found = [changes(row, place) for row in rows for place in range(len(row["norms"]["layers"]))]
    early, late, moved = (
        [value for value in column if value is not None] for column in zip(*found, strict=True)
    )
    ranges = (
        "-" if not values else f"{min(values):{form}} to {max(values):{form}}"
        for values, form in ((early, ".1f"), (late, ".1f"), (moved, ".0%"))
    )
    seeds = ", ".join(str(row["job"]["seed"]) for row in rows)
    return (
        "Over all layers and the seeds {}: {} in the first tenth, {} in the last half; {}.".format(
            seeds, *ranges
        )
    )


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw norms and the interval over the steps: the mean over seeds with the range behind it."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # slow to import

    picture = Figure(figsize=(10, 6.5), layout="constrained")
    above, below = picture.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    layers, steps = rows[0]["norms"]["layers"], rows[0]["norms"]["step"]
    for place, layer in enumerate(layers):
        series = [[at[place] for at in row["norms"]["norm"]] for row in rows]
        draw_band(
            above,
            steps,
            series,
            label=layer,
            colour=colormaps["viridis"](place / max(1, len(layers) - 1)),
        )
    between = [after - before for before, after in itertools.pairwise(steps)]
    below.step(steps[:-1], between, where="post", marker=marker(between))
    above.set(yscale="log", ylabel="$\\|F\\|_F = T\\,\\|A\\|_F\\,\\|G\\|_F$, fresh factors")
    below.set(ylabel="steps to the\nnext refresh", xlabel="step", xscale="log")
    for axes in (above, below):
        axes.grid(alpha=0.3)
        label_in_full(axes)
    above.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
    save(picture, path)
