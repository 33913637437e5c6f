"""Linear layers: ``nn.Linear``, those of PyTorch Geometric and timm, Hugging Face's ``Conv1D`` (GPT-2), projections.

Every leading index of the input is a row.
"""

import math

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.kinds.base import MatrixWeight, spacing
from torch_thor.curvature.kinds.registry import class_of


class LinearKind(MatrixWeight):
    """``nn.Linear``: every leading index of the input is a row; a base class for layers that differ in the weight."""

    label = "Linear"

    def __init__(self, module: nn.Module) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.outputs, self.inputs = weight.shape

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of ``x``, 1 for a single vector."""
        return x.shape[0] if x.dim() > 1 else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the leading dimensions of the input."""
        return x.shape[:-1]

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Add the rows of the input."""
        rows = _kept(x.reshape(-1, self.inputs), keep)
        rows = rows[:: spacing(len(rows), most, math.prod(x.shape[1:-1]))]
        if len(rows):
            a.add_second_moment_(rows.to(a.dtype).mT[None])
        return len(rows)

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the rows of the gradient of the output."""
        rows = _kept(grad.reshape(-1, self.outputs), keep)
        if len(rows):
            g.add_second_moment_(rows.to(g.dtype).mT[None])


def _kept(rows: Tensor, keep: Tensor | None) -> Tensor:
    return rows if keep is None else rows[keep.reshape(-1)]


class TransposedLinearKind(LinearKind):
    """Hugging Face's ``Conv1D``: a linear layer whose weight is ``(in, out)``."""

    label = "Conv1D"
    transposed = True

    def __init__(self, module: nn.Module) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.inputs, self.outputs = weight.shape


class ProjectionKind(LinearKind):
    """A linear layer inside a composite module, which receives its inputs batch first, ``(N, ..., in)``.

    The module computes it without calling a module for it: a projection of an attention, a gate matrix of a recurrent
    layer (:mod:`torch_thor.capture.composites`). Its weight is a parameter, or rows of a fused one.

    Args:
        weight: the weight, ``(out, in)``, of which only the shape is used.
        label: the name of the kind in ``optimizer.coverage()``.
    """

    batch_first = True

    def __init__(self, weight: Tensor, label: str) -> None:
        self.outputs, self.inputs = weight.shape
        self.label = label


class PackedCall(ProjectionKind):
    """One call of a projection on packed sequences, whose rows are all their time steps, ``(rows, in)``."""

    def __init__(self, weight: Tensor, label: str, sequences: int) -> None:
        super().__init__(weight, label)
        self._sequences = sequences

    def loss_terms(self, x: Tensor) -> int:
        """Return the number of sequences."""
        return self._sequences

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return no dimensions: a mask of padded sequences does not fit packed ones."""
        return torch.Size()


def is_linear_of_a_library(module: nn.Module) -> bool:
    """Return whether a module is ``Linear`` of PyTorch Geometric or timm, which computes what ``nn.Linear`` does."""
    own = class_of(module)
    return own.__module__.partition(".")[0] in ("torch_geometric", "timm") and own.__name__ == "Linear"


def is_hugging_face_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' ``Conv1D``, the linear layer of GPT-2, whose weight is ``(in, out)``."""
    # By name, because transformers is not a dependency and must not be imported here.
    own = class_of(module)
    return own.__module__.partition(".")[0] == "transformers" and own.__name__ == "Conv1D"
