"""Loading a state dict as a whole or not at all, and what torch's ``load_state_dict`` gets wrong with state like ours.

Checked are where the dict comes from, its options, and every number of its state; what is refused has changed nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.optim.thor.gradient_checks import some

StateDict = dict[str, Any]

# What optimizers keep of a parameter in its own shape.
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")

# What the parameter groups of one optimizer have and those of others have not, to name a stranger by; first match.
_SIGNS = (
    ("THOR", {"damping", "trace_thresholds"}),
    ("AGCSGD", {"dampening", "clip_factor"}),
    ("torch.optim.SGD", {"dampening", "momentum"}),
    ("torch.optim.Adam or AdamW", {"betas", "amsgrad"}),
    ("an optimizer of Adam's kind", {"betas"}),
)


@contextmanager
def as_a_whole(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put state and parameter groups back where loading raises.

    Args:
        optimizer: who loads; the base class puts new objects in the place of both.

    Yields:
        Nothing.
    """
    before = optimizer.state, optimizer.param_groups
    try:
        yield
    except BaseException:
        optimizer.state, optimizer.param_groups = before
        raise


def hooked_load(
    optimizer: torch.optim.Optimizer,
    load: Callable[[StateDict], None],
    state_dict: StateDict,
    check: Callable[[StateDict], None],
) -> StateDict:
    """Load by the base class, and check what the user's hooks have made of the dict before anything is replaced.

    Args:
        optimizer: who loads.
        load: the base class's ``load_state_dict``.
        state_dict: what the user has given.
        check: raises what is wrong with the dict.

    Returns:
        The dict as the hooks have left it.
    """
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


def check_origin(state_dict: StateDict, optimizer: str, needed: Iterable[str], remedy: str) -> None:
    """Refuse what is no state dict of an optimizer, or that of another one.

    Args:
        state_dict: what is to be loaded.
        optimizer: who loads, for the message.
        needed: options that its groups have in every version, and those of others have not.
        remedy: what to do instead.

    Raises:
        ValueError: it is another's.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = some([repr(key) for key in state_dict]) if isinstance(state_dict, Mapping) else repr(type(state_dict))
        raise ValueError(
            f"this is not the state dict of an optimizer, which has 'state' and 'param_groups': found {found}; pass "
            f"what optimizer.state_dict() gave"
        )
    for i, group in enumerate(state_dict["param_groups"]):
        missing = [key for key in needed if key not in group]
        if missing:
            options = [key for key in group if key not in ("params", "param_names")]
            known = next((name for name, keys in _SIGNS if keys <= group.keys()), "another optimizer")
            raise ValueError(
                f"the state dict is not one of {optimizer}: its parameter group {i} has no {' or '.join(missing)}, and "
                f"looks like that of {known} (it has {some(options, most=8)}); nothing was loaded. {remedy}"
            )


def complete_groups(groups: Iterable[dict[str, Any]], own: Iterable[Mapping[str, Any]]) -> None:
    """Add the options that a state dict lacks, such as one of an earlier version.

    Args:
        groups: as loaded; changed in place.
        own: the groups as they were.
    """
    for group, kept in zip(groups, own, strict=True):
        for key, value in kept.items():
            group.setdefault(key, value)


def options_of(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options of parameter groups.

    Args:
        groups: the groups.

    Returns:
        Copies without the parameters.
    """
    return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def restore_tensors(
    state: MutableMapping[Tensor, dict[str, Any]], groups: Iterable[dict[str, Any]], saved: StateDict
) -> None:
    """Put the saved tensors back in the dtype they were saved in, and in the strides that a step makes them with.

    The base class casts every floating-point tensor to the parameter's dtype (pytorch#43706), which would ruin float32
    factors under bfloat16 parameters, and shares tensors with the dict it was given. Strides are not kept by every
    checkpoint format, and products are rounded by them.

    Args:
        state: the optimizer's state, as the base class loaded it; changed in place.
        groups: its parameter groups.
        saved: the state dict.
    """
    ids = [i for group in saved["param_groups"] for i in group["params"]]
    parameters: list[nn.Parameter] = [p for group in groups for p in group["params"]]
    for i, parameter in zip(ids, parameters, strict=True):
        for key, value in saved["state"].get(i, {}).items():
            if isinstance(value, Tensor):
                state[parameter][key] = as_made(value.detach(), parameter, value.dtype)


def as_made(value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor of the state as a step would have made it.

    Args:
        value: the tensor.
        parameter: whose state it is in.
        dtype: the dtype of the copy.

    Returns:
        On the parameter's device, with its strides where it has its shape (momentum), else row-major.
    """
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
    return torch.empty(value.shape, dtype=dtype, device=parameter.device).copy_(value)


def check_moments(
    state: Mapping[Tensor, Mapping[str, Any]], groups: Iterable[Mapping[str, Any]], name: Callable[[Tensor], str]
) -> None:
    """Check that momentum and the like have their parameter's shape, and that every number is finite.

    Args:
        state: the optimizer's state, loaded.
        groups: its parameter groups.
        name: names a parameter.

    Raises:
        ValueError: something has another shape, or holds NaN or inf.
    """
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
                sound.append((where, value.isfinite().all()))
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
