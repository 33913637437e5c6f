"""All undocumented parts of torch that the package uses: private names, each with the reason.

All of them are in torch from 2.9, the oldest that is supported, to 2.14. If a newer torch lacks
a name, the import of this module fails first, and this is the only module to change.
Private attributes of single modules, tensors and parameters (``_parameters``, ``_version``) and
``torch._foreach_*`` are used in their places.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.overrides import _get_current_function_mode

# batches are trees of tensors, and torch has no public functions for trees
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

# a number for the backward pass that is running, -1 outside: nested passes are told apart by it
backward_id = torch._C._current_graph_task_id
# whether the running backward pass has retain_graph: only then can an output have another gradient
backward_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
# whether the running backward pass executes a node; RuntimeError for a leaf under autograd.grad
backward_reaches = torch._C._will_engine_execute_node
# the transform of torch.func that is running, whose tensors are not those of the training; None
# outside
functorch = torch._C._functorch.peek_interpreter_stack
# whether torch.jit.trace is running; torch.jit itself may go, and warns
is_tracing = torch._C._is_tracing
# the innermost TorchFunctionMode that is active, to take away a mode that an interrupt left behind
function_mode: Callable[[], Any] = _get_current_function_mode

# of torch: the stance of torch.compile, which torch.compiler can set but not read; slow to import,
# so not imported here
compile_stance: Callable[[Any], Any] = attrgetter("_dynamo.eval_frame._stance")
# torch.compiler.disable, which imports the compiler at once, not when the function is called
uncompiled: Callable[[Any], Any] = _disable_dynamo


def storage_of(tensor: torch.Tensor) -> int:
    """Return a number for the storage of a tensor, which tensors without numbers have too."""
    return int(tensor.untyped_storage()._cdata)
