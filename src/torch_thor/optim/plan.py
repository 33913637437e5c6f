"""What is known of a model (:class:`Plan`), and how it is bound to an optimizer (:class:`Binding`).

It is bound to the groups and the state of the optimizer.

Wrappers such as Accelerate put new parameters into modules and groups, users prune, freeze or
replace layers, and a state dict replaces the state. So every step asks its :class:`Binding` whether
it is current, and takes a new one, as a whole, if it is not. The truth stays in ``optimizer.state``
and ``optimizer.param_groups``. Layers that are still there keep the statistics of the running step;
new ones gather from the next step on.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.coverage import Covered, Rest, covered
from torch_thor.capture.hooks import ModuleHook
from torch_thor.capture.inspection import inspect
from torch_thor.capture.layers import Owner, hooks_of
from torch_thor.capture.patterns import Patterns
from torch_thor.capture.reasons import LEFT_OUT
from torch_thor.capture.sharding import device_of_mesh, is_sharded, row_shards_of
from torch_thor.curvature.blocks import has_values
from torch_thor.curvature.factor import local
from torch_thor.curvature.geometry import Geometry
from torch_thor.curvature.layer import Layer, LayerCurvature
from torch_thor.curvature.layout import Owners
from torch_thor.curvature.row_splits import Declared, RowSplit, declared_of, take
from torch_thor.curvature.view import ParameterView, RowShards
from torch_thor.optim.matrices import (
    Fused,
    check_are_matrices,
    fused_layers,
    modules_by_weight,
    plain_matrices,
    row_splits_of,
)
from torch_thor.optim.model_argument import Group, States
from torch_thor.optim.options import OPTIONS


@dataclass(frozen=True)
class Form:
    """What a class of optimizers needs of the curvature, and what one of them was made with."""

    rest: Rest  # how it trains what has no factors, in words
    factor_names: tuple[str, ...] = ("A", "G")  # the factors that are used: these or ("A",)
    # whether the damping is relative to the mean diagonal of a factor
    relative_damping: bool = False
    # where a group has none
    trace_thresholds: tuple[float, float] = OPTIONS["trace_thresholds"].default
    orthogonalises: bool = False  # whether whole matrices can be asked for
    # of one optimizer: its class, for messages and options, and what every parameter group has
    optimizer: type = torch.optim.Optimizer
    options: tuple[str, ...] = ()
    loss_reduction: str = "mean"
    fisher: str = "empirical"

    @cached_property
    def has_g(self) -> bool:
        """Whether G is used beside A, so that gradients of outputs are needed."""
        return "G" in self.factor_names


@dataclass(frozen=True)
class LayerParameter:
    """The share of a layer in a parameter."""

    layer: LayerCurvature
    view: ParameterView  # the parameter, or the rows of it that belong to the layer
    is_weight: bool  # whether it is the layer's weight; otherwise it is a bias


class Plan:
    """What is known of a model: its layers, and each parameter's name, place and shards.

    It is never changed.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[nn.Parameter],
        form: Form,
        chosen: Patterns,
        before: "Plan | None" = None,
    ) -> None:
        self.model, self._form = model, form
        inspection = inspect(model, trained, chosen=chosen, inputs_alone=not form.has_g)
        matrices = {} if form.rest.matrix is None else plain_matrices(model, inspection)
        self.entries: tuple[Covered, ...] = tuple(covered(model, inspection, form.rest, matrices))
        self.left_out: tuple[Layer, ...] = tuple(inspection.left_out)
        self._take_parameters(inspection.owners)
        self._check_present(trained, before)
        known = {} if before is None else before.layers
        self.layers: dict[str, LayerCurvature] = {
            name: self._curvature_of(layer, known.get(name))
            for name, layer in inspection.layers.items()
        }
        self.hooks: tuple[ModuleHook, ...] = tuple(hooks_of(inspection.layers, self.layers))
        # parameters that are matrices without factors, by id
        self.matrix_of: dict[int, Geometry] = {
            key: matrices[name] for key, name in self.names.items() if name in matrices
        }
        # What is declared of each module. A later declaration changes nothing between two steps.
        declared = {} if before is None else before.declared
        self.declared: dict[nn.Module, Declared | None] = {
            module: declared[module] if module in declared else declared_of(module)
            for module in model.modules()
        }
        # parameters that are several projections in one, by id; only matrices are orthogonalised
        self.row_splits: dict[int, RowSplit] = {}
        # why declarations of layers that came later do not hold
        self.unfit: list[str] = []
        fused, unfit = fused_layers(model, self.declared)
        if before is None and unfit:
            raise ValueError(unfit[0])
        if not form.has_g:
            self.unfit = unfit
            self._take_projections(fused, inspection.owners, is_new=before is None)

    def _take_parameters(self, owners: Mapping[int, Sequence[Owner]]) -> None:
        """Note the name and the places of each parameter, and how its rows are divided."""
        named = dict(self.model.named_parameters())
        self.names = {id(parameter): name for name, parameter in named.items()}
        # the place of each parameter in the model
        self.order = {key: i for i, key in enumerate(self.names)}
        # the module that holds each parameter first, and its name there
        self.attributes = [(self.names[key], owners[key][0]) for key in self.names]
        # the parameter of each place: FSDP2 replaces those of modules while they run
        self.places: dict[tuple[int, str], nn.Parameter] = {
            (id(owner.module), owner.attribute): parameter
            for parameter in named.values()
            for owner in owners[id(parameter)]
        }
        # parameters that are DTensors, and how their rows are divided, by name
        self.sharded: dict[str, tuple[nn.Parameter, RowShards | None]] = {
            name: (parameter, row_shards_of(parameter))
            for name, parameter in named.items()
            if is_sharded(parameter)
        }
        divided = (shards for _, shards in self.sharded.values() if shards is not None)
        self.first_shards = next(divided, None)

    def _take_projections(
        self,
        fused: Mapping[nn.Module, Fused],
        owners: Mapping[int, Sequence[Owner]],
        *,
        is_new: bool,
    ) -> None:
        """Take the projections of matrices from fused layers."""
        modules = modules_by_weight(self.model, owners)
        if is_new:
            entries = zip(self.names, self.entries, strict=True)
            plain = {
                key: entry
                for key, entry in entries
                if entry.trained
                and entry.rest == self._form.rest.plain
                and entry.reason != LEFT_OUT
            }
            check_are_matrices(fused, modules, plain)
        matrices = dict(self.matrix_of)
        for layer in self.layers.values():
            view = layer.weight_view
            if view.rows is None:
                matrices[id(self.parameter_of(view))] = layer.kind.geometry
        self.row_splits = row_splits_of(fused, modules, matrices)
        self._taken = take(
            {
                module: self.row_splits.get(key, RowSplit((matrix.outputs,)))
                for key, matrix in matrices.items()
                for module in modules[key]
            }
        )

    def _curvature_of(self, layer: Layer, before: LayerCurvature | None) -> LayerCurvature:
        """Return the curvature of a layer, which stays if the layer of the plan before is this."""
        if before is not None:
            # It must have the same weight, divided in the same way.
            old, new = before.weight_view, layer.weight
            is_same = (old.module, old.attribute, old.rows) == (new.module, new.attribute, new.rows)
            has_biases = len(before.layer.biases) == len(layer.biases)
            if is_same and has_biases and old.shards == self.shards_of(new.parameter):
                return before
        return LayerCurvature(layer, self._form.factor_names)

    def _check_present(self, trained: Sequence[nn.Parameter], before: "Plan | None") -> None:
        """Raise an error if groups hold nothing of the model, or weights were tied since before."""
        if trained and not any(id(p) in self.names for p in trained):
            if all(p.dim() == 1 for p in trained):
                raise RuntimeError(
                    "the optimizer's parameter groups have flat tensors in the place of the "
                    "model's parameters, as DeepSpeed's ZeRO and bf16 optimizers make them: the "
                    "matrices are needed, and such partitioned parameters cannot be used; use "
                    "FSDP2 (fully_shard, then the optimizer) or DistributedDataParallel in the "
                    "place of ZeRO"
                )
            raise RuntimeError(
                f"parameter {next(iter(self.names.values()))!r} is in none of the optimizer's "
                "parameter groups, and so are all others: they were replaced after the optimizer "
                "was made. Make it after that (after fully_shard, which replaces all parameters), "
                "or assign to parameter.data instead. DeepSpeed's bf16 and fp16 optimizers "
                "replace them too: use float32 with torch.autocast"
            )
        if before is None:
            return
        views = [view for layer in before.layers.values() for view in layer.layer.views]
        of_layers = {before.name(before.parameter_of(view)) for view in views}
        first: dict[int, str] = {}
        for name, owner in before.attributes:
            present = dict(owner.module._parameters.items())  # no dict in TorchScript
            now = present.get(owner.attribute)
            other = name if now is None else first.setdefault(id(now), name)
            if other != name and not of_layers.isdisjoint((other, name)):
                raise RuntimeError(
                    f"{other!r} and {name!r} are one parameter: they were tied after the optimizer "
                    "was made, which takes them for the weights of two layers. Tie the weights "
                    "first, then make the optimizer"
                )

    # ---- queries ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model; of sharded parameters, the one for collectives."""
        for parameter, _ in self.sharded.values():
            return device_of_mesh(parameter)
        weights = [layer.weight for layer in self.layers.values()] or [*self.model.parameters()]
        return next((weight for weight in weights if has_values(weight)), weights[0]).device

    def parameter_of(self, view: ParameterView) -> nn.Parameter:
        """Return the parameter of which a view shows all rows or some."""
        return self.places[id(view.module), view.attribute]

    def name(self, parameter: Tensor) -> str:
        """Return a parameter's name in the model."""
        return self.names.get(id(parameter), f"<parameter of shape {tuple(parameter.shape)}>")

    def shards_of(self, parameter: Tensor) -> RowShards | None:
        """Return how the rows of a parameter are divided."""
        return self.sharded.get(self.name(parameter), (parameter, None))[1]


