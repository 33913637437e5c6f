"""Optimizers that treat some parameters of a model apart: chosen by name, by module, or by the optimizer's own rule."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.selection import self_and_parents
from torch_thor.optim.checkpoint import (
    as_a_whole,
    check_moments,
    complete_groups,
    hooked_load,
    options_of,
    restore_tensors,
)
from torch_thor.optim.parameters import parameters_of
from torch_thor.optim.thor.gradient_checks import some

# Names or patterns, modules, a list of either; or a callable (name, parameter) -> bool; None for the optimizer's rule.
Exclude = str | nn.Module | Iterable[str | nn.Module] | Callable[[str, nn.Parameter], bool] | None


def excluded_parameters(exclude: Exclude, model: nn.Module) -> set[int]:
    """Return the parameters that a user has named.

    A name or pattern (``*``, ``?``, ``[...]``, case counts) means the parameter of that name, or all inside a module of
    that name: ``"head"`` is everything in the head, ``"*.bias"`` every bias.

    Args:
        exclude: names, patterns, modules, or a callable ``(name, parameter) -> bool``.
        model: the model.

    Returns:
        Their ``id``.

    Raises:
        ValueError: a pattern matches no parameter, or a module is not in the model.
        TypeError: it is none of these.
    """
    # by every name that a shared parameter has
    named = list(model.named_parameters(remove_duplicate=False))
    if callable(exclude) and not isinstance(exclude, nn.Module):
        return {id(parameter) for name, parameter in named if exclude(name, parameter)}
    entries = [exclude] if isinstance(exclude, str | nn.Module) else exclude
    if not isinstance(entries, Iterable):
        raise TypeError(_not_understood(exclude))
    found: set[int] = set()
    modules = {id(module) for module in model.modules()}
    for entry in entries:
        if isinstance(entry, nn.Module):
            if id(entry) not in modules:
                raise ValueError(f"exclude: a {type(entry).__name__} is not in the model; give a module of this model")
            found |= {id(parameter) for parameter in entry.parameters()}
            continue
        if not isinstance(entry, str):
            raise TypeError(_not_understood(exclude))
        matched = {id(p) for name, p in named if any(fnmatchcase(part, entry) for part in self_and_parents(name))}
        if not matched:
            names = some([name for name, _ in named], most=20)
            raise ValueError(f"exclude: {entry!r} matches no parameter; the model has {names}")
        found |= matched
    return found


def _not_understood(exclude: Any) -> str:
    return (
        f"exclude={exclude!r}: must be a name, a pattern, a module, a list of them, or a callable "
        f"(name, parameter) -> bool; () excludes nothing"
    )


class ExcludingOptimizer(torch.optim.Optimizer):
    """What optimizers share that treat some parameters apart.

    Which parameters these are is kept by group and position: wrappers such as FSDP2 and Accelerate put other parameter
    objects into the groups after the optimizer was made, at the same places.

    Args:
        params: the model; or parameters, named parameters or parameter groups.
        defaults: options.
        model: the model, where ``params`` are parameters; None where it is not needed.
        exclude: what is treated apart; None for the optimizer's own rule.

    Raises:
        TypeError: ``exclude`` names parameters and the model is missing.
        ValueError: an option is out of range, or a parameter is not the model's.
    """

    def __init__(
        self, params: nn.Module | Iterable[Any], defaults: dict[str, Any], model: nn.Module | None, exclude: Exclude
    ) -> None:
        label = type(self).__name__
        params, model = parameters_of(params, model, label)
        if isinstance(exclude, Iterable) and not isinstance(exclude, str | nn.Module):
            exclude = tuple(exclude)
        if model is None and exclude is not None and exclude != ():
            raise TypeError(
                f"exclude={exclude!r} without a model: names and modules are looked up in the model; pass "
                f"{label}(model, ...) or {label}(parameters, model=model, ...)"
            )
        self.model = model
        self.exclude = exclude
        self._excluded: list[list[bool]] = []
        self._names: list[list[str]] = []
        super().__init__(params, defaults)

    @property
    def excluded(self) -> tuple[str, ...]:
        """The names of the parameters that are treated apart, in the order of the groups.

        Without a model a name is that of the ``(name, parameter)`` pair that was given, or ``group 0, parameter 3``.
        """
        pairs = zip(self._names, self._excluded, strict=True)
        return tuple(n for names, flags in pairs for n, flag in zip(names, flags, strict=True) if flag)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nexcluded: {', '.join(self.excluded) or 'nothing'}"

    # ---- what an optimizer says of itself --------------------------------------------------------------------------

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Check the options of a parameter group."""
        raise NotImplementedError

    def _check_origin(self, state_dict: dict[str, Any]) -> None:
        """Refuse the state dict of an optimizer that this one cannot go on from."""
        raise NotImplementedError

    def _take_options(self, group: dict[str, Any], own: dict[str, Any]) -> None:
        """Put back options that do not mean the same in the optimizer that was saved."""

    def _excluded_by_default(self, params: list[Tensor]) -> set[int]:
        """Return the ``id`` of those that are treated apart where the user has not said."""
        raise NotImplementedError

    # ---- groups ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: as for :meth:`torch.optim.Optimizer.add_param_group`.

        Raises:
            ValueError: an option is out of range, or a parameter is not the model's.
        """
        self._check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            flags, names = self._look_up(group)
        except Exception:
            self.param_groups.pop()
            raise
        self._excluded.append(flags)
        self._names.append(names)

    def _look_up(self, group: dict[str, Any]) -> tuple[list[bool], list[str]]:
        params: list[Tensor] = group["params"]
        if self.model is None:
            numbered = [f"group {len(self.param_groups) - 1}, parameter {i}" for i in range(len(params))]
            names = list(group.get("param_names", numbered))
        else:
            known = {id(p): name for name, p in self.model.named_parameters()}
            strangers = [str(tuple(p.shape)) for p in params if id(p) not in known]
            if strangers:
                raise ValueError(
                    f"parameters of shape {some(strangers)} are not in the model; pass the model that holds them, or "
                    f"give them an optimizer of their own"
                )
            names = [known[id(p)] for p in params]
        if self.exclude is None:
            chosen = self._excluded_by_default(params)
        else:
            chosen = set() if self.model is None else excluded_parameters(self.exclude, self.model)
        return [id(p) in chosen for p in params], names

    def _with_gradient(self, group_index: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield position, parameter and gradient of those that have one; refuse sparse ones."""
        params = self.param_groups[group_index]["params"]
        if len(params) != len(self._excluded[group_index]):
            raise RuntimeError(
                f"parameter group {group_index} has {len(params)} parameters and had "
                f"{len(self._excluded[group_index])}: it was changed behind the optimizer's back; use add_param_group, "
                f"or make a new optimizer"
            )
        for position, parameter in enumerate(params):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"parameter {self._names[group_index][position]!r} has a gradient of layout {gradient.layout}; "
                    f"{type(self).__name__} takes dense gradients: norms are of whole weights. Make the layer with "
                    f"sparse=False"
                )
            yield position, parameter, gradient

    def _asks_for_state(self, found: list[list[tuple[int, Tensor, Tensor]]]) -> bool:
        """Whether a step without state before it is torch.distributed.checkpoint's: lr 0, and all gradients 0."""
        # waits for the device where lr is 0: once, in a training that warms up from there
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        return not any(bool(gradient.any()) for one in found for _, _, gradient in one)

    # ---- checkpoints and copies --------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as a whole, or raise and have changed nothing; what is treated apart stays as it was made.

        Args:
            state_dict: what ``state_dict()`` gave. Options that it does not hold stay as they are.
        """
        own = options_of(self.param_groups)
        with as_a_whole(self):
            saved = hooked_load(self, super().load_state_dict, state_dict, self._check_origin)
            for group, kept in zip(self.param_groups, own, strict=True):
                self._take_options(group, kept)
            complete_groups(self.param_groups, own)
            for group in self.param_groups:
                self._check_group(group)
            restore_tensors(self.state, self.param_groups, saved)
            names = {
                id(p): name
                for group, names in zip(self.param_groups, self._names, strict=True)
                for p, name in zip(group["params"], names, strict=True)
            }
            check_moments(self.state, self.param_groups, lambda parameter: names[id(parameter)])

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("model", "exclude", "_excluded", "_names")}
        return {**super().__getstate__(), **own}
