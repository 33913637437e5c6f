"""State dicts: loaded as a whole or not at all, and fitted to this model and these processes.

A factor of the rows of a weight is stored as a matrix with these rows, whose blocks end where
shards end (:mod:`torch_thor.curvature.layout`). So a checkpoint of some processes can be loaded on
others: with ``torch.distributed.checkpoint``, or as a state dict of one process. If the number of
shards is another, the factors are cut again, and blocks that have changed are inverted again.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.patterns import some
from torch_thor.curvature.blocks import block_of_rows, factor_dtype, reblock
from torch_thor.curvature.communication import Processes
from torch_thor.curvature.inverse import inverse_of, relative_damping
from torch_thor.curvature.layer import NUMBERS as LAYER_NUMBERS
from torch_thor.curvature.layer import SHARDS, Factor, LayerCurvature
from torch_thor.curvature.layout import block_sizes_of
from torch_thor.curvature.view import State, shard_bounds
from torch_thor.optim.batches import Binding, parameters
from torch_thor.optim.model_argument import Group, States
from torch_thor.optim.options import COUNTERS, OPTIONS, check, scoped

StateDict = dict[str, Any]

# The entries of an optimizer's state that have the shape of their parameter.
MOMENTS = ("momentum_buffer", "exp_avg", "exp_avg_sq", "z", "x")
# The numbers in a state, all others being tensors.
NUMBERS = (*LAYER_NUMBERS, SHARDS, "lr_factor", "preconditioned")
# Options that trainers leave in the groups of any optimizer.
_ANYWHERE = {"eps", "foreach", "maximize"}


def load(
    optimizer: torch.optim.Optimizer,
    load_plainly: Callable[[StateDict], None],
    state_dict: StateDict,
    adopt: Callable[[Group, Group], None],
    complete: Callable[[], None],
) -> None:
    """Load a state dict; whatever raises an error, a hook of the user too, has changed nothing.

    ``adopt`` fits a saved group to the optimizer's, ``complete`` fits what was loaded. Hooks
    of the user run before and after.
    """
    before = optimizer.state, optimizer.param_groups
    entries: dict[Tensor, dict[str, Any]] = {}

    def read(_: torch.optim.Optimizer, hooked: StateDict) -> StateDict:
        known = {name for name in optimizer.defaults if name in OPTIONS or name in COUNTERS}
        _check_origin(optimizer, hooked["param_groups"], known)
        groups, state = [dict(group) for group in hooked["param_groups"]], dict(hooked["state"])
        # torch compares their numbers
        for group, present in zip(groups, optimizer.param_groups, strict=False):
            for key in group.keys() - {"params"}:
                if not isinstance(present.get(key), Tensor):
                    group[key] = _number(group[key])
            group.update({key: present[key] for key in known - group.keys()})
            adopt(group, present)
            check({key: group[key] for key in known})
        by_number = zip(parameters(groups), parameters(optimizer.param_groups), strict=False)
        for i, parameter in by_number:
            if i in state:
                state[i] = {key: _entry(key, value) for key, value in state[i].items()}
                entries[parameter] = state[i]
        return {"state": state, "param_groups": groups}

    def finish(_: torch.optim.Optimizer) -> None:
        # The base class casts every floating-point tensor to the dtype of its parameter
        # (pytorch#43706), which would destroy float32 factors of bfloat16 parameters, and shares
        # tensors with the dict. Not every checkpoint format keeps strides, and the rounding of
        # matrix products depends on them.
        for parameter, loaded in entries.items():
            for key, value in loaded.items():
                if isinstance(value, Tensor):
                    made = value if key == "step" else _as_made(key, value, parameter, value.dtype)
                    optimizer.state[parameter][key] = made
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


def _check_origin(
    optimizer: torch.optim.Optimizer, groups: Iterable[Group], known: set[str]
) -> None:
    """Raise an error for the state dict of another optimizer."""
    for i, group in enumerate(groups):
        foreign = sorted(group.keys() & {*scoped("group")} - known - _ANYWHERE)
        lacking = sorted(known - group.keys())
        if foreign or len(lacking) > 0.3 * len(known):
            raise ValueError(
                f"the state dict is not from {type(optimizer).__name__}: its parameter group {i} "
                f"has {' and '.join(foreign or [f'no {name}' for name in lacking])}; nothing was "
                "loaded. Load the model's weights, and let the optimizer start anew"
            )


def _number(value: Any) -> Any:
    """Return a number of Python where a format of checkpoints has made it a tensor."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _entry(key: str, value: Any) -> Any:
    """Return an entry of a loaded state as a step makes it: a tensor, or a number of Python."""
    if key == "step":  # on the CPU, because every step reads it
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    is_number = key.endswith(NUMBERS) and not key.endswith("group_rows_per_term")
    return _number(value) if is_number else value


