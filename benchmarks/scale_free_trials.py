"""Trials from which the step of ThorMuon was chosen: variants of a prototype, with one seed each.

    python benchmarks/scale_free_trials.py            # runs what is missing, then prints one line per trial
    python benchmarks/scale_free_trials.py --table    # prints the lines only

The seeds are not those that scale_free.py reports. The prototype is contained in this file. It is the step of
:class:`torch_thor.ThorMuon` for linear layers and convolutions, with the variants that were tried. ``deep``
is a larger autoencoder, 784-1000-500-250-30 and the reverse, with batches of 500.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tasks import TASKS, autoencoder, train
from torch_thor.bench import Rows, describe, key_of, script

OUT = Path(__file__).parent / "results" / "scale_free_trials.json"
ALL = {**TASKS, "deep": autoencoder((1000, 500, 250, 30, 250, 500, 1000), steps=300, eval_interval=50, batch_size=500)}
BLOCK = 128  # rows that are orthogonalised together
ROOTS = {"A": 1.0, "A and G": 0.25}  # the exponent of each factor's inverse


def interval(text: str) -> Callable[[int], int]:
    """Return a schedule of refreshes.

    Args:
        text: ``"10"``, or ``"5-20"``: a fifth of the step, at most 20.

    Returns:
        From the step of a refresh to the steps until the next.
    """
    first, _, last = text.partition("-")
    if not last:
        return lambda step: int(first)
    return lambda step: max(1, min(int(last), step // int(first)))


class Prototype(torch.optim.Optimizer):
    """The step of ThorMuon with everything that was tried.

    Args:
        model: the network.
        lr: learning rate.
        momentum: Nesterov momentum.
        curvature: ``"A"``, its inverse; ``"A and G"``, fourth roots of both; ``"none"``.
        damping: relative to the mean diagonal of a factor.
        refresh: see :func:`interval`.
        decay: weight of the old factors in their running average.
        rows: of a batch, that A is taken of; None for all.
        adamw_share: of lr, for what is no matrix.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        momentum: float = 0.9,
        curvature: str = "A",
        damping: float = 0.1,
        refresh: str = "10",
        decay: float = 0.5,
        rows: int | None = None,
        adamw_share: float = 0.2,
    ) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.momentum, self.damping, self.decay, self.rows = momentum, damping, decay, rows
        self.exponent = ROOTS.get(curvature)
        self.sides = "AG" if curvature == "A and G" else "A" if curvature == "A" else ""
        self.interval, self.adamw_share = interval(refresh), adamw_share
        self.taken, self.due = 0, 0
        self.factors: dict[tuple[str, Tensor], Tensor] = {}
        self.roots: dict[tuple[str, Tensor], Tensor] = {}
        self.weights: dict[Tensor, nn.Module] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                self.weights[module.weight] = module
                if self.sides:
                    module.register_forward_hook(self._take_rows)
        self.buffers = {w: torch.zeros_like(w.flatten(1)) for w in self.weights}
        rest = [p for p in model.parameters() if p not in self.weights]
        self.adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    @torch.no_grad()
    def _take_rows(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if not module.training or self.taken != self.due:
            return
        x = inputs[0].detach()
        if isinstance(module, nn.Conv2d):
            patches = functional.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
            x = patches.transpose(1, 2).flatten(0, 1)
        x = x.flatten(0, -2)
        if self.rows is not None and len(x) > self.rows:
            x = x[:: len(x) // self.rows]
        self._average("A", module.weight, x)
        if "G" in self.sides:

            def on_gradient(g: Tensor) -> None:
                is_image = isinstance(module, nn.Conv2d)
                self._average(
                    "G", module.weight, g.detach().transpose(0, 1).flatten(1).T if is_image else g.flatten(0, -2)
                )

            output.register_hook(on_gradient)

    def _average(self, side: str, weight: Tensor, rows: Tensor) -> None:
        fresh = rows.T @ rows / len(rows)
        old = self.factors.get((side, weight))
        self.factors[side, weight] = fresh if old is None else old * self.decay + fresh * (1 - self.decay)

    def _root(self, factor: Tensor) -> Tensor:
        damped = factor + self.damping * factor.diagonal().mean() * torch.eye(len(factor))
        if self.exponent == 1.0:
            return torch.cholesky_inverse(torch.linalg.cholesky(damped))
        values, vectors = torch.linalg.eigh(damped)
        return (vectors * values.pow(-self.exponent)) @ vectors.T

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Take one step.

        Args:
            closure: not used.
        """
        lr = self.param_groups[0]["lr"]
        if self.taken == self.due:
            self.roots = {key: self._root(factor) for key, factor in self.factors.items()}
            self.due += self.interval(self.taken)
        for weight, buffer in self.buffers.items():
            gradient = weight.grad.flatten(1)
            buffer.mul_(self.momentum).add_(gradient)
            ahead = gradient + self.momentum * buffer
            if ("A", weight) in self.roots:
                ahead = ahead @ self.roots["A", weight]
            if ("G", weight) in self.roots:
                ahead = self.roots["G", weight] @ ahead
            outputs, inputs = ahead.shape
            direction = orthogonal(ahead)
            length = math.sqrt(min(outputs, inputs)) * math.sqrt(max(1, outputs / inputs))
            weight.mul_(1 - lr * 0.01)  # weight decay
            weight.add_((direction * (length / direction.norm().clamp(min=1e-12))).view(weight.shape), alpha=-lr)
        self.adamw.param_groups[0]["lr"] = lr * self.adamw_share
        self.adamw.step()
        self.taken += 1


def orthogonal(matrix: Tensor) -> Tensor:
    """Return the polar factors of blocks of ``BLOCK`` rows.

    Args:
        matrix: ``(m, n)``; of a tall one blocks of columns are taken.

    Returns:
        Of the same shape.
    """
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T).T
    return torch.cat([_polar(block) for block in matrix.split(BLOCK)])


def _polar(block: Tensor) -> Tensor:
    block = block / block.abs().max().clamp(min=1e-37)
    values, vectors = torch.linalg.eigh(block @ block.T)
    return (vectors * values.maximum(1e-6 * values[-1:].clamp(min=1e-30)).rsqrt()) @ (vectors.T @ block)


def trials() -> list[dict[str, Any]]:
    """Return all trials, as the keywords of :class:`Prototype` with ``task``, ``length`` and ``seed``."""
    fast = {"rows": 1024, "refresh": "5-20"}
    found = []
    for task in ("language", "autoencoder"):
        found += [
            {"task": task, "curvature": c, "momentum": mu, "lr": lr}
            for c, momenta in (("A", (0.8, 0.9, 0.95)), ("none", (0.9,)), ("A and G", (0.9,)))
            for mu in momenta
            for lr in (0.04, 0.06, 0.08)
        ]
        found += [
            {"task": task, "momentum": mu, "lr": lr, "length": 2.0} for mu in (0.8, 0.9, 0.95) for lr in (0.04, 0.06)
        ]
        one = {"task": task, "momentum": 0.9, "lr": 0.06}
        found += [{**one, "refresh": r} for r in ("5", "20")] + [{**one, "rows": r} for r in (512, 1024)]
        found += [{**one, "adamw_share": s} for s in (0.1, 0.5)] + [{**one, "damping": d} for d in (0.01, 1.0)]
    found += [
        {"task": "language", "momentum": mu, "lr": 0.06, "rows": 1024, "refresh": r}
        for r in ("5-10", "5-20", "3-20", "5-50")
        for mu in (0.9, 0.8)
    ]
    found += [
        {"task": "classifier1024", "momentum": mu, "lr": lr, "rows": 1024}
        for mu in (0.8, 0.9)
        for lr in (0.04, 0.06, 0.08)
    ]
    found += [
        {"task": "classifier1024", "curvature": "none", "momentum": mu, "lr": lr}
        for mu, lr in ((0.8, 0.06), (0.9, 0.06), (0.9, 0.04))
    ]
    found += [
        {"task": "deep", "momentum": mu, "lr": lr, "rows": 1024}
        for mu, lr in ((0.8, 0.04), (0.8, 0.06), (0.9, 0.04), (0.9, 0.06))
    ]
    found += [{"task": "deep", "curvature": "none", "momentum": 0.9, "lr": 0.04}]
    found += [{"task": "language", "momentum": 0.8, "lr": 0.08, "length": n, "seed": 11, **fast} for n in (1.0, 2.0)]
    found += [{"task": "autoencoder", "momentum": 0.8, "lr": 0.08, "length": n, "seed": 11, **fast} for n in (1.0, 2.0)]
    found += [{"task": "classifier1024", "momentum": 0.8, "lr": 0.08, **fast}]
    return [{"seed": 10, "length": 1.0, "curvature": "A", **trial} for trial in found]


@dataclass(frozen=True)
class Trial:
    """One run.

    Args:
        words: the keywords of :class:`Prototype` with ``task``, ``length`` and ``seed``.
    """

    words: dict[str, Any]

    @property
    def key(self) -> str:
        """Name of its raw data."""
        return key_of(self.words)

    def run(self) -> dict[str, Any]:
        """Train.

        Returns:
            The raw data.
        """
        own = {key: value for key, value in self.words.items() if key not in ("task", "seed", "length")}
        task, seed, length = (self.words[key] for key in ("task", "seed", "length"))
        outcome = train(ALL[task], seed, lambda model: Prototype(model, **own), length)
        kept = {key: outcome[key] for key in ("evaluations", "failure")}
        return {"trial": self.words, **kept, "machine": describe()}


def main() -> None:
    """Run what is missing, write it, and print a line a trial."""
    options = script.parser(__doc__, workers=1).parse_args()
    store, jobs = Rows(OUT, "trial"), [Trial(words) for words in trials()]
    if not options.table:
        script.measure(store, [lambda: jobs], options.workers)
    for job in jobs:
        found = store.find(job.key)
        if found is not None:
            print(f"{found['evaluations'][-1][1]:8.4f}  {job.words}")


if __name__ == "__main__":
    main()
