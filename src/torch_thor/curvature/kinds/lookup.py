"""Finds what is registered for a module: for its class, for a parent class whose methods it runs, or by a test."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn


class Registered(Protocol):
    """What can be registered for a class of modules."""

    @property
    def fixed(self) -> tuple[str, ...]:
        """The methods that a subclass may not override, because the registration depends on what they compute."""
        ...

    @property
    def why_not(self) -> Callable[[Any], str | None]:
        """Returns the reason why the registration does not hold for a module of the class, or None."""
        ...


_R = TypeVar("_R", bound=Registered)


def class_of(module: nn.Module) -> type:
    """Return the class of a module, for its name."""
    own = type(module)
    is_derived = any(base.__name__ == "FSDPModule" for base in own.__bases__)
    return own.__bases__[-1] if is_derived else own


def class_name(own: type, registered: Iterable[type]) -> str:
    """Return the name of a class, with its module if a registered class has the same name."""
    alike = any(cls is not own and cls.__name__ == own.__name__ for cls in registered)
    return f"{own.__module__}.{own.__qualname__}" if alike else own.__name__


def registered_for(
    module: nn.Module, classes: Mapping[type[nn.Module], _R], found: Sequence[tuple[Callable[[nn.Module], bool], _R]]
) -> tuple[_R | None, str | None]:
    """Return what is registered for a module, and whether it holds."""
    own = type(module)
    parent = next((cls for cls in own.__mro__ if cls in classes), None)
    if parent is not None and _runs_methods_of(own, parent, classes[parent].fixed):
        return classes[parent], classes[parent].why_not(module)
    for passes, registration in found:
        if passes(module):
            return registration, registration.why_not(module)
    name = class_name(class_of(module), classes)
    if parent is None:
        return None, f"no curvature for {name}"
    return classes[parent], f"{name} overrides the forward of {parent.__name__}"


def _runs_methods_of(own: type, parent: type, names: Sequence[str]) -> bool:
    return all(getattr(own, name) is getattr(parent, name) for name in names)
