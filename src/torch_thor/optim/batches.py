"""A plan that is bound to an optimizer, and what a step goes through: batches and their matrices.

Wrappers such as Accelerate put new parameters into modules and groups, users prune, freeze or
replace layers, and a state dict replaces the state. So every step asks its :class:`Binding` whether
it is current, and takes a whole new plan if it is not. The truth stays in ``optimizer.state``
and ``optimizer.param_groups``.

The parameters of a batch have one group, dtype and device, so that they share kernels. A stack is
what is multiplied by its inverses at once: n matrices of one shape are like a matrix with n times
as many groups (:mod:`torch_thor.curvature.blocks`). On a CPU a stack has one matrix, and a batch of
THOR one parameter, so that it and its direction stay in the cache. All are made once between two
refreshes (:meth:`Binding.batches`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.blocks import Blocks, factor_dtype
from torch_thor.curvature.layer import Factor, LayerCurvature
from torch_thor.curvature.view import ParameterView, local
from torch_thor.optim.model_argument import Group, States
from torch_thor.optim.plan import Plan


class Binding:
    """A plan, bound to the parameter groups and the state of an optimizer.

    It is replaced as a whole if one of them differs.

    Args:
        plan: what is known of the model.
        groups: the parameter groups.
        states: the state of each parameter.
        complete: whether the state has all entries.
    """

    def __init__(
        self, plan: Plan, groups: list[Group], states: States, *, complete: bool = False
    ) -> None:
        self.plan, self.groups, self.states, self.complete = plan, groups, states, complete
        self.group_of = {id(p): group for group in groups for p in group["params"]}
        # the layers that precondition a parameter, by its id, each with the rows that belong to it
        self.shares_of: dict[int, list[tuple[LayerCurvature, ParameterView]]] = {}
        # the batches, and for what they were made; none after a refresh
        self.made: tuple[list[Any], list[Any]] | None = None
        for layer in plan.layers.values():
            for view in layer.layer.views:
                parameter = plan.parameter_of(view)
                self.shares_of.setdefault(id(parameter), []).append((layer, view))
        # the factors of each layer, for its weight with this state and these options
        self.factors: dict[LayerCurvature, tuple[Factor, ...]] = {}
        for shares in self.shares_of.values():
            most = max(len(view.outline()) for _, view in shares)
            for i, (layer, view) in enumerate(shares):
                bound = self._bound(view, most)
                shares[i] = layer, bound
                if view is layer.layer.weight:
                    self.factors[layer] = layer.laid_out(bound)
        moving = {id(p) for p in plan.places.values() if p.requires_grad and id(p) in self.group_of}
        layers = [id(plan.parameter_of(layer.layer.weight)) in moving for layer in self.factors]
        more = [len(split.sizes) - 1 for key, split in plan.row_splits.items() if key in moving]
        # the number of matrices that are trained
        self.depth = sum(layers) + len(moving & plan.matrix_of.keys()) + sum(more)
        self.device_types = {p.device.type for group in groups for p in group["params"]}
        self.note_state()

    def _bound(self, view: ParameterView, most_rows: int) -> ParameterView:
        """Return a view of a parameter that reads its state and the options of its group."""
        parameter = self.plan.parameter_of(view)
        shards = self.plan.shards.get(id(parameter))
        return replace(
            view,
            state=self.states.get(parameter, {}),
            options=self.group_of.get(id(parameter), {}),
            shards=shards,
            divided=None if shards is None else parameter,
            most_rows=most_rows,
        )

    def note_state(self) -> None:
        """Take the entries that the state has now for those that it is to have."""
        self._fingerprint = fingerprint(self.plan, self.groups, self.states)

    def take_effect(self) -> "Binding":
        """Let the layers of the plan read this state and these options."""
        for layer, factors in self.factors.items():
            layer.bind(factors)
        return self

    def is_current(self, groups: list[Group], states: States, *, modules: bool) -> bool:
        """Return whether this is still true; ``modules``: look for removed modules too."""
        if modules:  # finding a removed module takes time
            present = {id(module) for module in self.plan.model.modules()}
            if any(id(owner.module) not in present for _, owner in self.plan.attributes):
                return False
        return self._fingerprint == fingerprint(self.plan, groups, states)

    def layers_of(self, parameter: Tensor) -> list[LayerCurvature]:
        """Return the layers that precondition a parameter."""
        return [layer for layer, _ in self.shares_of.get(id(parameter), ())]

    def shares(
        self, parameter: Tensor
    ) -> Iterator[tuple[slice | None, LayerCurvature | None, ParameterView | None]]:
        """Yield the rows of a parameter that belong to no layer, then each layer with its rows.

        Rows of no layer are, for example, those of a projection that the user has left out.
        """
        shares = self.shares_of.get(id(parameter), ())
        taken = sorted((view.rows.start, view.rows.stop) for _, view in shares if view.rows)
        starts = [0, *(stop for _, stop in taken)] if taken else []
        stops = [*(start for start, _ in taken), len(parameter)] if taken else []
        for start, stop in zip(starts, stops, strict=True):
            if start < stop:
                yield slice(start, stop), None, None
        for layer, view in shares:
            yield view.rows, layer, view
        if not shares:
            yield None, None, None

    def is_matrix(self, parameter: Tensor) -> bool:
        """Return whether a parameter belongs to a layer, or is a matrix without factors."""
        return id(parameter) in self.shares_of or id(parameter) in self.plan.matrix_of

    def batches(self, of_group: Callable[["Binding", Group], list[Any]]) -> list[Any]:
        """Return what steps with gradients of the same parameters go through until a refresh."""
        states, sharded = self.states, self.plan.sharded
        # what the batches hold, which others replace (offloading, moving a model, a reset)
        present = [
            (p.grad is not None, sharded and id(local(p)), *map(id, states.get(p, {}).values()))
            for group in self.groups
            for p in group["params"]
        ]
        if self.made is None or self.made[0] != present:
            self.made = present, [b for group in self.groups for b in of_group(self, group)]
        return self.made[1]


def parameters(groups: Iterable[Group]) -> list[nn.Parameter]:
    """Return the parameters of all groups."""
    return [parameter for group in groups for parameter in group["params"]]


def fingerprint(plan: Plan, groups: Iterable[Group], states: States) -> list[Any]:
    """Return everything on which a bound plan depends, but for the modules of the model."""
    facts: list[Any] = [len(states)]
    # FSDP2 replaces the parameters of modules while they run, and those of groups stay
    if not plan.sharded:
        present = ((o.module._parameters, o.attribute) for _, o in plan.attributes)
        facts += [name in own and id(own[name]) for own, name in present]
    for group in groups:
        facts.append(
            (
                id(group),
                len(group["params"]),
                group.get("split_dim"),
                # how batches are formed
                bool(group.get("momentum")),
                group.get("nesterov"),
                group.get("kl_clip") is None,
                group.get("auto_lr"),
            )
        )
        for p in group["params"]:
            shape = None if isinstance(p, nn.UninitializedParameter) else p.shape
            state = states.get(p)
            facts.append((id(p), p.requires_grad, shape, p.dtype, p.device, id(state)))
    return facts


# ---- batches -------------------------------------------------------------------------------------

# A weight of zeros (a zero-initialised residual branch, a LoRA adapter) must be able to move, so
# its norm counts as at least this number times √d_out, or the root of its first size where a weight
# has its inputs first. That is a twentieth of the norm of a newly initialised linear layer,
# √(d_out / 3).
SMALLEST_SHARE = 0.03


@dataclass(eq=False)
class Matrix:
    """A weight or a bias, or rows of them, and the factors whose inverses precondition it."""

    index: int  # the place of the parameter in its batch
    rows: Any = None  # the index of its rows in the parameter; None for all
    geometry: Any = None  # turns these rows into matrices; None for rows without factors
    left: Factor | None = None  # whose inverse stands on its left
    right: Factor | None = None  # on its right
    scale: float = 1.0  # 1 / T
    scales: Tensor | None = None  # 1 / T of each expert, for a bias

    def of(self, tensor: Tensor) -> Tensor:
        """Return the rows of this matrix from a tensor in the shape of the parameter."""
        return tensor if self.rows is None else tensor[self.rows]


class Stack:
    """Matrices of one shape that are multiplied by their inverses together.

    Args:
        members: the matrices.
    """

    def __init__(self, members: list[Any]) -> None:
        self.members = members
        # the inverses of all members in one matrix each, which contains 1 / T if there are several
        self.left = _stacked([matrix.left for matrix in members])
        self.right = _stacked([matrix.right for matrix in members])
        # of this step, ``(n, numbers)``, where the directions of the members are views of it
        self.result: Tensor | None = None
        blocks = self.right if self.left is None else self.left
        if blocks is None or len(members) == 1:
            return
        for rows, matrix in zip(blocks.rows.chunk(len(members)), members, strict=True):
            if matrix.scale != 1.0:
                rows.mul_(matrix.scale)


@dataclass(eq=False)
class Batch:
    """Parameters with gradients that take their step together, with all that it needs."""

    group: Group
    parameters: list[nn.Parameter]
    weights: list[Tensor]  # the rows of the parameters that this process holds
    # the momentum, or the two of AdamW, of these rows; each a list as long as the weights
    moments: list[list[Tensor]]
    states: list[dict[str, Any]]
    order: list[int]  # the places of the parameters in the model
    lr_factor: float = 1.0  # of the learning rate of its group
    gradients: list[Tensor] = field(default_factory=list)  # of this step
    # of ThorMuon's average: what holds it, where the weights are those of the latest step
    averages: list[Tensor] = field(default_factory=list)
    # what is preconditioned, or orthogonalised; none if the parameters are not
    stacks: list[Stack] = field(default_factory=list)
    # rows of preconditioned parameters that have no factors
    plain: list[Matrix] = field(default_factory=list)
    # whether its only parameter takes its step by itself (on a CPU)
    is_single: bool = False
    # on an accelerator: the tensor of each element of the vector of all small tensors, by sizes
    owner_in_vector: tuple[dict[int, int], Tensor] | None = None

    def __post_init__(self) -> None:
        first = self.weights[0]
        self.dtype = factor_dtype(first.dtype)  # of directions and momentum
        self.on_cpu = first.device.type == "cpu"
        sizes = (next((size for size in w.shape if size != 1), 1) for w in self.weights)
        self.smallest = [SMALLEST_SHARE * math.sqrt(size) for size in sizes]


@dataclass(eq=False)
class Rows:
    """A parameter with a gradient, the rows of it that this process holds, and its state."""

    parameter: nn.Parameter
    local: Tensor
    state: dict[str, Any]
    lr_factor: float  # of the learning rate of its group, where that was not given
    average: Tensor | None = None  # of ThorMuon's: what holds it


def with_gradients(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Give batches the gradients of this step."""
    for batch in batches:
        batch.gradients = [
            parameter.grad if weight is parameter else local(parameter.grad)  # type: ignore[arg-type,misc]
            for weight, parameter in zip(batch.weights, batch.parameters, strict=True)
        ]
        yield batch


