"""Which kind of layer a module is: :func:`register_kind`, by which the built-in kinds are known too."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.kinds.base import Kind

_METHODS = ("loss_terms", "row_shape", "add_inputs_", "add_outputs_", "to_matrix", "from_matrix_")
_ATTRIBUTES = ("label", "groups", "inputs", "outputs", "diagonal_input", "transposed", "solves_biases", "routed")
_REMEDY = "derive it from torch_thor.curvature.LinearKind, or see torch_thor.curvature.Kind for what it must have"


@dataclass(frozen=True)
class Registration:
    """How a module's weight is preconditioned.

    Args:
        kind: makes the geometry of a module.
        weight: the name of its weight.
        bias: the name of its bias, which it need not have.
        fixed: the methods that a subclass may not override, because the geometry is that of what they compute.
        why_not: returns why a module has no geometry all the same, or None.
        checked: whether what ``kind`` makes is checked each time, because nobody here has written it.
    """

    kind: Callable[[Any], Kind]
    weight: str = "weight"
    bias: str = "bias"
    fixed: tuple[str, ...] = ("forward",)
    why_not: Callable[[Any], str | None] = lambda _: None
    checked: bool = True


_classes: dict[type[nn.Module], Registration] = {}
# of modules whose classes are known by name or by what they compute, since nothing here imports their packages
_found: list[tuple[Callable[[nn.Module], bool], Registration]] = []


def register_kind(
    module_type: type[nn.Module], kind: Callable[[Any], Kind], *, weight: str = "weight", bias: str = "bias"
) -> None:
    """Have layers of a class preconditioned.

    It holds for optimizers that are made afterwards, for the class and for subclasses that run its ``forward``. The
    module takes one tensor, its first argument, and returns one. What it is computed with is up to the kind:

    .. code-block:: python

        class InOutKind(LinearKind):  # a linear layer whose weight is (in, out)
            label, transposed = "InOut", True

            def __init__(self, module):
                self.inputs, self.outputs = module.weight.shape

        register_kind(InOut, InOutKind)

    Args:
        module_type: the class of the layers.
        kind: called with such a module, returns its geometry (:class:`torch_thor.curvature.Kind`); as a rule a class.
        weight: the name of the parameter that is preconditioned.
        bias: the name of the parameter that is added to the output; modules need not have one.

    Raises:
        TypeError: ``module_type`` is no class of modules, or ``kind`` is none of kinds.
        ValueError: the class is registered already. Making an optimizer raises it too, where a kind does not fit a
            module.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(
            f"register_kind: module_type={module_type!r} must be a class of torch.nn.Module; give the class of the "
            f"layers, not one of them"
        )
    if not callable(kind):
        raise TypeError(f"register_kind: kind={kind!r} must be a class of kinds, or return one; {_REMEDY}")
    if isinstance(kind, type):
        _check_has(kind, _METHODS, f"register_kind: {kind.__name__}", TypeError)
    if module_type in _classes:
        raise ValueError(
            f"register_kind: {module_type.__name__} is registered already, with "
            f"{_name(_classes[module_type].kind)}, and a class has one kind; register a class derived from it, or "
            f"change the kind that it has"
        )
    _classes[module_type] = Registration(kind, weight, bias)


def register_built_in(module_type: type[nn.Module], kind: Callable[[Any], Kind], **options: Any) -> None:
    """Register a kind of this package.

    Args:
        module_type: the class of the layers.
        kind: makes their geometry.
        options: of :class:`Registration`.
    """
    _classes[module_type] = Registration(kind, checked=False, **options)


def register_found(is_one: Callable[[nn.Module], bool], kind: Callable[[Any], Kind], **options: Any) -> None:
    """Register a kind of this package for modules that no class stands for.

    Args:
        is_one: returns whether a module is one of them; asked where no class that is registered says so.
        kind: makes their geometry.
        options: of :class:`Registration`.
    """
    _found.append((is_one, Registration(kind, checked=False, **options)))


