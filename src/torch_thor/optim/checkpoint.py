"""Loads an optimizer's state dict wholly or not at all, and checks that a state fits its model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.patterns import some
from torch_thor.curvature.blocks import factor_dtype, has_values
from torch_thor.curvature.factor import local
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.optim.options import OF_GROUPS
from torch_thor.optim.parameters import Group, States
from torch_thor.optim.plan import Bound, parameters

StateDict = dict[str, Any]

# The entries of an optimizer's state that have the shape of their parameter.
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq")

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


@contextmanager
def loading(
    optimizer: torch.optim.Optimizer,
    load: Callable[[StateDict], None],
    state_dict: StateDict,
    *,
    needed: Iterable[str],
    relative: str | None = None,
) -> Iterator[list[tuple[Group, Group]]]:
    """Load a state dict, for the block to complete with the options before."""
    # If an error is raised, nothing changes.
    before = optimizer.state, optimizer.param_groups
    own = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    saved: StateDict = {}

    def look(_: torch.optim.Optimizer, hooked: StateDict) -> None:
        _check_origin(optimizer, hooked, needed, relative)
        saved.update(hooked)

    handle = optimizer.register_load_state_dict_pre_hook(look)  # runs after the user's hooks
    try:
        load(state_dict)
        # The base class casts every floating-point tensor to the dtype of its parameter
        # (pytorch#43706), which would destroy float32 factors of bfloat16 parameters, and shares
        # tensors with the dict. Not every checkpoint format keeps strides, and the rounding of
        # matrix products depends on them.
        ids = [i for group in saved["param_groups"] for i in group["params"]]
        for i, parameter in zip(ids, parameters(optimizer.param_groups), strict=True):
            for key, value in saved["state"].get(i, {}).items():
                if isinstance(value, Tensor):
                    optimizer.state[parameter][key] = _as_made(
                        key, value.detach(), parameter, value.dtype
                    )
        yield list(zip(optimizer.param_groups, own, strict=True))
    except BaseException:
        optimizer.state, optimizer.param_groups = before
        raise
    finally:
        handle.remove()


def _check_origin(
    optimizer: torch.optim.Optimizer,
    state_dict: StateDict,
    needed: Iterable[str],
    relative: str | None,
) -> None:
    """Raise an error for a state dict that neither such an optimizer nor its relative saved."""
    # The relative is an optimizer with the same state.
    label = type(optimizer).__name__
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        found = (
            some([repr(key) for key in state_dict])
            if isinstance(state_dict, Mapping)
            else repr(type(state_dict))
        )
        raise ValueError(
            "this is not the state dict of an optimizer, which has 'state' and 'param_groups': "
            f"found {found}; pass what optimizer.state_dict() gave"
        )
    for i, group in enumerate(state_dict["param_groups"]):
        signs = [f"no {key}" for key in needed if key not in group]
        signs += [key for key in group if key in OF_GROUPS and key not in optimizer.defaults]
        if signs:
            options = [key for key in group if key not in ("params", "param_names")]
            known = next(
                (name for name, keys in _SIGNS if keys <= group.keys()), "another optimizer"
            )
            raise ValueError(
                f"the state dict is not one of {label}: its parameter group {i} has "
                f"{' and '.join(signs)}, and looks like that of {known} (it has "
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
    trained: Iterable[Tensor],
    name: Callable[[Tensor], str],
    layers: Iterable[LayerCurvature],
) -> Iterator[str]:
    """Yield the tensors of a state whose shape is not the one that model and options need."""
    expected: list[tuple[str, Any, tuple[int, ...]]] = []
    for layer in layers:
        for key, shape in layer.shapes().items():
            what = (
                f"split_dim={layer.weight_view.options['split_dim']}: {key} of layer {layer.name!r}"
            )
            expected.append((what, layer.state.get(key), shape))
    for p in trained:
        expected += [
            (f"{k} of parameter {name(p)!r}", states.get(p, {}).get(k), tuple(p.shape))
            for k in MOMENTS
        ]
    for what, found, needed in expected:
        has = tuple(getattr(found, "shape", ()))
        if found is not None and has != needed:
            yield f"{what} has shape {has} and needs {needed}"


def check_loaded(
    states: States,
    trained: Iterable[Tensor],
    name: Callable[[Tensor], str],
    layers: Iterable[LayerCurvature] = (),
) -> None:
    """Check that loaded tensors have the shapes that model and options need, and are finite."""
    trained = list(trained)
    for misfit in _misfits(states, trained, name, layers):
        raise ValueError(
            f"{misfit}: the state dict belongs to another model or option, or its parameters stand "
            "in another order; load it into the model, and with the options, that it was saved "
            "with"
        )
    tensors = [
        (k, p, v) for p in trained for k, v in states.get(p, {}).items() if isinstance(v, Tensor)
    ]
    bad = [
        f"{k!r} of parameter {name(p)!r}"
        for k, p, v in tensors
        if has_values(v) and not bool(local(v).isfinite().all())
    ]
    if bad:
        raise ValueError(
            f"the state dict holds NaN or inf in {some(bad)}, which would reach the weights; load "
            f"an earlier checkpoint, or let the optimizer start anew"
        )


def conform(bound: Bound) -> None:
    """Check that state fits parameters, then move and convert it to their devices and dtypes."""
    # between two steps a model may be moved or converted (model.double(), model.to(device))
    plan, states, trained = bound.plan, bound.states, parameters(bound.groups)
    for misfit in _misfits(states, trained, plan.name, plan.layers.values()):
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
    for layer in plan.layers.values():
        layer.statistics.follow_weight()
