"""A base class of optimizers that treat the parameters of ``exclude`` in a way of their own."""

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_thor.capture.patterns import Patterns, selected
from torch_thor.optim.base import CheckedOptimizer
from torch_thor.optim.batches import parameters
from torch_thor.optim.gradients import creates_state_only
from torch_thor.optim.model_argument import Closure, Group, check_known, parameters_of
from torch_thor.optim.options import options_in
from torch_thor.optim.state_dict import check_loaded, load, misfits
from torch_thor.torch_internals import uncompiled


class Slot(NamedTuple):
    """What is known of the parameter at one position of a group, whatever object stands there."""

    name: str
    excluded: bool
    units: Any = None  # for AGC


Found = tuple[Slot, Tensor, Tensor]  # a slot, its parameter and the gradient


def excluded_parameters(exclude: Patterns, model: nn.Module | None) -> set[Tensor]:
    """Return the parameters that a user has selected."""
    if exclude in ((), []):
        return set()
    if model is None:
        raise TypeError(
            f"exclude={exclude!r} without a model: names are looked up in the model; pass the "
            f"model as the first argument (or, to an optimizer of parameters, model=model)"
        )
    # with duplicates, because a shared parameter may be selected by any of its names; nn.Module's
    # own method, because modules may override it with fewer arguments
    named = dict(nn.Module.named_parameters(model, remove_duplicate=False))
    # a module is callable, and no rule
    patterns: Any = [exclude] if isinstance(exclude, nn.Module) else exclude
    return {named[name] for name in selected("exclude", patterns, named, "parameter")}


def check_dense(name: str, gradient: Tensor) -> None:
    """Raise an error for a sparse gradient."""
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"parameter {name} has a gradient of layout {gradient.layout}, and norms of whole "
            f"weights need dense gradients; make the layer with sparse=False"
        )


def gathered(tensor: Tensor) -> Tensor:
    """Return a DTensor with what all processes hold of it, any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class ExcludingOptimizer(CheckedOptimizer):
    """An optimizer with the option ``exclude``."""

    _excluded_by_default: Callable[[list[Tensor]], set[Tensor]]
    _make_state: Callable[[Tensor, Group], None]  # of one parameter, if it has none
    _update: Callable[[list[list[Found]]], None]  # the parameters of each group

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        model: nn.Module | None,
        exclude: Patterns,
        given: Mapping[str, Any],
    ) -> None:
        params, self.model = parameters_of(params, model, type(self).__name__)
        several = isinstance(exclude, Iterable) and not isinstance(exclude, str | nn.Module)
        self.exclude = tuple(exclude) if several else exclude  # type: ignore[arg-type]
        # by position, because wrappers such as FSDP2 and Accelerate replace the objects in the
        # groups
        self._slots: list[list[Slot]] = []
        super().__init__(params, options_in(given))

    @property
    def excluded(self) -> tuple[str, ...]:
        """The names of the excluded parameters, in the order of the groups."""
        return tuple(slot.name for slots in self._slots for slot in slots if slot.excluded)

    def _take(self, group: Group) -> None:
        self._slots.append(self._slots_of(group))

    def _slots_of(self, group: Group) -> list[Slot]:
        params = group["params"]
        names = group.get(
            "param_names", [f"group {len(self._slots)}, parameter {i}" for i in range(len(params))]
        )
        if self.model is not None:
            check_known(params, self.model)
            known = {p: name for name, p in nn.Module.named_parameters(self.model)}
            names = [known.get(p, name) for p, name in zip(params, names, strict=True)]
        chosen = (
            self._excluded_by_default(params)
            if self.exclude is None
            else excluded_parameters(self.exclude, self.model)
        )
        return [Slot(name, p in chosen) for name, p in zip(names, params, strict=True)]

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:
        """Take one step after calling ``closure`` with gradients enabled; return its result."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        of_groups: list[list[Found]] = []
        for group, slots in zip(self.param_groups, self._slots, strict=True):
            pairs = zip(slots, group["params"], strict=True)
            of_groups.append([(slot, p, p.grad) for slot, p in pairs if p.grad is not None])
            for slot, _, gradient in of_groups[-1]:
                check_dense(repr(slot.name), gradient)
        if not self.state and creates_state_only(self.param_groups):
            self._make_states()
        else:
            self._update(of_groups)
        return loss

    def _make_states(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.requires_grad or parameter.grad is not None:
                    self._make_state(parameter, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of torch's with the same state.

        It is loaded as a whole or, on an error, not at all.
        """
        load(self, super().load_state_dict, state_dict, self._adopt, self._complete)

    def _adopt(self, group: Group, present: Group) -> None:
        """Fit a saved group to the optimizer's."""
        self._check_group(group)

    def _complete(self) -> None:
        """Fit the state that was loaded to the parameters."""
        slots = chain.from_iterable(self._slots)
        pairs = zip(parameters(self.param_groups), slots, strict=True)
        names: dict[Tensor, str] = {parameter: slot.name for parameter, slot in pairs}
        check_loaded(misfits(self.state, names, names.__getitem__))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {
            name: getattr(self, name) for name in ("model", "exclude", "_slots")
        }
