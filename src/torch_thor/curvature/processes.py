"""What a refresh asks of the processes that train together, and the answers of one that trains alone.

Curvature knows of no ranks and no collectives: whoever trains on several processes hands it something that answers
these questions (:mod:`torch_thor.distributed`). Who inverts which factor, and who holds which part of a layer, are
answers that another implementation may give; the mathematics stays as it is.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.inverse import Inverse

# factors and what is added to the diagonal of each, or of each of its groups
Damped = Sequence[tuple[BlockDiagonal, float | Tensor]]


class Processes(Protocol):
    """Processes that train one model, each on its own part of every batch.

    All of them ask the same questions in the same order: what leads to one must be known to all alike.
    """

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def first(self) -> bool:
        """Whether this is the one that decides where one must."""
        ...

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, as many from each; whole numbers are exact up to 2⁵³."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Put into every tensor the sum over all processes, to the same bits on all of them."""
        ...

    def invert(self, factors: Damped, solve: Callable[[Damped], list[Inverse]]) -> list[Inverse]:
        """Return what ``solve`` gives for factors that all processes hold alike: who solves what is decided here."""
        ...


class OneProcess:
    """A process that trains alone."""

    count = 1
    rank = 0
    first = True

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return its own numbers.

        Args:
            numbers: any.

        Returns:
            One list.
        """
        return [list(numbers)]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Leave the tensors as they are.

        Args:
            tensors: any.
        """

    def invert(self, factors: Damped, solve: Callable[[Damped], list[Inverse]]) -> list[Inverse]:
        """Solve.

        Args:
            factors: pairs of a factor and its damping.
            solve: what to do with them.

        Returns:
            One result per factor.
        """
        return solve(factors)


ALONE = OneProcess()
