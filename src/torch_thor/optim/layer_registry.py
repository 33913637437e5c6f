"""The preconditioned layers of a model: finds them, registers their hooks, and updates both when the model changes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.capture import Capture
from torch_thor.capture.coverage import NOT_TRAINED, Covered, table
from torch_thor.capture.inspection import Inspection, inspect_model
from torch_thor.capture.layers import Layer
from torch_thor.capture.module_hooks import hooks_of
from torch_thor.capture.selection import Selection
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.distributed.sharded_parameters import device_of_mesh
from torch_thor.optim.covered import (
    computed_message,
    current_coverage,
    new_parameters,
    nothing_trained_message,
    removed_message,
)
from torch_thor.optim.parameter_index import ParameterIndex
from torch_thor.optim.parameters import Group
from torch_thor.optim.step_warnings import StepWarnings

DIVIDED_SINCE = (
    "THOR: the parameters were divided among processes after THOR was made, so this step has no statistics "
    "that it can use, and is taken without curvature; make THOR after fully_shard"
)


class LayerRegistry:
    """The layers that an optimizer preconditions, the index of the parameters, and the capture of statistics."""

    def __init__(
        self, model: nn.Module, sides: tuple[str, ...], *, skip: Selection, only: Selection, sampled: bool
    ) -> None:
        self.model = model
        self.sides = sides
        self.layers: dict[str, LayerCurvature] = {}
        self.index = ParameterIndex(model)
        self.capture = Capture(sampled=sampled)
        self.warnings = StepWarnings()
        self._skip, self._only = skip, only
        self._found: list[Covered] = []
        self.left_out: list[Layer] = []  # the layers that skip= and only= leave out
        self.replacement: Inspection | None = None  # the layers to use from the next step on

    @property
    def is_found(self) -> bool:
        """Whether the model has been inspected."""
        return bool(self._found)

    @property
    def device(self) -> torch.device:
        """The device of the first layer, for that of the model; of sharded parameters, the one for collectives."""
        for parameter, _ in self.index.sharded.values():
            return device_of_mesh(parameter)
        for layer in self.layers.values():
            return layer.weight.device
        return next(self.model.parameters()).device

    def find(self, groups: list[Group], states: Mapping[Tensor, Any]) -> None:
        """Inspect the model, and capture the statistics of the layers that are found."""
        self._watch(self._inspect_or_raise(groups), groups, states)

    def leave_out_removed(self, groups: list[Group], states: Mapping[Tensor, Any]) -> None:
        """Drop the layers whose modules were removed from the model, or compute their weight now (pruning)."""
        # Layers that have replaced removed ones are used from the next step on, because this step has no statistics of
        # them. So are all layers if parameters were divided since THOR was made, because other blocks are needed.
        removed, computed = self.index.removed_modules(self.model), self.index.computed
        if not removed and not computed and not self.index.divided_since:
            return
        found = self._inspect_or_raise(groups)
        before = set(self.layers)
        self.layers = {} if self.index.divided_since else self._still_there(found)
        if self.index.divided_since:
            self.warnings.note(("", "divided"), DIVIDED_SINCE)
        untrained = new_parameters(self._found, found.entries)
        for name in removed:
            self.warnings.note((name, "gone"), "THOR: module ", name, removed_message(untrained))
        for name in sorted(before - set(found.layers)) if computed else ():
            self.warnings.note((name, "computed"), "THOR: the weight of ", name, computed_message(untrained))
        self.index.read_modules(self.model)
        self.index.set_layers(self.layers, found.matrices)
        self.index.update(groups, states)
        self.capture.follow(hooks_of({k: found.layers[k] for k in self.layers}, self.layers))
        self.replacement = found

    def watch_replacement(self, groups: list[Group], states: Mapping[Tensor, Any]) -> None:
        """Use the layers that have replaced removed ones, if there are any."""
        if self.replacement is not None:
            self._watch(self.replacement, groups, states)

    def coverage(self, groups: list[Group], states: Mapping[Tensor, Any]) -> list[Covered]:
        """Return how each parameter of the model is trained now."""
        self.index.update(groups, states)
        changed = self.index.removed_modules(self.model) or self.index.computed
        return self._now(self._inspect(groups).entries if changed else self._found)

    def report(self, layer: LayerCurvature, what: str) -> None:
        """Warn of a problem of a layer after the step, once for each layer and problem."""
        step = layer.weight_view.options["step"]
        self.warnings.note((layer.name, what), f"THOR, step {step}, layer ", layer.name, f": {what}")

    def report_nothing_trained(self, groups: list[Group]) -> None:
        """Warn once if no parameter of the groups has a gradient, and the model has got others since, as by LoRA."""
        if any(p.grad is not None for group in groups for p in group["params"]):
            return
        own = {id(p) for group in groups for p in group["params"]}
        known = {entry.name for entry in self._found if entry.reason == NOT_TRAINED}
        trainable = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
        new = [name for name, p in trainable if id(p) not in own and name not in known]
        if new:
            self.warnings.note("nothing trained", nothing_trained_message(groups[0]["step"], new))

    def nothing_found(self, entries: list[Covered]) -> str:
        """Return the text of the error for a model without a layer to precondition."""
        return (
            f"THOR found no layer to precondition among what is trained in {type(self.model).__name__}; use "
            f"torch.optim.SGD, or give THOR the weights of its layers. What it found:\n{table(self._now(entries), '-')}"
        )

    def _inspect(self, groups: list[Group]) -> Inspection:
        return inspect_model(
            self.model,
            [p for group in groups for p in group["params"]],
            skip=self._skip,
            only=self._only,
            matrices_alone="G" not in self.sides,
        )

    def _inspect_or_raise(self, groups: list[Group]) -> Inspection:
        found = self._inspect(groups)
        if not found.layers and "G" in self.sides:  # the scale-free step needs no layer
            raise ValueError(self.nothing_found(found.entries))
        return found

    def _watch(self, found: Inspection, groups: list[Group], states: Mapping[Tensor, Any]) -> None:
        self.replacement = None
        self._found, self.left_out = found.entries, found.left_out
        self.index.read_modules(self.model)
        known = self._still_there(found)
        self.layers = {
            name: known.get(name)
            or LayerCurvature(name, layer.kind, layer.weight, layer.biases, layer.prefix, self.sides)
            for name, layer in found.layers.items()
        }
        self.index.set_layers(self.layers, found.matrices)
        self.index.update(groups, states)
        self.capture.follow(hooks_of(found.layers, self.layers))
        self.capture.resume()

    def _still_there(self, found: Inspection) -> dict[str, LayerCurvature]:
        """Return the present layers that were found again, with the same weights."""
        layers = found.layers
        return {
            k: old
            for k, old in self.layers.items()
            if k in layers and old.weight_view.is_same_as(layers[k].weight) and len(old.biases) == len(layers[k].biases)
        }

    def _now(self, entries: list[Covered]) -> list[Covered]:
        return current_coverage(entries, dict(self.model.named_parameters()), self.index)
