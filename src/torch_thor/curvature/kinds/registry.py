"""Which kind of layer a module is: :func:`register_kind`, through which the built-in kinds are known too."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.kinds.checks import REMEDY, check_complete, check_fits
from torch_thor.curvature.kinds.lookup import class_name, class_of, registered_for


@dataclass(frozen=True)
class Registration:
    """How modules of a class that are one layer are preconditioned."""

    kind: Callable[[Any], Kind]  # makes the kind of a module
    weight: str = "weight"  # the name of the weight
    bias: str = "bias"  # the name of the bias, which a module may lack
    fixed: tuple[str, ...] = ("forward",)
    why_not: Callable[[Any], str | None] = lambda _: None
    checked: bool = True  # whether what `kind` makes is checked; what this package registers is not


_classes: dict[type[nn.Module], Registration] = {}
# Modules of packages that are not imported here, recognised by the name of their class or by what they compute.
_found: list[tuple[Callable[[nn.Module], bool], Registration]] = []


def register_kind(
    module_type: type[nn.Module], kind: Callable[[Any], Kind], *, weight: str = "weight", bias: str = "bias"
) -> None:
    """Precondition the layers of a class.

    The registration holds for optimizers that are made afterwards, for the class and for subclasses that do not
    override its ``forward``. A module of the class takes one tensor, its first argument, and returns one tensor. The
    kind says what matrix the weight is, and which rows the input and the gradient of the output have:

    .. code-block:: python

        class InOutKind(LinearKind):  # a linear layer whose weight is (in, out)
            label, transposed = "InOut", True

            def __init__(self, module):
                self.inputs, self.outputs = module.weight.shape

        register_kind(InOut, InOutKind)

    Args:
        module_type: the class of the layers.
        kind: called with such a module, returns its kind (:class:`torch_thor.curvature.Kind`); as a rule a class.
        weight: the name of the parameter that is preconditioned.
        bias: the name of the parameter that is added to the output; modules may lack it.

    Raises:
        TypeError: ``module_type`` is not a class of modules, or ``kind`` is not a class of kinds and does not return
            one.
        ValueError: the class is already registered. An optimizer raises it when it is made, where a kind does not fit
            a module.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(
            f"register_kind: module_type={module_type!r} must be a class of torch.nn.Module; give the class of the "
            f"layers, not one of them"
        )
    if not callable(kind):
        raise TypeError(f"register_kind: kind={kind!r} must be a class of kinds, or return one; {REMEDY}")
    if isinstance(kind, type):
        check_complete(kind, f"register_kind: {kind.__name__}", TypeError)
    if module_type in _classes:
        raise ValueError(
            f"register_kind: {module_type.__module__}.{module_type.__qualname__} is registered already, with "
            f"{_name(_classes[module_type].kind)}, and a class has one kind; register a class derived from it, "
            f"or change the kind that it has"
        )
    _classes[module_type] = Registration(kind, weight, bias)


def register_built_in(module_type: type[nn.Module], kind: Callable[[Any], Kind], **options: Any) -> None:
    """Register a kind for this package."""
    _classes[module_type] = Registration(kind, checked=False, **options)


def register_found(is_one: Callable[[nn.Module], bool], kind: Callable[[Any], Kind], **options: Any) -> None:
    """Register, for this package, a kind for modules that are recognised without their class."""
    _found.append((is_one, Registration(kind, checked=False, **options)))


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of a module, or None where it has none."""
    registration, reason = _registration_of(module)
    if registration is None or reason is not None:
        return None
    kind = registration.kind(module)
    if registration.checked:
        bias = getattr(module, registration.bias, None)
        biases = [bias] if isinstance(bias, Tensor) else []
        check_fits(kind, getattr(module, registration.weight), biases, _who(registration, module))
    return kind


def why_not(module: nn.Module) -> str | None:
    """Return the reason why a module has no kind."""
    return _registration_of(module)[1]


def check_weight(module: nn.Module) -> None:
    """Raise an error for a module that lacks the weight that is registered for its class."""
    registration, reason = _registration_of(module)
    if registration is None or reason is not None or not registration.checked:
        return
    if not isinstance(getattr(module, registration.weight, None), Tensor):
        raise ValueError(
            f"{_who(registration, module)} has the weight {registration.weight!r}, and the module has no parameter of "
            f"that name; name it in register_kind(..., weight=...)"
        )


def class_name_of(module: nn.Module) -> str:
    """Return the name of a module's class, with that of its Python module if a kind has a class of the same name."""
    return class_name(class_of(module), _classes)


def has_kind(module_type: type[nn.Module]) -> bool:
    """Return whether a kind is registered for a class itself, and not only for a parent of it."""
    return module_type in _classes


def parameter_names_of(module: nn.Module) -> tuple[str, str]:
    """Return the names of the weight and the bias of a module."""
    registration, _ = _registration_of(module)
    return ("weight", "bias") if registration is None else (registration.weight, registration.bias)


def _registration_of(module: nn.Module) -> tuple[Registration | None, str | None]:
    return registered_for(module, _classes, _found)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


def _who(registration: Registration, module: nn.Module) -> str:
    return f"{_name(registration.kind)}, registered for {class_name_of(module)},"
