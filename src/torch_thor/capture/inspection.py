"""Inspects a model: which layers can be preconditioned, and for every parameter, which layer does it, or why none."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from torch_thor.capture.attention import opens
from torch_thor.capture.coverage import Covered
from torch_thor.capture.recurrence import unrolls
from torch_thor.capture.selection import NOT_KEPT, SKIPPED, Selection, left_out
from torch_thor.curvature.kinds import (
    PROJECTIONS,
    Kind,
    ProjectionKind,
    RecurrentKind,
    check_weight,
    fused_experts,
    kind_of,
    parameter_names_of,
    why_not,
)
from torch_thor.curvature.matrices import PlainMatrix, matrix_of
from torch_thor.curvature.parameter_view import ParameterView

_NORM = "a normalisation layer"
NOT_TRAINED = "in no parameter group of this optimizer: not trained"

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


@dataclass
class Layer:
    """A layer that can be preconditioned.

    Args:
        name: its name: the module's, or the projection's inside an attention.
        kind: its geometry.
        weight: its weight.
        biases: its biases.
        prefix: put before the keys of its state, where several layers share a weight.
        modules: the modules whose calls give its rows, each with its own geometry.
        attention: the attention, and which of its projections this is; None for a module that is called.
        experts: the module of the experts, and the name of their weight in it.
        recurrent: the recurrent layer, and the name of this weight in it.
    """

    name: str
    kind: Kind
    weight: ParameterView
    biases: list[ParameterView] = field(default_factory=list)
    prefix: str = ""
    modules: list[tuple[nn.Module, Kind]] = field(default_factory=list)
    attention: tuple[nn.MultiheadAttention, str] | None = None
    experts: tuple[nn.Module, str] | None = None
    recurrent: tuple[nn.Module, str] | None = None

    @property
    def module(self) -> nn.Module:
        """The module that its name stands for."""
        return self.weight.module


@dataclass
class Inspection:
    """What was found of a model.

    Args:
        entries: one a parameter, in the model's order.
        layers: the layers to precondition, by name.
        matrices: parameters that are matrices and have no factors, by name; found with ``matrices_alone``.
    """

    entries: list[Covered]
    layers: dict[str, Layer]
    matrices: dict[str, PlainMatrix]


@dataclass(frozen=True)
class _Owner:
    module_name: str
    attribute: str
    module: nn.Module

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}".lstrip(".")

    @property
    def is_weight(self) -> bool:
        return self.attribute == parameter_names_of(self.module)[0]

    @property
    def bias(self) -> str:
        """The name of the module's bias."""
        return parameter_names_of(self.module)[1]


