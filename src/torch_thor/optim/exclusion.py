"""A base class of optimizers with the option ``exclude``, which selects parameters by name, by module or by a rule."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.patterns import some
from torch_thor.capture.selection import self_and_parents
from torch_thor.optim.checkpoint import (
    check_moments,
    load_checked,
    options_of,
    restore_tensors,
    restored_on_error,
)
from torch_thor.optim.parameters import parameters_of

# Names or patterns, modules, or a list of these; a callable (name, parameter) -> bool; or None for the default rule.
Exclude = str | nn.Module | Iterable[str | nn.Module] | Callable[[str, nn.Parameter], bool] | None


def excluded_parameters(exclude: Exclude, model: nn.Module) -> set[int]:
    """Return the parameters that a user has selected."""
    # with duplicates, because a shared parameter may be selected by any of its names; nn.Module's own method, because
    # modules may override it with fewer arguments
    named = list(nn.Module.named_parameters(model, remove_duplicate=False))
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
    """A base class of optimizers that treat some parameters, the excluded ones, differently from the others."""

    # They are stored by group and position, because wrappers such as FSDP2 and Accelerate replace the parameter objects
    # in the groups after the optimizer was created, at the same positions.

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
        """The names of the excluded parameters, in the order of the groups."""
        pairs = zip(self._names, self._excluded, strict=True)
        return tuple(n for names, flags in pairs for n, flag in zip(names, flags, strict=True) if flag)

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nexcluded: {', '.join(self.excluded) or 'nothing'}"

    # ---- to be defined by subclasses -------------------------------------------------------------------------------

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Check the options of a parameter group."""
        raise NotImplementedError

    def _check_origin(self, state_dict: dict[str, Any]) -> None:
        """Raise an error for the state dict of an optimizer whose state this one cannot use."""
        raise NotImplementedError

    def _restore_options(self, group: dict[str, Any], own: dict[str, Any]) -> None:
        """Restore the options that have another meaning in the optimizer that saved the group."""

    def _excluded_by_default(self, params: list[Tensor]) -> set[int]:
        """Return the ``id`` of each parameter that is excluded if the user has chosen none."""
        raise NotImplementedError

    # ---- groups ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own."""
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
            unknown = [str(tuple(p.shape)) for p in params if id(p) not in known]
            if unknown:
                raise ValueError(
                    f"parameters of shape {some(unknown)} are not in the model; pass the model that holds them, or "
                    f"give them an optimizer of their own"
                )
            names = [known[id(p)] for p in params]
        if self.exclude is None:
            chosen = self._excluded_by_default(params)
        else:
            chosen = set() if self.model is None else excluded_parameters(self.exclude, self.model)
        return [id(p) in chosen for p in params], names

    def _with_gradient(self, group_index: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield position, parameter and gradient of each parameter that has one; raise an error for a sparse one."""
        params = self.param_groups[group_index]["params"]
        if len(params) != len(self._excluded[group_index]):
            raise RuntimeError(
                f"parameter group {group_index} has {len(params)} parameters and had "
                f"{len(self._excluded[group_index])}: it was changed without add_param_group; use that, or make a new "
                f"optimizer"
            )
        for position, parameter in enumerate(params):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"parameter {self._names[group_index][position]!r} has a gradient of layout {gradient.layout}; "
                    f"{type(self).__name__} takes dense gradients, because it computes norms of whole weights. Make "
                    f"the layer with sparse=False"
                )
            yield position, parameter, gradient

    def _creates_state_only(self, found: list[list[tuple[int, Tensor, Tensor]]]) -> bool:
        """Return whether torch.distributed.checkpoint takes this step to create the state: lr and gradients are 0."""
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        return not any(bool(gradient.any()) for one in found for _, _, gradient in one)

    # ---- checkpoints and copies --------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; if it raises an error, nothing has changed. The excluded parameters stay the same."""
        own = options_of(self.param_groups)
        with restored_on_error(self):
            saved = load_checked(self, super().load_state_dict, state_dict, self._check_origin)
            for group, kept in zip(self.param_groups, own, strict=True):
                group.update({**kept, **group})  # that of torch's optimizer has fewer options
                self._restore_options(group, kept)
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
