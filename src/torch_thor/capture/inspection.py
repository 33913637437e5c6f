"""The inspection of a model: the layers that can be preconditioned, and each parameter's layer.

For every other parameter it finds why it has none (:mod:`torch_thor.capture.reasons`).

A layer is one or several modules that share a weight, with a kind that is registered for their
class (:mod:`torch_thor.curvature.kinds`), or one of the layers inside a composite module
(:mod:`torch_thor.capture.composites`).
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from torch_thor.capture import reasons
from torch_thor.capture.composites import composite_of
from torch_thor.capture.hooks import CalledModuleHook, ModuleHook
from torch_thor.capture.patterns import Patterns, selected, some
from torch_thor.capture.sharding import check_sharded, row_shards_of
from torch_thor.curvature.kinds import (
    Kind,
    class_name_of,
    is_norm,
    kind_of,
    parameter_names_of,
    why_not,
)
from torch_thor.curvature.layer import Layer, LayerCurvature
from torch_thor.curvature.layout import why_not_by_rows
from torch_thor.curvature.view import ParameterView


@dataclass(frozen=True)
class Owner:
    """One place of a parameter in a model; a shared parameter has several."""

    module_name: str  # the name of the module that holds the parameter
    attribute: str  # the parameter's name in it
    module: nn.Module  # the module

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.module_name}.{self.attribute}".lstrip(".")

    @property
    def is_weight(self) -> bool:
        """Whether the parameter has the name of the module's weight."""
        return self.attribute == parameter_names_of(self.module)[0]

    @property
    def bias(self) -> str:
        """The name of the module's bias."""
        return parameter_names_of(self.module)[1]


def owners_of(model: nn.Module) -> Mapping[int, Sequence[Owner]]:
    """Find the owners of all parameters, by their `id`."""
    owners: defaultdict[int, list[Owner]] = defaultdict(list)
    for module_name, module in model.named_modules():
        # modules may override named_parameters()
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                owners[id(parameter)].append(Owner(module_name, attribute, module))
    return dict(owners)


@dataclass(frozen=True)
class Use:
    """A module that computes a layer, and so has its rows."""

    module: nn.Module
    name: str  # the layer's name inside the module; empty if the module is the layer
    hook: Callable[[Any], ModuleHook]  # makes the hook on the module


# the places of each parameter, and why parameters are not preconditioned, by their ids
Owners = Mapping[int, Sequence[Owner]]
Reasons = Mapping[int, str]


@dataclass(frozen=True)
class Inspection:
    """What a model was found to hold.

    Args:
        owners: the places of each parameter, by its id.
        layers: the layers to precondition, by name.
        left_out: the layers that the option ``layers`` leaves out.
        reasons: why each other parameter is not preconditioned, by its id.
        inputs_alone: whether only the input factor is used.
    """

    owners: Owners
    layers: Mapping[str, Layer]
    left_out: Sequence[Layer]
    reasons: Reasons
    inputs_alone: bool


def inspect(
    model: nn.Module,
    trained: Iterable[Tensor],
    *,
    chosen: Patterns = None,
    inputs_alone: bool = False,
) -> Inspection:
    """Find the layers of a model.

    Args:
        model: the model.
        trained: the parameters of the optimizer.
        chosen: the option ``layers``.
        inputs_alone: whether only the input factor is used: of layers with a full factor, and
            for no bias.

    Returns:
        What was found.
    """
    trained = list(trained)
    check_sharded(model, trained)
    _check_lasting(model)
    owners = owners_of(model)
    unusable = _unusable(owners, {id(p) for p in trained})

    def is_free(view: ParameterView) -> bool:
        # not where it is computed from other parameters (pruning, a parametrization)
        key = id(view.present)
        return view.present is not None and key not in unusable and len(owners[key]) == 1

    called = list(_called_layers(owners, unusable, _uncalled(model)))
    inside = list(_layers_inside(model))
    taken = {id(layer.weight.parameter) for layer in called}
    usable = [
        layer for layer in inside if is_free(layer.weight) and id(layer.weight.present) not in taken
    ]
    candidates = {
        layer.name: replace(layer, biases=list(filter(is_free, layer.biases)))
        for layer in (*called, *usable)
    }
    norms = {
        name: module
        for name, module in model.named_modules()
        if is_norm(module) and any(id(p) not in unusable for p in module.parameters(recurse=False))
    }
    kept = _kept(chosen, candidates, norms)
    refused = {
        name: why
        for name, layer in candidates.items()
        if (why := _why_not(layer, kept, inputs_alone)) is not None
    }
    no_biases = {
        name: why
        for name, layer in candidates.items()
        if (why := _why_no_bias(layer, inputs_alone)) is not None
    }
    layers = {
        name: replace(layer, biases=[]) if name in no_biases else layer
        for name, layer in candidates.items()
        if name not in refused
    }
    # of several reasons the last counts
    of_parameters = (
        {key: _why_plain(owner) for key, (owner, *_) in owners.items() if key not in unusable}
        | {id(bias.present): reasons.WITHOUT_WEIGHT for layer in inside for bias in layer.biases}
        | {key: _why_shared(places) for key, places in owners.items() if len(places) > 1}
        | _why_tied(owners, layers)
        | {
            id(p): reasons.NORM if name in kept else reasons.LEFT_OUT
            for name, norm in norms.items()
            for p in norm.parameters(recurse=False)
        }
        | {
            id(bias.parameter): why
            for name, why in no_biases.items()
            for bias in candidates[name].biases
        }
        | {id(p): why for name, why in refused.items() for p in _parameters_of(candidates[name])}
        | _why_composites_are_not(model)
        | unusable
    )
    return Inspection(
        owners=owners,
        layers=layers,
        left_out=[layer for name, layer in candidates.items() if name not in kept],
        reasons=of_parameters,
        inputs_alone=inputs_alone,
    )


