"""Loads an optimizer's state dict wholly or not at all, and checks that a state fits its model."""

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.patterns import some
from torch_thor.curvature.blocks import factor_dtype, has_values
from torch_thor.curvature.factor import Factor, local
from torch_thor.curvature.layer import NUMBERS as LAYER_NUMBERS
from torch_thor.curvature.layer import SHARDS, LayerCurvature
from torch_thor.curvature.view import State
from torch_thor.optim.callers import level_of_user
from torch_thor.optim.model_argument import Group, States
from torch_thor.optim.options import OptionGroup, number, options_of, scoped
from torch_thor.optim.plan import Binding, parameters
from torch_thor.plain import plain

StateDict = dict[str, Any]

# The entries of an optimizer's state that have the shape of their parameter.
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")

# The numbers in a state, all others being tensors.
NUMBERS = (*LAYER_NUMBERS, SHARDS, "lr_factor", "preconditioned")

VERSION = 1  # of a state dict; another one is not read

# Options by which the optimizer that saved a state dict is recognised, for error messages; the
# first match counts.
_SIGNS = (
    ("THOR", {"damping", "trace_thresholds"}),
    ("ThorMuon", {"damping", "update_interval"}),
    ("AGCSGD", {"dampening", "clip_factor"}),
    ("torch.optim.SGD", {"dampening", "momentum"}),
    ("torch.optim.Adam or AdamW", {"betas", "amsgrad"}),
    ("an optimizer of Adam's kind", {"betas"}),
)
# Options that an optimizer either has, or did not save.
_TELLING = {*scoped("group"), "amsgrad", "alpha", "rho", "lambd", "etas"} - {
    *("eps", "foreach", "maximize")  # which trainers leave in groups of all optimizers
}
_OF_RELATIVES = {"torch.optim.AdamW": {"amsgrad"}}


def load(
    optimizer: torch.optim.Optimizer,
    load_plainly: Callable[[StateDict], None],
    state_dict: StateDict,
    *,
    adopt: Callable[[Group, Group], None],
    complete: Callable[[], None],
    name: Callable[[Tensor], str],
    relative: str = "",
) -> None:
    """Load a state dict; whatever raises an error, a hook of the user too, has changed nothing.

    ``adopt`` fits a saved group to that of the optimizer, ``complete`` checks what was loaded. The
    relative is an optimizer of torch with the same state. Hooks of the user run before and after.
    """
    before = optimizer.state, optimizer.param_groups
    entries: dict[Tensor, dict[str, Any]] = {}

    def read(_: torch.optim.Optimizer, hooked: StateDict) -> StateDict:
        _check_origin(optimizer, hooked, relative)
        groups = [OptionGroup(group) for group in hooked["param_groups"]]
        pairs = zip(groups, optimizer.param_groups, strict=False)  # torch compares their numbers
        for group, present in pairs:
            for key in (group.keys() & present.keys()) - {"params"}:
                if not isinstance(present[key], Tensor):
                    group[key] = _numbers(group[key])
            adopt(group, present)
        by_number = zip(parameters(groups), parameters(optimizer.param_groups), strict=False)
        state = dict(hooked["state"])
        for i, parameter in by_number:
            if i in state:
                owner = name(parameter)
                state[i] = {key: _entry(key, value, owner) for key, value in state[i].items()}
                entries[parameter] = state[i]
        return {"state": state, "param_groups": groups}

    def finish(_: torch.optim.Optimizer) -> None:
        # The base class casts every floating-point tensor to the dtype of its parameter
        # (pytorch#43706), which would destroy float32 factors of bfloat16 parameters, and shares
        # tensors with the dict. Not every checkpoint format keeps strides, and the rounding of
        # matrix products depends on them.
        for parameter, loaded in entries.items():
            for key, value in loaded.items():
                if key == "step":
                    optimizer.state[parameter][key] = value
                elif isinstance(value, Tensor):
                    optimizer.state[parameter][key] = _as_made(
                        key, value.detach(), parameter, value.dtype
                    )
        complete()

    handles = (
        optimizer.register_load_state_dict_pre_hook(read),
        optimizer.register_load_state_dict_post_hook(finish, prepend=True),
    )
    try:
        load_plainly(state_dict)
    except BaseException:
        optimizer.state, optimizer.param_groups = before
        raise
    finally:
        for handle in handles:
            handle.remove()