def kind_of(module: nn.Module) -> Kind | None:
    """Return the geometry of a module, or None where there is none for it.

    A subclass counts as its parent only while it computes what the parent computes: one that overrides ``forward``
    (a weight-standardised convolution, a quantised layer) may use the weight in another way.

    Args:
        module: any module.

    Returns:
        Its kind, or None.

    Raises:
        ValueError: the kind that is registered for it does not fit it.
    """
    registration, reason = _registration_of(module)
    if registration is None or reason is not None:
        return None
    kind = registration.kind(module)
    if registration.checked:
        _check_fits(kind, module, registration)
    return kind


def why_not(module: nn.Module) -> str | None:
    """Return why a module has no geometry of its own.

    Args:
        module: any module.

    Returns:
        The reason; None where :func:`kind_of` has a kind.
    """
    return _registration_of(module)[1]


def check_weight(module: nn.Module) -> None:
    """Refuse a module without the weight that is registered for its class.

    Args:
        module: any module.

    Raises:
        ValueError: it has nothing of that name.
    """
    registration, reason = _registration_of(module)
    if registration is None or reason is not None or not registration.checked:
        return
    if not isinstance(getattr(module, registration.weight, None), Tensor):
        raise ValueError(
            f"{_name(registration.kind)}, registered for {type(module).__name__}, has the weight "
            f"{registration.weight!r}, and the module has no parameter of that name; name it in "
            f"register_kind(..., weight=...)"
        )


def parameter_names_of(module: nn.Module) -> tuple[str, str]:
    """Return what the parameters of a module are called.

    Args:
        module: any module.

    Returns:
        The names of its weight and of its bias; ``("weight", "bias")`` where nothing else is registered.
    """
    registration, _ = _registration_of(module)
    return ("weight", "bias") if registration is None else (registration.weight, registration.bias)


def _registration_of(module: nn.Module) -> tuple[Registration | None, str | None]:
    """Return what is registered for a module, and why it does not hold."""
    own = type(module)
    parent = next((cls for cls in own.__mro__ if cls in _classes), None)
    if parent is not None:
        registration = _classes[parent]
        if all(getattr(own, name) is getattr(parent, name) for name in registration.fixed):
            return registration, registration.why_not(module)
    for is_one, registration in _found:
        if is_one(module):
            return registration, registration.why_not(module)
    if parent is None:
        return None, f"no curvature for {own.__name__}"
    return None, f"{own.__name__} overrides the forward of {parent.__name__}"


def _check_has(owner: Any, names: tuple[str, ...], who: str, error: type[Exception]) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise error(f"{who} has no {', '.join(missing)}, which every kind of layer has; {_REMEDY}")


def _check_fits(kind: Kind, module: nn.Module, registration: Registration) -> None:
    """Refuse a kind whose matrices are not those of its module."""
    who = f"{_name(registration.kind)}, registered for {type(module).__name__},"
    _check_has(kind, _METHODS + _ATTRIBUTES, who, ValueError)
    weight = getattr(module, registration.weight)
    sizes = kind.groups, kind.outputs, kind.inputs
    rule = f"groups={kind.groups}, outputs={kind.outputs}, inputs={kind.inputs}"
    whole = all(isinstance(size, int) and size > 0 for size in sizes)
    if not whole or math.prod(sizes) != weight.numel():
        raise ValueError(
            f"{who} says {rule} of a weight of shape {tuple(weight.shape)}: they must be whole numbers whose product "
            f"is the weight's {weight.numel()} numbers; correct the kind"
        )
    wanted = (kind.groups, kind.inputs, kind.outputs) if kind.transposed else sizes
    found = tuple(kind.to_matrix(torch.empty(weight.shape, device="meta")).shape)  # a tensor without memory
    if found != wanted:
        order = "(groups, inputs, outputs)" if kind.transposed else "(groups, outputs, inputs)"
        raise ValueError(
            f"to_matrix of {who} makes {found} of the weight: with {rule} and transposed={kind.transposed} it must be "
            f"{order} = {wanted}; correct the kind"
        )
    bias = getattr(module, registration.bias, None)
    if isinstance(bias, Tensor) and kind.solves_biases and bias.numel() != kind.groups * kind.outputs:
        raise ValueError(
            f"{who} says {rule} and solves_biases=True of a bias of shape {tuple(bias.shape)}: a bias has a number for "
            f"each of the {kind.groups * kind.outputs} outputs; set solves_biases=False for one that has not"
        )


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))