def _check_lasting(model: nn.Module) -> None:
    """Raise an error for parameters that are other objects each time they are read."""
    first = dict(model.named_parameters())
    changed = [name for name, p in model.named_parameters() if first.get(name) is not p]
    if changed:
        raise ValueError(
            f"{some(changed)} are other objects whenever they are read, as those of peft's LoRA of "
            "nn.MultiheadAttention are, so they belong to no layer: leave the module out of LoRA "
            "(target_modules), or train with another optimizer"
        )


# ---- the layers ----------------------------------------------------------------------------------


def _unusable(owners: Owners, trained: Collection[int]) -> dict[int, str]:
    """Return the parameters that cannot be preconditioned, whatever their layer's kind is."""
    why = {}
    for key, (owner, *_) in owners.items():
        parameter: Any = owner.module._parameters[owner.attribute]
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {owner.name!r} has no shape yet; run one batch through the lazy module "
                "before the optimizer is made"
            )
        names = [owner.attribute.removesuffix(suffix) for suffix in ("_orig", "_g", "_v")]
        computed = [name for name in names if isinstance(vars(owner.module).get(name), Tensor)]
        if key not in trained:
            why[key] = reasons.NOT_TRAINED
        elif not parameter.is_floating_point():
            why[key] = reasons.NO_REAL_NUMBERS.format(parameter.dtype)
        elif computed:
            why[key] = reasons.COMPUTES.format(computed[0])
    return why


def _uncalled(model: nn.Module) -> set[int]:
    """Return the modules that hold weights for a composite module around them."""
    return {
        id(inner)
        for module in model.modules()
        if (composite := composite_of(module)[0]) is not None and composite.with_children
        for inner in list(module.modules())[1:]
    }


def _called_layers(owners: Owners, unusable: Reasons, uncalled: Collection[int]) -> Iterator[Layer]:
    """Yield the layers that are modules; modules that share a weight are one layer."""
    for key, places in owners.items():
        if key in unusable or not all(
            o.is_weight and not is_norm(o.module) and id(o.module) not in uncalled for o in places
        ):
            continue
        known = [(o, kind) for o in places if (kind := kind_of(o.module)) is not None]
        pooled = _pooled(known) if len(known) == len(places) else []
        for first, kind in pooled[:1]:
            yield Layer(
                name=first.module_name,
                kind=kind,
                weight=ParameterView(first.module, first.attribute),
                biases=[ParameterView(o.module, o.bias) for o, _ in pooled],
                uses=[Use(o.module, "", partial(CalledModuleHook, kind=k)) for o, k in pooled],
            )


def _pooled(sharing: list[tuple[Owner, Kind]]) -> list[tuple[Owner, Kind]]:
    """Return the modules whose rows make the factors of a shared weight; none if they differ."""
    # Modules of one geometry pool their rows. An embedding and the linear decoder that is tied to
    # it are treated as the embedding, as in the reference implementation: a row of the weight is a
    # token in both, and the embedding's A, the token frequencies, is exact and cheap, where the
    # decoder's G would be vocabulary by vocabulary.
    if len({(type(k), k.groups, k.inputs, k.outputs) for _, k in sharing}) == 1:
        return sharing
    are_tied = all(isinstance(o.module, nn.Embedding | nn.Linear) for o, _ in sharing)
    return [(o, k) for o, k in sharing if are_tied and isinstance(o.module, nn.Embedding)]


