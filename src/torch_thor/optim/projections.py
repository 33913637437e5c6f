"""Matrices that are orthogonalised: those without factors, and those that are parts of a weight.

Some weights compute several projections at once: those of known classes, and those that the option
``row_splits`` of ThorMuon names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture import reasons
from torch_thor.capture.inspection import Inspection, Owner
from torch_thor.capture.patterns import selected
from torch_thor.capture.sharding import is_sharded
from torch_thor.curvature.geometry import Geometry, matrix_of
from torch_thor.curvature.kinds import owner_of_forward

# The reasons of parameters that are no matrices, or are not trained as such.
_NO_MATRICES = (reasons.LEFT_OUT, reasons.NOT_TRAINED, reasons.NORM, reasons.NO_MATRIX)

# From patterns of the names of layers to the number of equal projections, or the sizes of each.
RowSplits = Mapping[str, int | Sequence[int]] | None


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
class RowSplit:
    """The rows of a weight that belong to each of several projections."""

    sizes: tuple[int, ...]  # the numbers of rows of the projections
    # 1: all rows of the first, then all of the next; n: they take turns n times, as in each head
    turns: int = 1

    def rows(self) -> list[Tensor]:
        """Return the indices of the rows of each projection, in increasing order."""
        by_turn = torch.arange(sum(self.sizes), device="cpu").view(self.turns, -1)
        of_projections = by_turn.split([size // self.turns for size in self.sizes], dim=1)
        return [rows.flatten() for rows in of_projections]


# By module and class whose forward is run: the name of the fused layer in it, and what returns how
# often its projections take turns in the rows; None if they follow each other.
_KNOWN: Mapping[str, tuple[str, Callable[[Any], int] | None]] = {
    "timm.layers.attention.Attention": ("qkv", None),
    "timm.layers.attention.AttentionRope": ("qkv", None),
    "timm.models.vision_transformer.Attention": ("qkv", None),  # of timm before 1.0.17
    "timm.models.beit.Attention": ("qkv", None),
    "timm.models.eva.EvaAttention": ("qkv", None),
    "timm.models.swin_transformer.WindowAttention": ("qkv", None),
    "timm.models.swin_transformer_v2.WindowAttention": ("qkv", None),
    "transformers.models.gpt2.modeling_gpt2.GPT2Attention": ("c_attn", None),
    "transformers.models.imagegpt.modeling_imagegpt.ImageGPTAttention": ("c_attn", None),
    "transformers.models.decision_transformer.modeling_decision_transformer."
    "DecisionTransformerGPT2Attention": ("c_attn", None),
    "transformers.models.openai.modeling_openai.Attention": ("c_attn", None),
    "transformers.models.mpt.modeling_mpt.MptAttention": ("Wqkv", None),
    "transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention": (
        "query_key_value",
        lambda module: module.config.num_attention_heads,
    ),
    "transformers.models.bloom.modeling_bloom.BloomAttention": (
        "query_key_value",
        lambda module: module.num_heads,
    ),
}


def row_splits_of(
    model: nn.Module,
    chosen: RowSplits,
    matrices: Mapping[int, Geometry],
    owners: Mapping[int, Sequence[Owner]],
) -> dict[int, RowSplit]:
    """Return the projections of weights that have several, by the ids of the parameters.

    Args:
        model: the model.
        chosen: the option ``row_splits``.
        matrices: the parameters that are orthogonalised, by their ids.
        owners: the places of each parameter, by its id.

    Raises:
        ValueError: a pattern matches no layer with one matrix, or sizes do not fit its outputs.
    """
    layers = {  # a layer whose weight is computed by a parametrization has that inside
        owner.module_name.partition(".parametrizations.")[0]: key
        for key, geometry in matrices.items()
        if geometry.groups == 1 and geometry.converter is None
        for owner in owners[key]
    }
    splits = {
        layers[name]: split
        for name, split in _known_layers(model)
        if name in layers and sum(split.sizes) == matrices[layers[name]].outputs
    }
    for pattern, sizes in (chosen or {}).items():
        for name in selected("row_splits", [pattern], layers, "layer"):
            outputs = matrices[layers[name]].outputs
            equal = outputs // sizes if isinstance(sizes, int) and sizes > 0 else 0
            each = (equal,) * sizes if isinstance(sizes, int) else tuple(sizes)
            if sum(each) != outputs or min(each, default=0) < 1:
                raise ValueError(
                    f"row_splits={{{pattern!r}: {sizes!r}}}: the sizes must add up to the "
                    f"{outputs} outputs of layer {name!r}, and a number must divide them"
                )
            splits[layers[name]] = RowSplit(each)
    return {key: split for key, split in splits.items() if len(split.sizes) > 1}


def _known_layers(model: nn.Module) -> Iterator[tuple[str, RowSplit]]:
    """Yield the names of the fused layers of modules of known classes, and their projections."""
    for name, module in model.named_modules():
        owner = owner_of_forward(module)
        known = f"{owner.__module__}.{owner.__name__}"
        attribute, turns_of = _KNOWN.get(known, ("", None))
        layer = getattr(module, attribute, None) if attribute else None
        inside = f"{attribute}.base_layer" if hasattr(layer, "base_layer") else attribute
        weight = getattr(getattr(layer, "base_layer", layer), "weight", None)
        if not isinstance(weight, Tensor):
            continue
        # the query of a cross-attention has a weight of its own
        count = 2 if getattr(module, "is_cross_attention", False) else 3
        turns = 1 if turns_of is None else turns_of(module)
        # the weight has the outputs first, or last where a layer of transformers is a Conv1D
        outputs = weight.shape[-1] if attribute == "c_attn" else weight.shape[0]
        if outputs % count == 0 and outputs // count % turns == 0:
            yield f"{name}.{inside}".lstrip("."), RowSplit((outputs // count,) * count, turns)
