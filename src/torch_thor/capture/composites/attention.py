"""``nn.MultiheadAttention``: four projections that it computes in one function.

They are those of query, key, value and output.

On a step that gathers statistics that function is called with its projections taken out. Query, key
and value are projected by ``F.linear`` beforehand, the function's own weights are replaced by
identity matrices (which is exact: products with 1 and sums with 0), and its result is projected
afterwards. The numbers are equal except for the order of rounding. The inputs and outputs of the
four projections are then those of ordinary linear layers, and the model is not changed.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor.capture.composites.declarations import InnerLayer
from torch_thor.capture.hooks import CompositeHook, Report
from torch_thor.curvature.kinds import ProjectionKind
from torch_thor.curvature.view import ParameterView

# The inputs and their projections, in the order of the rows of the fused weight, and the weights of
# these if they are separate.
_INPUTS = ("query", "key", "value")
_PROJECTED = ("q_proj", "k_proj", "v_proj")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_WEIGHTS = ("in_proj_weight", "out_proj_weight", *_SEPARATE)


def projections(module: nn.MultiheadAttention) -> Iterator[InnerLayer]:
    """Yield the projections of an attention's inputs and of its output.

    Those of the inputs are rows of the fused weight, or three weights.
    """
    is_fused, size = module._qkv_same_embed_dim, module.embed_dim
    for i, name in enumerate(_PROJECTED):
        rows = slice(i * size, (i + 1) * size)
        fused, separate = ("in_proj_weight", rows), (_SEPARATE[i],)
        weight = ParameterView(module, *(fused if is_fused else separate))
        bias = ParameterView(module, "in_proj_bias", rows)
        prefix = name.removesuffix("proj") if is_fused else ""
        yield InnerLayer(name, _kind(weight), weight, [bias], prefix)
    weight, bias = (ParameterView(module.out_proj, name) for name in ("weight", "bias"))
    yield InnerLayer("out_proj", _kind(weight), weight, [bias])


def _kind(weight: ParameterView) -> ProjectionKind:
    return ProjectionKind(weight.outline(), nn.MultiheadAttention.__name__)


class AttentionHook(CompositeHook):
    """The hook on an attention: reports its four projections."""

    def call(
        self, report: Report, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Replace the arguments of the attention function; call every other function as it is."""
        if func is not F.multi_head_attention_forward:
            return func(*args, **kwargs)
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        of_module = {id(parameter) for parameter in self.module.parameters()}
        if of_module.isdisjoint(id(given.get(name)) for name in _WEIGHTS):
            # of another module, or the mode of another optimizer has taken the projections out
            return func(**given)
        if given.get("use_separate_proj_weight"):
            of_inputs = [given[name] for name in _SEPARATE]
        else:
            of_inputs = given["in_proj_weight"].chunk(3)
        bias = given["in_proj_bias"]
        biases = [None] * 3 if bias is None else bias.chunk(3)
        for name, x, *layer in zip(_PROJECTED, _INPUTS, of_inputs, biases, strict=True):
            given[x] = _projected(report, name, given[x], *layer)
        out = given["out_proj_weight"], given["out_proj_bias"]
        identity = torch.eye(len(out[0]), dtype=given["query"].dtype, device=out[0].device)
        given.update(
            dict.fromkeys((*_SEPARATE, "out_proj_weight"), identity),
            use_separate_proj_weight=True,
            **dict.fromkeys(("in_proj_weight", "in_proj_bias", "out_proj_bias")),
        )
        output, attention = func(**given)
        return _projected(report, "out_proj", output, *out), attention


def _projected(report: Report, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a projection, and report it; sequences of a batch are along the first dimension."""
    y = F.linear(x, weight, bias)
    if x.dim() < 3:  # one sequence without a batch: (L, features)
        report(name, x, y)
        return y
    y = y.transpose(0, 1)
    report(name, x.transpose(0, 1), y)
    return y.transpose(0, 1)