def inspect_model(
    model: nn.Module,
    trained: Iterable[Tensor],
    *,
    skip: Selection = None,
    only: Selection = None,
    matrices_alone: bool = False,
) -> Inspection:
    """Find the layers of a model, and how each of its parameters is trained.

    Args:
        model: the model.
        trained: the parameters that the optimizer has.
        skip: layers to leave out.
        only: layers to keep.
        matrices_alone: leave out what has no full factor A (embeddings and biases), and look for matrices without
            factors, as the scale-free step wants it.

    Returns:
        The layers, and an entry for each parameter.

    Raises:
        ValueError: a parameter has no shape yet (a lazy module), a pattern matches nothing, or the kind that is
            registered for a module does not fit it.
    """
    owners: defaultdict[int, list[_Owner]] = defaultdict(list)
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            owners[id(parameter)].append(_Owner(module_name, attribute, module))
    reasons = {**_computing(owners), **_untrainable(model, trained)}
    layers = _called_layers(model, owners, reasons)
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            layers.update(_attention_layers(name, module, owners, reasons))
        layers.update(_expert_layers(name, module, owners, reasons))
        if isinstance(module, nn.RNNBase | nn.RNNCellBase):
            layers.update(_recurrent_layers(name, module, owners, reasons))
    norms = {
        name: module
        for name, module in model.named_modules()
        if _is_norm(module) and any(id(p) not in reasons for p in module.parameters(recurse=False))
    }
    # norms are never preconditioned, but skip="*norm*" must not be refused as a pattern without a match
    unwanted = left_out({name: layer.module for name, layer in layers.items()} | norms, skip, only)
    for name in unwanted.keys() & layers.keys():
        reasons.setdefault(id(layers[name].weight.parameter), unwanted[name])
        del layers[name]
    # a bias is a vector, whatever its shape; that of experts is one for each of them
    vectors = {id(bias.parameter) for layer in layers.values() if layer.modules for bias in layer.biases}
    if matrices_alone:
        layers = _matrices_alone(layers, reasons)
    for name, norm in norms.items():
        reason = unwanted.get(name, _NORM)
        for p in norm.parameters(recurse=False):
            reasons.setdefault(id(p), reason)
    entries = [
        _entry(name, parameter, owners[id(parameter)], layers.values(), reasons, unwanted)
        for name, parameter in model.named_parameters()
    ]
    if not matrices_alone:
        return Inspection(entries, layers, {})
    left = {SKIPPED, NOT_KEPT, NOT_TRAINED, _NORM}
    matrices = {
        entry.name: matrix
        for entry, parameter in zip(entries, model.parameters(), strict=True)
        if not entry.preconditioned
        and entry.reason not in left
        and id(parameter) not in vectors
        and (matrix := _plain_matrix(owners[id(parameter)], parameter)) is not None
    }
    rest = [
        replace(
            entry,
            factor_sizes=entry.factor_sizes and entry.factor_sizes[:1],
            rest="orthogonalised momentum" if entry.name in matrices else "AdamW",
        )
        for entry in entries
    ]
    return Inspection(rest, layers, matrices)


def _plain_matrix(owners: Sequence[_Owner], parameter: nn.Parameter) -> PlainMatrix | None:
    found = [matrix_of(o.module, o.attribute, parameter) for o in owners]
    return None if None in found else found[0]


def _matrices_alone(layers: dict[str, Layer], reasons: dict[int, str]) -> dict[str, Layer]:
    kept = {}
    for name, layer in layers.items():
        if layer.kind.diagonal_input:
            reasons.setdefault(id(layer.weight.parameter), "the input factor is diagonal")
        else:
            kept[name] = layer
            reasons.update({id(bias.parameter): "no matrix" for bias in layer.biases})
            layer.biases.clear()
    return kept


def _untrainable(model: nn.Module, trained: Iterable[Tensor]) -> dict[int, str]:
    trained_ids = {id(p) for p in trained}
    reasons = {}
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ValueError(
                f"parameter {name!r} has no shape yet; run one batch through the lazy module before THOR is made"
            )
        if id(parameter) not in trained_ids:
            reasons[id(parameter)] = NOT_TRAINED
        elif not parameter.is_floating_point():
            reasons[id(parameter)] = f"{parameter.dtype} is not a real floating-point type"
    return reasons


def _computing(owners: Mapping[int, Sequence[_Owner]]) -> dict[int, str]:
    """Find what weights are computed from: ``weight_orig`` (pruning), ``weight_g`` and ``weight_v`` (weight_norm)."""
    reasons = {}
    for key, (owner, *_) in owners.items():
        for name, value in vars(owner.module).items():
            if isinstance(value, Tensor) and owner.attribute in (f"{name}_orig", f"{name}_g", f"{name}_v"):
                reasons[key] = f"{name!r} is computed from it (pruned, weight_norm): its gradient is not the weight's"
    return reasons


def _called_layers(model: nn.Module, owners: dict[int, list[_Owner]], reasons: dict[int, str]) -> dict[str, Layer]:
    """Find the layers that are modules, one a weight: modules that share one are one layer."""
    inside_attention = {
        id(m) for a in model.modules() if isinstance(a, nn.MultiheadAttention) for m in a.modules() if m is not a
    }
    for module in model.modules():
        check_weight(module)
    layers = {}
    for parameter in model.parameters():
        sharing = owners[id(parameter)]
        if id(parameter) in reasons or any(not o.is_weight or _is_norm(o.module) for o in sharing):
            continue
        if any(id(o.module) in inside_attention for o in sharing):
            continue
        kinds = [kind_of(o.module) for o in sharing]
        group = _one_layer([(o, k) for o, k in zip(sharing, kinds, strict=True) if k is not None], len(sharing))
        if not group:
            if len(sharing) > 1:
                reasons[id(parameter)] = f"shared by {', '.join(repr(o.name) for o in sharing)}"
            continue
        first, kind = group[0]
        own_biases = [(o, b) for o, _ in group if (b := getattr(o.module, o.bias, None)) is not None]
        if not kind.solves_biases:
            reasons.update({id(b): f"G of {kind.label} is that of its weight alone" for _, b in own_biases})
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


