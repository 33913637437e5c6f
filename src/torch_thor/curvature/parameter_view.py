"""How a layer meets a parameter: through one view of the parameter, its gradient, and the optimizer's state of it.

A view is of a whole local tensor or of rows of one (a projection inside a fused weight). What kinds of tensors there
are is known here and nowhere else in :mod:`torch_thor.curvature`.
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor, nn

State = MutableMapping[str, Any]

# A larger matrix (a vocabulary's) is cut in blocks of this size while the split dimension is being chosen: 256 MB each.
LARGEST = 8192


class ParameterView:
    """A parameter of a module, or rows of one.

    The parameter is looked up in the module each time, because wrappers such as FSDP replace it. Its state and the
    options of its parameter group are handed over by the optimizer (:meth:`bind`) whenever either is made, loaded or
    replaced, so that a step looks up neither.

    Args:
        module: the module that owns the parameter.
        attribute: its name in the module.
        rows: which of its rows; None for all.
    """

    def __init__(self, module: nn.Module, attribute: str, rows: slice | None = None) -> None:
        self.module = module
        self.attribute = attribute
        self.rows = rows
        self.entries: State | None = None  # the optimizer's state of the parameter; None while there is none
        self.options: Mapping[str, Any] = {}  # the parameter's group; empty while the optimizer has none for it

    def bind(self, state: State | None, options: Mapping[str, Any]) -> None:
        """Take the optimizer's state of the parameter, and the options of its group.

        Args:
            state: the optimizer's entries for the parameter; None while there are none.
            options: the parameter's group itself, not a copy: users change options in it between two steps.
        """
        self.entries, self.options = state, options

    @property
    def split_dim(self) -> int | None:
        """The block size to cut factors with: the group's number, None for factors that are not split.

        While ``"auto"`` is undecided it is 8192: the choice needs uncut factors.
        """
        split_dim: int | str | None = self.options.get("split_dim")
        return split_dim if split_dim is None or isinstance(split_dim, int) else LARGEST

    @property
    def state(self) -> State:
        """The optimizer's entries for the parameter; an empty mapping, stored nowhere, while there are none."""
        return {} if self.entries is None else self.entries

    @property
    def parameter(self) -> nn.Parameter:
        """The whole parameter.

        Raises:
            RuntimeError: the module computes it now.
        """
        parameter = getattr(self.module, self.attribute)
        if not isinstance(parameter, nn.Parameter):
            raise RuntimeError(
                f"{self.attribute!r} of {self.module} is no parameter any more: it was pruned or parametrised after "
                f"THOR was made, and is computed from other parameters. The next step trains those plainly"
            )
        return parameter

    @property
    def is_there(self) -> bool:
        """Whether the module has it as a parameter, and does not compute it from others (pruning)."""
        return self.module._parameters.get(self.attribute) is not None

    def has_gradient(self) -> bool:
        """Return whether a loss has reached the parameter; zeros are what an unused one may have for a gradient.

        Returns:
            Whether this view's part of the gradient holds anything but zeros (a host–device synchronisation).
        """
        gradient = self.parameter.grad
        if gradient is None:
            return False
        return bool((gradient._values() if gradient.is_sparse else self.of(gradient)).any())

    def of(self, tensor: Tensor) -> Tensor:
        """Return this view's part of a tensor that is shaped like the parameter.

        Args:
            tensor: of the parameter's shape.

        Returns:
            A view of it.
        """
        return tensor if self.rows is None else tensor[self.rows]

    def is_same_as(self, other: "ParameterView") -> bool:
        """Return whether another view is of the same part of the same module's parameter.

        Args:
            other: the other one.

        Returns:
            Whether it is.
        """
        return self.module is other.module and (self.attribute, self.rows) == (other.attribute, other.rows)
