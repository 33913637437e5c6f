"""What steps between two refreshes need, looked up once: parameters, their matrices and inverses.

A work is what takes its step at once. On a CPU that is one parameter, so that it and its direction
stay in the cache. On an accelerator it is all parameters of a group, and matrices of one shape are
one batch: a few kernels for all of them. A batch of n matrices is like a matrix with n times as
many groups (:mod:`torch_thor.curvature.blocks`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks, factor_dtype
from torch_thor.curvature.factor import Factor, collected, local
from torch_thor.optim.parameters import Group
from torch_thor.optim.plan import Bound

# A weight of zeros (a zero-initialised residual branch, a LoRA adapter) must be able to move, so
# its norm counts as at least this number times √d_out. That is a twentieth of the norm of a newly
# initialised linear layer, √(d_out / 3).
SMALLEST_SHARE = 0.03


def smallest_norm(outputs: int) -> float:
    """Return the norm that the bound assumes at least of a matrix."""
    return SMALLEST_SHARE * math.sqrt(outputs)


@dataclass(eq=False)
class Matrix:
    """A weight or a bias, or rows of one, and the factors whose inverses precondition it."""

    index: int  # the place of the parameter in its work
    rows: Any = None  # the index of its rows in the parameter; None for all
    kind: Any = None  # turns it into a matrix, or one for each group
    left: Factor | None = None  # whose inverse stands on its left
    right: Factor | None = None  # on its right
    scale: float = 1.0  # 1 / T
    scales: Tensor | None = None  # 1 / T of each expert, for a bias
    # those of the factors, while they are here
    inverses: tuple[Blocks | None, Blocks | None] = (None, None)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of this matrix from a tensor in the shape of the parameter."""
        return tensor if self.rows is None else tensor[self.rows]

    def moved(self, place: Mapping[int, int]) -> "Matrix":
        """Return this matrix at its place in a smaller work."""
        return replace(self, index=place[self.index])

    @property
    def factors(self) -> list[Factor]:
        """The factors."""
        return [factor for factor in (self.left, self.right) if factor is not None]


@dataclass(eq=False)
class Batch:
    """Matrices of one shape that are multiplied by their inverses together."""

    members: list[Matrix]
    left: Blocks | None = None
    right: Blocks | None = None
    # of this step, ``(n, numbers)``, where the directions of the members are views of it
    result: Tensor | None = None

    def only(self, place: Mapping[int, int]) -> "Batch | None":
        """Return the batch of the members that a smaller work has, at other places."""
        members = [one.moved(place) for one in self.members if one.index in place]
        if not members:
            return None
        found = Batch(members)
        found.stack()
        return found

    def bind(self, inverses: Mapping[Factor, Blocks]) -> None:
        """Take the inverses of the factors."""
        for one in self.members:
            left, right = (None if of is None else inverses.get(of) for of in (one.left, one.right))
            one.inverses = left, right
        self.stack()

    def stack(self) -> None:
        """Put the inverses of all members into one matrix each.

        If there are several members, 1 / T is contained in it.
        """
        scales = [one.scale for one in self.members]
        self.left, self.right = (
            _stacked([one.inverses[side] for one in self.members]) for side in (0, 1)
        )
        blocks = self.right if self.left is None else self.left
        if blocks is not None and len(scales) > 1 and scales != [1.0] * len(scales):
            for rows, scale in zip(blocks.rows.chunk(len(scales)), scales, strict=True):
                rows.mul_(scale)


