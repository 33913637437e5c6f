"""Finds the rows of fused experts, whose module multiplies by parts of one 3-d weight without calling a module.

On a refresh step, and only then, the matrix products inside that module are inspected. A product with the weight, with
a view of some of its matrices, or with a gathered copy of them, is a call of those experts. No function is replaced.
What is recognised: ``F.linear``, ``@``, ``torch.mm``, ``bmm`` and ``matmul`` with ``weight[e]``, with the whole weight
or with ``weight[indices]``, and grouped products (``F.grouped_mm``, transformers' own).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from torch_thor.curvature.kinds.experts import ExpertsCall, ExpertsKind

Watch = Callable[[str, ExpertsKind, Tensor, Tensor], None]

_PRODUCTS = ("matmul", "__matmul__", "mm", "bmm")
_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")


@dataclass(frozen=True)
class _Operand:
    """What a tensor has of the experts' weight.

    Args:
        name: the weight's name in its module.
        kind: the experts' geometry.
        which: one expert, the experts of each matrix, or None for all in their order.
        outputs_first: whether a matrix of it is ``(out, in)``.
    """

    name: str
    kind: ExpertsKind
    which: int | Tensor | None
    outputs_first: bool


class OpenExperts(TorchFunctionMode):
    """While it is active, products with the experts' weights are reported.

    Args:
        weights: the 3-d weights, by name, each with its geometry.
        watch: called with the name, the geometry of the call, its input and its output.
    """

    def __init__(self, weights: Mapping[str, tuple[Tensor, ExpertsKind]], watch: Watch) -> None:
        super().__init__()
        self._weights = weights
        self._watch = watch
        self._gathered: list[tuple[Tensor, _Operand]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and look at it if it is a product.

        Args:
            func: the function.
            types: unused.
            args: its arguments.
            kwargs: its keyword arguments.

        Returns:
            Its result.
        """
        given = kwargs or {}
        result = func(*args, **given)
        name = getattr(func, "__name__", "")
        if name == "__getitem__":
            self._note_gathered(args[0], args[1], result)
        elif name == "linear":
            x, weight = (*args, *(given[key] for key in ("input", "weight") if key in given))[:2]
            self._look(x, weight, result, outputs_first=True)
        elif name in _GROUPED:
            self._look_grouped(args, given, result)
        elif name in _PRODUCTS or name == "__rmatmul__":
            left, right = (*args, *(given[key] for key in ("mat2", "other") if key in given))[:2]
            if name == "__rmatmul__":
                left, right = right, left
            if not self._look(left, right, result, outputs_first=False):
                self._look(right, left, result, outputs_first=True, columns=True)
        return result

    def _look(self, x: Any, weight: Any, y: Any, *, outputs_first: bool, columns: bool = False) -> bool:
        """Tell of a product; return whether it was one with experts."""
        operand = self._operand(weight)
        if operand is None or not isinstance(x, Tensor) or operand.outputs_first is not outputs_first:
            return False
        if not isinstance(operand.which, int) and y.dim() != 3:  # matrices broadcast over more than rows
            return False
        self._watch(operand.name, ExpertsCall(operand.kind, operand.which, columns=columns), x, y)
        return True

    def _look_grouped(self, args: tuple[Any, ...], given: Mapping[str, Any], y: Tensor) -> None:
        x, weight = args[:2]
        offsets = given["offs"] if "offs" in given else args[2] if len(args) > 2 else None
        operand = self._operand(weight)
        if operand is None or operand.which is not None or operand.outputs_first or offsets is None or x.dim() != 2:
            return
        ends = offsets.tolist()  # a wait for the device, once a call of a refresh step
        counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        self._watch(operand.name, ExpertsCall(operand.kind, counts), x, y)

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
                which, as_it_lies = place
                return _Operand(name, kind, which, outputs_first=as_it_lies is not kind.transposed)
        return None


def _place(tensor: Tensor, weight: Tensor) -> tuple[int | None, bool] | None:
    """Return which matrix of a weight a tensor is (None: all of them), and whether as it lies or transposed."""
    if tensor.dtype != weight.dtype or tensor.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
        return None
    matrix, strides = tuple(weight.shape[1:]), tuple(weight.stride()[1:])
    found = tuple(tensor.shape[-2:]), tuple(tensor.stride()[-2:])
    if found == (matrix, strides):
        as_it_lies = True
    elif found == (matrix[::-1], strides[::-1]):
        as_it_lies = False
    else:
        return None
    offset = int(tensor.storage_offset()) - int(weight.storage_offset())
    if tensor.dim() == 3:
        whole = len(tensor) == len(weight) and tensor.stride(0) == weight.stride(0) and offset == 0
        return (None, as_it_lies) if whole else None
    expert, rest = divmod(offset, int(weight.stride(0)))
    return (expert, as_it_lies) if rest == 0 and 0 <= expert < len(weight) else None
