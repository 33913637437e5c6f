"""Rows that are gathered in the forward pass, for layers that have A alone: no gradient is waited for.

So they come before it is known what becomes of the loss: a loss that is not finite may be dropped, and the forward pass
with it. What becomes of the weights' gradients tells.
"""

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature

if TYPE_CHECKING:
    from torch_thor.capture.capture import Capture

# Rows that are enough for A: statistics are what large batches would pay for.
_ENOUGH_ROWS = 1024
_ROWS_PER_COLUMN = 8  # and as many for each column of a block


class InputPhase(enum.Enum):
    """Where the inputs stand that have been gathered in this step.

    NONE: none has been gathered. GATHERED: some have. RESET: some have, and the gradients have been reset before their
    backward pass: it is still to come (loops call ``zero_grad`` between forward pass and ``loss.backward()``), or it
    never comes, because the loss was dropped.
    """

    NONE = enum.auto()
    GATHERED = enum.auto()
    RESET = enum.auto()


class ForwardPasses:
    """Gathers inputs, and tells whether those gathered so far belong to a loss that was dropped."""

    def __init__(self) -> None:
        # the gradients as they were when the first input of the step was gathered, or when they were reset since
        self._mark: list[tuple[int, int]] = []
        self.phase = InputPhase.NONE

    def gather(self, capture: "Capture", layer: LayerCurvature, kind: Kind, x: Tensor, output: Tensor) -> None:
        """Gather the rows of a layer that has A alone, now.

        A pass that is never differentiated counts too, unless ``optimizer.zero_grad()`` comes after it; what
        checkpointing recomputes does not count again.

        Args:
            capture: knows what has been gathered of which layers.
            layer: the layer.
            kind: the geometry of the module that has just run.
            x: its input.
            output: its output.
        """
        running = torch._C._current_graph_task_id() >= 0  # in a backward pass
        if running and torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return  # the first pass had gradients enabled and has been counted; else there are no such hooks
        if self.phase is not InputPhase.GATHERED:
            gradients = _gradients(capture.layers)
            if self.phase is InputPhase.RESET and self._mark == gradients:
                capture.discard()  # reset after the inputs were gathered, and no backward pass since: a dropped loss
            if self.phase is InputPhase.NONE:
                self._mark = gradients
            self.phase = InputPhase.GATHERED
        mask = capture.row_mask
        keep = mask if mask is not None and kind.row_shape(x) == mask.shape else None
        capture.mask_taken |= keep is not None
        capture.reached.add(layer)
        enough = max(_ENOUGH_ROWS, _ROWS_PER_COLUMN * layer.layouts()["A"].block)
        layer.statistics.gather_inputs(kind, x, output.shape, keep, enough)

    def before_reset(self, layers: Sequence[LayerCurvature]) -> bool:
        """Take note that gradients are about to be reset.

        Args:
            layers: all layers.

        Returns:
            Whether the inputs stay, because the backward pass of their loss has not come yet.
        """
        if self.phase is InputPhase.NONE or self._mark != _gradients(layers):
            return False
        self.phase = InputPhase.RESET
        return True

    def after_reset(self, layers: Sequence[LayerCurvature]) -> None:
        """Take note that gradients have been reset.

        Args:
            layers: all layers.
        """
        if self.phase is not InputPhase.NONE:
            self._mark = _gradients(layers)

    def forget(self) -> None:
        """Take note that the inputs of this step have been dropped, or used."""
        self.phase, self._mark = InputPhase.NONE, []


def _gradients(layers: Sequence[LayerCurvature]) -> list[tuple[int, int]]:
    """Return what changes when a backward pass adds to the weights' gradients."""
    found = []
    for layer in layers:
        view = layer.weight_view
        weight = view.module._parameters.get(view.attribute)
        if weight is not None:
            gradient = weight.grad
            found.append((-1, -1) if gradient is None else (id(gradient), gradient._version))
    return found
