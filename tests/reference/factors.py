"""Second moments, blocks, damping, the trace rule and the natural gradient of one layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from torch import nn

from reference.layers import Layer
from reference.rows import rows_of


def second_moment(rows: np.ndarray) -> np.ndarray:
    """(1/R) Σ r rᵀ, one outer product at a time."""
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for row in rows:
        total += np.outer(row, row)
    return total / len(rows)


def keep_blocks(matrix: np.ndarray, size: int | None) -> np.ndarray:
    """The matrix with everything outside the size × size blocks on its diagonal set to zero."""
    n = len(matrix)
    size = n if size is None else size
    return np.array(
        [[matrix[i, j] if i // size == j // size else 0.0 for j in range(n)] for i in range(n)]
    )


def damped(matrix: np.ndarray, damping: float, rows_per_term: float) -> np.ndarray:
    """The matrix + √(λ/T) I."""
    return matrix + np.sqrt(damping / rows_per_term) * np.eye(len(matrix))


@dataclass
class Factors:
    """A and G of one layer, a matrix for each group, and its T."""

    A: list[np.ndarray]
    G: list[np.ndarray]
    rows_per_term: float

    def trace(self, damping: float) -> float:
        """tr(T · A ⊗ G + λI), summed over groups; the Kronecker product is not even formed."""
        T = self.rows_per_term
        return sum(
            T * np.trace(A) * np.trace(G) + damping * len(A) * len(G)
            for A, G in zip(self.A, self.G, strict=True)
        )

    def averaged(self, before: Factors, decay: float) -> Factors:
        """The running average with the factors before; T is always new."""

        def average(old, new):
            pairs = zip(old, new, strict=True)
            return [decay * then + (1 - decay) * now for then, now in pairs]

        return Factors(average(before.A, self.A), average(before.G, self.G), self.rows_per_term)


def factors_of_rows(
    per_use, terms: float, g_scale: float, a_split: int | None, g_split: int | None
) -> Factors:
    """The factors of one step, from the rows of every use together.

    g is `g_scale` times the gradient of the loss.
    """
    A, G = [], []
    for q in range(len(per_use[0])):
        used = [use[q] for use in per_use if len(use[q][0])]
        a = np.concatenate([rows for rows, _ in used])
        g = g_scale * np.concatenate([rows for _, rows in used])
        assert len(a) == len(g)
        A.append(keep_blocks(second_moment(a), a_split))
        G.append(keep_blocks(second_moment(g), g_split))
    return Factors(A, G, len(a) / terms)


def factors_of(
    module: nn.Module | None,
    uses: Iterable[tuple[np.ndarray, np.ndarray]],
    terms: float,
    g_scale: float,
    split: int | None,
    mask: np.ndarray | None = None,
) -> Factors:
    """The factors of a layer that is one module, from (x, gradient by y) of every use.

    None stands for a linear layer.
    """
    per_use = [rows_of(module, x, grad_y, mask) for x, grad_y in uses]
    return factors_of_rows(per_use, terms, g_scale, Layer(module, "").input_split or split, split)


@dataclass
class Curvature:
    """What one layer keeps between refreshes."""

    taken: Factors | None = None
    damped_blocks: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    refreshes: int = 0
    stopped: bool = False
    last_trace_change: float | None = None
    layer: Layer = field(default_factory=lambda: Layer(None, ""))

    def refresh(
        self, fresh: Factors, damping: float, thresholds: tuple[float, float], decay: float
    ) -> None:
        """Take, keep or stop, as the trace rule has it."""
        if self.stopped:
            return
        if self.taken is not None:
            before, now = abs(self.taken.trace(damping)), abs(fresh.trace(damping))
            change = abs(now - before) / before
            self.last_trace_change = change
            if change < thresholds[1]:
                self.stopped = True
                return
            if change <= thresholds[0]:
                return
            fresh = fresh.averaged(self.taken, decay)
        self.taken = fresh
        self.refreshes += 1
        T = fresh.rows_per_term
        self.damped_blocks = [
            (damped(A, damping, T), damped(G, damping, T))
            for A, G in zip(fresh.A, fresh.G, strict=True)
        ]

    def weight_direction(self, grad: np.ndarray) -> np.ndarray:
        """Solves T · (G_d ⊗ A_d) vec(ΔW) = vec(∇W) for each group.

        The Kronecker product is written out.
        """
        assert self.taken is not None
        parts = []
        for (A, G), piece in zip(self.damped_blocks, self.layer.matrices(grad), strict=True):
            # rows of vec: output first, then input
            fisher = self.taken.rows_per_term * np.kron(G, A)
            parts.append(np.linalg.solve(fisher, piece.ravel()).reshape(piece.shape))
        return self.layer.tensor(parts, grad.shape)

    def bias_direction(self, grad: np.ndarray) -> np.ndarray:
        """(1/T) G_d⁻¹ ∇b for each group."""
        assert self.taken is not None
        pieces = np.split(grad.ravel(), len(self.damped_blocks))
        parts = [
            np.linalg.solve(G, piece)
            for (_, G), piece in zip(self.damped_blocks, pieces, strict=True)
        ]
        return np.concatenate(parts).reshape(grad.shape) / self.taken.rows_per_term