def _layers_inside(model: nn.Module) -> Iterator[Layer]:
    """Yield the layers inside composite modules."""
    for module_name, module in model.named_modules():
        composite, why = composite_of(module)
        if composite is None or why is not None:
            continue
        for inner in composite.layers_of(module):
            yield Layer(
                name=f"{module_name}.{inner.name}".lstrip("."),
                kind=inner.kind,
                weight=inner.weight,
                biases=list(inner.biases),
                prefix=inner.prefix,
                uses=[Use(module, inner.name, composite.hook)],
            )


def _kept(
    chosen: Patterns, layers: Mapping[str, Layer], norms: dict[str, nn.Module]
) -> Collection[str]:
    """Return the names that the option ``layers`` selects."""
    # Normalisation layers are never preconditioned, but layers="-*norm*" must not be refused as
    # matching nothing.
    named = {name: layer.weight.module for name, layer in layers.items()} | norms
    return named.keys() if chosen is None else selected("layers", chosen, named, "layer")


def hooks_of(
    layers: Mapping[str, Layer], curvature: Mapping[str, LayerCurvature]
) -> list[ModuleHook]:
    """Make the hooks on the modules whose calls give rows to layers, one for each module."""
    hooks: dict[int, ModuleHook] = {}
    for name, layer in layers.items():
        for use in layer.uses:
            if id(use.module) not in hooks:
                hooks[id(use.module)] = use.hook(use.module)
            hooks[id(use.module)].by_name[use.name] = curvature[name]
    return list(hooks.values())


# ---- why the rest is left out --------------------------------------------------------------------


def _why_not(layer: Layer, kept: Collection[str], inputs_alone: bool) -> str | None:
    """Return why a layer is not preconditioned although it has a kind."""
    if layer.name not in kept:
        return reasons.LEFT_OUT
    if inputs_alone and layer.kind.diagonal_input:
        return reasons.DIAGONAL
    if row_shards_of(layer.weight.parameter) is None:
        return None
    return why_not_by_rows(layer.kind, tuple(layer.weight.parameter.shape))


def _why_no_bias(layer: Layer, inputs_alone: bool) -> str | None:
    """Return why the biases of a layer are not preconditioned with it."""
    if inputs_alone:
        return reasons.NO_INPUTS if layer.kind.has_own_rows else reasons.NO_MATRIX
    if not layer.kind.solves_biases:
        return reasons.G_DIFFERS.format(layer.kind.label)
    # its G covers all outputs, and the bias is divided among processes
    if layer.kind.transposed and row_shards_of(layer.weight.parameter) is not None:
        return reasons.INPUTS_ARE_ROWS
    return None


def _parameters_of(layer: Layer) -> list[Tensor]:
    """Return the parameters of a layer, and all others of a module that is the layer."""
    others = [p for use in layer.uses if not use.name for p in use.module.parameters(recurse=False)]
    return [*(view.parameter for view in (layer.weight, *layer.biases)), *others]


def _why_shared(places: Sequence[Owner]) -> str:
    return reasons.SHARED.format(", ".join(repr(owner.name) for owner in places))


def _why_tied(owners: Owners, layers: Mapping[str, Layer]) -> dict[int, str]:
    """Return the reasons for biases of decoders that share the weight of an embedding."""
    return {
        id(owner.module._parameters.get(owner.bias)): reasons.TIED.format(layer.name)
        for layer in layers.values()
        for owner in owners[id(layer.weight.parameter)]
        if len(owners[id(layer.weight.parameter)]) > 1
        and owner.module not in [use.module for use in layer.uses]
    }


def _why_composites_are_not(model: nn.Module) -> dict[int, str]:
    """Return the reasons for parameters of composite modules that cannot be preconditioned."""
    return {
        id(p): why
        for module in model.modules()
        for composite, why in [composite_of(module)]
        if composite is not None and why is not None
        for p in module.parameters(recurse=composite.with_children)
    }


def _why_plain(owner: Owner) -> str:
    """Return the reason for a parameter of which nothing more special is known."""
    module, label = owner.module, class_name_of(owner.module)
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return reasons.PARAMETRISES
    if composite_of(module)[0] is not None:
        return reasons.NO_LAYER_INSIDE.format(label)
    is_bias = owner.attribute == owner.bias
    rest = reasons.WITHOUT_WEIGHT if is_bias else reasons.NEITHER.format(label)
    return why_not(module) or rest