def _as_made(key: str, value: Tensor, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a state tensor to the device and the memory layout with which a step creates it."""
    # its rows are divided among processes, as those of the parameter
    if hasattr(value, "to_local"):
        return value.detach().to(dtype=dtype, copy=True)
    if key in MOMENTS and value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value.detach())
    return torch.empty(value.shape, dtype=dtype, device=parameter.device).copy_(value.detach())


def misfits(
    states: States,
    trained: Collection[Tensor],
    name: Callable[[Tensor], str],
    factors: Iterable[tuple[LayerCurvature, tuple[Factor, ...]]] = (),
) -> Iterator[str]:
    """Yield the tensors of a state whose shape does not fit model and options."""
    expected: list[tuple[str, State, str, tuple[int, ...]]] = [
        (
            f"split_dim={f.view.options.get('split_dim')}: {key} of layer {layer.name!r}",
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


def check_loaded(found: Iterable[str]) -> None:
    """Raise an error for the first tensor whose shape does not fit."""
    for misfit in found:
        raise ValueError(
            f"{misfit}: the state dict belongs to another model or option, or its parameters stand "
            "in another order; load it into the model, and with the options, that it was saved "
            "with"
        )


# ---- THOR and ThorMuon ---------------------------------------------------------------------------


def fit_to_layers(binding: Binding, processes: Processes, *, relative: bool) -> None:
    """Fit a loaded state to the layers and shards of this process, and check that it is whole."""
    _fit_rows(binding, processes, relative=relative)
    _check_whole(binding)
    trained = parameters(binding.groups)
    check_loaded(misfits(binding.states, trained, binding.plan.name, binding.factors.items()))


def _check_whole(binding: Binding) -> None:
    """Check that the loaded state has all entries of the layers that are preconditioned here."""
    lacking = [
        f"{keys[-1]} of layer {layer.name!r}"
        for layer in binding.plan.layers.values()
        if layer.state and (keys := layer.missing_entries())
    ]
    if lacking:
        raise ValueError(
            "the state dict was saved with other preconditioned layers, or is not whole: it lacks "
            f"{some(lacking)}. Make the optimizer with the layers= that it was saved with, or let "
            "it start anew"
        )


def _fit_rows(binding: Binding, processes: Processes, *, relative: bool) -> None:
    """Turn loaded state into this process's. What does not fit the layers stays as it is."""
    for parameter in parameters(binding.groups):
        entries, shards = binding.states.get(parameter, {}), binding.plan.shards.get(id(parameter))
        factors = [
            (layer, factor)
            for layer, view in binding.shares_of.get(id(parameter), ())
            for factor in layer.stored
            if view is layer.weight_view and factor.layout.by_rows
        ]
        keys = factors[0][1].layout.keys if factors else ()
        shape = factors[0][1].layout.shape if factors else ()
        for key in entries.keys() & {*MOMENTS, *keys}:
            full = entries[key]
            has_all_rows = isinstance(full, Tensor) and not hasattr(full, "to_local")
            if shards is not None and has_all_rows and full.shape[:1] == parameter.shape[:1]:
                entries[key] = shards.wrap(full[shards.local].to(parameter.device, copy=True))
        if not factors or any(getattr(entries.get(key), "shape", None) != shape for key in keys):
            continue
        before, entries[SHARDS] = int(entries.get(SHARDS, 1)), 1 if shards is None else shards.count
        for layer, factor in factors if before != entries[SHARDS] else ():
            if layer.refreshes:
                old = shard_bounds(len(parameter), before)
                _reblock_(layer, factor, old, processes, relative=relative)


def _reblock_(
    layer: LayerCurvature,
    factor: Factor,
    bounds: tuple[int, ...],
    processes: Processes,
    *,
    relative: bool,
) -> None:
    """Cut a factor at the present shards, and invert only the blocks that have changed."""
    view, damping = layer.weight_view, float(layer.weight_view.options["damping"])
    new = factor.layout.block_sizes
    old = block_sizes_of(factor.side, layer.kind, view, bounds)
    here = slice(None)  # the rows of the layer that this process holds
    if view.shards is not None:
        first = max(view.shards.local.start - (view.rows.start if view.rows is not None else 0), 0)
        here = slice(first, first + factor.layout.local.rows)
    stored, inverse = factor.read(), factor.read(inverse=True)
    moved = stored.rows.new_zeros(new.rows, stored.rows.shape[1])
    moved[here] = stored.rows
    stored.rows.copy_(reblock(moved, old, new)[here])
    if relative:
        trace = stored.traces().sum()
        if view.shards is not None:
            trace = processes.all_reduce(trace, "shards")
        damping = relative_damping(float(trace), new.rows, damping, stored.rows.dtype)
    else:
        damping = math.sqrt(damping / layer.rows_per_term)
    again = inverse_of(stored, damping)
    if again is None:
        raise ValueError(
            f"layer {layer.name!r}: {factor.side} was saved for another number of processes, and "
            f"its blocks here cannot be inverted with the damping {damping:g}; raise it"
        )
    changed = (block_of_rows(old) != block_of_rows(new)).any(1, keepdim=True)[here]
    inverse.rows.copy_(torch.where(changed.to(again.rows.device), again.rows, inverse.rows))


def convert_state(binding: Binding) -> None:
    """Check that state fits parameters, then move and convert it to their devices and dtypes."""
    # between two steps a model may be moved or converted (model.double(), model.to(device))
    plan, states, trained = binding.plan, binding.states, parameters(binding.groups)
    for misfit in misfits(states, trained, plan.name, binding.factors.items()):
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
