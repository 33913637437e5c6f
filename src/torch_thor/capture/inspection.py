"""Inspects a model: which layers can be preconditioned, and for every parameter, which layer has it, or why none.

A layer is one or several modules that share a weight, with a kind that is registered for their class
(:mod:`torch_thor.curvature.kinds`), or one of the layers inside a composite module
(:mod:`torch_thor.capture.composites`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from torch_thor.capture.composites import InnerLayer, composite_of
from torch_thor.capture.coverage import LEFT_OUT, NORM, NOT_TRAINED, Covered
from torch_thor.capture.coverage_entries import Reasons, entry_of
from torch_thor.capture.layers import Inside, Layer
from torch_thor.capture.owners import Owner, Owners, owners_of, reasons_of_parameters, shared_by
from torch_thor.capture.patterns import Patterns, selected
from torch_thor.capture.sharding import check_sharded, is_sharded, leave_out_sharded
from torch_thor.curvature.kinds import Kind, check_weight, kind_of
from torch_thor.curvature.matrices import PlainMatrix, matrix_of
from torch_thor.curvature.parameter_view import ParameterView

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


@dataclass
class Inspection:
    """The result of inspecting a model."""

    entries: list[Covered]  # one entry per parameter, in the model's order
    layers: dict[str, Layer]  # the layers to precondition, by name
    matrices: dict[str, PlainMatrix]  # the parameters that are matrices without factors, by name
    left_out: list[Layer]  # the layers that `layers=` leaves out


def inspect_model(
    model: nn.Module,
    trained: Iterable[Tensor],
    *,
    chosen: Patterns = None,
    matrices_alone: bool = False,
) -> Inspection:
    """Find the layers of a model, and how each of its parameters is trained."""
    trained = list(trained)
    check_sharded(model, trained)
    owners = owners_of(model)
    reasons = Reasons(reasons_of_parameters(model, owners, trained))
    plain = reasons.of_parameters
    layers = _called_layers(model, owners, plain)
    layers |= _inner_layers(model, owners, plain, {id(layer.weight.parameter) for layer in layers.values()})
    norms = {
        name: module
        for name, module in model.named_modules()
        if _is_norm(module) and any(id(p) not in plain for p in module.parameters(recurse=False))
    }
    # Normalisation layers are never preconditioned, but layers="-*norm*" must not be refused as matching nothing.
    candidates = {name: layer.module for name, layer in layers.items()} | norms
    kept = candidates.keys() if chosen is None else selected("layers", chosen, candidates, "layer")
    unwanted = {name: LEFT_OUT for name in candidates if name not in kept}
    reasons.of_modules = unwanted
    removed = [layers.pop(name) for name in list(layers) if name in unwanted]
    rest = "orthogonalised momentum" if matrices_alone else "plain momentum"
    for layer in removed:
        reasons.leave_out(layer, unwanted[layer.name], rest)
    leave_out_sharded(layers, plain)
    # A bias is no matrix, whatever its shape, unless it has one row per expert.
    vectors = {id(bias.parameter) for layer in layers.values() if not layer.kind.routed for bias in layer.biases}
    if matrices_alone:
        layers = _with_full_input_factor(layers, plain)
    for name, norm in norms.items():
        for p in norm.parameters(recurse=False):
            plain.setdefault(id(p), unwanted.get(name, NORM))
    entries = [
        entry_of(name, parameter, owners[id(parameter)], layers.values(), reasons)
        for name, parameter in model.named_parameters()
    ]
    if not matrices_alone:
        return Inspection(entries, layers, {}, removed)
    matrices = _plain_matrices(model, entries, owners, vectors)
    entries = [_without_g(entry, is_matrix=entry.name in matrices) for entry in entries]
    return Inspection(entries, layers, matrices, removed)


# ---- layers that are modules ----------------------------------------------------------------------------------------


def _called_layers(model: nn.Module, owners: Owners, reasons: dict[int, str]) -> dict[str, Layer]:
    """Find the layers that are modules, one per weight: modules that share a weight are one layer."""
    uncalled = {id(module) for module in model.modules() for module in _uncalled_children(module)}
    for module in model.modules():
        check_weight(module)
    layers = {}
    for parameter in model.parameters():
        sharing = owners[id(parameter)]
        if id(parameter) in reasons or any(not o.is_weight or _is_norm(o.module) for o in sharing):
            continue
        if any(id(o.module) in uncalled for o in sharing):
            continue
        kinds = [kind_of(o.module) for o in sharing]
        group = _one_layer([(o, k) for o, k in zip(sharing, kinds, strict=True) if k is not None], len(sharing))
        if not group:
            if len(sharing) > 1:
                reasons[id(parameter)] = shared_by(sharing)
            continue
        first, kind = group[0]
        own_biases = [(o, b) for o, _ in group if (b := o.module._parameters.get(o.bias)) is not None]
        if not kind.solves_biases:
            reasons.update({id(b): f"G of {kind.label} does not apply to its bias" for _, b in own_biases})
        biases = [
            ParameterView(o.module, o.bias) for o, b in own_biases if id(b) not in reasons and len(owners[id(b)]) == 1
        ]
        layers[first.module_name] = Layer(
            first.module_name,
            kind,
            ParameterView(first.module, first.attribute),
            biases,
            modules=[(o.module, k) for o, k in group],
        )
    return layers


def _uncalled_children(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside a composite module that hold weights of its layers, and are not called."""
    composite, _ = composite_of(module)
    return [] if composite is None or not composite.with_children else list(module.modules())[1:]


