"""Measures what each factor of a model loses when it is split, over a sample batch.

This takes a forward and backward pass over the batch.

The pass runs on a copy of the model. The unsplit factors of a layer are computed when its last
gradient is there, and are dropped when their losses are known. So if every layer is called once,
those of one layer exist at a time.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor.capture.gathering import as_rows
from torch_thor.capture.hooks import ModuleCalls
from torch_thor.capture.inspection import inspect
from torch_thor.capture.layers import hooks_of
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import SIDES, LayerCurvature
from torch_thor.split.spectral import spectral_losses
from torch_thor.torch_internals import tree_map

LARGEST = 8192  # the largest block that is tried, which limits a block of a large factor to 256 MB
LossFn = Callable[..., Tensor]
Losses = dict[str, dict[str, tuple[float, ...]]]


class Observer:
    """Runs a copy of a model, gathers its layers' statistics and measures their spectral losses."""

    def __init__(
        self, model: nn.Module, device: torch.device, factor_names: tuple[str, ...] = SIDES
    ) -> None:
        self._model = copy.deepcopy(model).to(device)
        self._device = device
        trained = [p for p in self._model.parameters() if p.requires_grad]
        layers = inspect(self._model, trained, inputs_alone="G" not in factor_names).layers
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no layer that is preconditioned with Kronecker "
                "factors and trained, so there is nothing to split; give a model with linear "
                "layers or convolutions that require gradients"
            )
        self.layers = {name: LayerCurvature(layer, factor_names) for name, layer in layers.items()}
        for layer in self.layers.values():
            layer.bind(layer.laid_out(replace(layer.weight_view, options={"split_dim": LARGEST})))
        self._split_dims: Sequence[int] = ()
        # the number of calls that have no gradient yet
        self._waiting = dict.fromkeys(self.layers, 0)
        self._losses: Losses = {}
        self._hooks = hooks_of(layers, self.layers)
        self.gathering = set(self.layers.values())

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Gather a layer's rows when the gradient of its output has been computed."""
        if not (isinstance(output, Tensor) and output.requires_grad and torch.is_grad_enabled()):
            return
        x = as_rows(x)
        self._waiting[layer.name] += 1

        def on_gradient(g: Tensor) -> None:
            rows = as_rows(g)
            layer.statistics.gather(kind, x, rows.shape if layer.g is None else rows)
            self._waiting[layer.name] -= 1
            if not self._waiting[layer.name]:
                self._finish(layer)

        output.register_hook(on_gradient)

    def spectral_losses(
        self, sample_batch: Any, loss_fn: LossFn | None, split_dims: Sequence[int]
    ) -> Losses:
        """Run the sample batch forward and backward, and return the spectral losses."""
        self._split_dims = split_dims
        devices = [] if self._device.type == "cpu" else [self._device]
        calls = ModuleCalls(self)
        with torch.random.fork_rng(devices, device_type=self._device.type), torch.enable_grad():
            calls.listen(self._model, self._hooks)
            try:
                loss_of(self._model, sample_batch, loss_fn, self._device).backward()
            finally:
                calls.close()
        # layers of which one of several calls has received no gradient
        for layer in self.layers.values():
            self._finish(layer)
        if not self._losses:
            raise ValueError(
                "the loss of the sample batch has no gradient in any layer that is "
                "preconditioned; give sample_batch= and loss_fn= with a loss that depends on the "
                "output of the model"
            )
        return {name: self._losses[name] for name in self.layers if name in self._losses}

    def _finish(self, layer: LayerCurvature) -> None:
        for key, factor in zip(
            layer.factor_names, layer.statistics.take(loss_terms=1) or (), strict=False
        ):
            if key == "A" and layer.kind.diagonal_input:
                continue
            if not bool(factor.rows.isfinite().all()):
                raise ValueError(
                    f"factor {key} of layer {layer.name!r} holds NaN or inf; check the model and "
                    "its sample batch"
                )
            self._losses.setdefault(layer.name, {})[key] = spectral_losses(factor, self._split_dims)


def loss_of(
    model: nn.Module, sample_batch: Any, loss_fn: LossFn | None, device: torch.device
) -> Tensor:
    """Run a model on a batch, as ``choose_split_dim`` takes it, and return its loss."""
    has_targets = isinstance(sample_batch, tuple | list) and len(sample_batch) == 2
    inputs, targets = tree_map(
        lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf,
        tuple(sample_batch) if has_targets else (sample_batch, None),
    )
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    if loss_fn is not None:
        return loss_fn(output) if targets is None else loss_fn(output, targets)
    scores = getattr(output, "logits", output)
    if targets is None:
        if not (isinstance(scores, Tensor) and scores.dim() == 2):
            raise ValueError(
                "without targets the model must return class scores (N, classes), from which "
                "labels are drawn; pass sample_batch=(inputs, targets), or loss_fn="
            )
        targets = torch.multinomial(scores.detach().float().softmax(-1), 1)[:, 0]
    return F.cross_entropy(scores, targets)
