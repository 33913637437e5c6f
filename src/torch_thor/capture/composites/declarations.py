"""Which modules are composite: ``register_composite``, which the built-in composites use too.

A composite module computes several layers in its own forward, without calling a module for any of
them: an attention with its projections, a recurrent layer, fused experts. A layer that is one
matrix is registered with ``torch_thor.register_kind`` instead.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from torch_thor.capture.hooks import CompositeHook
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.kinds.registry import KINDS, Registration, Registry, check_fits
from torch_thor.curvature.view import ParameterView


@dataclass(frozen=True)
class InnerLayer:
    """One layer that a composite module computes.

    Args:
        name: its name inside the module; with the module's name before it, it is the layer's name
            in ``optimizer.curvature``, and the module's hook reports calls under it.
        kind: its kind, ``torch_thor.curvature.ProjectionKind`` for a linear layer.
        weight: its weight: a parameter, or rows of a parameter.
        biases: its biases, at most one. A bias that other modules share, or that is not trained, is
            left out later.
        prefix: put before the names of its state, where several layers are rows of one parameter;
            such layers need different prefixes, because the state belongs to the parameter.
    """

    name: str
    kind: Kind
    weight: ParameterView
    biases: Sequence[ParameterView] = field(default=())
    prefix: str = ""


@dataclass(frozen=True)
class Composite(Registration):
    """How composite modules are preconditioned."""

    layers: Callable[[Any], Iterable[InnerLayer]]  # returns the layers that a module computes
    hook: Callable[[Any], CompositeHook]  # makes the hook that reports their calls
    with_children: bool = False

    def layers_of(self, module: nn.Module) -> list[InnerLayer]:
        """Return the layers of a module; an error for registered layers that do not fit it."""
        layers = list(self.layers(module))
        for layer in layers if self.checked else ():
            who = f"layer {layer.name!r}, registered for {type(module).__name__},"
            check_fits(layer.kind, layer.weight.outline(), who)
        return layers


COMPOSITES: Registry[Composite] = Registry()
composite_of = COMPOSITES.find


def register_composite(
    module_type: type[nn.Module],
    layers: Callable[[Any], Iterable[InnerLayer]],
    hook: Callable[[Any], CompositeHook],
    *,
    with_children: bool = False,
) -> None:
    """Precondition the layers that modules of a class compute in their own forward.

    The registration holds for optimizers that are made afterwards, for the class and for subclasses
    that do not override its ``forward``.

    Args:
        module_type: the class of the modules.
        layers: called with such a module, returns its layers.
        hook: called with such a module, returns the hook that reports the calls of its layers; as a
            rule a subclass of ``CompositeHook``.
        with_children: whether weights of the layers belong to child modules, which the forward does
            not call. No child of such a module is then preconditioned by itself.

    Raises:
        TypeError: ``module_type`` is not a class of modules.
        ValueError: the class is already registered, here or with ``torch_thor.register_kind``. An
            optimizer raises it when it is made, where a layer does not fit its weight.
    """
    for registry in (COMPOSITES, KINDS):
        registry.check_new(module_type, "register_composite")
    COMPOSITES.classes[module_type] = Composite(layers, hook, with_children, checked=True)
