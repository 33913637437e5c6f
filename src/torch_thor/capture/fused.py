"""Fused weights: layers that compute several projections at once, which ThorMuon takes apart.

What a user declares is kept in the module itself, so it is copied, saved and divided with it.
"""

import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from torch_thor.curvature.kinds import Kind, class_name_of, kind_of
from torch_thor.curvature.matrices import PlainMatrix, matrix_of
from torch_thor.plain import plain

Parts = int | tuple[int, ...]  # a number of equal projections, or the outputs of each

_ATTRIBUTE = "_torch_thor_split_rows"
# the modules of living optimizers, with what knows them
_IN_USE: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]]" = weakref.WeakKeyDictionary()

# Classes whose layer computes query, key and value one after the other: its attribute.
_THIRDS = {
    "timm.layers.attention.Attention": "qkv",
    "timm.layers.attention.AttentionRope": "qkv",
    "timm.models.vision_transformer.Attention": "qkv",
    "timm.models.vision_transformer_relpos.RelPosAttention": "qkv",
    "timm.models.beit.Attention": "qkv",
    "timm.models.eva.EvaAttention": "qkv",
    "timm.models.swin_transformer.WindowAttention": "qkv",
    "timm.models.swin_transformer_v2.WindowAttention": "qkv",
    "transformers.models.mpt.modeling_mpt.MptAttention": "Wqkv",
    "transformers.models.openai.modeling_openai.Attention": "c_attn",
}
# The same, but key and value alone in attention to another sequence.
_THIRDS_OR_HALVES = {
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": "c_attn",
    "transformers.models.imagegpt.modeling_imagegpt.ImageGPTAttention": "c_attn",
    "transformers.models.decision_transformer.modeling_decision_transformer."
    "DecisionTransformerGPT2Attention": "c_attn",
}
# Classes whose rows are in the order of the heads: those of a projection do not adjoin.
_INTERLEAVED = {
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention": "query_key_value",
    "transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": (
        "query_key_value"
    ),
    "transformers.models.bloom.modeling_bloom.BloomAttention": "query_key_value",
    "transformers.models.falcon.modeling_falcon.FalconAttention": "query_key_value",
    "transformers.models.persimmon.modeling_persimmon.PersimmonAttention": "query_key_value",
    "transformers.models.codegen.modeling_codegen.CodeGenAttention": "qkv_proj",
    "transformers.models.gpt_bigcode.modeling_gpt_bigcode.GPTBigCodeAttention": "c_attn",
}
_TELLING_NAMES = ("qkv", "c_attn", "in_proj", "query_key_value")


