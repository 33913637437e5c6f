"""Does the state still fit the model? Looked at before a step moves anything, so that it is taken as a whole.

Between two steps a model may be moved or converted (``model.double()``, ``model.to(device)``): its state follows. What
cannot be followed (another shape, another cut of the factors) is an error while everything is as it was.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from torch_thor.capture.coverage import Covered
from torch_thor.capture.inspection import NOT_TRAINED
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import factor_dtype
from torch_thor.optim.checkpoint import MOMENTS, as_made
from torch_thor.optim.parameters import Group, ParameterIndex
from torch_thor.optim.thor.auto_split import AUTO
from torch_thor.optim.thor.gradient_checks import some

Look = list[tuple[Any, ...]]

_NOTHING: Mapping[str, Any] = {}


def look(groups: Iterable[Group], states: Mapping[Tensor, dict[str, Any]], index: ParameterIndex) -> Look:
    """Return all that state hangs on, to be compared with what it was made for: cheap, since every step asks.

    Args:
        groups: the optimizer's parameter groups.
        states: its state.
        index: knows the model's parameters of today.

    Returns:
        An entry a parameter, after what holds for the whole optimizer.
    """
    found: Look = [(len(states), index.identities())]
    for group in groups:
        found.append((group["split_dim"], len(group["params"])))
        for parameter in group["params"]:
            buffer = states.get(parameter, _NOTHING).get("momentum_buffer")
            made = (parameter.requires_grad, None if buffer is None else buffer.shape)
            found.append((parameter.shape, parameter.dtype, parameter.device, *made))
    return found


def conform(
    groups: Iterable[Group],
    states: Mapping[Tensor, dict[str, Any]],
    layers: Iterable[LayerCurvature],
    index: ParameterIndex,
) -> None:
    """Check that the state fits today's parameters, then bring it to their devices and precisions.

    Args:
        groups: the optimizer's parameter groups.
        states: its state; changed in place.
        layers: the preconditioned layers.
        index: knows the model's parameters of today.

    Raises:
        RuntimeError: a parameter was replaced, or has another shape than its state.
    """
    for group in groups:
        for parameter in group["params"]:
            for key in MOMENTS:
                kept = states.get(parameter, _NOTHING).get(key)
                if isinstance(kept, Tensor) and kept.shape != parameter.shape:
                    raise RuntimeError(
                        f"parameter {index.name(parameter)!r} has shape {tuple(parameter.shape)}, and its {key!r} has "
                        f"{tuple(kept.shape)}: one of them was changed behind the optimizer's back. Make THOR anew "
                        f"after a weight was given another shape; weights and optimizer state are as before this step"
                    )
    for layer in layers:
        group = index.group(layer.weight)
        _check_cut(layer, group["split_dim"])
    for group in groups:
        for parameter in group["params"]:
            _follow(parameter, states.get(parameter))
    for layer in layers:
        layer.follow_weight()


def _check_cut(layer: LayerCurvature, split_dim: Any) -> None:
    for key, layout in layer.layouts().items():
        for matrix in (key, f"{key}_inverse"):
            blocks, tail = layer.stored(matrix)
            if blocks is None:
                continue
            found = (tuple(blocks.shape), None if tail is None else tuple(tail.shape))
            if found != layout.shapes() or split_dim == AUTO:
                raise RuntimeError(
                    f"split_dim={split_dim!r}: the factors of layer {layer.name!r} are cut in blocks of "
                    f"{blocks.shape[-1]}, and stay so; put the group's split_dim back, or make THOR anew with the "
                    f"other. Weights and optimizer state are as before this step"
                )


def _follow(parameter: Tensor, state: dict[str, Any] | None) -> None:
    dtype = factor_dtype(parameter.dtype)
    for key, value in (state or {}).items():
        # AdamW's step is a number that stands in a tensor
        if isinstance(value, Tensor) and key != "step" and (value.dtype, value.device) != (dtype, parameter.device):
            assert state is not None
            state[key] = as_made(value, parameter, dtype)


def gone_message(name: str, before: Iterable[Covered], now: Iterable[Covered], *, computed: bool = False) -> str:
    """Return the text of the warning for a module that is no longer in the model, or has lost a parameter.

    Args:
        name: the module.
        before: what every parameter got while it was there.
        now: what every parameter gets.
        computed: whether the module is there, and computes what was its weight.

    Returns:
        The message.
    """
    known = {entry.name for entry in before if entry.reason == NOT_TRAINED}
    new = [entry.name for entry in now if entry.reason == NOT_TRAINED and entry.name not in known]
    told = f"THOR: module {name!r} is no longer in the model: it was replaced or removed after THOR was made"
    then = ", and what it had is not trained any more"
    if computed:
        told = (
            f"THOR: the weight of {name!r} is no parameter any more: it was pruned or parametrised after THOR was made"
        )
        then = ", and what it is computed from is trained plainly; THOR takes it up again when it is a parameter again"
    if not new:
        return told + then
    return (
        f"{told}. In no parameter group, and so not trained, are {some(new)}: give them to "
        f"optimizer.add_param_group({{'params': [...]}}), or make THOR anew"
    )
