"""What all optimizers share: steps that run eagerly inside of compiled functions, and groups."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ClassVar

import torch

from torch_thor.capture.hooks import suspended_stances
from torch_thor.optim import counterparts
from torch_thor.optim.model_argument import Group
from torch_thor.optim.options import OptionGroup, check_group, group_of
from torch_thor.optim.state_dict import VERSION
from torch_thor.torch_internals import (
    compiler_in_use,
    refuse_running_fullgraph,
    refuse_tracing_fullgraph,
    traced_not_compiled,
    use_compiler,
)

_NO_FULL_GRAPH = (
    "torch.compile(fullgraph=True) of a function that calls {}.step() or its zero_grad(): a step "
    "decides by values of tensors, which no graph does; leave fullgraph out, and the step runs "
    "eagerly between the graphs"
)


class EagerStep(torch.optim.Optimizer):
    """An optimizer whose ``step`` runs eagerly in compiled functions, as one call between graphs.

    Traced, it would be compiled again for each refresh and each state, and stop at each value of a
    tensor that it reads.
    """

    # options of other optimizers, and what stands in the place of each
    counterparts: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def profile_hook_step(cls, func: Callable[..., Any]) -> Callable[..., Any]:
        """Do what torch does to ``step`` when the first optimizer of a class is made, and more."""
        message = _NO_FULL_GRAPH.format(cls.__name__)
        eagerly = torch.compiler.disable(super().profile_hook_step(func), reason=message)

        # What this calls and what it reads are no part of the graphs: the call of `eagerly` ends
        # them.
        @traced_not_compiled
        @wraps(func)
        def step(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                refuse_tracing_fullgraph(message)
            # nothing is traced if step itself was compiled, or if a refresh is due
            elif compiler_in_use() is not None or suspended_stances:
                refuse_running_fullgraph(message)
            result = eagerly(*args, **kwargs)
            if suspended_stances:  # the rest of the function that runs may call the model
                use_compiler(None)
            return result

        return step

    def _own_groups(self) -> None:
        """Take groups that other code has put in the place of the optimizer's as its own."""
        self.param_groups[:] = [
            group if isinstance(group, OptionGroup) else OptionGroup(group)
            for group in self.param_groups
        ]

    def _check_group(self, group: Group) -> None:
        """Raise ValueError for an option that is out of range."""
        check_group(self, group)

    def _take(self, group: Group) -> None:
        """Take a group that was added, or raise an error for parameters that do not fit."""

    def _as_saved(self, group: Group) -> None:
        """Change a group of a state dict to the form that is saved."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: as for ``torch.optim.Optimizer.add_param_group``; it is copied.

        Raises:
            ValueError: an option is out of range or one of another optimizer, or a parameter is
                not in the model.
            TypeError: it is no dict.
        """
        group, before = group_of(param_group), len(self.param_groups)
        self._check_group({**self.defaults, **group})
        counterparts.check_group(type(self), group, self.defaults)
        super().add_param_group(group)
        try:
            self._take(self.param_groups[-1])
        except BaseException:
            del self.param_groups[before:]
            raise

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, as tensors, numbers, strings, and dicts of them.

        Hooks that are registered for it see this form. ``version`` is that of the form.

        Returns:
            As ``torch.optim.Optimizer.state_dict``.
        """
        self._own_groups()

        def finish(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
            for group in state_dict["param_groups"]:
                self._as_saved(group)
            state_dict["version"] = VERSION

        handle = self.register_state_dict_post_hook(finish, prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own_groups()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as any optimizer of torch does.

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.
        """
        if torch.compiler.is_dynamo_compiling() and set_to_none:  # torch's would end the graph
            refuse_tracing_fullgraph(_NO_FULL_GRAPH.format(type(self).__name__))
            # for the attribute itself the compiler would guard all options and counters
            for group in self.__dict__["param_groups"]:
                for parameter in group["params"]:
                    parameter.grad = None
        else:
            super().zero_grad(set_to_none)
