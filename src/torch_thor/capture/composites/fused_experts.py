"""Fused experts of mixture-of-experts models: one 3-d weight that holds a matrix per expert.

Such a module multiplies by parts of the weight without calling a module. On a step that gathers
statistics, the matrix products inside it are inspected; no function is replaced. A product with the
weight, with a view of some of its matrices or with a gathered copy of them is a call of those
experts. Recognised are ``F.linear``, ``@``, ``torch.mm``, ``bmm`` and ``matmul`` with
``weight[e]``, with the whole weight or with ``weight[indices]``, and grouped products
(``F.grouped_mm`` and transformers' own).
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_thor.capture.composites.declarations import InnerLayer
from torch_thor.capture.hooks import CompositeHook, FunctionCalls, Report
from torch_thor.curvature.kinds.experts import ExpertsKind
from torch_thor.curvature.view import ParameterView
from torch_thor.torch_internals import functorch, storage_of

_MATRIX_PRODUCTS = ("matmul", "__matmul__", "__rmatmul__", "mm", "bmm")
_GROUPED = ("_grouped_mm", "grouped_mm", "grouped_mm_fallback")
_FUNCTIONS = ("__getitem__", "linear", *_MATRIX_PRODUCTS, *_GROUPED)
_INTEGERS = (torch.int64, torch.int32)  # those of lists of experts
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
        bias = ParameterView(module, f"{name}_bias")
        fits = bias.present is not None and bias.shape == (kind.groups, kind.outputs)
        yield InnerLayer(name, kind, ParameterView(module, name), [bias] if fits else [])


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
        operands: Operands = {}
        with torch.no_grad():
            for name, layer in self.by_name.items():
                # looked up at each call: a wrapper may have replaced the parameters, and pruning
                # removed one
                weight, is_turned = layer.weight_view.present, layer.kind.transposed
                parts = [] if weight is None else [(None, weight), *enumerate(weight)]
                for which, part in parts:
                    for tensor, outputs_first in ((part.mT, is_turned), (part, not is_turned)):
                        operands[_place(tensor)] = _Operand(
                            name, layer.kind, which, outputs_first, tensor
                        )
        return FunctionCalls(partial(_call, report, operands))


class _Operand(NamedTuple):
    """Which matrices of an experts' weight a tensor holds."""

    name: str  # the weight's name in its module
    kind: Any  # the kind of the weight
    which: int | Tensor | None  # the expert, or each matrix's; None for the whole weight
    outputs_first: bool  # whether the matrices in the tensor are `(out, in)`
    tensor: Tensor  # kept alive, so that no other tensor takes its place in memory


# by the place of a tensor in memory
Operands = dict[Any, _Operand]


def _place(tensor: Any) -> tuple[Any, ...]:
    """Return what equal views of the same memory have in common, and other objects have not."""
    # sparse tensors and those of a transform have no storage
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    if not is_dense or functorch() is not None:
        return (id(tensor),)
    offset = tensor.storage_offset()
    return storage_of(tensor), tensor.dtype, offset, tensor.shape, tensor.stride()


def _call(
    report: Report,
    operands: Operands,
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call a function, and report it if it is a product with the experts' weights."""
    result = func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    if name not in _FUNCTIONS:
        return result
    left, right = (*args, *(kwargs[key] for key in _OPERANDS if key in kwargs))[:2]
    left, right = (right, left) if name == "__rmatmul__" else (left, right)
    if name == "__getitem__":
        operand = operands.get(_place(left))
        is_list = isinstance(right, Tensor) and right.dim() == 1 and right.dtype in _INTEGERS
        if operand is not None and operand.which is None and is_list:
            operands[_place(result)] = operand._replace(which=right.long(), tensor=result)
        return result
    # the rows, the experts, and whether their matrices are `(out, in)`
    uses = [(left, right, name == "linear")]
    if name in _MATRIX_PRODUCTS:
        uses.append((right, left, True))
    offsets = kwargs.get("offs", args[2] if len(args) > 2 else None) if name in _GROUPED else None
    for x, experts, outputs_first in uses:
        operand = operands.get(_place(experts))
        if operand is not None and operand.outputs_first is outputs_first and torch.is_tensor(x):
            _report_product(report, operand, x, result, offsets, columns=experts is left)
    return result


def _report_product(
    report: Report,
    operand: _Operand,
    x: Tensor,
    y: Tensor,
    offsets: Tensor | None,
    *,
    columns: bool,
) -> None:
    which: int | Tensor | list[int] | None = operand.which
    if offsets is not None:  # a grouped product
        if which is not None or x.dim() != 2:
            return
        # a host–device synchronisation, once per call on a refresh step
        which = [end - start for start, end in pairwise([0, *offsets.tolist()])]
    # several matrices, broadcast over leading dimensions
    elif not isinstance(which, int) and y.dim() != 3:
        return
    report(operand.name, x, y, operand.kind.of_call(which, columns=columns))
