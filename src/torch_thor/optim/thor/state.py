"""What is kept of each parameter from step to step: when it is made, and that it still fits the model.

Between two steps a model may be moved or converted (``model.double()``, ``model.to(device)``): its state follows. What
cannot be followed (another shape, another cut of the factors) is an error while everything is as it was.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.layer_state import make_layer_state, stored_tensors
from torch_thor.curvature.precision import factor_dtype
from torch_thor.optim.checkpoint import MOMENTS, as_made
from torch_thor.optim.parameters import Group, States, with_gradient
from torch_thor.optim.thor.auto_split import AUTO
from torch_thor.optim.thor.gradient_checks import numbers_of
from torch_thor.optim.thor.parameter_index import ParameterIndex
from torch_thor.optim.thor.update_rule import UpdateRule

_NOTHING: Mapping[str, Any] = {}


def is_only_asked_for(groups: list[Group], states: States) -> bool:
    """Return whether torch.distributed.checkpoint asks for the state, by a first step in which nothing moves.

    That is no step of training, and maybe not every process takes it.

    Args:
        groups: the optimizer's parameter groups.
        states: its state.

    Returns:
        Whether there is no state yet, lr is 0 and every gradient is.
    """
    if states or any(float(group["lr"]) for group in groups):
        return False
    return not any(bool(numbers_of(gradient).any()) for _, _, gradient in with_gradient(groups))


def make_state(
    groups: list[Group],
    states: States,
    index: ParameterIndex,
    layers: Iterable[LayerCurvature],
    rule: UpdateRule,
) -> None:
    """Make all state that there is not yet, at the first step and where parameters have come.

    So that a checkpoint has the same keys on every rank and at every time; not at construction, because wrappers that
    replace parameters would leave it under keys that are gone. Frozen parameters have none.

    Args:
        groups: the optimizer's parameter groups.
        states: its state, which makes missing entries.
        index: which layer preconditions which parameter; hands the new state to the layers.
        layers: the preconditioned layers.
        rule: makes what it keeps of a parameter.
    """
    for group in groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            state = states[parameter]
            # a number for each: torch.distributed.checkpoint takes a parameter without any for one that is lost
            state.setdefault("preconditioned", int(bool(index.shares(parameter))))
            rule.make_state(index, parameter, state, group)
    index.update(groups, states)
    for layer in layers:
        make_layer_state(layer)


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
        _check_cut(layer, index.group(layer.weight)["split_dim"])
    for group in groups:
        for parameter in group["params"]:
            _follow(parameter, states.get(parameter))
    for layer in layers:
        layer.statistics.follow_weight()


def _check_cut(layer: LayerCurvature, split_dim: Any) -> None:
    layouts = layer.layouts()
    for matrix, (blocks, tail) in stored_tensors(layer).items():
        if blocks is None:
            continue
        found = (tuple(blocks.shape), None if tail is None else tuple(tail.shape))
        if found != layouts[matrix[0]].shapes or split_dim == AUTO:
            raise RuntimeError(
                f"split_dim={split_dim!r}: the factors of layer {layer.name!r} are cut in blocks of "
                f"{blocks.shape[-1]}, and stay so; put the group's split_dim back, or make THOR anew with the "
                f"other. Weights and optimizer state are as before this step"
            )


def _follow(parameter: Tensor, state: dict[str, Any] | None) -> None:
    dtype = factor_dtype(parameter.dtype)
    for key, value in (state or {}).items():
        # AdamW's step is a number, stored as a tensor
        if isinstance(value, Tensor) and key != "step" and (value.dtype, value.device) != (dtype, parameter.device):
            assert state is not None
            state[key] = as_made(value, parameter, dtype)
