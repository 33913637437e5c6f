"""Gathers rows in the forward pass, for layers that have A alone.

Such rows are gathered before the backward pass, which may never come: a training loop may drop a loss that is not
finite. Changes of the gradients of the weights show whether the backward pass has run.
"""

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.torch_internals import backward_id, saves_through_hooks

if TYPE_CHECKING:
    from torch_thor.capture.capture import Capture

# The number of rows that is enough for A: this many, and at least so many for each column of a block. More rows would
# take time in large batches without improving A.
_ENOUGH_ROWS = 1024
_ROWS_PER_COLUMN = 8


class InputPhase(enum.Enum):
    """The phase of the inputs of a step.

    NONE: no input has been gathered. GATHERED: inputs have been gathered. RESET: inputs have been gathered, and the
    gradients have been reset before their backward pass. That pass is still to come (loops call ``zero_grad`` between
    forward pass and ``loss.backward()``), or never comes, because the loss was dropped.
    """

    NONE = enum.auto()
    GATHERED = enum.auto()
    RESET = enum.auto()


class ForwardPasses:
    """Gathers inputs, and detects whether those gathered so far belong to a loss that was dropped."""

    def __init__(self) -> None:
        # the versions of the gradients when the first input of the step was gathered, or at the last reset since
        self._mark: list[tuple[int, int]] = []
        self.phase = InputPhase.NONE

    def gather(self, capture: "Capture", layer: LayerCurvature, kind: Kind, x: Tensor, output: Tensor) -> None:
        """Gather the rows of a layer that has A alone.

        A forward pass that is never differentiated counts too, unless ``optimizer.zero_grad()`` is called after it. A
        forward pass that activation checkpointing recomputes does not count again.

        Args:
            capture: records the layers that have been reached.
            layer: the layer.
            kind: the kind of the module that has just run.
            x: the input of the module.
            output: the output of the module.
        """
        if backward_id() >= 0 and saves_through_hooks():
            return  # recomputed by a non-reentrant checkpoint, whose first pass had gradients enabled and was counted
        if self.phase is not InputPhase.GATHERED:
            gradients = _gradients(capture.layers)
            if self.phase is InputPhase.RESET and self._mark == gradients:
                capture.discard()  # no backward pass since the reset: the earlier inputs belong to a dropped loss
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
        """Record that gradients are about to be reset.

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
        """Record that gradients have been reset.

        Args:
            layers: all layers.
        """
        if self.phase is not InputPhase.NONE:
            self._mark = _gradients(layers)

    def forget(self) -> None:
        """Record that the inputs of this step have been dropped or used."""
        self.phase, self._mark = InputPhase.NONE, []


def _gradients(layers: Sequence[LayerCurvature]) -> list[tuple[int, int]]:
    """Return the identity and version of each weight's gradient, which change when a backward pass adds to it."""
    found = []
    for layer in layers:
        weight = layer.weight_view.present
        if weight is not None:
            gradient = weight.grad
            found.append((-1, -1) if gradient is None else (id(gradient), gradient._version))
    return found
