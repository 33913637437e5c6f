"""Which kind of layer a module is: ``register_kind``, which the built-in kinds use, too."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from torch_thor.curvature.geometry import Geometry
from torch_thor.curvature.kinds.base import Kind

_METHODS = ("loss_terms", "row_shape", "add_inputs_", "add_outputs_", "to_matrix", "from_matrix_")
_ATTRIBUTES = (
    "label",
    "groups",
    "inputs",
    "outputs",
    "diagonal_input",
    "transposed",
    "solves_biases",
    "has_own_rows",
)
_REMEDY = (
    "derive it from torch_thor.curvature.LinearKind, or see torch_thor.curvature.Kind for what a "
    "kind must define"
)


@dataclass(frozen=True, kw_only=True)
class Registration:
    """What is registered for a class of modules, or for modules that pass a test."""

    # the methods that it depends on, which a subclass may not override
    fixed: tuple[str, ...] = ("forward",)
    checked: bool = False  # whether what it makes is checked; what this package registers is not


@dataclass(frozen=True)
class KindRegistration(Registration):
    """How modules that are one layer are preconditioned."""

    kind: Callable[[Any], Kind]  # makes the kind of a module
    weight: str = "weight"  # the name of the weight
    bias: str = "bias"  # the name of the bias, which a module may lack


R = TypeVar("R", bound=Registration)


class Registry(Generic[R]):
    """A registry that finds what is registered for a module.

    It looks for the module's class, for a parent class whose methods it runs, or by a test.
    """

    def __init__(self) -> None:
        self.classes: dict[type[nn.Module], R] = {}
        # of packages that are not imported here
        self.tests: list[tuple[Callable[[nn.Module], object], R]] = []

    def find(self, module: nn.Module) -> tuple[R | None, str | None]:
        """Return what is registered for a module, and why that does not hold for a subclass."""
        cls = type(module)
        parent = next((base for base in cls.__mro__ if base in self.classes), None)
        registered = None if parent is None else self.classes[parent]
        if registered is not None and all(
            getattr(cls, name) is getattr(parent, name) for name in registered.fixed
        ):
            return registered, None
        for passes, registration in self.tests:
            if passes(module):
                return registration, None
        name = self.class_name(module)
        overridden = "" if parent is None else f"{name} overrides the forward of {parent.__name__}"
        return registered, overridden or f"no curvature for {name}"

    def class_name(self, module: nn.Module) -> str:
        """Return the name of a module's class.

        It has its Python module if a registered class has the same name.
        """
        cls = class_of(module)
        alike = any(other is not cls and other.__name__ == cls.__name__ for other in self.classes)
        return f"{cls.__module__}.{cls.__qualname__}" if alike else cls.__name__

    def check_new(self, module_type: Any, caller: str) -> None:
        """Raise an error unless this is a class of modules that is not registered yet."""
        if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
            raise TypeError(
                f"{caller}: module_type={module_type!r} must be a class of torch.nn.Module; give "
                f"the class of the modules, not a module"
            )
        if module_type in self.classes:
            raise ValueError(
                f"{caller}: {module_type.__module__}.{module_type.__qualname__} is registered "
                f"already, and a class is registered once; register a class derived from it"
            )


KINDS: Registry[KindRegistration] = Registry()
class_name_of = KINDS.class_name


def register_kind(
    module_type: type[nn.Module],
    kind: Callable[[Any], Kind],
    *,
    weight: str = "weight",
    bias: str = "bias",
) -> None:
    """Precondition the layers of a class.

    The registration holds for optimizers that are made afterwards, for the class and for subclasses
    that do not override its ``forward``. A module of the class takes one tensor, its first
    argument, and returns one tensor. The kind says what matrix the weight is, and which rows the
    input and the gradient of the output have:

    .. code-block:: python

        class InOutKind(LinearKind):  # a linear layer whose weight is (in, out)
            label, transposed = "InOut", True

            def __init__(self, module):
                self.inputs, self.outputs = module.weight.shape

        register_kind(InOut, InOutKind)

    Args:
        module_type: the class of the layers.
        kind: called with such a module, returns its kind (``torch_thor.curvature.Kind``); as a rule
            a class.
        weight: the name of the parameter that is preconditioned.
        bias: the name of the parameter that is added to the output; modules may lack it.

    Raises:
        TypeError: ``module_type`` is not a class of modules.
        ValueError: the class is already registered. An optimizer raises it when it is made, where a
            kind does not fit a module.
    """
    KINDS.check_new(module_type, "register_kind")
    KINDS.classes[module_type] = KindRegistration(kind, weight, bias, checked=True)


def kind_of(module: nn.Module) -> Kind | None:
    """Return the kind of a module, or None where it has none."""
    registration, reason = KINDS.find(module)
    if registration is None or reason is not None:
        return None
    kind = registration.kind(module)
    if registration.checked:
        check_fits(kind, getattr(module, registration.weight), _described(registration, module))
    return kind


def why_not(module: nn.Module) -> str | None:
    """Return the reason why a module has no kind."""
    return KINDS.find(module)[1]


def parameter_names_of(module: nn.Module) -> tuple[str, str]:
    """Return the names of the weight and the bias of a module.

    Raises:
        ValueError: it lacks the weight of its kind.
    """
    registration, reason = KINDS.find(module)
    if registration is None:
        return "weight", "bias"
    weight = registration.weight
    is_checked = registration.checked and reason is None
    if is_checked and not isinstance(getattr(module, weight, None), Tensor):
        raise ValueError(
            f"{_described(registration, module)} has the weight {weight!r}, and the module has no "
            f"parameter of that name; name it in register_kind(..., weight=...)"
        )
    return weight, registration.bias


_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation layer, as LlamaRMSNorm and T5LayerNorm are."""
    by_name = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    parameters = list(module.parameters(recurse=False))
    are_vectors = bool(parameters) and all(p.dim() == 1 for p in parameters)
    return isinstance(module, _NORMS) or (by_name and are_vectors)


