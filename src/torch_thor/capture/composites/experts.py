"""Fused experts of mixture-of-experts models: one 3-d weight that holds a matrix per expert.

Such a module multiplies by parts of the weight without calling a module. On a step that gathers statistics, the matrix
products inside it are inspected; no function is replaced. A product with the weight, with a view of some of its
matrices or with a gathered copy of them is a call of those experts. Recognised are ``F.linear``, ``@``, ``torch.mm``,
``bmm`` and ``matmul`` with ``weight[e]``, with the whole weight or with ``weight[indices]``, and grouped products
(``F.grouped_mm``, and that of transformers).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_thor.capture.composites.hook import CompositeHook, Report
from torch_thor.capture.composites.registry import Composite, InnerLayer
from torch_thor.curvature.kinds.experts import ExpertsCall, ExpertsKind
from torch_thor.curvature.parameter_view import ParameterView

_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm")
_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")


def is_experts(module: nn.Module) -> bool:
    """Return whether a module holds weights of fused experts."""
    return bool(_expert_weights(module))


def expert_layers(module: nn.Module) -> Iterator[InnerLayer]:
    """Yield the weights of fused experts, each with its biases ``(E, out)``."""
    weights = _expert_weights(module)
    inputs_first = _inputs_come_first(module, weights)
    for name, weight in weights.items():
        kind = ExpertsKind(weight, inputs_first=inputs_first)
        bias = module._parameters.get(f"{name}_bias")
        has_biases = bias is not None and bias.shape == (kind.groups, kind.outputs)
        biases = [ParameterView(module, f"{name}_bias")] if has_biases else []
        yield InnerLayer(name, kind, ParameterView(module, name), biases)


def _expert_weights(module: nn.Module) -> dict[str, nn.Parameter]:
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


def _inputs_come_first(module: nn.Module, weights: Mapping[str, nn.Parameter]) -> bool:
    """Return whether matrices are ``(in, out)``, for ``x @ W_e``, and not ``(out, in)``, for ``F.linear(x, W_e)``."""
    declared = getattr(module, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    up, down = weights.get("gate_up_proj"), weights.get("down_proj")
    if up is None or down is None:
        return False
    # (E, hidden, 2 inner) beside (E, inner, hidden)
    return up.shape[1] == down.shape[2] and up.shape[2] == 2 * down.shape[1]


class ExpertsHook(CompositeHook):
    """The hook on a module of fused experts: reports the products with its weights."""

    def mode(self, report: Report) -> TorchFunctionMode:
        """Return the mode that recognises the products."""
        # looked up at each call: a wrapper may have replaced the parameters, and pruning removed one
        there = {name: layer for name, layer in self.by_name.items() if layer.weight_view.is_there}
        kinds = {name: (layer.weight, layer.kind) for name, layer in there.items()}
        return ExpertsMode({n: (w, k) for n, (w, k) in kinds.items() if isinstance(k, ExpertsKind)}, report)

    def count(self, report: Report, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Report nothing: the number of rows that a router sends to an expert is not a number of loss terms."""


EXPERTS = Composite(expert_layers, ExpertsHook)


@dataclass(frozen=True)
class _Operand:
    """Which matrices of an experts' weight a tensor holds."""

    name: str  # the weight's name in its module
    kind: ExpertsKind  # the kind of the weight
    which: int | Tensor | None  # one expert
    outputs_first: bool  # whether the matrices in the tensor are `(out, in)`


class ExpertsMode(TorchFunctionMode):
    """While it is active, products with the experts' weights are reported."""

    def __init__(self, weights: Mapping[str, tuple[Tensor, ExpertsKind]], report: Report) -> None:
        super().__init__()
        self._weights = weights
        self._report = report
        self._gathered: list[tuple[Tensor, _Operand]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function, and report it if it is a product with the experts' weights."""
        given = kwargs or {}
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            self._note_gathered(args[0], args[1], result)
        elif name == "linear":
            x, weight = (*args, *(given[key] for key in ("input", "weight") if key in given))[:2]
            self._report_product(x, weight, result, outputs_first=True)
        elif name in _GROUPED:
            self._report_grouped(args, given, result)
        elif name in _PRODUCTS or name == "__rmatmul__":
            left, right = (*args, *(given[key] for key in ("mat2", "other") if key in given))[:2]
            if name == "__rmatmul__":
                left, right = right, left
            if not self._report_product(left, right, result, outputs_first=False):
                self._report_product(right, left, result, outputs_first=True, columns=True)
        return result

    def _report_product(self, x: Any, weight: Any, y: Any, *, outputs_first: bool, columns: bool = False) -> bool:
        """Report a product if it is one with experts, and return whether it is."""
        operand = self._operand(weight)
        if operand is None or not isinstance(x, Tensor) or operand.outputs_first is not outputs_first:
            return False
        if not isinstance(operand.which, int) and y.dim() != 3:  # several matrices, broadcast over leading dimensions
            return False
        self._report(operand.name, x, y, ExpertsCall(operand.kind, operand.which, columns=columns))
        return True

    def _report_grouped(self, args: tuple[Any, ...], given: Mapping[str, Any], y: Tensor) -> None:
        x, weight = args[:2]
        offsets = given["offs"] if "offs" in given else args[2] if len(args) > 2 else None
        operand = self._operand(weight)
        if operand is None or operand.which is not None or operand.outputs_first or offsets is None or x.dim() != 2:
            return
        ends = offsets.tolist()  # a host–device synchronisation, once per call on a refresh step
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        self._report(operand.name, x, y, ExpertsCall(operand.kind, counts))

    def _note_gathered(self, weight: Any, index: Any, result: Any) -> None:
        is_list = isinstance(index, Tensor) and index.dim() == 1 and not index.is_floating_point()
        operand = self._operand(weight) if is_list and index.dtype != torch.bool else None
        if operand is not None and operand.which is None:
            gathered = _Operand(operand.name, operand.kind, index.long(), operand.outputs_first)
            self._gathered.append((result, gathered))

    def _operand(self, tensor: Any) -> _Operand | None:
        if not isinstance(tensor, Tensor) or tensor.dim() not in (2, 3):
            return None
        for gathered, operand in self._gathered:
            if gathered is tensor:
                return operand
        for name, (weight, kind) in self._weights.items():
            place = _place(tensor, weight)
            if place is not None:
                which, is_transposed = place
                return _Operand(name, kind, which, outputs_first=is_transposed is kind.transposed)
        return None


def _place(tensor: Tensor, weight: Tensor) -> tuple[int | None, bool] | None:
    """Return which matrix of a weight a tensor is (None: all) and whether it is transposed; None if it is none."""
    if tensor.dtype != weight.dtype or tensor.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
        return None
    matrix, strides = tuple(weight.shape[1:]), tuple(weight.stride()[1:])
    found = tuple(tensor.shape[-2:]), tuple(tensor.stride()[-2:])
    if found == (matrix, strides):
        is_transposed = False
    elif found == (matrix[::-1], strides[::-1]):
        is_transposed = True
    else:
        return None
    offset = int(tensor.storage_offset()) - int(weight.storage_offset())
    if tensor.dim() == 3:
        whole = len(tensor) == len(weight) and tensor.stride(0) == weight.stride(0) and offset == 0
        return (None, is_transposed) if whole else None
    expert, rest = divmod(offset, int(weight.stride(0)))
    return (expert, is_transposed) if rest == 0 and 0 <= expert < len(weight) else None