@dataclass(eq=False)
class Work:
    """Parameters that take their step at once, with all that it needs."""

    group: Group
    parameters: list[nn.Parameter]
    weights: list[Tensor]  # the rows of the parameters that this process holds
    # the momentum, or the two of AdamW, of these rows; each a list as long as the weights
    moments: list[list[Tensor]]
    dtype: torch.dtype  # of directions and momentum
    smallest: list[float] = field(default_factory=list)  # the norm that the bound assumes at least
    order: list[int] = field(default_factory=list)  # the places of the parameters in the model
    # none if the parameters are not preconditioned
    batches: list[Batch] = field(default_factory=list)
    # rows of preconditioned parameters that have no factors
    plain: list[Matrix] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)  # of this step
    is_natural: bool = False  # whether its parameters are preconditioned, if only in some rows
    on_cpu: bool = True
    # (numbers, shape, strides) of the only parameter, which takes its step by itself (on a CPU)
    layout: Any = None
    # on an accelerator: which tensor each element of the vector of all small ones is of, by sizes
    owner_in_vector: tuple[dict[int, int], Tensor] | None = None

    def with_gradients(self) -> "Work | None":
        """Return this work with the gradients of this step, without parameters that have none."""
        # on a CPU, where a call of Python takes as long as a small product
        if len(self.parameters) == 1:
            gradient = self.parameters[0].grad
            if gradient is None:
                return None
            self.gradients = [
                gradient if self.weights[0] is self.parameters[0] else local(gradient)
            ]
            return self
        gradients = [parameter.grad for parameter in self.parameters]
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) < len(gradients):
            kept = [i for i, gradient in enumerate(gradients) if gradient is not None]
            return self._only(kept).with_gradients() if kept else None
        self.gradients = [
            gradient if weight is parameter else local(gradient)
            for gradient, weight, parameter in zip(
                present, self.weights, self.parameters, strict=True
            )
        ]
        return self

    def _only(self, kept: Sequence[int]) -> "Work":
        """Return the work of some of the parameters."""

        def of(values: Sequence[Any]) -> list[Any]:
            return [values[i] for i in kept] if values else []

        place = {old: new for new, old in enumerate(kept)}

        return replace(
            self,
            parameters=of(self.parameters),
            weights=of(self.weights),
            moments=[of(moment) for moment in self.moments],
            smallest=of(self.smallest),
            order=of(self.order),
            states=of(self.states),
            batches=[own for batch in self.batches if (own := batch.only(place)) is not None],
            plain=[one.moved(place) for one in self.plain if one.index in place],
        )


@dataclass(eq=False)
class Turn:
    """Works, or batches of one, whose inverses are there together.

    All are together unless curvature is divided.
    """

    items: list[Any]
    factors: list[Factor] = field(default_factory=list)  # those that are collected for it
    batches: list[Batch] = field(default_factory=list)  # which they precondition


def in_turns(turns: Iterable[Turn]) -> Iterator[Any]:
    """Yield what the turns hold, each when its inverses are there.

    All processes consume it alike.
    """
    for turn in turns:
        if not turn.factors:
            yield from turn.items
            continue
        inverses = dict(zip(turn.factors, collected(turn.factors, inverse=True), strict=True))
        for batch in turn.batches:
            batch.bind({**here([batch]), **inverses})
        try:
            yield from turn.items
        finally:
            for batch in turn.batches:
                batch.bind({})


def work_of(
    group: Group,
    rows: Sequence[tuple[nn.Parameter, Tensor, dict[str, Any]]],
    keys: Sequence[str],
    bound: Bound,
) -> Work:
    """Return the work of some parameters, each with this process's rows and its state."""
    parameters, weights, states = (list(column) for column in zip(*rows, strict=True))
    moments = [
        [
            state[key] if weight is parameter else local(state[key])
            for parameter, weight, state in rows
        ]
        for key in keys
    ]
    sizes = [next((size for size in weight.shape if size != 1), 1) for weight in weights]
    order = [bound.plan.order.get(id(parameter), len(bound.plan.order)) for parameter in parameters]
    smallest = [smallest_norm(size) for size in sizes]
    found = Work(
        group,
        parameters,
        weights,
        moments,
        factor_dtype(weights[0].dtype),
        smallest,
        order,
        states=states,
    )
    found.on_cpu = weights[0].device.type == "cpu"
    return found


def here(batches: Iterable[Batch]) -> dict[Factor, Blocks]:
    """Return the inverses that this process holds.

    Those of divided curvature are collected in each step.
    """
    factors = {factor for batch in batches for one in batch.members for factor in one.factors}
    return {factor: factor.read(inverse=True) for factor in factors if factor.divided is None}


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Put items with the same key together, in the order of the first of each."""
    alike: dict[Any, list[Any]] = {}
    for one in items:
        alike.setdefault(key(one), []).append(one)
    return list(alike.values())


def _stacked(blocks: Sequence[Blocks | None]) -> Blocks | None:
    """Return matrices with the same cut as the groups of one."""
    first = blocks[0]
    if first is None or len(blocks) == 1:
        return first
    width = first.cut.width
    return Blocks(
        first.cut.times(len(blocks)),
        torch.cat([one.rows[:, :width] for one in blocks if one is not None]),
    )
