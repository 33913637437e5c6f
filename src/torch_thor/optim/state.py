"""The state of each parameter: it is created in the first step, and converted when the model is.

Between two steps a model may be moved or converted (``model.double()``, ``model.to(device)``), and its state is moved
and converted with it. If that is impossible (another shape, another block size), an error is raised before anything
has changed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.layer_state import make_layer_state, misfitting_entry
from torch_thor.curvature.precision import factor_dtype
from torch_thor.optim.auto_split import AUTO
from torch_thor.optim.checkpoint import MOMENTS, as_made
from torch_thor.optim.gradient_checks import real_elements
from torch_thor.optim.parameter_index import ParameterIndex
from torch_thor.optim.parameters import Group, States, parameters_with_gradient
from torch_thor.optim.update_rule import UpdateRule

_NOTHING: Mapping[str, Any] = {}


def creates_state_only(groups: list[Group], states: States) -> bool:
    """Return whether torch.distributed.checkpoint takes the first step to create the state, with lr and gradients 0."""
    if states or any(float(group["lr"]) for group in groups):
        return False
    return not any(bool(real_elements(gradient).any()) for _, _, gradient in parameters_with_gradient(groups))


def make_state(
    groups: list[Group],
    states: States,
    index: ParameterIndex,
    layers: Iterable[LayerCurvature],
    rule: UpdateRule,
) -> None:
    """Create all state that is missing, in the first step and after parameters were added."""
    # All entries are created at once, so that a checkpoint has the same keys on every rank and at every time. They are
    # not created with the optimizer, because wrappers may replace the parameters after that. Frozen parameters have no
    # state.
    for group in groups:
        for parameter in group["params"]:
            if not parameter.requires_grad:
                continue
            state = states[parameter]
            # every parameter has an entry, because torch.distributed.checkpoint reports one without state as missing
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
    """Check that the state fits the current parameters, then move and convert it to their devices and dtypes."""
    for first, second in index.tied:
        raise RuntimeError(
            f"{first!r} and {second!r} are one parameter: they were tied after THOR was made, which takes them for the "
            f"weights of two layers. Tie the weights first, then make THOR"
        )
    for group in groups:
        for parameter in group["params"]:
            for key in MOMENTS:
                kept = states.get(parameter, _NOTHING).get(key)
                if isinstance(kept, Tensor) and kept.shape != parameter.shape:
                    raise RuntimeError(
                        f"parameter {index.name(parameter)!r} has shape {tuple(parameter.shape)}, and its {key!r} has "
                        f"{tuple(kept.shape)}: one of them was changed outside of the optimizer. Make THOR again after "
                        f"the shape of a weight has changed; weights and optimizer state are as before this step"
                    )
    for layer in layers:
        _check_cut(layer, index.group(layer.weight)["split_dim"])
    for group in groups:
        for parameter in group["params"]:
            _convert_state(parameter, states.get(parameter))
    for layer in layers:
        layer.statistics.follow_weight()


def _check_cut(layer: LayerCurvature, split_dim: Any) -> None:
    misfit = misfitting_entry(layer)
    if misfit is not None or (split_dim == AUTO and layer.stored.are_there()):
        key = next(iter(layer.stored.shapes())) if misfit is None else misfit[0]
        raise RuntimeError(
            f"split_dim={split_dim!r}: the factors of layer {layer.name!r} are cut in blocks of "
            f"{layer.state[key].shape[-1]}, and cannot be cut again; put the group's split_dim back, or make THOR anew "
            f"with the other. Weights and optimizer state are as before this step"
        )


def _convert_state(parameter: Tensor, state: dict[str, Any] | None) -> None:
    dtype = factor_dtype(parameter.dtype)
    for key, value in (state or {}).items():
        # AdamW's step is a counter that is stored as a tensor, and stays on the CPU in float32
        if isinstance(value, Tensor) and key != "step" and (value.dtype, value.device) != (dtype, parameter.device):
            assert state is not None
            state[key] = as_made(key, value, parameter, dtype)