def split_rows(module: nn.Module, sizes: int | Sequence[int]) -> None:
    """Declare that a layer computes several projections at once.

    ThorMuon then orthogonalises them apart, as those of ``torch.nn.MultiheadAttention`` and of the
    attention of GPT-2 in transformers and of vision transformers in timm, which it knows.

    ``split_rows(block.attention.qkv, 3)`` for the query, key and value of a fused linear layer. It
    holds for optimizers that are made afterwards, and stays with the module: when it is copied,
    pickled, compiled, or divided among processes.

    Args:
        module: a layer whose weight is one matrix: a linear layer, a convolution without groups.
        sizes: the numbers of outputs of the projections, in their order; or a number of projections
            of the same size. 1: one matrix, also where the class is known to be fused.

    Raises:
        ValueError: the sizes are no positive whole numbers, or the weight of the layer is not one
            matrix. Where they do not add up to the layer's outputs, the next optimizer that is made
            raises it.
        TypeError: it is no module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"split_rows({type(module).__name__}): must be a layer, such as model.attention.qkv"
        )
    found = plain(sizes)
    numbers = found if isinstance(found, list | tuple) else [found]
    if not numbers or not all(type(size) is int and size > 0 for size in numbers):
        raise ValueError(
            f"sizes={sizes!r}: must be whole numbers ≥ 1, the outputs of each projection, or a "
            "number of equal ones; give (d, d, d), or 3"
        )
    if (why := _why_not(module)) is not None:
        raise ValueError(
            f"split_rows of a {class_name_of(module)}: must be a layer whose weight is one matrix, "
            f"a linear layer or a convolution without groups; {why}"
        )
    parts = found if isinstance(found, int) else tuple(found)
    user = _IN_USE.get(module)
    if user is not None and user() is not None and parts != getattr(module, _ATTRIBUTE, None):
        warnings.warn(
            f"split_rows({class_name_of(module)}, {sizes!r}) after an optimizer was made with this "
            "layer: that one goes on without it, so that nothing changes between two steps; "
            "declare it first, then make the optimizer",
            UserWarning,
            stacklevel=2,
        )
    setattr(module, _ATTRIBUTE, parts)


def _why_not(module: nn.Module) -> str | None:
    """Return why the weight of a module is not one matrix."""
    weight: Any = module._parameters.get("weight")
    if isinstance(weight, UninitializedParameter):
        return None
    kind = kind_of(module)
    if kind is None and weight is not None:
        matrix = matrix_of(module, "weight", weight)
        return "its weight is no matrix" if matrix is None else _why_not_one(matrix)
    if kind is None:
        return "it has no weight of its own: name the layer inside it"
    return "its weight is a table" if kind.diagonal_input else _why_not_one(kind)


def _why_not_one(kind: Kind | PlainMatrix) -> str | None:
    return f"it has {kind.groups} matrices" if kind.groups > 1 else None


def splits_of(
    model: nn.Module, kinds: Mapping[int, Kind | PlainMatrix], user: object
) -> dict[int, tuple[int, ...]]:
    """Return the outputs of each projection of the fused weights of a model, by ``id``.

    ``kinds`` has the weights that are matrices; ``user`` is what will use them.

    Raises:
        ValueError: what was declared of a layer does not fit it.
    """
    found: dict[int, tuple[int, ...]] = {}
    known = _known_parts(model)
    for name, module in model.named_modules():
        weight, parts = module._parameters.get("weight"), getattr(module, _ATTRIBUTE, None)
        kind = kinds.get(id(weight))
        if parts is not None and weight is None:
            raise ValueError(
                f"split_rows of layer {name!r}: its weight is computed from other parameters (a "
                "parametrization, weight_norm, pruning), which are no projections; leave one out"
            )
        if kind is None:
            continue
        _IN_USE[module] = weakref.ref(user)
        if parts is None:
            parts = known.get(module)
        if parts is None:
            continue
        sizes = (kind.outputs // parts,) * parts if isinstance(parts, int) else parts
        if sum(sizes) != kind.outputs or 0 in sizes:
            raise ValueError(
                f"split_rows of layer {name!r}: {parts!r} must "
                + ("divide" if isinstance(parts, int) else "add up to")
                + f" its {kind.outputs} outputs; correct the sizes"
            )
        if len(sizes) > 1 and found.setdefault(id(weight), sizes) != sizes:
            raise ValueError(
                f"split_rows of layer {name!r}: {sizes} must be {found[id(weight)]}, which another "
                "layer with the same weight has; give both the same sizes"
            )
    return found


def _fused_layers(
    model: nn.Module, table: Mapping[str, str]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield modules whose class, or one that it is derived from, is in a table, and their layer."""
    for module in model.modules():
        for owner in type(module).__mro__:
            attribute = table.get(f"{owner.__module__}.{owner.__qualname__}")
            layer = module._modules.get(attribute or "")
            if layer is not None:
                yield module, layer
                break


def _known_parts(model: nn.Module) -> dict[nn.Module, Parts]:
    """Return the parts of layers whose class is known to fuse them."""
    found: dict[nn.Module, Parts] = {layer: 3 for _, layer in _fused_layers(model, _THIRDS)}
    for module, layer in _fused_layers(model, _THIRDS_OR_HALVES):
        found[layer] = 2 if getattr(module, "is_cross_attention", False) else 3
    return found


def hints(model: nn.Module) -> dict[str, str]:
    """Return what to say of weights that look fused and are one matrix, by their names."""
    interleaved = {layer for _, layer in _fused_layers(model, _INTERLEAVED)}
    known, found = _known_parts(model), {}
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None or module in known or hasattr(module, _ATTRIBUTE):
            continue
        if module in interleaved:
            found[f"{name}.weight"] = (
                "one matrix: its class has query, key and value in turn for each head, so their "
                "rows do not adjoin, and split_rows cannot take them apart"
            )
        elif (parts := _looks_fused(name, module, weight)) is not None:
            found[f"{name}.weight"] = (
                f"one matrix: if it computes query, key and value, declare "
                f"torch_thor.split_rows(model.{name}, {parts}) before the optimizer is made"
            )
    return found


def _looks_fused(name: str, module: nn.Module, weight: Tensor) -> Parts | None:
    """Return the parts that the name and the sizes of a layer suggest."""
    kind, last = kind_of(module), name.rpartition(".")[2].lower()
    if kind is None or kind.groups > 1 or not any(part in last for part in _TELLING_NAMES):
        return None
    rest = (kind.outputs - kind.inputs) // 2  # of key and of value
    if kind.outputs == 3 * kind.inputs:
        return 3
    if weight.dim() == 2 and kind.outputs == kind.inputs + 2 * rest and rest > 0:
        return (kind.inputs, rest, rest) if kind.inputs % rest == 0 else None
    return None
