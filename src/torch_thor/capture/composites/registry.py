"""Which modules are composite: :func:`register_composite`, through which the built-in composite modules are known too.

A composite module computes several layers in its own forward, without calling a module for any of them: an attention
with its projections, a recurrent layer, fused experts. A layer that is one matrix is registered with
:func:`torch_thor.register_kind` instead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from torch_thor.capture.composites.hook import CompositeHook
from torch_thor.curvature.kinds import Kind, has_kind
from torch_thor.curvature.kinds.checks import check_fits
from torch_thor.curvature.kinds.lookup import registered_for
from torch_thor.curvature.parameter_view import ParameterView


@dataclass(frozen=True)
class InnerLayer:
    """One layer that a composite module computes.

    Args:
        name: its name inside the module; with the module's name before it, it is the layer's name in
            ``optimizer.curvature``, and the module's hook reports calls under it.
        kind: its kind, :class:`torch_thor.curvature.ProjectionKind` for a linear layer.
        weight: its weight: a parameter, or rows of one.
        biases: its biases, none or one. A bias that other modules share, or that is not trained, is left out later.
        prefix: put before the names of its state, where several layers are rows of one parameter; such layers need
            different prefixes, because the state belongs to the parameter.
    """

    name: str
    kind: Kind
    weight: ParameterView
    biases: Sequence[ParameterView] = field(default=())
    prefix: str = ""


@dataclass(frozen=True)
class Composite:
    """How composite modules of one class are preconditioned."""

    layers: Callable[[Any], Iterable[InnerLayer]]  # returns the layers that a module computes
    hook: Callable[[Any], CompositeHook]  # makes the hook that reports their calls
    with_children: bool = False
    fixed: tuple[str, ...] = ("forward",)
    why_not: Callable[[Any], str | None] = lambda _: None
    checked: bool = False  # whether what `layers` returns is checked; what this package registers is not

    def layers_of(self, module: nn.Module) -> list[InnerLayer]:
        """Return the layers of a module."""
        found = list(self.layers(module))
        if self.checked:
            _check(found, module)
        return found


_classes: dict[type[nn.Module], Composite] = {}
# Composite modules of packages that are not imported here, recognised by their parameters.
_found: list[tuple[Callable[[nn.Module], bool], Composite]] = []


def register_composite(
    module_type: type[nn.Module],
    layers: Callable[[Any], Iterable[InnerLayer]],
    hook: Callable[[Any], CompositeHook],
    *,
    with_children: bool = False,
) -> None:
    """Precondition the layers that modules of a class compute in their own forward.

    The registration holds for optimizers that are made afterwards, for the class and for subclasses that do not
    override its ``forward``.

    Args:
        module_type: the class of the modules.
        layers: called with such a module, returns its layers.
        hook: called with such a module, returns the hook that reports the calls of its layers; as a rule a subclass
            of :class:`CompositeHook`.
        with_children: whether weights of the layers belong to child modules, which the forward does not call. No
            child of such a module is then preconditioned by itself.

    Raises:
        TypeError: ``module_type`` is not a class of modules, or ``layers`` or ``hook`` cannot be called.
        ValueError: the class is already registered, here or with :func:`torch_thor.register_kind`. An optimizer raises
            it when it is made, where a layer does not fit its weight.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise TypeError(
            f"register_composite: module_type={module_type!r} must be a class of torch.nn.Module; give the class of "
            f"the modules, not one of them"
        )
    for argument, value in (("layers", layers), ("hook", hook)):
        if not callable(value):
            raise TypeError(
                f"register_composite: {argument}={value!r} must be callable with a module of class "
                f"{module_type.__name__}; pass a function or a class"
            )
    if module_type in _classes or has_kind(module_type):
        raise ValueError(
            f"register_composite: {module_type.__module__}.{module_type.__qualname__} is registered already, and a "
            f"class is registered once; register a class derived from it"
        )
    _classes[module_type] = Composite(layers, hook, with_children, checked=True)


def register_built_in(module_type: type[nn.Module], composite: Composite) -> None:
    """Register composite modules of a class for this package."""
    _classes[module_type] = composite


def register_found(is_one: Callable[[nn.Module], bool], composite: Composite) -> None:
    """Register, for this package, composite modules that are recognised without their class."""
    _found.append((is_one, composite))


def composite_of(module: nn.Module) -> tuple[Composite | None, str | None]:
    """Return how a composite module is preconditioned."""
    composite, reason = registered_for(module, _classes, _found)
    return composite, reason if composite is not None else None


def _check(layers: Sequence[InnerLayer], module: nn.Module) -> None:
    """Raise an error for layers that do not fit the module they are registered for."""
    owner = type(module).__name__
    names, states = set(), set()
    for layer in layers:
        who = f"layer {layer.name!r}, registered for {owner},"
        if layer.name in names:
            raise ValueError(f"{who} has the name of another layer of the module; give each layer a name of its own")
        names.add(layer.name)
        weight = getattr(layer.weight.module, layer.weight.attribute, None)
        if not isinstance(weight, Tensor):
            raise ValueError(
                f"{who} has the weight {layer.weight.attribute!r}, and the module has no parameter of that name; "
                f"correct the name"
            )
        state = id(layer.weight.module), layer.weight.attribute, layer.prefix
        if state in states:
            raise ValueError(
                f"{who} has the prefix {layer.prefix!r}, as another layer of the same parameter has; give each a "
                f"prefix of its own"
            )
        states.add(state)
        check_fits(layer.kind, layer.weight.outline(), [view.outline() for view in layer.biases], who)
