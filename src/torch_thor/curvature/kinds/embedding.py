"""``nn.Embedding``: a linear layer on one-hot rows, whose A is the diagonal of token frequencies."""

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.kinds.base import MatrixWeight


class EmbeddingKind(MatrixWeight):
    """``nn.Embedding``: the rows of ``a`` are one-hot, so A = diag(count / R) and no row is ever formed.

    Tokens equal to ``padding_idx`` get no gradient and are no rows.

    Args:
        module: the layer.
    """

    label = "Embedding"
    groups = 1
    diagonal_input = True
    transposed = True

    def __init__(self, module: nn.Embedding) -> None:
        self.inputs = module.num_embeddings
        self.outputs = module.embedding_dim
        self._padding = module.padding_idx

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of ``x``, 1 for a single token.

        Args:
            x: token indices, any shape.

        Returns:
            The number of loss terms this input stands for by default.
        """
        return x.shape[0] if x.dim() else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the shape: every token is a row.

        Args:
            x: token indices, any shape.

        Returns:
            That shape.
        """
        return x.shape

    def add_rows_(self, a: BlockDiagonal, g: BlockDiagonal, x: Tensor, grad: Tensor, keep: Tensor | None) -> int:
        """Add token counts, and the second moment of the output gradient.

        Args:
            a: the diagonal input factor, changed in place.
            g: the output factor, changed in place.
            x: token indices, any shape.
            grad: ``(*x.shape, embedding_dim)``.
            keep: of the shape of ``x``, which tokens count; None for all.

        Returns:
            The number of rows.
        """
        tokens, outputs = x.reshape(-1), grad.reshape(-1, self.outputs)
        chosen = None if keep is None else keep.reshape(-1)
        if self._padding is not None:
            real = tokens != self._padding
            chosen = real if chosen is None else chosen & real
        if chosen is not None:
            tokens, outputs = tokens[chosen], outputs[chosen]
        if not len(tokens):
            return 0
        a.blocks.view(-1).add_(torch.bincount(tokens, minlength=self.inputs))
        g.add_second_moment_(outputs.to(g.blocks.dtype).mT[None])
        return len(tokens)
