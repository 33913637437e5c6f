"""Loads the state dict of an optimizer completely or not at all, and corrects what torch's ``load_state_dict`` changes.

The origin of the state dict, its options and its tensors are checked. If a check fails, nothing has changed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.patterns import some
from torch_thor.curvature.precision import factor_dtype
from torch_thor.curvature.shards import local
from torch_thor.optim.plan import Plan

StateDict = dict[str, Any]

# The entries of an optimizer's state that have the shape of their parameter.
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")

# Options by which the optimizer that saved a state dict is recognised, for error messages; the first match counts.
_SIGNS = (
    ("THOR", {"damping", "trace_thresholds"}),
    ("ThorMuon", {"damping", "update_interval"}),
    ("AGCSGD", {"dampening", "clip_factor"}),
    ("torch.optim.SGD", {"dampening", "momentum"}),
    ("torch.optim.Adam or AdamW", {"betas", "amsgrad"}),
    ("an optimizer of Adam's kind", {"betas"}),
)


@contextmanager
def restored_on_error(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore state and parameter groups if the block raises an exception."""
    before = optimizer.state, optimizer.param_groups
    try:
        yield
    except BaseException:
        optimizer.state, optimizer.param_groups = before
        raise


def load_checked(
    optimizer: torch.optim.Optimizer,
    load: Callable[[StateDict], None],
    state_dict: StateDict,
    check: Callable[[StateDict], None],
) -> StateDict:
    """Load a state dict with the base class, and check it after the user's hooks and before anything is replaced."""
    seen: list[StateDict] = []

    def look(_: torch.optim.Optimizer, hooked: StateDict) -> None:
        check(hooked)
        seen.append(hooked)

    handle = optimizer.register_load_state_dict_pre_hook(look)
    try:
        load(state_dict)
    finally:
        handle.remove()
    return seen[0]


def check_origin(
    state_dict: StateDict, optimizer: str, needed: Iterable[str], remedy: str, *, foreign: Iterable[str] = ()
) -> None:
    """Raise an error for a state dict that was not saved by a given optimizer, which has no option in ``foreign``."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = some([repr(key) for key in state_dict]) if isinstance(state_dict, Mapping) else repr(type(state_dict))
        raise ValueError(
            f"this is not the state dict of an optimizer, which has 'state' and 'param_groups': found {found}; pass "
            f"what optimizer.state_dict() gave"
        )
    for i, group in enumerate(state_dict["param_groups"]):
        signs = [f"no {key}" for key in needed if key not in group] + [key for key in foreign if key in group]
        if signs:
            options = [key for key in group if key not in ("params", "param_names")]
            known = next((name for name, keys in _SIGNS if keys <= group.keys()), "another optimizer")
            raise ValueError(
                f"the state dict is not one of {optimizer}: its parameter group {i} has {' and '.join(signs)}, and "
                f"looks like that of {known} (it has {some(options, most=8)}); nothing was loaded. {remedy}"
            )


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of parameter groups."""
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def restore_tensors(
    state: MutableMapping[Tensor, dict[str, Any]], groups: Iterable[dict[str, Any]], saved: StateDict
) -> None:
    """Replace loaded tensors by copies in the dtype that was saved, with the strides that a step gives them."""
    # The base class casts every floating-point tensor to the dtype of its parameter (pytorch#43706), which would
    # destroy float32 factors of bfloat16 parameters, and shares tensors with the dict. Not every checkpoint format
    # keeps strides, and the rounding of matrix products depends on them.
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
    for i, parameter in zip(ids, parameters, strict=True):
        for key, value in saved["state"].get(i, {}).items():
            if isinstance(value, Tensor):
                state[parameter][key] = as_made(key, value.detach(), parameter, value.dtype)


def as_made(key: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor of the state to the device and the memory layout with which a step creates it."""
    if hasattr(value, "to_local"):  # its rows are divided among processes, as those of the parameter
        return value.to(dtype=dtype, copy=True)
    if key in MOMENTS and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
    return torch.empty(value.shape, dtype=dtype, device=parameter.device).copy_(value)


def check_moments(
    state: Mapping[Tensor, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]], name: Callable[[Tensor], str]
) -> None:
    """Check that moments have the shape of their parameter, and that all tensors are finite."""
    sound: list[tuple[str, Tensor]] = []
    for parameter in (p for group in groups for p in group["params"]):
        for key, value in state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            where = f"{key!r} of parameter {name(parameter)!r}"
            if key in MOMENTS and value.shape != parameter.shape:
                raise ValueError(
                    f"the state dict has {where} in shape {tuple(value.shape)}, the parameter has "
                    f"{tuple(parameter.shape)}: it belongs to another model, or its parameters stand in another order; "
                    f"load it into the model that it was saved with"
                )
            if value.is_floating_point() or value.is_complex():
                sound.append((where, local(value).isfinite().all()))
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for where, flag in sound:
        by_device.setdefault(flag.device, []).append((where, flag))
    for entries in by_device.values():
        flags = torch.stack([flag for _, flag in entries]).tolist()
        bad = [where for (where, _), good in zip(entries, flags, strict=True) if not good]
        if bad:
            raise ValueError(
                f"the state dict holds NaN or inf in {some(bad)}, which would reach the weights; load an earlier "
                f"checkpoint, or let the optimizer start anew"
            )


def conform(plan: Plan, groups: Iterable[dict[str, Any]], states: Mapping[Tensor, dict[str, Any]]) -> None:
    """Check that the state fits the parameters, then move and convert it to their devices and dtypes."""
    # between two steps a model may be moved or converted (model.double(), model.to(device))
    parameters = plan.parameters(groups)
    for parameter in parameters:
        for key in MOMENTS:
            kept = states.get(parameter, {}).get(key)
            if isinstance(kept, Tensor) and kept.shape != parameter.shape:
                raise RuntimeError(
                    f"parameter {plan.name(parameter)!r} has shape {tuple(parameter.shape)}, and its {key!r} has "
                    f"{tuple(kept.shape)}: one of them was changed outside of the optimizer. Make the optimizer again "
                    f"after the shape of a weight has changed; weights and optimizer state are as before this step"
                )
    for layer in plan.layers.values():
        misfit = layer.misfitting_entry()
        if misfit is not None:
            raise RuntimeError(
                f"split_dim={layer.weight_view.options['split_dim']!r}: the factors of layer {layer.name!r} are cut in "
                f"blocks of {layer.state[misfit[0]].shape[-1]}, and cannot be cut again; put the group's split_dim "
                f"back, or make the optimizer anew. Weights and optimizer state are as before this step"
            )
    for parameter in parameters:
        state, dtype = states.get(parameter, {}), factor_dtype(parameter.dtype)
        for key, value in state.items():
            # AdamW's step is a counter that is stored as a tensor, and stays on the CPU in float32
            if isinstance(value, Tensor) and key != "step" and (value.dtype, value.device) != (dtype, parameter.device):
                state[key] = as_made(key, value, parameter, dtype)
    for layer in plan.layers.values():
        layer.statistics.follow_weight()