def _numbers(value: Any) -> Any:
    """Return an option whose numbers a format of checkpoints has made tensors as it was."""
    if isinstance(value, list | tuple):
        return type(value)(map(_numbers, value))
    if not isinstance(value, Tensor) or value.numel() != 1:
        return value
    exact = value.item()
    digits = (float(f"{exact:.{n}g}") for n in range(1, 18))  # 0.9 in float32 is 0.89999998
    # NaN equals no number, and is refused by the rule of its option
    rounded = ((x, torch.tensor(x, dtype=value.dtype, device="cpu").item()) for x in digits)
    return next((x for x, same in rounded if same == exact), exact)


def _entry(key: str, value: Any, parameter: str) -> Any:
    """Return an entry of a loaded state as a step makes it: a tensor, or a number of Python."""
    is_number = key.endswith((*NUMBERS, "step")) and not key.endswith("group_rows_per_term")
    exact = number(plain(value)) if is_number else None
    if exact is not None and math.isfinite(exact) and (key != "step" or exact >= 0):
        if key == "step":  # on the CPU, because every step reads it
            return torch.tensor(exact, dtype=torch.float32, device="cpu")
        return value.item() if hasattr(value, "item") else value
    if not is_number and hasattr(value, "ndim"):  # of NumPy too
        return value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    if is_number or key in MOMENTS:
        finite = "a finite number ≥ 0" if key == "step" else "a finite number"
        rule = finite if is_number else "a tensor"
        raise ValueError(
            f"{key}={value!r} of parameter {parameter!r} in the state dict must be {rule}; load "
            "an earlier checkpoint, or let the optimizer start anew"
        )
    return value


def take_missing(optimizer: torch.optim.Optimizer, group: Group, present: Group) -> None:
    """Give a saved group the options that it lacks, and say so."""
    missing = {name: present[name] for name in options_of(optimizer) if name not in group}
    if missing:
        warnings.warn(
            f"the state dict of {type(optimizer).__name__} has no "
            + ", ".join(f"{name} ({value!r} is taken)" for name, value in missing.items())
            + ": it was saved by another version, or changed since; what is taken is the "
            "optimizer's, which you can set in its parameter groups",
            UserWarning,
            stacklevel=level_of_user(),
        )
    group.update(missing)


def _check_origin(optimizer: torch.optim.Optimizer, state_dict: StateDict, relative: str) -> None:
    """Raise an error for a state dict that neither such an optimizer nor its relative saved."""
    label = type(optimizer).__name__
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        is_dict = isinstance(state_dict, Mapping)
        content = some([repr(key) for key in state_dict]) if is_dict else repr(type(state_dict))
        raise ValueError(
            "this is not the state dict of an optimizer, which has 'state' and 'param_groups': "
            f"found {content}; pass what optimizer.state_dict() gave"
        )
    if (version := state_dict.get("version", VERSION)) != VERSION:
        raise ValueError(
            f"the state dict has version {version!r}: this torch_thor reads version {VERSION}; "
            "load it with the torch_thor that saved it, or let the optimizer start anew"
        )
    known = options_of(optimizer)
    of_others = _TELLING - {*known} - _OF_RELATIVES.get(relative, set())
    for i, group in enumerate(state_dict["param_groups"]):
        lacking = [key for key in known if key not in group]
        foreign = [key for key in group if key in of_others]
        if not foreign and 2 * len(lacking) <= len(known):
            continue
        signs = foreign or [f"no {key}" for key in lacking]
        options = [key for key in group if key not in ("params", "param_names")]
        saved_by = next(
            (name for name, keys in _SIGNS if keys <= group.keys()), "another optimizer"
        )
        raise ValueError(
            f"the state dict is not one of {label}: its parameter group {i} has "
            f"{' and '.join(signs)}, and looks like that of {saved_by} (it has "
            f"{some(options, most=8)}); nothing was loaded. {label} takes its "
            f"own{f' and those of {relative}' if relative else ''}: load the model's weights, "
            "and let it start anew"
        )


