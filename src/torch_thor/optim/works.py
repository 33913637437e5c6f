"""What steps between two refreshes need, looked up once: parameters, their matrices and inverses.

A work is what takes its step at once. On a CPU that is one parameter, so that it and its direction
stay in the cache. On an accelerator it is all parameters of a group, and matrices of one shape are
one batch: a few kernels for all of them. A batch of n matrices is like a matrix with n times as
many groups (:mod:`torch_thor.curvature.blocks`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks, factor_dtype, has_values
from torch_thor.curvature.factor import Factor, collected, local
from torch_thor.distributed.partitioned import buckets_of_parameters
from torch_thor.optim.model_argument import Group
from torch_thor.optim.plan import Binding

# A weight of zeros (a zero-initialised residual branch, a LoRA adapter) must be able to move, so
# its norm counts as at least this number times √d_out, or the root of its first size where a weight
# has its inputs first. That is a twentieth of the norm of a newly initialised linear layer,
# √(d_out / 3).
SMALLEST_SHARE = 0.03


def smallest_norm(outputs: int) -> float:
    """Return the norm that the bound assumes at least of a matrix."""
    return SMALLEST_SHARE * math.sqrt(outputs)


W = TypeVar("W", bound="Work")


@dataclass(eq=False)
class Rows:
    """A parameter, the rows of it that this process holds, and its state."""

    parameter: nn.Parameter
    local: Tensor
    state: dict[str, Any]
    lr_factor: float = 1.0  # less where it was trained already (optim.learned)


@dataclass(eq=False)
class Matrix:
    """A weight or a bias, or rows of one, and the factors whose inverses precondition it."""

    index: int  # the place of the parameter in its work
    rows: Any = None  # the index of its rows in the parameter; None for all
    geometry: Any = None  # turns these rows into matrices; None for rows without factors
    left: Factor | None = None  # whose inverse stands on its left
    right: Factor | None = None  # on its right
    scale: float = 1.0  # 1 / T
    scales: Tensor | None = None  # 1 / T of each expert, for a bias

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of this matrix from a tensor in the shape of the parameter."""
        return tensor if self.rows is None else tensor[self.rows]


@dataclass(eq=False)
class Batch:
    """Matrices of one shape that are multiplied by their inverses together."""

    members: list[Matrix]
    # the inverses of all members in one matrix each, which contains 1 / T if there are several
    left: Blocks | None = None
    right: Blocks | None = None
    # of this step, ``(n, numbers)``, where the directions of the members are views of it
    result: Tensor | None = None

    def bind(self, inverses: Mapping[Any, Blocks]) -> None:
        """Take the inverses of the factors, as far as they are there."""
        self.left = _stacked([inverses.get(matrix.left) for matrix in self.members])
        self.right = _stacked([inverses.get(matrix.right) for matrix in self.members])
        blocks = self.right if self.left is None else self.left
        if blocks is None or len(self.members) == 1:
            return
        for rows, matrix in zip(blocks.rows.chunk(len(self.members)), self.members, strict=True):
            if matrix.scale != 1.0:
                rows.mul_(matrix.scale)


@dataclass(eq=False)
class Work:
    """Parameters with gradients that take their step at once, with all that it needs."""

    group: Group
    parameters: list[nn.Parameter]
    weights: list[Tensor]  # the rows of the parameters that this process holds
    # the momentum, or the two of AdamW, of these rows; each a list as long as the weights
    moments: list[list[Tensor]]
    states: list[dict[str, Any]]
    smallest: list[float]  # the norm that the bound assumes at least
    order: list[int]  # the places of the parameters in the model
    dtype: torch.dtype  # of directions and momentum
    on_cpu: bool
    lr_factor: float = 1.0  # of the learning rate of its group
    is_natural: bool = False  # whether its parameters are preconditioned, if only in some rows
    gradients: list[Tensor] = field(default_factory=list)  # of this step
    # what is preconditioned; none if the parameters are not
    batches: list[Batch] = field(default_factory=list)
    # rows of preconditioned parameters that have no factors
    plain: list[Matrix] = field(default_factory=list)
    # (numbers, shape, strides) of the only parameter, which takes its step by itself (on a CPU)
    layout: Any = None
    # on an accelerator: which tensor each element of the vector of all small ones is of, by sizes
    owner_in_vector: tuple[dict[int, int], Tensor] | None = None