def owner_of_forward(module: nn.Module) -> type[nn.Module]:
    """Return the class that defines the forward of a module."""
    return next(cls for cls in type(module).__mro__ if "forward" in vars(cls))


def runs_forward_of(**classes: Sequence[str]) -> Callable[[nn.Module], bool]:
    """Return a test for modules that run the forward of some packages' classes, by name.

    No package is imported.
    """

    def passes(module: nn.Module) -> bool:
        owner = owner_of_forward(module)
        return owner.__name__ in classes.get(owner.__module__.partition(".")[0], ())

    return passes


def class_of(module: nn.Module) -> type:
    """Return the class of a module, or the original where FSDP2 has derived one from it."""
    cls = type(module)
    is_derived = any(base.__name__ == "FSDPModule" for base in cls.__bases__)
    return cls.__bases__[-1] if is_derived else cls


def check_fits(kind: Kind, weight: Tensor, who: str) -> None:
    """Take the geometry of a registered kind; raise an error if it does not fit its weight."""
    missing = [name for name in _METHODS + _ATTRIBUTES if not hasattr(kind, name)]
    if missing:
        raise ValueError(
            f"{who} has no {', '.join(missing)}, which every kind of layer has; {_REMEDY}"
        )
    groups, outputs, inputs = sizes = kind.groups, kind.outputs, kind.inputs
    rule = f"groups={groups}, outputs={outputs}, inputs={inputs}"
    if (
        not all(isinstance(size, int) and size > 0 for size in sizes)
        or math.prod(sizes) != weight.numel()
    ):
        raise ValueError(
            f"{who} says {rule} of a weight of shape {tuple(weight.shape)}: they must be whole "
            f"numbers whose product is the weight's {weight.numel()} numbers; correct the kind"
        )
    order = "(groups, inputs, outputs)" if kind.transposed else "(groups, outputs, inputs)"
    wanted = (groups, inputs, outputs) if kind.transposed else sizes
    tensor = torch.empty(weight.shape, device="meta")  # without memory
    matrix = kind.to_matrix(tensor)
    if tuple(matrix.shape) != wanted:
        raise ValueError(
            f"to_matrix of {who} makes {tuple(matrix.shape)} of the weight: with {rule} and "
            f"transposed={kind.transposed} it must be {order} = {wanted}; correct the kind"
        )
    is_view = (matrix is tensor or matrix._is_view()) and matrix.is_contiguous()
    converter, taps = None if is_view else kind, getattr(kind, "taps", 0)
    vars(kind)["geometry"] = Geometry(*sizes, kind.transposed, taps, converter)


def _described(registration: KindRegistration, module: nn.Module) -> str:
    name = getattr(registration.kind, "__name__", repr(registration.kind))
    return f"{name}, registered for {class_name_of(module)},"
