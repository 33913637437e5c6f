"""Matrices that are orthogonalised: those without factors, and those that are parts of a weight.

Some weights compute several projections at once: those that ``torch_thor.split_rows`` declares, and
those of known classes. Modules are known by their class and never by a name, because in some
classes heads take turns in the rows. A name makes no more than a hint.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from torch_thor.capture import reasons
from torch_thor.capture.coverage import Covered
from torch_thor.capture.inspection import Inspection
from torch_thor.capture.layers import Owner
from torch_thor.capture.patterns import some
from torch_thor.capture.sharding import is_sharded
from torch_thor.curvature.geometry import Geometry, matrix_of
from torch_thor.curvature.kinds import LinearKind, owner_of_forward
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.row_splits import Declared, RowSplit, geometry_of, sizes_of

# The reasons of parameters that are no matrices, or are not trained as such.
_NO_MATRICES = (reasons.LEFT_OUT, reasons.NOT_TRAINED, reasons.NORM, reasons.NO_MATRIX)


def plain_matrices(model: nn.Module, inspection: Inspection) -> dict[str, Geometry]:
    """Return the trained parameters that are matrices without factors, by name."""
    matrices = {}
    weights = {id(layer.weight.parameter) for layer in inspection.layers.values()}
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if key in weights or inspection.reasons[key] in _NO_MATRICES:
            continue
        shapes = [matrix_of(o.module, o.attribute, parameter) for o in inspection.owners[key]]
        first = shapes[0]
        if first is None or None in shapes:
            continue
        if not is_sharded(parameter) or first.of_rows(len(parameter), 1) is not None:
            matrices[name] = first
    return matrices


# ---- weights that are several projections --------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """The fused layer in modules of a class."""

    layer: str  # its name in the module
    projections: Callable[[Any], int] = lambda module: 3
    turns: Callable[[Any], int] = lambda module: 1  # as in RowSplit


# the query of a cross-attention has a weight of its own
_GPT2 = Known("c_attn", lambda module: 2 if module.is_cross_attention else 3)
_TIMM = Known("qkv")
_CLASSES: Mapping[str, Mapping[str, Known]] = {
    "timm.layers": {"Attention": _TIMM, "AttentionRope": _TIMM},
    "timm.models.vision_transformer": {"Attention": _TIMM},  # of timm before 1.0.17
    "timm.models.beit": {"Attention": _TIMM},
    "timm.models.eva": {"EvaAttention": _TIMM},
    "timm.models.swin_transformer": {"WindowAttention": _TIMM},
    "timm.models.swin_transformer_v2": {"WindowAttention": _TIMM},
    "transformers.models.gpt2.modeling_gpt2": {"GPT2Attention": _GPT2},
    "transformers.models.imagegpt.modeling_imagegpt": {"ImageGPTAttention": _GPT2},
    "transformers.models.decision_transformer.modeling_decision_transformer": {
        "DecisionTransformerGPT2Attention": _GPT2
    },
    "transformers.models.openai.modeling_openai": {"Attention": Known("c_attn")},
    "transformers.models.mpt.modeling_mpt": {"MptAttention": Known("Wqkv")},
    "transformers.models.gpt_neox.modeling_gpt_neox": {
        "GPTNeoXAttention": Known(
            "query_key_value", turns=lambda module: module.config.num_attention_heads
        )
    },
    "transformers.models.bloom.modeling_bloom": {
        "BloomAttention": Known("query_key_value", turns=lambda module: module.num_heads)
    },
}
_NAMES = ("qkv", "c_attn", "in_proj")  # of layers that may compute query, key and value


@dataclass(frozen=True)
class Fused:
    """A layer that computes several projections."""

    name: str
    split: RowSplit
    is_declared: bool


def fused_layers(
    model: nn.Module, declared: Mapping[nn.Module, Declared | None]
) -> tuple[dict[nn.Module, Fused], list[str]]:
    """Return the fused layers of a model, and why declarations of others do not hold.

    ``declared``: what ``split_rows`` has declared of each module, which counts more than its class.
    """
    fused, unfit = {}, []
    known = dict(_known_layers(model))
    for name, module in model.named_modules():
        sizes = declared.get(module)
        if sizes is None and module not in known:
            continue
        geometry = geometry_of(module)
        if geometry is None:
            unfit.append(f"split_rows of layer {name!r}: its weight must be one matrix; {_UNDO}")
            continue
        rows = None if sizes is None else sizes_of(sizes, geometry.outputs)
        if sizes is None:
            fused[module] = Fused(name, known[module], is_declared=False)
        elif rows is not None:
            fused[module] = Fused(name, RowSplit(rows), is_declared=True)
        else:
            rule, remedy = _OF_SIZES if isinstance(sizes, tuple) else _OF_A_NUMBER
            unfit.append(
                f"split_rows of layer {name!r}: {sizes} must {rule} its {geometry.outputs} "
                f"outputs; {remedy}"
            )
    return fused, unfit


_UNDO = "undo it with split_rows(layer, 1)"
# the rule of a declaration, and what to do
_OF_SIZES = "add up to", "correct the sizes"
_OF_A_NUMBER = "divide", "give the size of each"


def _known_layers(model: nn.Module) -> Iterator[tuple[nn.Module, RowSplit]]:
    """Yield the fused layers of modules of known classes, and their projections."""
    # whoever has such a module has imported its class
    classes: dict[Any, Known] = {
        getattr(sys.modules.get(of_python), name, None): known
        for of_python, by_name in _CLASSES.items()
        for name, known in by_name.items()
    }
    for module in model.modules():
        known = classes.get(owner_of_forward(module))
        layer = None if known is None else getattr(module, known.layer, None)
        layer = getattr(layer, "base_layer", layer)  # inside an adapter
        if known is None or not isinstance(layer, nn.Module):
            continue
        geometry = geometry_of(layer)
        if geometry is None:
            continue
        sizes, turns = sizes_of(known.projections(module), geometry.outputs), known.turns(module)
        if sizes is not None and sizes[0] % turns == 0:
            yield layer, RowSplit(sizes, turns)


def modules_by_weight(
    model: nn.Module, owners: Mapping[int, Sequence[Owner]]
) -> dict[int, list[nn.Module]]:
    """Return the modules that have each parameter, or compute their weight from it, by its id."""
    parents = {
        computed: module
        for module in model.modules()
        if parametrize.is_parametrized(module)
        for computed in module.parametrizations.values()  # type: ignore[operator]
    }
    return {
        key: [parents.get(owner.module, owner.module) for owner in of_parameter]
        for key, of_parameter in owners.items()
    }


def row_splits_of(
    fused: Mapping[nn.Module, Fused],
    modules: Mapping[int, Sequence[nn.Module]],
    matrices: Mapping[int, Geometry],
) -> dict[int, RowSplit]:
    """Return the projections of matrices, by the ids of the parameters.

    Args:
        fused: the fused layers.
        modules: the modules of each parameter, by its id.
        matrices: the parameters that are orthogonalised, by their ids.

    Raises:
        ValueError: layers that share a weight declare other projections.
    """
    splits = {}
    for key, geometry in matrices.items():
        sharing = [fused[module] for module in modules[key] if module in fused]
        layers = [layer for layer in sharing if sum(layer.split.sizes) == geometry.outputs]
        layers.sort(key=lambda layer: not layer.is_declared)
        for layer in layers:
            if layer.is_declared and layer.split != layers[0].split:
                raise ValueError(
                    f"split_rows of layer {layer.name!r}: {layer.split.sizes} must be those of "
                    f"layer {layers[0].name!r}, {layers[0].split.sizes}, which shares its weight; "
                    "declare the same of both"
                )
        if layers and len(layers[0].split.sizes) > 1:
            splits[key] = layers[0].split
    return splits


def check_are_matrices(
    fused: Mapping[nn.Module, Fused],
    modules: Mapping[int, Sequence[nn.Module]],
    entries: Mapping[int, Covered],
) -> None:
    """Check that no weight with declared projections is trained as no matrix."""
    # ``entries`` are those of the parameters that are trained as no matrices, by their ids.
    for key, entry in entries.items():
        for layer in (fused[module] for module in modules[key] if module in fused):
            # a bias, or a length of weight_norm, has one number for each output
            is_weight = math.prod(entry.shape) > sum(layer.split.sizes)
            if layer.is_declared and len(layer.split.sizes) > 1 and is_weight:
                raise ValueError(
                    f"split_rows of layer {layer.name!r}: its weight {entry.name!r} must be "
                    f"trained as a matrix, and {entry.rest} trains it: {entry.reason}; {_UNDO}"
                )


def hints(
    layers: Iterable[LayerCurvature],
    declared: Mapping[nn.Module, Declared | None],
    splits: Mapping[int, RowSplit],
) -> list[str]:
    """Return lines about linear layers that may be query, key and value in one.

    Args:
        layers: the layers of the model.
        declared: what ``split_rows`` has declared of each module.
        splits: the projections that are known, by the ids of the weights.
    """
    alike: defaultdict[Declared, list[str]] = defaultdict(list)
    for layer in layers:
        is_told = declared.get(layer.weight_view.module) is not None or id(layer.weight) in splits
        name = layer.name.rpartition(".")[2].lower()
        is_named = any(part in name for part in _NAMES) and isinstance(layer.kind, LinearKind)
        sizes = _looks_fused(layer.kind.outputs, layer.kind.inputs)
        if is_named and sizes is not None and layer.weight.requires_grad and not is_told:
            alike[sizes].append(repr(layer.name))
    return [
        f"{some(names)}: by name and size query, key and value in one weight. If its outputs are "
        f"in this order, call torch_thor.split_rows(layer, {sizes}) before the optimizer is made: "
        "it then orthogonalises them apart. split_rows(layer, 1) says that it is one matrix"
        for sizes, names in alike.items()
    ]


def _looks_fused(outputs: int, inputs: int) -> Declared | None:
    """Return the sizes of query, key and value that would have these outputs together."""
    if outputs == 3 * inputs:
        return 3
    grouped, rest = divmod(outputs - inputs, 2)  # of grouped queries
    return (inputs, grouped, grouped) if grouped > 0 == rest == inputs % grouped else None
