"""A small task with what a loop may not assume, such as unequal and missing terms; an observer."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F

from torch_thor.errors import UserError
from torch_thor.training.loop import Observer
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.run import build
from torch_thor.training.tasks.task import Loss, Metric, Terms

COUNTS = torch.tensor([5, 1, 0, 3, 2, 4])  # rows that count, of the five of each sample
CUTS = {1: (0, 6), 2: (0, 2, 6)}  # of a batch, by the number of processes
MUON = {"lr": 0.05, "damping": 0.1, "update_interval": 2, "factor_decay": 0.5}
OPTIMIZERS = {
    "sgd": {"lr": 0.3},
    "thor": {**MUON, "trace_thresholds": (0.0, 0.0)},
    "thor-muon": MUON,
}


class Padded:
    """Sequences of rows with a label or of padding, which is `junk`; one step may be spoiled."""

    unit, steps_per_epoch, data = "rows", 4, {"samples": 24}
    metrics = (
        Metric("loss", "loss", "loss", False, primary=True),
        Metric("double", "double", "double", False, derived=lambda means: 2 * means["loss"]),
    )

    def __init__(self, junk=0.0, spoiled=None):
        self.junk, self.spoiled, self.read, self.passes = junk, spoiled, -1, 0

    def model(self):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()

    def batch(self, seed, own=slice(None)):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(6, 5, 4, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (6, 5), generator=generator)
        counts = torch.arange(5) < COUNTS[:, None]
        rows *= float("nan") if seed + 1 == self.spoiled else 1
        rows = rows.where(counts[..., None], self.junk)
        return {"rows": rows[own], "truth": (labels[own], counts[own])}

    def batches(self, ranks, start):
        for self.read in itertools.count(start):
            yield self.batch(self.read, slice(*CUTS[ranks.world][ranks.rank : ranks.rank + 2]))

    def held_out(self, ranks):
        nothing = self.batch(0, slice(2, 3))  # a sequence of padding
        for seed in (100, 101, 102, 103)[ranks.rank :: ranks.world]:
            yield from ((self.batch(seed), True), (self.batch(seed + 50), False), (nothing, True))

    def terms(self, batch):
        return Terms(int(batch["truth"][1].sum()), batch["truth"][1])

    def each(self, scores, batch):
        self.passes += 1
        labels, counts = batch["truth"]
        losses = F.cross_entropy(scores.movedim(-1, 1), labels, reduction="none")
        return losses.where(counts, 0.0).sum()

    def loss(self, net, batch):
        scores = net(batch["rows"])
        mean = self.each(scores, batch) / max(1, self.terms(batch).number)
        return Loss(mean, scores.flatten(0, 1))

    def measure(self, net, batch):
        return {"loss": self.each(net(batch["rows"]), batch)}


def started(name="sgd", task=None, ranks=None, *, settings=None, **given):
    """A run of the task with one of OPTIMIZERS, before its first step."""
    own = {"epochs": 2, "batch_size": 6, "seed": 5, "device": "cpu", "schedule": {"kind": "linear"}}
    own |= {"optimizer": [name], "optimizers": {name: OPTIMIZERS[name] | (settings or {})}}
    recipe = Recipe.model_validate(own | given)
    return build(recipe, name, task or Padded(), ranks or Ranks())


class Diary(Observer):
    """Writes down what happens, and raises where it is told to."""

    def __init__(self, error=None):
        self.lines, self.error = [], error

    def write(self, line):
        self.lines.append(line)
        if line == self.error:
            raise UserError(f"at {line}")

    def step(self, run, point):
        self.write(f"step {point.step}")

    def evaluation(self, run, score):
        self.write(f"eval {score.step}")

    def end_of_step(self, run):
        self.write(f"end {run.step}")

    def close(self):
        self.write("close")