class Binding:
    """A plan, bound to the parameter groups and the state of an optimizer.

    It is replaced as a whole if one of them differs.

    Args:
        owners: of the blocks of each factor that processes partition, by layer and side.
        complete: whether the state has all entries.
    """

    def __init__(
        self,
        plan: Plan,
        groups: list[Group],
        states: States,
        owners: Mapping[LayerCurvature, Mapping[str, Owners]],
        *,
        complete: bool = False,
    ) -> None:
        self.plan, self.groups, self.states, self.complete = plan, groups, states, complete
        self.owners = {layer: owners[layer] for layer in plan.layers.values() if layer in owners}
        self.group_of = {id(p): group for group in groups for p in group["params"]}
        # the layers that precondition a parameter, by its id
        self.layer_parameters_of: dict[int, list[LayerParameter]] = {}
        self._buckets: tuple[list[Any], list[Any]] | None = None
        for layer in plan.layers.values():
            for view in layer.layer.views:
                parameter = plan.parameter_of(view)
                shards = plan.shards_of(parameter)
                bound_view = replace(
                    view,
                    state=states.get(parameter, {}),
                    options=self.group_of.get(id(parameter), {}),
                    shards=shards,
                    divided=None if shards is None else parameter,
                )
                part = LayerParameter(layer, bound_view, view is layer.layer.weight)
                self.layer_parameters_of.setdefault(id(parameter), []).append(part)
        for layer_parameters in self.layer_parameters_of.values():
            most = max(len(part.view.outline()) for part in layer_parameters)
            layer_parameters[:] = [
                replace(of, view=replace(of.view, most_rows=most)) for of in layer_parameters
            ]
        weights = [
            s
            for layer_parameters in self.layer_parameters_of.values()
            for s in layer_parameters
            if s.is_weight
        ]
        self.factors = {s.layer: s.layer.laid_out(s.view, owners.get(s.layer)) for s in weights}
        moving = {id(p) for p in plan.places.values() if p.requires_grad and id(p) in self.group_of}
        layers = [
            part.is_weight for key in moving for part in self.layer_parameters_of.get(key, ())
        ]
        more = [len(split.sizes) - 1 for key, split in plan.row_splits.items() if key in moving]
        # the number of matrices that are trained
        self.depth = sum(layers) + len(moving & plan.matrix_of.keys()) + sum(more)
        self.device_types = {p.device.type for group in groups for p in group["params"]}
        self._fingerprint = fingerprint(plan, groups, states)

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

    def layer_parameters(self, parameter: Tensor) -> list[LayerParameter]:
        """Return the shares of the layers that precondition a parameter."""
        return self.layer_parameters_of.get(id(parameter), [])

    def is_matrix(self, parameter: Tensor) -> bool:
        """Return whether a parameter is one of a layer, or a matrix without factors."""
        return id(parameter) in self.layer_parameters_of or id(parameter) in self.plan.matrix_of

    def buckets(self, of_group: Callable[["Binding", Group], list[Any]]) -> list[Any]:
        """Return what steps with gradients of the same parameters need until the next refresh."""
        states, sharded = self.states, self.plan.sharded
        # what the buckets hold, which others replace (offloading, moving a model, a reset)
        present = [
            (p.grad is not None, sharded and id(local(p)), *map(id, states.get(p, {}).values()))
            for group in self.groups
            for p in group["params"]
        ]
        if self._buckets is None or self._buckets[0] != present:
            buckets = [bucket for group in self.groups for bucket in of_group(self, group)]
            self._buckets = present, buckets
        return self._buckets[1]

    def refreshed(self) -> "Binding":
        """Return the same for steps with other factors."""
        binding = copy.copy(self)
        binding._buckets = None
        return binding


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
                group["split_dim"],
                # how works are formed
                bool(group["momentum"]),
                group.get("nesterov"),
                group.get("kl_clip") is None,
                group.get("auto_lr"),
            )
        )
        for p in group["params"]:
            shape = None if isinstance(p, nn.UninitializedParameter) else p.shape
            state = states.get(p)
            entries = None if state is None else len(state)  # users may remove the momentum
            facts.append((id(p), p.requires_grad, shape, p.dtype, p.device, id(state), entries))
    return facts


def rows_without_layer(taken: Iterable[slice | None], length: int) -> list[slice]:
    """Return the rows of a parameter that belong to no layer.

    Such rows are, for example, those of a projection that the user has left out.
    """
    rows = sorted((0, length) if of is None else (of.start, of.stop) for of in taken)
    rows = [(start, stop) for start, stop in rows if start < stop]
    starts, stops = [0, *(stop for _, stop in rows)], [*(start for start, _ in rows), length]
    return [slice(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
