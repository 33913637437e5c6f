"""Embeddings whose input factor A THOR computes in another way, for bert_treatments.py."""

import torch
from torch import Tensor, nn

from torch_thor.curvature import Blocks, register_kind
from torch_thor.curvature.kinds.embedding import EmbeddingKind


class UniformEmbedding(nn.Embedding):
    """An embedding whose A is a multiple of the identity."""


class UniformKind(EmbeddingKind):
    """The kind of :class:`UniformEmbedding`."""

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Count the tokens, and divide their number evenly between the rows of the weight: see ``EmbeddingKind``."""
        counted = Blocks(a.cut, torch.zeros_like(a.rows))
        rows = super().add_inputs_(counted, x, output, keep, most)
        a.rows.add_(counted.rows.mean())
        return rows


class CountedEmbedding(nn.Embedding):
    """An embedding that is told which tokens its tied decoder predicts: ``predicted``, (masked tokens,)."""

    predicted: Tensor


class CountedKind(EmbeddingKind):
    """The kind of :class:`CountedEmbedding`.

    Args:
        module: The embedding.
    """

    def __init__(self, module: CountedEmbedding) -> None:
        super().__init__(module)
        self._module = module

    def add_inputs_(
        self, a: Blocks, x: Tensor, output: torch.Size, keep: Tensor | None, most: int | None = None
    ) -> int:
        """Count the tokens of the input and those that are predicted: see ``EmbeddingKind``.

        The number of rows stays that of the input: a predicted token raises A, as a second use of the weight does.
        """
        a.rows.view(-1).add_(torch.bincount(self._module.predicted, minlength=self.inputs))
        return super().add_inputs_(a, x, output, keep, most)


register_kind(UniformEmbedding, UniformKind)
register_kind(CountedEmbedding, CountedKind)
