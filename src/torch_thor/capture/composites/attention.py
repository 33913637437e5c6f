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
from torch.overrides import TorchFunctionMode

from torch_thor.capture.composites.declarations import InnerLayer
from torch_thor.capture.composites.hook import CompositeHook, Report
from torch_thor.curvature.kinds import ProjectionKind
from torch_thor.curvature.view import ParameterView

# The projections of the inputs, in the order of the rows of the fused weight, and their weights if
# those are separate.
_INPUTS = ("q_proj", "k_proj", "v_proj")
_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


def projections(module: nn.MultiheadAttention) -> Iterator[InnerLayer]:
    """Yield the projections of an attention's inputs and of its output.

    Those of the inputs are rows of the fused weight, or three weights.
    """
    fused, size = module._qkv_same_embed_dim, module.embed_dim
    for i, name in enumerate(_INPUTS):
        rows = slice(i * size, (i + 1) * size)
        weight = (
            ParameterView(module, "in_proj_weight", rows)
            if fused
            else ParameterView(module, _SEPARATE[i])
        )
        biases = (
            [] if module.in_proj_bias is None else [ParameterView(module, "in_proj_bias", rows)]
        )
        yield InnerLayer(
            name, _kind(weight), weight, biases, name.removesuffix("proj") if fused else ""
        )
    weight = ParameterView(module.out_proj, "weight")
    biases = [] if module.out_proj.bias is None else [ParameterView(module.out_proj, "bias")]
    yield InnerLayer("out_proj", _kind(weight), weight, biases)


def _kind(weight: ParameterView) -> ProjectionKind:
    return ProjectionKind(weight.outline(), nn.MultiheadAttention.__name__)


class AttentionHook(CompositeHook):
    """The hook on an attention: reports its four projections."""

    def mode(self, report: Report) -> TorchFunctionMode:
        """Return the mode that takes the projections out of the attention function."""
        return AttentionMode(self.module, report)


class AttentionMode(TorchFunctionMode):
    """A mode in which one module's attention function runs with its projections taken out."""

    def __init__(self, module: nn.Module, report: Report) -> None:
        super().__init__()
        self._module = module
        self._report = report

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the arguments of the attention function; call every other function as it is."""
        if func is not F.multi_head_attention_forward:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(func).bind(*args, **(kwargs or {})).arguments
        own = {id(parameter) for parameter in self._module.parameters()}
        if own.isdisjoint(
            id(given.get(name)) for name in ("in_proj_weight", "out_proj_weight", *_SEPARATE)
        ):
            # of another module, or the mode of another optimizer has taken the projections out
            return func(**given)
        separate, bias = given.get("use_separate_proj_weight"), given["in_proj_bias"]
        weights = (
            [given[name] for name in _SEPARATE] if separate else given["in_proj_weight"].chunk(3)
        )
        biases = [None] * 3 if bias is None else bias.chunk(3)
        for name, argument, *layer in zip(
            _INPUTS, ("query", "key", "value"), weights, biases, strict=True
        ):
            given[argument] = self._project(name, given[argument], *layer)
        out = given["out_proj_weight"], given["out_proj_bias"]
        identity = torch.eye(len(out[0]), dtype=given["query"].dtype, device=out[0].device)
        given.update(
            dict.fromkeys((*_SEPARATE, "out_proj_weight"), identity), use_separate_proj_weight=True
        )
        given.update(in_proj_weight=None, in_proj_bias=None, out_proj_bias=None)
        output, attention = func(**given)
        return self._project("out_proj", output, *out), attention

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        if x.dim() < 3:  # one sequence without a batch: (L, features)
            self._report(name, x, y)
            return y
        y = y.transpose(0, 1)  # the function's layout is sequence first
        self._report(name, x.transpose(0, 1), y)
        return y.transpose(0, 1)