def rows_of(binding: Binding, group: Group) -> list[Rows]:
    """Return the parameters of a group that have a gradient in this step."""
    return [
        Rows(
            p,
            local(p) if binding.plan.sharded else p,
            state := binding.states.get(p, {}),
            state.get("lr_factor", 1.0) if group.get("auto_lr") else 1.0,
        )
        for p in group["params"]
        if p.grad is not None
    ]


def batch_of(group: Group, rows: Sequence[Rows], keys: Sequence[str], binding: Binding) -> Batch:
    """Return the batch of some parameters; ``keys`` are those of the moments in the state."""
    return Batch(
        group,
        parameters=[each.parameter for each in rows],
        weights=[each.local for each in rows],
        moments=[
            [
                each.state[key] if each.local is each.parameter else local(each.state[key])
                for each in rows
            ]
            for key in keys
        ],
        states=[each.state for each in rows],
        lr_factor=rows[0].lr_factor,
        averages=[each.average for each in rows if each.average is not None],
        order=[
            binding.plan.order.get(id(each.parameter), len(binding.plan.order)) for each in rows
        ],
    )


def grouped(items: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Put items with the same key together, in the order of the first of each."""
    alike: dict[Any, list[Any]] = {}
    for item in items:
        alike.setdefault(key(item), []).append(item)
    return list(alike.values())


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient with all its rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _stacked(factors: Sequence[Factor | None]) -> Blocks | None:
    """Return the inverses of factors with the same cut as the groups of one."""
    blocks = [factor.read(inverse=True) for factor in factors if factor is not None]
    if len(blocks) < 2:
        return blocks[0] if blocks else None
    width = blocks[0].block_sizes.width
    rows = torch.cat([each.rows[:, :width] for each in blocks])
    return Blocks(blocks[0].block_sizes.times(len(blocks)), rows)


# ---- the arithmetic of a batch -------------------------------------------------------------------


def momentum_(batch: Batch, directions: list[Tensor]) -> list[Tensor]:
    """Compute ``v ← μ v + d``, and return v, or with Nesterov's look-ahead ``d + μ v``."""
    velocities, momentum = batch.moments[0], float(batch.group["momentum"])
    torch._foreach_mul_(velocities, momentum)
    torch._foreach_add_(velocities, directions)
    if not batch.group.get("nesterov"):
        return velocities
    return list(torch._foreach_add(directions, velocities, alpha=momentum))


def shrink_(weights: list[Tensor], share: float) -> None:
    """Compute ``W ← (1 - share) W``."""
    if share:
        torch._foreach_mul_(weights, 1 - share)


def subtract_(weights: list[Tensor], steps: list[Tensor], lr: float) -> None:
    """Compute ``W ← W - lr · s``."""
    torch._foreach_add_(weights, steps, alpha=-lr)


def trust_ratios(
    norms: list[Tensor],
    smallest: Sequence[float],
    factors: Sequence[float],
    lengths: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Return ``min(1, factor · max(norm, smallest) / length)`` of each matrix, in ``norms``.

    ``lengths`` are None where the factors contain them.
    """
    torch._foreach_maximum_(norms, smallest)
    torch._foreach_mul_(norms, factors)
    if lengths is not None:
        torch._foreach_div_(norms, list(lengths))
    torch._foreach_clamp_max_(norms, 1.0)
    return norms
