"""``nn.Embedding``: a linear layer on one-hot rows, whose A is diagonal (token frequencies).

Subclasses in model libraries (``GemmaTextScaledWordEmbedding``, ``BartScaledWordEmbedding``)
multiply the vectors by a number, ``embed_scale``. The gradient of a vector is then that number
times the gradient of the output.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks, has_values
from torch_thor.curvature.kinds.matrix import MatrixWeight
from torch_thor.torch_internals import unset_fake_temporarily


class EmbeddingKind(MatrixWeight):
    """``nn.Embedding``: the rows ``a`` are one-hot, so A = diag(count / R).

    No row is formed.
    """

    label = "Embedding"
    diagonal_input = True
    transposed = True

    def __init__(self, module: Any, *, scaled: bool = False) -> None:
        # the module if its output is ``embed_scale`` times the vectors
        self._scaled = module if scaled else None
        self.inputs, self.outputs = module.num_embeddings, module.embedding_dim
        self._padding = module.padding_idx

    def loss_terms(self, x: Tensor) -> int:
        """Return the leading dimension of ``x``, 1 for a single token."""
        return x.shape[0] if x.dim() else 1

    def row_shape(self, x: Tensor) -> torch.Size:
        """Return the shape of the input: every token is a row."""
        return x.shape

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Count the tokens."""
        tokens = self._real(x.reshape(-1), x, keep)
        # bincount would wait for the device
        counts = a.rows.view(-1)
        counts.index_add_(0, tokens, counts.new_ones(()).expand(len(tokens)))
        return len(tokens)

    def add_outputs_(self, g: Blocks, x: Tensor, grad: Tensor, keep: Tensor | None) -> None:
        """Add the gradients of the vectors."""
        rows = self._real(grad.reshape(-1, self.outputs), x, keep)
        scale = 1.0 if self._scaled is None else self._scaled.embed_scale
        g.add_second_moment_((rows.to(g.rows.dtype) * scale).mT[None])

    def _real(self, rows: Tensor, x: Tensor, keep: Tensor | None) -> Tensor:
        """Return the rows of tokens that count: those that are kept and no padding."""
        if self._padding is not None:
            real = x != self._padding
            keep = real if keep is None else keep & real
        return rows if keep is None else rows[keep.reshape(-1)]


def why_not_counted(module: nn.Embedding) -> str | None:
    """Return the reason why the factors of an embedding would not be those of its gradient."""
    if module.scale_grad_by_freq:
        return (
            "scale_grad_by_freq divides its gradient by the token counts, which the factors do not "
            "contain"
        )
    return None


def is_scaled(module: nn.Module) -> bool:
    """Return whether a module is an embedding that multiplies by ``embed_scale`` and no more."""
    scale: Any = getattr(module, "embed_scale", None)
    is_number = isinstance(scale, float | int) or (isinstance(scale, Tensor) and scale.numel() == 1)
    alone = [name for name, _ in module.named_parameters(recurse=False)] == ["weight"]
    # with max_norm a lookup changes the weight
    if (
        not (isinstance(module, nn.Embedding) and is_number and alone)
        or module.max_norm is not None
    ):
        return False
    with torch.no_grad(), unset_fake_temporarily():
        return _scales(module if has_values(module.weight) else _with_values(module))


def _with_values(module: Any) -> Any:
    """Return a copy, with numbers and one vector, of an embedding without numbers."""
    small = copy.copy(module)
    small._parameters = {"weight": nn.Parameter(torch.ones(1, module.embedding_dim, device="cpu"))}
    small._buffers = {name: torch.full((), 2.0, device="cpu") for name in module._buffers}
    small.padding_idx = None
    return small


def _scales(module: Any) -> bool:
    """Return whether the vectors that an embedding looks up are ``embed_scale`` times its rows."""
    if type(module.weight.data) is not Tensor:  # a weight in shards has no values to compare
        return False
    tokens = torch.arange(min(len(module.weight), 8), device=module.weight.device)[None]
    vectors, scale = module.weight[tokens], module.embed_scale
    expected = vectors * (scale.to(vectors.dtype) if isinstance(scale, Tensor) else scale)
    try:
        output = type(module).forward(module, tokens)
    # its forward needs other arguments
    except (TypeError, ValueError, IndexError, RuntimeError):
        return False
    return isinstance(output, Tensor) and torch.equal(output, expected)
