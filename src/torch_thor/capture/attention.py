"""Makes the projections of ``nn.MultiheadAttention`` visible, which it computes in one function without a module.

On a refresh step, and only then, that function is called with its four projections taken out: query, key and value are
projected by ``F.linear`` beforehand, its own weights are replaced by identities (exact: products with 1 and sums with
0), and its result is projected afterwards. The numbers are the same up to the order of rounding. The inputs and outputs
of the four projections are then those of ordinary linear layers, and the model is not changed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from torch_thor.curvature.kinds import PROJECTIONS

Watch = Callable[[str, Tensor, Tensor], None]

# The parameters of F.multi_head_attention_forward that come by position, in its order.
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


_OPENED = "_torch_thor_opened"


class OpenAttention(TorchFunctionMode):
    """While it is active, the attention function runs with its projections outside.

    Args:
        watch: called with the projection (``"q"``, ``"k"``, ``"v"``, ``"out"``), its input and its output, both
            batch first: ``(N, L, features)``.
    """

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._spent = False  # one forward calls the function once; what an interrupt left behind must see no other's

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Replace the attention function's arguments; leave every other function alone.

        Args:
            func: the function.
            types: unused.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            Its result.
        """
        if func is not F.multi_head_attention_forward or self._spent:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(_POSITIONS, args, strict=False)), **(kwargs or {})}
        if getattr(given["out_proj_weight"], _OPENED, False):  # by the mode of an attention inside this one
            return func(*args, **(kwargs or {}))
        self._spent = True
        weights, biases = _projections(given)
        for name, argument, weight, bias in zip(PROJECTIONS, ("query", "key", "value"), weights, biases, strict=True):
            given[argument] = self._project(name, given[argument], weight, bias)
        out_weight, out_bias = given["out_proj_weight"], given["out_proj_bias"]
        identity = torch.eye(len(out_weight), dtype=given["query"].dtype, device=out_weight.device)
        setattr(identity, _OPENED, True)
        given.update(in_proj_weight=None, in_proj_bias=None, use_separate_proj_weight=True)
        given.update(q_proj_weight=identity, k_proj_weight=identity, v_proj_weight=identity)
        given.update(out_proj_weight=identity, out_proj_bias=None)
        output, attention = func(**given)
        return self._project("out", output, out_weight, out_bias), attention

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, weight, bias)
        if x.dim() < 3:  # one sequence alone: (L, features)
            self._watch(name, x, y)
            return y
        y = y.transpose(0, 1)  # the function's own layout is sequence first
        self._watch(name, x.transpose(0, 1), y)
        return y.transpose(0, 1)


def _projections(given: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return weights and biases of query, key and value."""
    if given.get("use_separate_proj_weight"):
        weights = [given[f"{name}_proj_weight"] for name in PROJECTIONS]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    bias = given["in_proj_bias"]
    return weights, [None] * 3 if bias is None else list(bias.chunk(3))


def opens(module: nn.Module) -> bool:
    """Return whether a module is an attention whose projections can be seen.

    Args:
        module: any module.

    Returns:
        Whether it is ``nn.MultiheadAttention``, or a subclass that runs its forward.
    """
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