def _one_layer(sharing: list[tuple[Owner, Kind]], owners: int) -> list[tuple[Owner, Kind]]:
    """Return the modules whose rows make the factors of a shared weight; none where their geometries do not fit."""
    # Modules of one geometry pool their rows. An embedding and the linear decoder that is tied to it are treated as the
    # embedding, as in the reference implementation: a row of the weight is a token in both, and the embedding's A, the
    # token frequencies, is exact and cheap, where the decoder's G would be vocabulary by vocabulary.
    if len(sharing) < owners:
        return []
    geometry = {(type(k), k.groups, k.inputs, k.outputs) for _, k in sharing}
    if len(geometry) == 1:
        return sharing
    embeddings = [(o, k) for o, k in sharing if isinstance(o.module, nn.Embedding)]
    rest = [o.module for o, _ in sharing if not isinstance(o.module, nn.Embedding)]
    return embeddings if all(isinstance(m, nn.Linear) for m in rest) else []


def _is_norm(module: nn.Module) -> bool:
    # Those of model libraries too (LlamaRMSNorm, T5LayerNorm), so that coverage() calls them normalisation layers.
    by_name = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    own = list(module.parameters(recurse=False))
    return isinstance(module, _NORMS) or (by_name and bool(own) and all(p.dim() == 1 for p in own))


# ---- layers inside composite modules --------------------------------------------------------------------------------


def _inner_layers(model: nn.Module, owners: Owners, reasons: dict[int, str], taken: set[int]) -> dict[str, Layer]:
    """Find the layers inside composite modules, but for weights that are ``taken`` by layers that are modules."""
    layers: dict[str, Layer] = {}
    biases: list[ParameterView] = []  # of weights that are not preconditioned
    for module_name, module in model.named_modules():
        composite, why_not = composite_of(module)
        if composite is None:
            continue
        if why_not is not None:
            for p in module.parameters(recurse=composite.with_children):
                reasons.setdefault(id(p), why_not)
            continue
        for inner in composite.layers_of(module):
            its_biases = [bias for bias in inner.biases if bias.is_there]
            if not _is_trained_alone(inner, owners, reasons, taken):
                biases += its_biases
                continue
            name = f"{module_name}.{inner.name}".lstrip(".")
            its_biases = [
                bias for bias in its_biases if (key := id(bias.parameter)) not in reasons and len(owners[key]) == 1
            ]
            inside = Inside(module, inner.name, composite.hook)
            layers[name] = Layer(name, inner.kind, inner.weight, its_biases, inner.prefix, inside=inside)
    for bias in biases:
        if len(owners[id(bias.parameter)]) == 1:
            reasons.setdefault(id(bias.parameter), "the weight of its layer is not preconditioned")
    return layers


def _is_trained_alone(inner: InnerLayer, owners: Owners, reasons: dict[int, str], taken: set[int]) -> bool:
    """Return whether a weight is trained and belongs to one module; a shared one is given its reason."""
    if not inner.weight.is_there:  # computed from other parameters (pruning, a parametrization)
        return False
    key = id(inner.weight.parameter)
    if len(owners[key]) > 1:
        reasons.setdefault(key, shared_by(owners[key]))
    return key not in reasons and key not in taken


# ---- matrices without G, for the scale-free step --------------------------------------------------------------------


def _with_full_input_factor(layers: dict[str, Layer], reasons: dict[int, str]) -> dict[str, Layer]:
    """Return the layers whose A is a full matrix, without their biases."""
    kept = {}
    for name, layer in layers.items():
        if layer.kind.diagonal_input:
            reasons.setdefault(id(layer.weight.parameter), "the input factor is diagonal")
        else:
            kept[name] = layer
            reasons.update({id(bias.parameter): "no matrix" for bias in layer.biases})
            layer.biases.clear()
    return kept


def _plain_matrices(
    model: nn.Module, entries: Sequence[Covered], owners: Owners, vectors: set[int]
) -> dict[str, PlainMatrix]:
    """Find the trained parameters that are matrices and have no factors, by name."""
    excluded = {LEFT_OUT, NOT_TRAINED, NORM}
    found = {}
    for entry, parameter in zip(entries, model.parameters(), strict=True):
        if entry.preconditioned or entry.reason in excluded or id(parameter) in vectors:
            continue
        matrices = [matrix_of(o.module, o.attribute, parameter) for o in owners[id(parameter)]]
        if matrices[0] is None or None in matrices:
            continue
        if not is_sharded(parameter) or matrices[0].of_rows(tuple(parameter.shape), 1) is not None:
            found[entry.name] = matrices[0]
    return found


def _without_g(entry: Covered, *, is_matrix: bool) -> Covered:
    rest = "orthogonalised momentum" if is_matrix else "AdamW"
    return replace(entry, factor_sizes=entry.factor_sizes and entry.factor_sizes[:1], rest=rest)
