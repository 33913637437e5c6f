"""Everything that the package uses of torch and that torch does not document: private names, each with the reason.

All of them are in torch from 2.9, the oldest that is supported, to 2.14. Where a newer torch lacks one, its test in
tests/test_torch_internals.py fails first, and this is the only module to change. Private attributes of single modules,
tensors and parameters (``_parameters``, ``_version``) and ``torch._foreach_*`` are used in their places.
"""

from typing import Any

import torch
from torch.autograd.graph import Node
from torch.overrides import _get_current_function_mode

# batches are trees of tensors, and torch has no public functions for trees
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten


def backward_id() -> int:
    """Return a number for the backward pass that is running, -1 outside: nested passes are told apart by it."""
    return int(torch._C._current_graph_task_id())


def backward_keeps_graph() -> bool:
    """Return whether the running backward pass has ``retain_graph``: only then can an output have another gradient."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def backward_reaches(node: Node) -> bool:
    """Return whether the running backward pass executes a node; RuntimeError for a leaf under ``autograd.grad``."""
    return bool(torch._C._will_engine_execute_node(node))


def saves_through_hooks() -> bool:
    """Return whether hooks on saved tensors are set, as by a checkpoint without reentry while it recomputes."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def inside_functorch() -> bool:
    """Return whether a transform of ``torch.func`` is running, whose tensors are not those of the training."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_tracing() -> bool:
    """Return whether ``torch.jit.trace`` is running; ``torch.jit`` itself may go, and warns."""
    return bool(torch._C._is_tracing())


def compile_stance() -> Any:
    """Return the stance of ``torch.compile``, which ``torch.compiler`` can set but not read."""
    from torch._dynamo import eval_frame  # slow to import

    return eval_frame._stance


def set_compile_stance(stance: Any) -> None:
    """Set a stance that was read before; ``torch.compiler.set_stance`` makes a new one of a name."""
    from torch._dynamo import eval_frame

    eval_frame._set_stance(stance)


def function_mode() -> Any:
    """Return the innermost ``TorchFunctionMode`` that is active, to take away one that an interrupt left behind."""
    return _get_current_function_mode()
