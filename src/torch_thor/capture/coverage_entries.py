"""The entry of :meth:`torch_thor.THOR.coverage` for one parameter, from what the inspection has found."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from torch_thor.capture.composites import composite_of
from torch_thor.capture.coverage import NOT_TRAINED, Covered
from torch_thor.capture.layers import Layer
from torch_thor.capture.owners import Owner
from torch_thor.curvature.kinds import class_name_of, parameter_names_of, why_not


@dataclass
class Reasons:
    """Why parameters are not preconditioned."""

    of_parameters: dict[int, str]  # the reason, by the `id` of the parameter
    of_modules: Mapping[str, str] = field(default_factory=dict)
    notes: dict[int, list[str]] = field(default_factory=dict)  # what to say of a preconditioned parameter, by its `id`

    def leave_out(self, layer: Layer, reason: str, rest: str) -> None:
        """Record that the user has left out a layer."""
        for view in (layer.weight, *layer.biases):
            key = id(view.parameter)
            self.of_parameters.setdefault(key, reason)
            self.notes.setdefault(key, []).append(f"{rest} for {layer.name!r}: {reason}")


def entry_of(
    name: str, parameter: nn.Parameter, owners: Sequence[Owner], layers: Iterable[Layer], reasons: Reasons
) -> Covered:
    """Return the entry of a parameter."""
    shape, owner, others = tuple(parameter.shape), owners[0], owners[1:]
    as_weight = [layer for layer in layers if layer.weight.parameter is parameter]
    as_bias = [layer for layer in layers if any(b.parameter is parameter for b in layer.biases)]
    if as_weight or as_bias:
        found = as_weight or as_bias
        kind = found[0].kind
        sizes = (kind.inputs, kind.outputs) if as_weight else (kind.outputs,)
        notes = [f"shared with {', '.join(repr(o.name) for o in others)}"] if others else []
        note = "; ".join(notes + reasons.notes.get(id(parameter), [])) or None
        return Covered(name, shape, kind.label, sizes, kind.groups * len(found), note=note)
    reason = reasons.of_parameters.get(id(parameter)) or reasons.of_modules.get(owner.module_name)
    reason = reason or _why_tied(owners, layers) or _why_plain(owner, is_shared=bool(others))
    return Covered(name, shape, class_name_of(owner.module), reason=reason, trained=reason != NOT_TRAINED)


def _why_tied(owners: Sequence[Owner], layers: Iterable[Layer]) -> str | None:
    """Return the reason for the bias of a decoder whose weight is preconditioned as that of an embedding."""
    tied = []
    for owner in owners:  # BERT's bias has two: the decoder, and the head around it
        weight = getattr(owner.module, parameter_names_of(owner.module)[0], None)
        if owner.attribute == owner.bias and weight is not None:
            own = [layer for layer in layers if layer.weight.parameter is weight]
            tied += [o.name for o in own if o.modules and all(module is not owner.module for module, _ in o.modules)]
    return f"the weight of its layer is preconditioned as that of {tied[0]!r}, which has another G" if tied else None


def _why_plain(owner: Owner, *, is_shared: bool) -> str:
    """Return the reason for a parameter of which nothing more special is known."""
    module, label = owner.module, class_name_of(owner.module)
    if isinstance(module, nn.utils.parametrize.ParametrizationList):
        return "the weight is computed from it (a parametrization): its gradient is not the weight's"
    if is_shared:
        return "shared by several modules"
    composite, _ = composite_of(module)
    if composite is not None:
        return f"belongs to no layer inside {label}"
    reason = why_not(module)
    if reason is not None:
        return reason
    if owner.attribute == owner.bias:
        return "the weight of its layer is not preconditioned"
    return f"not the weight or bias of {label}"
