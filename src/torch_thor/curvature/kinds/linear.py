"""Layers whose rows are the leading indices of their input: ``nn.Linear``, and Hugging Face's ``Conv1D`` (GPT-2)."""

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.kinds.base import MatrixWeight


class LinearKind(MatrixWeight):
    """``nn.Linear``: every leading index is a row.

    Args:
        module: the layer.
    """

    label = "Linear"
    groups = 1
    diagonal_input = False
    transposed = False

    def __init__(self, module: nn.Linear) -> None:
        self.inputs = module.in_features
        self.outputs = module.out_features

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of ``x``, 1 for a single vector.

        Args:
            x: ``(..., in_features)``.

        Returns:
            The number of loss terms this input stands for by default.
        """
        return x.shape[0] if x.dim() > 1 else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the leading dimensions.

        Args:
            x: ``(..., in_features)``.

        Returns:
            ``(...)``.
        """
        return x.shape[:-1]

    def add_rows_(self, a: BlockDiagonal, g: BlockDiagonal, x: Tensor, grad: Tensor, keep: Tensor | None) -> int:
        """Add the rows of one pass.

        Args:
            a: the input factor, changed in place.
            g: the output factor, changed in place.
            x: ``(..., in_features)``.
            grad: ``(..., out_features)``.
            keep: ``(...)``, which rows count; None for all.

        Returns:
            The number of rows.
        """
        inputs, outputs = x.reshape(-1, self.inputs), grad.reshape(-1, self.outputs)
        if keep is not None:
            chosen = keep.reshape(-1)
            inputs, outputs = inputs[chosen], outputs[chosen]
        if not len(inputs):
            return 0
        a.add_second_moment_(inputs.to(a.blocks.dtype).mT[None])
        g.add_second_moment_(outputs.to(g.blocks.dtype).mT[None])
        return len(inputs)


class TransposedLinearKind(LinearKind):
    """Hugging Face's ``Conv1D``: a linear layer whose weight is ``(in, out)``.

    Args:
        module: the layer.
    """

    label = "Conv1D"
    transposed = True

    def __init__(self, module: nn.Module) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.inputs, self.outputs = weight.shape