def _as_made(key: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a state tensor to the device and the memory layout with which a step creates it."""
    # its rows are divided among processes, as those of the parameter
    if hasattr(value, "to_local"):
        return value.to(dtype=dtype, copy=True)
    if key in MOMENTS and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
    return torch.empty(value.shape, dtype=dtype, device=parameter.device).copy_(value)


def _misfits(
    states: States,
    trained: Collection[Tensor],
    name: Callable[[Tensor], str],
    factors: Iterable[tuple[LayerCurvature, tuple[Factor, ...]]],
) -> Iterator[str]:
    """Yield the tensors of a state whose shape is not the one that model and options need."""
    expected: list[tuple[str, State, str, tuple[int, ...]]] = [
        (
            f"split_dim={f.layout.split_dim}: {key} of layer {layer.name!r}",
            f.view.state,
            key,
            f.layout.shape,
        )
        for layer, of_layer in factors
        for f in of_layer
        for key in f.layout.keys
    ]
    expected += [
        (f"{key} of parameter {name(p)!r}", states.get(p, {}), key, tuple(p.shape))
        for p in trained
        for key in MOMENTS
    ]
    for what, state, key, needed in expected:
        shape = tuple(getattr(state.get(key), "shape", ()))
        if state.get(key) is not None and shape != needed:
            yield f"{what} has shape {shape} and needs {needed}"


def check_loaded(
    states: States,
    trained: Collection[Tensor],
    name: Callable[[Tensor], str],
    factors: Iterable[tuple[LayerCurvature, tuple[Factor, ...]]] = (),
) -> None:
    """Check that loaded tensors have the shapes that model and options need, and are finite."""
    for misfit in _misfits(states, trained, name, factors):
        raise ValueError(
            f"{misfit}: the state dict belongs to another model or option, or its parameters stand "
            "in another order; load it into the model, and with the options, that it was saved "
            "with"
        )
    bad = [
        f"{key!r} of parameter {name(p)!r}"
        for p in trained
        for key, value in states.get(p, {}).items()
        if isinstance(value, Tensor) and has_values(value) and not local(value).isfinite().all()
    ]
    if bad:
        raise ValueError(
            f"the state dict holds NaN or inf in {some(bad)}, which would reach the weights; load "
            f"an earlier checkpoint, or let the optimizer start anew"
        )


def convert_state(binding: Binding) -> None:
    """Check that state fits parameters, then move and convert it to their devices and dtypes."""
    # between two steps a model may be moved or converted (model.double(), model.to(device))
    plan, states, trained = binding.plan, binding.states, parameters(binding.groups)
    for misfit in _misfits(states, trained, plan.name, binding.factors.items()):
        raise RuntimeError(
            f"{misfit}: a weight or an option was changed, and the state cannot follow; put it "
            "back, or make the optimizer again. Weights and optimizer state are as before this "
            "step"
        )
    for parameter in trained:
        state, dtype = states.get(parameter, {}), factor_dtype(parameter.dtype)
        for key, value in state.items():
            # AdamW's step is a counter that is stored as a tensor, and stays on the CPU in float32
            if (
                isinstance(value, Tensor)
                and key != "step"
                and (value.dtype, value.device) != (dtype, parameter.device)
            ):
                state[key] = _as_made(key, value, parameter, dtype)
