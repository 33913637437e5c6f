"""THOR, slow and obvious, in float64: the oracle of the fast implementation.

Written from the mathematics alone, with explicit loops, dense matrices and `numpy.linalg`. It uses no hook,
no `unfold`, no Cholesky and no batching, and torch only for the gradients of the loss.

Legend:
    x       what goes into a layer             y       what comes out of it
    a       a row of the input (a patch)       g       gradient of ONE loss term by the matching row of y
    R       rows of a layer in one step        N       loss terms in one step             T = R / N
    A, G    second moments of a and g          λ       damping
    d       the direction: W ← W − lr · (momentum of d)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

Uses = dict[str, list[tuple[np.ndarray, np.ndarray]]]  # layer name -> (x, gradient of the loss by y), one a use


# ------------------------------------------------------------------------------------------------- rows


def padded_input(x: np.ndarray, conv: nn.Conv2d) -> np.ndarray:
    """(N, C, H, W) with the margins that the convolution sees."""
    if conv.padding == "valid":
        margins = [(0, 0), (0, 0)]
    elif conv.padding == "same":
        totals = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        margins = [(total // 2, total - total // 2) for total in totals]  # the odd one goes right and below
    else:
        margins = [(p, p) for p in conv.padding]
    mode = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}[conv.padding_mode]
    return np.pad(x, [(0, 0), (0, 0), *margins], mode=mode)


def conv_input_rows(x: np.ndarray, conv: nn.Conv2d, group: int) -> np.ndarray:
    """Every patch that one group of the convolution looks at, each in the order of `weight.flatten(1)`."""
    if x.ndim == 3:
        x = x[None]
    x = padded_input(x, conv)
    width = x.shape[1] // conv.groups
    (kh, kw), (sh, sw), (dh, dw) = conv.kernel_size, conv.stride, conv.dilation
    rows = []
    for image in x:
        for top in range(0, x.shape[2] - dh * (kh - 1), sh):
            for left in range(0, x.shape[3] - dw * (kw - 1), sw):
                row = []
                for channel in range(group * width, (group + 1) * width):
                    for i in range(kh):
                        for j in range(kw):
                            row.append(image[channel, top + i * dh, left + j * dw])
                rows.append(row)
    return np.array(rows)


def conv_output_rows(grad_y: np.ndarray, conv: nn.Conv2d, group: int) -> np.ndarray:
    """The gradient by every output position, for the output channels of one group."""
    if grad_y.ndim == 3:
        grad_y = grad_y[None]
    width = conv.out_channels // conv.groups
    rows = []
    for image in grad_y:
        for i in range(image.shape[1]):
            for j in range(image.shape[2]):
                rows.append(image[group * width : (group + 1) * width, i, j])
    return np.array(rows)


def rows_of(module: nn.Module, x: np.ndarray, grad_y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows of the input, rows of the output's gradient), one pair a group."""
    if isinstance(module, nn.Linear):
        return [(x.reshape(-1, x.shape[-1]), grad_y.reshape(-1, grad_y.shape[-1]))]
    assert isinstance(module, nn.Conv2d)
    return [(conv_input_rows(x, module, q), conv_output_rows(grad_y, module, q)) for q in range(module.groups)]


# --------------------------------------------------------------------------------------- factors and blocks


def second_moment(rows: np.ndarray) -> np.ndarray:
    """(1/R) Σ r rᵀ, one outer product at a time."""
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for row in rows:
        total += np.outer(row, row)
    return total / len(rows)


