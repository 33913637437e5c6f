"""The interface through which a refresh communicates with other processes, and its implementation for one process.

This package does not call torch.distributed. For training on several processes, :mod:`torch_thor.distributed`
implements the interface. An implementation decides which process inverts which factor.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.inverse import Inverse

# pairs of a factor and its damping, a number or one for each of its groups
Damped = Sequence[tuple[BlockDiagonal, float | Tensor]]


class Processes(Protocol):
    """The processes that train one model, each on its own part of every batch.

    All of them must call the same methods in the same order, so decisions that lead to a call must be the same on all.
    """

    @property
    def count(self) -> int:
        """The number of processes."""
        ...

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        ...

    @property
    def first(self) -> bool:
        """Whether this is the process that takes decisions for all."""
        ...

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every process, which passes as many as the others; integers are exact up to 2⁵³."""
        ...

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace every tensor by its sum over all processes, which is the same on all of them, bit for bit."""
        ...

    def invert(self, factors: Damped, solve: Callable[[Damped], list[Inverse]]) -> list[Inverse]:
        """Return the results of ``solve`` for factors that are the same on all processes, on all processes."""
        ...


class OneProcess:
    """A process that trains alone."""

    count = 1
    rank = 0
    first = True

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of this process.

        Args:
            numbers: the numbers.

        Returns:
            A list of one list.
        """
        return [list(numbers)]

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: the sum over one process is the tensor itself.

        Args:
            tensors: not used.
        """

    def invert(self, factors: Damped, solve: Callable[[Damped], list[Inverse]]) -> list[Inverse]:
        """Invert the factors in this process.

        Args:
            factors: pairs of a factor and its damping.
            solve: inverts them.

        Returns:
            One result per factor.
        """
        return solve(factors)


ALONE = OneProcess()
