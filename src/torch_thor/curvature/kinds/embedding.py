"""``nn.Embedding``: a linear layer on one-hot rows, whose A is the diagonal matrix of token frequencies.

Subclasses in model libraries (``GemmaTextScaledWordEmbedding``, ``BartScaledWordEmbedding``) multiply the vectors by a
number, ``embed_scale``. The gradient of a vector is then that number times the gradient of the output.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.kinds.base import MatrixWeight


class EmbeddingKind(MatrixWeight):
    """``nn.Embedding``: the rows ``a`` are one-hot, so A = diag(count / R), and no row is formed."""

    label = "Embedding"
    diagonal_input = True
    transposed = True

    def __init__(self, module: nn.Embedding) -> None:
        self.inputs = module.num_embeddings
        self.outputs = module.embedding_dim
        self._padding = module.padding_idx

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of ``x``, 1 for a single token."""
        return x.shape[0] if x.dim() else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the shape of the input: every token is a row."""
        return x.shape

    def scale(self) -> Tensor | float:
        """Return the number that the vectors are multiplied by."""
        return 1.0

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Count the tokens."""
        chosen = self._chosen(x, keep)
        tokens = x.reshape(-1) if chosen is None else x.reshape(-1)[chosen]
        if len(tokens):
            a.rows.view(-1).add_(torch.bincount(tokens, minlength=self.inputs))
        return len(tokens)

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the gradients of the vectors."""
        chosen, rows = self._chosen(x, keep), grad.reshape(-1, self.outputs)
        rows = rows if chosen is None else rows[chosen]
        if len(rows):
            g.add_second_moment_((rows.to(g.dtype) * self.scale()).mT[None])

    def _chosen(self, x: Tensor, keep: Tensor | None) -> Tensor | None:
        """Return a mask of the tokens that are rows, ``(tokens,)``; None where all of them are."""
        chosen = None if keep is None else keep.reshape(-1)
        if self._padding is None:
            return chosen
        real = x.reshape(-1) != self._padding
        return real if chosen is None else chosen & real


class ScaledEmbeddingKind(EmbeddingKind):
    """An embedding whose output is ``embed_scale`` times the vectors."""

    def __init__(self, module: nn.Embedding) -> None:
        super().__init__(module)
        self._module = module

    def scale(self) -> Tensor | float:
        """Return the number that the vectors are multiplied by."""
        scale: Tensor | float = _scale_of(self._module)
        return scale


def why_not_counted(module: nn.Embedding) -> str | None:
    """Return the reason why the factors of an embedding would not be those of its gradient."""
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq divides its gradient by the token counts, which the factors do not contain"
    return None


def is_scaled(module: nn.Module) -> bool:
    """Return whether a module is an embedding that multiplies by ``embed_scale`` and does nothing else."""
    if not isinstance(module, nn.Embedding) or type(module).forward is nn.Embedding.forward:
        return False
    scale = _scale_of(module)
    alone = [name for name, _ in module.named_parameters(recurse=False)] == ["weight"]
    # With max_norm a lookup changes the weight; a weight on the meta device or in shards has no values to compare.
    if scale is None or not alone or module.max_norm is not None or module.weight.is_meta:
        return False
    if type(module.weight.data) is not Tensor:
        return False
    tokens = torch.arange(min(len(module.weight), 8), device=module.weight.device)[None]
    with torch.no_grad():
        vectors = module.weight[tokens]
        expected = vectors * (scale.to(vectors.dtype) if isinstance(scale, Tensor) else scale)
        try:
            found = type(module).forward(module, tokens)
        except (TypeError, ValueError, IndexError, RuntimeError):  # its forward needs other arguments
            return False
    return isinstance(found, Tensor) and found.shape == expected.shape and bool(torch.equal(found, expected))


def _scale_of(module: nn.Module) -> Any:
    """Return ``embed_scale``; None where it is missing or not one number."""
    scale = getattr(module, "embed_scale", None)
    is_number = isinstance(scale, float | int) or (isinstance(scale, Tensor) and scale.numel() == 1)
    return scale if is_number else None