@dataclass(eq=False)
class Bucket:
    """Works, or batches of one, whose inverses are there together: all, unless they are divided."""

    items: list[Any]
    factors: list[Factor] = field(default_factory=list)  # those that are collected for it
    batches: list[Batch] = field(default_factory=list)  # which they precondition


def in_buckets(buckets: Iterable[Bucket]) -> Iterator[Any]:
    """Yield what the buckets hold, when the inverses are there; all processes consume it alike."""
    for bucket in buckets:
        if not bucket.factors:
            yield from bucket.items
            continue
        inverses = dict(zip(bucket.factors, collected(bucket.factors, inverse=True), strict=True))
        for batch in bucket.batches:
            batch.bind({**here([batch]), **inverses})
        try:
            yield from bucket.items
        finally:
            for batch in bucket.batches:
                batch.bind({})


def with_gradients(works: Iterable[Any]) -> Iterator[Any]:
    """Give works the gradients of this step."""
    for work in works:
        work.gradients = [
            parameter.grad if weight is parameter else local(parameter.grad)
            for weight, parameter in zip(work.weights, work.parameters, strict=True)
        ]
        yield work


def rows_of(binding: Binding, group: Group) -> list[Rows]:
    """Return the parameters of a group that have a gradient in this step."""
    rows = []
    for parameter in group["params"]:
        if parameter.grad is not None:
            state = binding.states.get(parameter, {})
            factor = state.get("lr_factor", 1.0) if group.get("auto_lr") else 1.0
            rows_here = local(parameter) if binding.plan.sharded else parameter
            rows.append(Rows(parameter, rows_here, state, factor))
    return rows


def work_of(
    kind: type[W], group: Group, rows: Sequence[Rows], keys: Sequence[str], binding: Binding
) -> W:
    """Return the work of some parameters; ``keys`` are those of the moments in the state."""
    sizes = [next((size for size in of.local.shape if size != 1), 1) for of in rows]
    return kind(
        group,
        parameters=[of.parameter for of in rows],
        weights=[of.local for of in rows],
        moments=[
            [of.state[key] if of.local is of.parameter else local(of.state[key]) for of in rows]
            for key in keys
        ],
        states=[of.state for of in rows],
        smallest=[smallest_norm(size) for size in sizes],
        order=[binding.plan.order.get(id(of.parameter), len(binding.plan.order)) for of in rows],
        dtype=factor_dtype(rows[0].local.dtype),
        on_cpu=rows[0].local.device.type == "cpu" and has_values(rows[0].local),
        lr_factor=rows[0].lr_factor,
    )


def here(batches: Iterable[Batch]) -> dict[Factor, Blocks]:
    """Return the inverses that this process holds, without those of divided curvature."""
    members = (matrix for batch in batches for matrix in batch.members)
    factors = {f for matrix in members for f in (matrix.left, matrix.right) if f is not None}
    return {f: f.read(inverse=True) for f in factors if not f.layout.is_partitioned}


def batches_of(matrices: Iterable[Any], key: Callable[[Any], Any]) -> list[Batch]:
    """Return matrices with the same key as batches, with the inverses that are here."""
    batches = [Batch(alike) for alike in grouped(matrices, key)]
    inverses = here(batches)
    for batch in batches:
        batch.bind(inverses)
    return batches


def collecting_buckets(
    parameters: Iterable[nn.Parameter], binding: Binding
) -> list[tuple[frozenset[int], list[Factor]]]:
    """Return the ids of the parameters of each bucket, and the factors collected for it."""
    if binding.owners:
        return buckets_of_parameters(parameters, binding)
    return [(frozenset(map(id, parameters)), [])]


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Put items with the same key together, in the order of the first of each."""
    alike: dict[Any, list[Any]] = {}
    for item in items:
        alike.setdefault(key(item), []).append(item)
    return list(alike.values())


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient with all its rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _stacked(blocks: Sequence[Blocks | None]) -> Blocks | None:
    """Return matrices with the same cut as the groups of one."""
    first = blocks[0]
    if first is None or len(blocks) == 1:
        return first
    width = first.block_sizes.width
    rows = torch.cat([block.rows[:, :width] for block in blocks if block is not None])
    return Blocks(first.block_sizes.times(len(blocks)), rows)
