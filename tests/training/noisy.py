"""A small task with all that a resumed run must remember, such as batch statistics and dropout."""

from contextlib import suppress
from itertools import count

import torch
from torch import nn
from torch.nn import functional as F

from torch_thor.errors import StoppedError
from torch_thor.training import checkpoint
from torch_thor.training.checkpoint import Saver, consolidated
from torch_thor.training.loop import Observer, train
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.run import build
from torch_thor.training.tasks.task import Loss, Metric, Terms

STEPS, PER_EPOCH = 12, 5
CUTS = {1: (0, 12), 2: (0, 4, 12), 4: (0, 2, 5, 8, 12)}  # cuts of batches, by process count
MUON = {"update_interval": 4, "factor_decay": 0.5, "lr": 0.01, "split_dim": 4}
SETTINGS = {**MUON, "trace_thresholds": (0.05, 0.001)}
OPTIMIZERS = {"thor": SETTINGS, "thor-muon": MUON, "sgd": {"momentum": 0.0}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
        self.lists = nn.ModuleList([nn.Linear(8, 7), nn.Linear(7, 8)])
        self.head = nn.Linear(8, 3)

    def forward(self, rows):
        x = self.body(rows)
        for layer in self.lists:
            x = torch.tanh(layer(x))
        return self.head(x)


class Quiet(nn.Module):
    """Without batch statistics and dropout, which differ between processes."""

    def __init__(self):
        super().__init__()
        layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 3)
        self.layers = nn.Sequential(*layers)

    def forward(self, rows):
        return self.layers(rows)


class Noisy:
    unit, steps_per_epoch, data = "rows", PER_EPOCH, {"samples": 60}
    metrics = (
        Metric("loss", "loss", "loss", False),
        Metric("top1", "top-1", "top-1", True, primary=True, share=True),
    )

    def __init__(self, kind=Net):
        self.kind = kind

    def model(self):
        return self.kind().double()

    def batch(self, seed, part):
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        return rows[part], rows[:, :3].argmax(1)[part]

    def batches(self, ranks, start):
        own = slice(*CUTS[ranks.world][ranks.rank : ranks.rank + 2])
        for step in count(start):
            yield self.batch(step, own)

    def held_out(self, ranks):
        for number in range(0, 4, ranks.world):
            yield self.batch(1000 + number + ranks.rank, slice(None)), True

    def terms(self, batch):
        return Terms(len(batch[0]))

    def loss(self, net, batch):
        output = net(batch[0])
        return Loss(F.cross_entropy(output, batch[1]), output)

    def measure(self, net, batch):
        output = net(batch[0])
        loss = F.cross_entropy(output, batch[1], reduction="sum")
        return {"loss": loss, "top1": (output.argmax(1) == batch[1]).sum()}


def recipe(**given):
    own = {
        "steps": STEPS, "eval_interval": 3, "checkpoint_interval": 5, "ema_decay": 0.5, "seed": 3,
        "device": "cpu", "optimizer": list(OPTIMIZERS), "optimizers": OPTIMIZERS,
    }  # fmt: skip
    return Recipe.model_validate(own | given)


class Losses(Observer):
    """Notes the losses and the evaluations, and asks to stop in a given step."""

    def __init__(self, stop_at=None):
        self.stop_at, self.seen = stop_at, []
        self.stops = [15] if stop_at == 1 else []

    def step(self, run, point):
        self.seen.append((point.step, point.loss))
        if point.step + 1 == self.stop_at:  # the next step notices it
            self.stops.append(15)

    def evaluation(self, run, score):
        self.seen.append((score.step, *score.metrics.values(), *(score.averaged or {}).values()))


def go(folder, given, name, ranks=None, *, stop_at=None, resume=False, task=None):
    """Train with checkpoints; gives losses, and on the first process whole weights and state."""
    ranks, task = ranks or Ranks(), task or Noisy()
    run = build(given, name, task, ranks, resumed=resume)
    if resume:
        torch.manual_seed(999)  # as in a new process, with other random numbers
        checkpoint.newest(folder, print).restore(run)
    noted = Losses(stop_at)
    with suppress(StoppedError):
        train(run, [noted, Saver(folder, lambda: run.step)], stops=noted.stops)
    # a stop is noticed in the next step, or in an evaluation before it
    assert run.step == given.steps if stop_at is None else stop_at - run.step in (0, 1)
    return noted.seen, state(run)


def state(run):
    weights, rest = consolidated(run)
    del rest["seconds"]
    for score in ("score", "best"):
        rest[score] = rest[score] and {**rest[score], "seconds": 0}
    return weights, rest