def keep_blocks(matrix: np.ndarray, size: int | None) -> np.ndarray:
    """The matrix with everything outside the size × size blocks on its diagonal set to zero."""
    n = len(matrix)
    size = n if size is None else size
    return np.array([[matrix[i, j] if i // size == j // size else 0.0 for j in range(n)] for i in range(n)])


def damped(matrix: np.ndarray, damping: float, rows_per_term: float) -> np.ndarray:
    """The matrix + √(λ/T) I."""
    return matrix + np.sqrt(damping / rows_per_term) * np.eye(len(matrix))


@dataclass
class Factors:
    """A and G of one layer, one a group, and its T."""

    A: list[np.ndarray]
    G: list[np.ndarray]
    rows_per_term: float

    def trace(self, damping: float) -> float:
        """tr(A ⊗ G + λI), summed over groups; the Kronecker product is not even formed."""
        return sum(np.trace(A) * np.trace(G) + damping * len(A) * len(G) for A, G in zip(self.A, self.G, strict=True))


def factors_of(
    module: nn.Module,
    uses: Iterable[tuple[np.ndarray, np.ndarray]],
    terms: float,
    g_scale: float,
    split: int | None,
) -> Factors:
    """The factors of one step: rows of every use together; g is `g_scale` times the gradient of the loss."""
    per_use = [rows_of(module, x, grad_y) for x, grad_y in uses]
    A, G = [], []
    for q in range(len(per_use[0])):
        a = np.concatenate([use[q][0] for use in per_use])
        g = g_scale * np.concatenate([use[q][1] for use in per_use])
        assert len(a) == len(g)
        A.append(keep_blocks(second_moment(a), split))
        G.append(keep_blocks(second_moment(g), split))
    return Factors(A, G, len(a) / terms)


@dataclass
class Curvature:
    """What one layer keeps between refreshes."""

    taken: Factors | None = None
    A_inverse: list[np.ndarray] = field(default_factory=list)
    G_inverse: list[np.ndarray] = field(default_factory=list)
    damped_blocks: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    refreshes: int = 0
    stopped: bool = False
    last_trace_change: float | None = None

    def refresh(self, fresh: Factors, damping: float, thresholds: tuple[float, float], decay: float) -> None:
        """Take, keep or stop, as the trace rule has it."""
        if self.stopped:
            return
        if self.taken is not None:
            before, now = abs(self.taken.trace(damping)), abs(fresh.trace(damping))
            change = abs(now - before) / before
            self.last_trace_change = change
            if change < thresholds[1]:
                self.stopped = True
                return
            if change <= thresholds[0]:
                return
            fresh = Factors(
                [decay * old + (1 - decay) * new for old, new in zip(self.taken.A, fresh.A, strict=True)],
                [decay * old + (1 - decay) * new for old, new in zip(self.taken.G, fresh.G, strict=True)],
                fresh.rows_per_term,
            )
        self.taken = fresh
        self.refreshes += 1
        self.damped_blocks = [
            (damped(A, damping, fresh.rows_per_term), damped(G, damping, fresh.rows_per_term))
            for A, G in zip(fresh.A, fresh.G, strict=True)
        ]
        self.A_inverse = [np.linalg.inv(A) for A, _ in self.damped_blocks]
        self.G_inverse = [np.linalg.inv(G) for _, G in self.damped_blocks]

    def weight_direction(self, grad: np.ndarray) -> np.ndarray:
        """Solves T · (G_d ⊗ A_d) vec(ΔW) = vec(∇W), the Kronecker product written out, a group at a time."""
        assert self.taken is not None
        parts = []
        pieces = np.split(grad.reshape(grad.shape[0], -1), len(self.damped_blocks))
        for (A, G), piece in zip(self.damped_blocks, pieces, strict=True):
            fisher = self.taken.rows_per_term * np.kron(G, A)  # rows of vec: output first, then input
            parts.append(np.linalg.solve(fisher, piece.ravel()).reshape(piece.shape))
        return np.concatenate(parts).reshape(grad.shape)

    def bias_direction(self, grad: np.ndarray) -> np.ndarray:
        """(1/T) G_d⁻¹ ∇b, a group at a time."""
        assert self.taken is not None
        pieces = np.split(grad, len(self.damped_blocks))
        parts = [np.linalg.solve(G, piece) for (_, G), piece in zip(self.damped_blocks, pieces, strict=True)]
        return np.concatenate(parts) / self.taken.rows_per_term


# --------------------------------------------------------------------------------------------- gradients


def by_stages(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """The forward of an `nn.Sequential`, stage by stage: (output, [(name, x, y) of every stage])."""
    seen = []
    for name, stage in model.named_children():
        y = stage(x)
        seen.append((name, x, y))
        x = y
    return x, seen


def gradients(
    model: nn.Module, x: torch.Tensor, loss: Callable, forward=by_stages
) -> tuple[dict[str, np.ndarray], Uses]:
    """Gradients of all parameters; input and output gradient of every use of every linear or conv layer."""
    output, seen = forward(model, x)
    modules = dict(model.named_modules())
    seen = [(name, a, y) for name, a, y in seen if isinstance(modules[name], nn.Linear | nn.Conv2d)]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    seen = [(name, a, y) for name, a, y in seen if y.requires_grad]  # nothing trainable before: no gradient
    wanted = [*parameters.values(), *(y for _, _, y in seen)]
    found = torch.autograd.grad(loss(output), wanted, allow_unused=True)
    grads = {
        name: grad.numpy().copy()
        for name, grad in zip(parameters, found[: len(parameters)], strict=True)
        if grad is not None
    }
    uses: Uses = {}
    for (name, a, _), grad_y in zip(seen, found[len(parameters) :], strict=True):
        if grad_y is not None:
            uses.setdefault(name, []).append((a.detach().numpy().copy(), grad_y.numpy().copy()))
    return grads, uses


# --------------------------------------------------------------------------------------------- optimizer


class ReferenceTHOR:
    """THOR over a float64 copy of a model, with the names and defaults of the fast one.

    `groups` maps a parameter name to the options that differ for it. `preconditioned` names the layers that
    get a natural gradient (default: linear and conv layers with a trainable weight); the rest is plain SGD.
    """

    defaults: dict[str, Any] = {  # noqa: RUF012
        "lr": 0.05,
        "damping": 0.03,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "decay_filter": None,
        "update_interval": 100,
        "trace_thresholds": (0.01, 0.0),
        "split_dim": 128,
        "factor_decay": 0.0,
        "kl_clip": None,
        "loss_reduction": "mean",
        "loss_terms": None,
    }

    def __init__(self, model: nn.Module, *, forward=by_stages, groups=None, preconditioned=None, **options: Any):
        assert not set(options) - set(self.defaults)
        self.model = copy.deepcopy(model).double()
        self.forward = forward
        self.options = {**self.defaults, **options}
        self.groups = groups or {}
        modules = dict(self.model.named_modules())
        if preconditioned is None:
            preconditioned = [
                name
                for name, module in modules.items()
                if isinstance(module, nn.Linear | nn.Conv2d) and module.weight.requires_grad
            ]
        self.layers = {name: modules[name] for name in preconditioned}
        self.curvature = {name: Curvature() for name in preconditioned}
        self.buffers: dict[str, np.ndarray] = {}
        self.clock = 0
        self.due = 0

    def option(self, parameter: str, name: str) -> Any:
        return self.groups.get(parameter, {}).get(name, self.options[name])

    def step(self, *batches: tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]) -> None:
        """One step over micro-batches (x, loss of the output), whose gradients add up."""
        grads: dict[str, np.ndarray] = {}
        uses: Uses = {}
        terms = 0
        for x, loss in batches:
            more_grads, more_uses = gradients(self.model, x, loss, self.forward)
            for name, grad in more_grads.items():
                grads[name] = grads[name] + grad if name in grads else grad
            for name, pairs in more_uses.items():
                uses.setdefault(name, []).extend(pairs)
            terms += len(x)
        if self.options["loss_terms"] is not None:
            terms = self.options["loss_terms"]
        if self.clock == self.due:
            self._refresh(uses, terms)
            interval = self.options["update_interval"]
            self.due = self.clock + (interval(self.clock) if callable(interval) else interval)
        self._update(grads)
        self.clock += 1

    def _refresh(self, uses: Uses, terms: int) -> None:
        for name, curvature in self.curvature.items():
            if name not in uses:
                continue
            option = {key: self.option(f"{name}.weight", key) for key in self.options}
            g_scale = terms if option["loss_reduction"] == "mean" else 1
            fresh = factors_of(self.layers[name], uses[name], terms, g_scale, option["split_dim"])
            curvature.refresh(fresh, option["damping"], option["trace_thresholds"], option["factor_decay"])

    def _update(self, grads: dict[str, np.ndarray]) -> None:
        values = {name: p.detach().numpy() for name, p in self.model.named_parameters()}  # views: written in place
        directions = {}
        clipped_sum = 0.0
        natural = []
        for name, grad in grads.items():
            layer, _, kind = name.rpartition(".")
            d = grad
            if layer in self.curvature and self.curvature[layer].taken is not None:
                curvature = self.curvature[layer]
                d = curvature.weight_direction(grad) if kind == "weight" else curvature.bias_direction(grad)
                natural.append(name)
            admitted = self.options["decay_filter"]
            if admitted is None or admitted(name, dict(self.model.named_parameters())[name]):
                d = d + self.option(name, "weight_decay") * values[name]
            directions[name] = d
        if self.options["kl_clip"] is not None:
            for name in natural:
                clipped_sum += self.option(name, "lr") ** 2 * float(np.sum(directions[name] * grads[name]))
            if clipped_sum > 0:
                shrink = min(1.0, float(np.sqrt(self.options["kl_clip"] / clipped_sum)))
                for name in natural:
                    directions[name] = shrink * directions[name]
        for name, d in directions.items():
            momentum = self.option(name, "momentum")
            if momentum:
                v = momentum * self.buffers[name] + d if name in self.buffers else d.copy()
                self.buffers[name] = v
                d = d + momentum * v if self.option(name, "nesterov") else v
            values[name] -= self.option(name, "lr") * d