def _one_layer(sharing: list[tuple[_Owner, Kind]], owners: int) -> list[tuple[_Owner, Kind]]:
    """Return the modules of a weight whose rows make its factors; none where they do not fit together.

    Modules of one geometry pool their rows. An embedding and the linear decoder that is tied to it are treated as the
    embedding, as the reference implementation has it: a row of the weight is a token in both, and the embedding's A,
    the token frequencies, is exact and cheap where the decoder's G would be vocabulary by vocabulary.
    """
    if len(sharing) < owners:
        return []
    geometry = {(type(k), k.groups, k.inputs, k.outputs) for _, k in sharing}
    if len(geometry) == 1:
        return sharing
    embeddings = [(o, k) for o, k in sharing if isinstance(o.module, nn.Embedding)]
    rest = [o.module for o, _ in sharing if not isinstance(o.module, nn.Embedding)]
    return embeddings if all(isinstance(m, nn.Linear) for m in rest) else []


def _attention_layers(
    name: str, module: nn.MultiheadAttention, owners: dict[int, list[_Owner]], reasons: dict[int, str]
) -> dict[str, Layer]:
    """Find the projections of an attention: three blocks of the fused weight, or three weights; and the output's."""
    if not opens(module):
        label = type(module).__name__
        for p in module.parameters():
            reasons.setdefault(id(p), f"{label} overrides the forward of MultiheadAttention")
        return {}
    found = {}
    size = module.embed_dim
    for i, projection in enumerate(PROJECTIONS):
        rows = slice(i * size, (i + 1) * size)
        if module._qkv_same_embed_dim:
            weight, prefix = ParameterView(module, "in_proj_weight", rows), f"{projection}_"
        else:
            weight, prefix = ParameterView(module, f"{projection}_proj_weight"), ""
        biases = [] if module.in_proj_bias is None else [ParameterView(module, "in_proj_bias", rows)]
        found[f"{projection}_proj"] = (weight, biases, prefix, projection)
    out = module.out_proj
    found["out_proj"] = (
        ParameterView(out, "weight"),
        [] if out.bias is None else [ParameterView(out, "bias")],
        "",
        "out",
    )
    layers = {}
    for part, (weight, biases, prefix, projection) in found.items():
        parameter = weight.parameter
        if len(owners[id(parameter)]) > 1:
            shared = ", ".join(repr(o.name) for o in owners[id(parameter)])
            reasons.setdefault(id(parameter), f"shared by {shared}")
        if id(parameter) not in reasons:
            full_name = f"{name}.{part}".lstrip(".")
            kept = [b for b in biases if id(b.parameter) not in reasons and len(owners[id(b.parameter)]) == 1]
            kind = ProjectionKind(weight.of(parameter))
            layers[full_name] = Layer(full_name, kind, weight, kept, prefix, attention=(module, projection))
    return layers


def _expert_layers(
    name: str, module: nn.Module, owners: dict[int, list[_Owner]], reasons: dict[int, str]
) -> dict[str, Layer]:
    """Find the 3-d weights that hold a matrix for each expert, with their biases ``(E, out)``."""
    layers = {}
    for attribute, kind in fused_experts(module).items():
        weight = ParameterView(module, attribute)
        if id(weight.parameter) in reasons or len(owners[id(weight.parameter)]) > 1:
            continue
        bias = module._parameters.get(f"{attribute}_bias")
        is_theirs = bias is not None and bias.shape == (kind.groups, kind.outputs)
        biases = [ParameterView(module, f"{attribute}_bias")] if is_theirs and id(bias) not in reasons else []
        full_name = f"{name}.{attribute}".lstrip(".")
        layers[full_name] = Layer(full_name, kind, weight, biases, experts=(module, attribute))
    return layers


