"""``nn.MultiheadAttention``: four projections (query, key, value, output) that it computes in one function.

On a step that gathers statistics that function is called with its projections taken out. Query, key and value are
projected by ``F.linear`` beforehand, the function's own weights are replaced by identity matrices (which is exact:
products with 1 and sums with 0), and its result is projected afterwards. The numbers are equal except for the order of
rounding. The inputs and outputs of the four projections are then those of ordinary linear layers, and the model is not
changed.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torch_thor.capture.composites.hook import CompositeHook, Report
from torch_thor.capture.composites.registry import Composite, InnerLayer
from torch_thor.capture.watcher import first_argument
from torch_thor.curvature.kinds import ProjectionKind
from torch_thor.curvature.parameter_view import ParameterView

# The projections of the inputs, in the order of the rows of the fused weight.
_INPUTS = ("q_proj", "k_proj", "v_proj")
_OUTPUT = "out_proj"

# The names of the positional parameters of F.multi_head_attention_forward.
_POSITIONS = (
    "query",
    "key",
    "value",
    "embed_dim_to_check",
    "num_heads",
    "in_proj_weight",
    "in_proj_bias",
    "bias_k",
    "bias_v",
    "add_zero_attn",
    "dropout_p",
    "out_proj_weight",
    "out_proj_bias",
)

# An attribute of the identity matrices, by which an outer mode knows that the projections have been taken out.
_OPENED = "_torch_thor_opened"


def projections(module: nn.MultiheadAttention) -> Iterator[InnerLayer]:
    """Yield the projections of an attention: rows of the fused weight, or three weights; and that of the output."""
    size = module.embed_dim
    for i, name in enumerate(_INPUTS):
        rows = slice(i * size, (i + 1) * size)
        biases = [] if module.in_proj_bias is None else [ParameterView(module, "in_proj_bias", rows)]
        if module._qkv_same_embed_dim:
            yield _projection(name, ParameterView(module, "in_proj_weight", rows), biases, name.removesuffix("proj"))
        else:
            yield _projection(name, ParameterView(module, f"{name}_weight"), biases)
    out = module.out_proj
    yield _projection(_OUTPUT, ParameterView(out, "weight"), [] if out.bias is None else [ParameterView(out, "bias")])


def _projection(name: str, weight: ParameterView, biases: list[ParameterView], prefix: str = "") -> InnerLayer:
    return InnerLayer(name, ProjectionKind(weight.outline(), nn.MultiheadAttention.__name__), weight, biases, prefix)


class AttentionHook(CompositeHook):
    """The hook on an attention: reports its four projections."""

    def mode(self, report: Report) -> TorchFunctionMode:
        """Return the mode that takes the projections out of the attention function."""
        return AttentionMode(report)

    def count(self, report: Report, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Report the query, batch first, for every projection."""
        query = first_argument(self.module, args, kwargs)
        batch_first = query if self.module.batch_first or query.dim() < 3 else query.transpose(0, 1)
        for name in self.by_name:
            report(name, batch_first, output[0])


ATTENTION = Composite(projections, AttentionHook, with_children=True)


class AttentionMode(TorchFunctionMode):
    """While it is active, the attention function runs with its projections taken out."""

    def __init__(self, report: Callable[[str, Tensor, Tensor], None]) -> None:
        super().__init__()
        self._report = report
        # One forward calls the function once. A mode that an interrupt left active must not see another module's call.
        self._spent = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the arguments of the attention function; call every other function as it is."""
        if func is not F.multi_head_attention_forward or self._spent:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(_POSITIONS, args, strict=False)), **(kwargs or {})}
        if getattr(given["out_proj_weight"], _OPENED, False):  # the mode of an inner attention has done it
            return func(*args, **(kwargs or {}))
        self._spent = True
        weights, biases = _weights(given)
        for name, argument, weight, bias in zip(_INPUTS, ("query", "key", "value"), weights, biases, strict=True):
            given[argument] = self._project(name, given[argument], weight, bias)
        out_weight, out_bias = given["out_proj_weight"], given["out_proj_bias"]
        identity = torch.eye(len(out_weight), dtype=given["query"].dtype, device=out_weight.device)
        setattr(identity, _OPENED, True)
        given.update(in_proj_weight=None, in_proj_bias=None, use_separate_proj_weight=True)
        given.update(q_proj_weight=identity, k_proj_weight=identity, v_proj_weight=identity)
        given.update(out_proj_weight=identity, out_proj_bias=None)
        output, attention = func(**given)
        return self._project(_OUTPUT, output, out_weight, out_bias), attention

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        if x.dim() < 3:  # one sequence without a batch: (L, features)
            self._report(name, x, y)
            return y
        y = y.transpose(0, 1)  # the function's layout is sequence first
        self._report(name, x.transpose(0, 1), y)
        return y.transpose(0, 1)


def _weights(given: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the weights and the biases of the projections of query, key and value."""
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{name}_weight"] for name in _INPUTS]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    bias = given["in_proj_bias"]
    return weights, [None] * 3 if bias is None else list(bias.chunk(3))
