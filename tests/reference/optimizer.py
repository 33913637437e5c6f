"""Gradients, refreshes and the update of all parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from reference.factors import Curvature, factors_of_rows
from reference.layers import layers_of
from reference.rows import CALLED, is_inputs_first, rows_of

# what ran -> (x, gradient of the loss by y) of each use
Uses = dict[str, list[tuple[np.ndarray, np.ndarray]]]


def by_stages(
    model: nn.Module, x: torch.Tensor
) -> tuple[torch.Tensor, list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """The forward of an `nn.Sequential`: (output, [(name, x, y) of every stage])."""
    seen = []
    for name, stage in model.named_children():
        y = stage(x)
        seen.append((name, x, y))
        x = y
    return x, seen


def gradients(
    model: nn.Module, x: torch.Tensor, loss: Callable, forward=by_stages
) -> tuple[dict[str, np.ndarray], Uses]:
    """Gradients of all parameters; input and output gradient of every use of every layer."""
    output, seen = forward(model, x)
    # modules that are no layers; other names belong to layers inside modules
    others = {
        name
        for name, m in model.named_modules()
        if not isinstance(m, CALLED) and not is_inputs_first(m)
    }
    # without a gradient where nothing before is trained
    seen = [(name, a, y) for name, a, y in seen if name not in others and y.requires_grad]
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
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


class ReferenceTHOR:
    """THOR over a float64 copy of a model, with the names and defaults of `torch_thor.THOR`.

    `groups` maps a parameter name to the options that differ for it. `preconditioned` names the
    modules that get a natural gradient (default: all that are layers and have a trainable weight),
    `pooled` those whose rows go to another, which has the same weight; `layers` makes from the
    model whatever other layers there are (attention's). The rest, norms among it, is plain SGD.
    Every parameter's step is bounded by `max_update_ratio`, which `kl_clip` replaces.
    """

    defaults: dict[str, Any] = {  # noqa: RUF012
        "lr": 0.05,
        "damping": 0.03,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "update_interval": 100,
        "trace_thresholds": (0.01, 0.0),
        "split_dim": 128,
        "factor_decay": 0.0,
        "kl_clip": None,
        "max_update_ratio": 0.01,
        "loss_reduction": "mean",
        "loss_terms": None,
    }

    def __init__(
        self,
        model: nn.Module,
        *,
        forward=by_stages,
        groups=None,
        preconditioned=None,
        pooled=None,
        layers=None,
        **options: Any,
    ):
        assert not set(options) - set(self.defaults)
        self.model = copy.deepcopy(model).double()
        self.forward = forward
        self.options = {**self.defaults, **options}
        self.groups = groups or {}
        self.layers = layers_of(self.model, preconditioned, pooled)
        if layers is not None:
            for name in [name for name in self.layers if name.endswith("out_proj")]:
                del self.layers[name]  # a module that attention never calls
            self.layers |= layers(self.model)
        self.curvature = {name: Curvature(layer=layer) for name, layer in self.layers.items()}
        self.buffers: dict[str, np.ndarray] = {}
        self.clock = 0
        self.due = 0

    def option(self, parameter: str, name: str) -> Any:
        return self.groups.get(parameter, {}).get(name, self.options[name])

    def step(self, *batches: tuple[Any, Callable[[torch.Tensor], torch.Tensor]], mask=None) -> None:
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
            terms += len(x[0] if isinstance(x, tuple) else x)
        if self.options["loss_terms"] is not None:
            terms = self.options["loss_terms"]
        if self.clock == self.due:
            self._refresh(uses, terms, None if mask is None else mask.numpy())
            interval = self.options["update_interval"]
            self.due = self.clock + (interval(self.clock) if callable(interval) else interval)
        self._update(grads)
        self.clock += 1

    def _refresh(self, uses: Uses, terms: int, mask: np.ndarray | None) -> None:
        modules = dict(self.model.named_modules())
        for name, curvature in self.curvature.items():
            layer = self.layers[name]
            per_use = [
                rows_of(None if layer.module is None else modules[call], x, grad_y, mask)
                for call in layer.calls
                for x, grad_y in uses.get(call, ())
            ]
            if not per_use:
                continue
            option = {key: self.option(layer.weight, key) for key in self.options}
            g_scale = terms if option["loss_reduction"] == "mean" else 1
            split = option["split_dim"]
            fresh = factors_of_rows(per_use, terms, g_scale, layer.input_split or split, split)
            curvature.refresh(
                fresh, option["damping"], option["trace_thresholds"], option["factor_decay"]
            )

    def _natural(self, parameter: str, grad: np.ndarray) -> np.ndarray | None:
        """The natural gradient of a parameter; None if it is of no layer with factors."""
        found = None
        for name, curvature in self.curvature.items():
            layer = self.layers[name]
            mine = layer.rows if parameter == layer.weight else layer.biases.get(parameter)
            if mine is None or curvature.taken is None:
                continue
            found = grad.copy() if found is None else found
            if parameter == layer.weight:
                found[mine] = curvature.weight_direction(grad[mine])
            else:
                found[mine] = curvature.bias_direction(grad[mine])
        return found

    def _bounded(self, parameter: str, value: np.ndarray, direction: np.ndarray) -> np.ndarray:
        """lr ‖d‖ ≤ r · max(‖W‖, 0.03 √d_out); dimensions of 1 do not count."""
        ratio, lr = self.option(parameter, "max_update_ratio"), self.option(parameter, "lr")
        if ratio is None or self.options["kl_clip"] is not None:
            return direction
        outputs = (*np.squeeze(value).shape, 1)[0]
        longest = ratio * max(np.linalg.norm(value), 0.03 * np.sqrt(outputs))
        length = lr * np.linalg.norm(direction)
        return direction if length <= longest else direction * (longest / length)

    def _update(self, grads: dict[str, np.ndarray]) -> None:
        # they are views, in which the update is written
        values = {name: p.detach().numpy() for name, p in self.model.named_parameters()}
        directions, natural = {}, []
        for name, grad in grads.items():
            d = self._natural(name, grad)
            natural += [name] if d is not None else []
            d = grad if d is None else d
            directions[name] = d + self.option(name, "weight_decay") * values[name]
        if self.options["kl_clip"] is not None:
            change = sum(
                self.option(name, "lr") ** 2 * float(np.sum(directions[name] * grads[name]))
                for name in natural
            )
            if change > 0:
                shrink = min(1.0, float(np.sqrt(self.options["kl_clip"] / change)))
                directions |= {name: shrink * directions[name] for name in natural}
        for name, direction in directions.items():
            d = self._bounded(name, values[name], direction)
            momentum = self.option(name, "momentum")
            if momentum:
                v = momentum * self.buffers[name] + d if name in self.buffers else d.copy()
                self.buffers[name] = v
                d = d + momentum * v if self.option(name, "nesterov") else v
            values[name] -= self.option(name, "lr") * d