def _recurrent_layers(
    name: str, module: nn.Module, owners: dict[int, list[_Owner]], reasons: dict[int, str]
) -> dict[str, Layer]:
    """Find the projections of a recurrent layer, each with its bias."""
    label = type(module).__name__
    if not unrolls(module):
        for p in module.parameters(recurse=False):
            reasons.setdefault(id(p), f"{label} overrides the forward of a recurrent layer")
        return {}
    layers = {}
    for attribute, parameter in module.named_parameters(recurse=False):
        alone = parameter.dim() == 2 and len(owners[id(parameter)]) == 1 and id(parameter) not in reasons
        if not attribute.startswith("weight_") or not alone:
            continue
        beside = attribute.replace("weight_", "bias_", 1)
        bias = module._parameters.get(beside)
        is_own = bias is not None and id(bias) not in reasons and len(owners[id(bias)]) == 1
        full_name = f"{name}.{attribute}".lstrip(".")
        layers[full_name] = Layer(
            full_name,
            RecurrentKind(parameter, label),
            ParameterView(module, attribute),
            [ParameterView(module, beside)] if is_own else [],
            recurrent=(module, attribute),
        )
    return layers


def _is_norm(module: nn.Module) -> bool:
    # the model libraries' own normalisations too (LlamaRMSNorm, T5LayerNorm): coverage() names them as what they are
    by_name = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    own = list(module.parameters(recurse=False))
    return isinstance(module, _NORMS) or (by_name and bool(own) and all(p.dim() == 1 for p in own))


def _entry(
    name: str,
    parameter: nn.Parameter,
    owners: Sequence[_Owner],
    layers: Iterable[Layer],
    reasons: dict[int, str],
    unwanted: dict[str, str],
) -> Covered:
    shape, owner = tuple(parameter.shape), owners[0]
    label = type(owner.module).__name__
    weighted = [layer for layer in layers if layer.weight.parameter is parameter]
    biased = [layer for layer in layers if any(b.parameter is parameter for b in layer.biases)]
    others = [o.name for o in owners[1:]]
    notes = [f"shared with {', '.join(repr(o) for o in others)}"] if others else []
    if isinstance(owner.module, nn.MultiheadAttention):
        parts = [f"{owner.module_name}.{part}_proj".lstrip(".") for part in PROJECTIONS]
        notes += [f"plain momentum for {part!r}: {unwanted[part]}" for part in parts if part in unwanted]
    note = "; ".join(notes) or None
    if weighted:
        kind = weighted[0].kind
        return Covered(name, shape, kind.label, (kind.inputs, kind.outputs), kind.groups * len(weighted), note=note)
    if biased:
        kind = biased[0].kind
        return Covered(name, shape, kind.label, (kind.outputs,), kind.groups * len(biased), note=note)
    reason = reasons.get(id(parameter)) or unwanted.get(owner.module_name)
    weight = getattr(owner.module, parameter_names_of(owner.module)[0], None)
    tied = [layer.name for layer in layers if owner.attribute == owner.bias and layer.weight.parameter is weight]
    if tied and not others:
        reason = reason or f"the weight of its layer is preconditioned as that of {tied[0]!r}, which has another G"
    reason = reason or _why_plain(owner, shared=len(owners) > 1)
    return Covered(name, shape, label, reason=reason, trained=reason != NOT_TRAINED)


def _why_plain(owner: _Owner, *, shared: bool) -> str:
    module = owner.module
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return "the weight is computed from it (a parametrization): its gradient is not the weight's"
    if shared:
        return "shared by several modules"
    reason = why_not(module)
    if reason is not None and not isinstance(module, nn.MultiheadAttention):
        return reason
    if owner.attribute == owner.bias:
        return "the weight of its layer is not preconditioned"
    return f"not the weight or bias of {type(module).__name__}"
