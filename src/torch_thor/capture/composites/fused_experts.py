"""Fused experts of mixture-of-experts models: one 3-d weight that holds a matrix per expert.

Such a module multiplies by parts of the weight without calling a module. On a step that gathers
statistics, the matrix products inside it are inspected; no function is replaced. A product with the
weight, with a view of some of its matrices or with a gathered copy of them is a call of those
experts. Recognised are ``F.linear``, ``@``, ``torch.mm``, ``bmm`` and ``matmul`` with
``weight[e]``, with the whole weight or with ``weight[indices]``, and grouped products
(``F.grouped_mm``, and that of transformers).
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_thor.capture.composites.declarations import InnerLayer
from torch_thor.capture.composites.hook import CompositeHook, Report
from torch_thor.curvature.blocks import has_values
from torch_thor.curvature.kinds.experts import ExpertsKind
from torch_thor.curvature.view import ParameterView
from torch_thor.torch_internals import shares_storage

_MATRIX_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm")
_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
_FUNCTIONS = ("__getitem__", "linear", *_MATRIX_PRODUCTS, *_GROUPED)
# the names of the first two arguments of all of them
_OPERANDS = ("input", "weight", "mat_a", "mat_b", "mat2", "other")


def expert_layers(module: nn.Module) -> Iterator[InnerLayer]:
    """Yield the weights of fused experts, each with its biases ``(E, out)``."""
    weights = expert_weights(module)
    up, down = weights.get("gate_up_proj"), weights.get("down_proj")
    # whether matrices are (in, out), for x @ W_e, and not (out, in), for F.linear(x, W_e)
    inputs_first = getattr(module, "is_transposed", None)
    if not isinstance(inputs_first, bool):  # (E, hidden, 2 inner) beside (E, inner, hidden)
        inputs_first = (
            up is not None
            and down is not None
            and up.shape[1:] == (down.shape[2], 2 * down.shape[1])
        )
    for name, weight in weights.items():
        kind = ExpertsKind(weight, inputs_first=inputs_first)
        bias = module._parameters.get(f"{name}_bias")
        has_biases = bias is not None and bias.shape == (kind.groups, kind.outputs)
        biases = [ParameterView(module, f"{name}_bias")] if has_biases else []
        yield InnerLayer(name, kind, ParameterView(module, name), biases)


def expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Find the weights of a module that hold one matrix per expert."""
    counts = {
        value
        for name, value in vars(module).items()
        if "expert" in name.lower() and isinstance(value, int) and not isinstance(value, bool)
    }
    is_called_so = "expert" in type(module).__name__.lower()
    return {
        name: p
        for name, p in module.named_parameters(recurse=False)
        if p.dim() == 3 and len(p) > 1 and min(p.shape) > 0 and (is_called_so or len(p) in counts)
    }


class ExpertsHook(CompositeHook):
    """The hook on a module of fused experts: reports the products with its weights."""

    def mode(self, report: Report) -> TorchFunctionMode:
        """Return the mode that recognises the products."""
        # looked up at each call: a wrapper may have replaced the parameters, and pruning removed
        # one
        there = [
            (name, layer)
            for name, layer in self.by_name.items()
            if layer.weight_view.present is not None
        ]
        return ExpertsMode({name: (layer.weight, layer.kind) for name, layer in there}, report)


class _Operand(NamedTuple):
    """Which matrices of an experts' weight a tensor holds."""

    name: str  # the weight's name in its module
    kind: ExpertsKind  # the kind of the weight
    which: int | Tensor | None  # one expert, or that of each matrix; None for the whole weight
    outputs_first: bool  # whether the matrices in the tensor are `(out, in)`


class ExpertsMode(TorchFunctionMode):
    """While it is active, products with the experts' weights are reported."""

    def __init__(self, weights: Mapping[str, tuple[Tensor, Any]], report: Report) -> None:
        super().__init__()
        self._weights = weights
        self._report = report
        self._gathered: list[tuple[Tensor, _Operand]] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function, and report it if it is a product with the experts' weights."""
        given = kwargs or {}
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        if name not in _FUNCTIONS:
            return result
        left, right = (*args, *(given[key] for key in _OPERANDS if key in given))[:2]
        if name == "__getitem__":
            is_list = (
                isinstance(right, Tensor) and right.dim() == 1 and not right.is_floating_point()
            )
            operand = self._operand(left) if is_list and right.dtype != torch.bool else None
            if operand is not None and operand.which is None:
                self._gathered.append((result, operand._replace(which=right.long())))
            return result
        left, right = (right, left) if name == "__rmatmul__" else (left, right)
        # the rows, the experts, and whether their matrices are `(out, in)`
        uses = [(left, right, name == "linear")]
        if name in _MATRIX_PRODUCTS:
            uses.append((right, left, True))
        for x, experts, outputs_first in uses:
            operand = self._operand(experts)
            if (
                operand is not None
                and operand.outputs_first is outputs_first
                and isinstance(x, Tensor)
            ):
                offsets = (
                    given.get("offs", args[2] if len(args) > 2 else None)
                    if name in _GROUPED
                    else None
                )
                self._report_product(operand, x, result, offsets, columns=experts is left)
        return result

    def _report_product(
        self, operand: _Operand, x: Tensor, y: Tensor, offsets: Tensor | None, *, columns: bool
    ) -> None:
        which: int | Tensor | list[int] | None = operand.which
        if offsets is not None:  # a grouped product
            if which is not None or x.dim() != 2:
                return
            # a host–device synchronisation, once per call on a refresh step
            ends = offsets.tolist() if has_values(offsets) else [0] * operand.kind.groups
            which = [end - start for start, end in pairwise([0, *ends])]
        # several matrices, broadcast over leading dimensions
        elif not isinstance(which, int) and y.dim() != 3:
            return
        self._report(operand.name, x, y, operand.kind.of_call(which, columns=columns))

    def _operand(self, tensor: Any) -> _Operand | None:
        if not isinstance(tensor, Tensor) or tensor.dim() not in (2, 3):
            return None
        for gathered, operand in self._gathered:
            if gathered is tensor:
                return operand
        for name, (weight, kind) in self._weights.items():
            place = _place(tensor, weight)
            if place is not None:
                return _Operand(name, kind, place[0], outputs_first=place[1] is kind.transposed)
        return None


def _share_memory(tensor: Tensor, weight: Tensor) -> bool:
    if not has_values(weight):  # without memory
        return shares_storage(tensor, weight)
    return tensor.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()


def _place(tensor: Tensor, weight: Tensor) -> tuple[int | None, bool] | None:
    """Return which matrix of a weight a tensor is (None: all), and whether it is transposed."""
    # The result is None if it is none of them.
    if tensor.dtype != weight.dtype or not _share_memory(tensor, weight):
        return None
    own, wanted = ([*zip(t.shape, t.stride(), strict=True)][-2:] for t in (tensor, weight))
    if own not in (wanted, wanted[::-1]):
        return None
    is_transposed = own != wanted
    expert, rest = divmod(
        int(tensor.storage_offset() - weight.storage_offset()), int(weight.stride(0))
    )
    if tensor.dim() == 3:
        whole = (
            len(tensor) == len(weight)
            and tensor.stride(0) == weight.stride(0)
            and expert == rest == 0
        )
        return (None, is_transposed) if whole else None
    return (expert, is_transposed) if rest == 0 and 0 <= expert < len(weight) else None
