"""State dicts of THOR and ThorMuon, loaded completely or not at all.

They are whole although curvature may be divided.

A factor of the rows of a weight is stored as a matrix with these rows, whose blocks end where
shards end (:mod:`torch_thor.curvature.factor`). So a checkpoint of some processes can be loaded on
others: with ``torch.distributed.checkpoint``, or as a state dict of one process. If the number of
shards is another, the factors are cut again, and blocks that have changed are inverted again.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torch_thor.capture.patterns import some
from torch_thor.curvature.blocks import block_of_rows, reblock
from torch_thor.curvature.factor import Factor, collected
from torch_thor.curvature.inverse import inverse_of, relative_damping
from torch_thor.curvature.layer import SHARDS, LayerCurvature
from torch_thor.curvature.layout import block_sizes_of, layout_of
from torch_thor.curvature.view import shard_bounds
from torch_thor.intervals import Interval
from torch_thor.optim.model_argument import Group, States
from torch_thor.optim.options import check_group
from torch_thor.optim.plan import Binding, parameters
from torch_thor.optim.preconditioner import Preconditioner
from torch_thor.optim.state_dict import MOMENTS, StateDict, check_loaded, take_missing
from torch_thor.optim.state_dict import load as load_at_once

_CALLABLE = "callable"  # stands for a callable, which no state dict holds


def as_saved(group: Group) -> None:
    """Give a group of a state dict the form in which it is saved."""
    interval = group["update_interval"]
    if isinstance(interval, Interval):
        group["update_interval"] = dict(interval)
    elif callable(interval):
        group["update_interval"] = _CALLABLE


def load(
    optimizer: torch.optim.Optimizer,
    curvature: Preconditioner,
    load_plainly: Callable[[StateDict], None],
    state_dict: StateDict,
) -> None:
    """Load a state dict; if an error is raised, nothing has changed."""
    before = curvature.current(optimizer.param_groups, optimizer.state)
    plan = before.plan

    def adopt(group: Group, present: Group) -> None:
        take_missing(optimizer, group, present)
        interval = present["update_interval"]
        is_function = callable(interval) and not isinstance(interval, Interval)
        if is_function or group["update_interval"] == _CALLABLE:
            group["update_interval"] = interval
        check_group(optimizer, group)

    def complete() -> None:
        # loaded tensors have all blocks; the next step divides them
        binding = Binding(plan, optimizer.param_groups, optimizer.state, {}).take_effect()
        curvature.binding = binding
        _fit_rows(binding, curvature)
        _check_layers(binding)
        check_loaded(
            optimizer.state, parameters(binding.groups), plan.name, binding.factors.items()
        )

    try:
        load_at_once(
            optimizer, load_plainly, state_dict, adopt=adopt, complete=complete, name=plan.name
        )
    except BaseException:
        curvature.binding = before.take_effect()
        raise
    curvature.listen_again(loaded=True)


def _check_layers(binding: Binding) -> None:
    """Check that the loaded state has exactly all entries of the layers preconditioned here."""
    # the others are pruned
    present = [layer for layer in binding.plan.left_out if layer.weight.present is not None]
    saved = [
        layer.name
        for layer in present
        if f"{layer.prefix}refreshes" in binding.states.get(layer.weight.parameter, {})
    ]
    layers = [layer for layer in binding.plan.layers.values() if layer.state]
    missing = {layer.name: layer.missing_entries() for layer in layers}
    lacking = [f"{keys[-1]} of layer {name!r}" for name, keys in missing.items() if keys]
    left_out = f"it has factors of {some(saved)}, which layers= leaves out here"
    differences = [left_out] if saved else []
    differences += [f"it lacks {some(lacking)}"] if lacking else []
    if differences:
        raise ValueError(
            "the state dict was saved with other preconditioned layers, or is not whole: "
            f"{', and '.join(differences)}. Make the optimizer with the layers= that it was saved "
            "with, or let it start anew"
        )
    for layer in layers:
        if layer.refreshes and not layer.rows_per_term > 0:
            raise ValueError(
                f"layer {layer.name!r}: rows_per_term={layer.rows_per_term!r} in the state dict "
                f"must be a number > 0 where there are factors; load an earlier checkpoint"
            )


# ---- factors of the rows of weights --------------------------------------------------------------


def _fit_rows(binding: Binding, curvature: Preconditioner) -> None:
    """Turn loaded state into that of this process. What does not fit the layers stays as it is."""
    for parameter in parameters(binding.groups):
        entries, shards = binding.states.get(parameter, {}), binding.plan.shards_of(parameter)
        layers = [part.layer for part in binding.layer_parameters(parameter) if part.is_weight]
        factors = [(layer, f) for layer in layers for f in layer.stored if f.layout.by_rows]
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
                _reblock_(layer, factor, before, len(parameter), curvature)


def _reblock_(
    layer: LayerCurvature, factor: Factor, before: int, rows: int, curvature: Preconditioner
) -> None:
    """Cut a factor at the present shards, and invert those blocks alone that have changed."""
    view, damping = layer.weight_view, float(layer.weight_view.options["damping"])
    new = factor.layout.block_sizes
    old = block_sizes_of(factor.side, layer.kind, view, shard_bounds(rows, before))
    here = slice(None)  # the rows of the layer that this process holds
    if view.shards is not None:
        first = max(view.shards.local.start - (view.rows.start if view.rows is not None else 0), 0)
        here = slice(first, first + factor.layout.local.rows)
    stored, inverse = factor.read(), factor.read(inverse=True)
    moved = stored.rows.new_zeros(new.rows, stored.rows.shape[1])
    moved[here] = stored.rows
    stored.rows.copy_(reblock(moved, old, new)[here])
    if curvature.form.relative_damping:
        trace = stored.traces().sum()
        if view.shards is not None:
            trace = curvature.processes.all_reduce(trace, "shards")
        damping = relative_damping(float(trace), new.rows, damping, stored.rows.dtype)
    else:
        damping = math.sqrt(damping / layer.rows_per_term)
    again = inverse_of(stored, damping)
    if again is None:
        raise ValueError(
            f"layer {layer.name!r}: {factor.side} was saved with {before} shards, and its blocks "
            f"for other shards cannot be inverted with the damping {damping:g}; load the "
            f"checkpoint on {before} processes, or raise damping"
        )
    changed = (block_of_rows(old) != block_of_rows(new)).any(1, keepdim=True)[here]
    inverse.rows.copy_(torch.where(changed.to(again.rows.device), again.rows, inverse.rows))


# ---- curvature that is divided among processes ---------------------------------------------------


def consolidated(
    binding: Binding, curvature: Preconditioner, to: int | None
) -> dict[Tensor, dict[str, Any]] | None:
    """Collect the curvature that is divided among the processes, for the next state dict."""
    keeps = to is None or curvature.processes.rank == to
    states: dict[Tensor, dict[str, Any]] = {}
    factors = [(layer, factor) for layer in binding.owners for factor in layer.stored]
    for layer, factor in factors:
        view = layer.weight_view
        layout = layout_of(factor.side, layer.kind, view, layer.prefix)
        for inverse in (False, True) if factor.layout.is_partitioned else ():
            rows = collected([factor], inverse=inverse)[0].rows
            if not keeps:
                continue
            entries = states.setdefault(view.parameter, dict(binding.states[view.parameter]))
            del entries[factor.layout.keys[inverse]]
            zeros = torch.zeros(layout.shape, dtype=rows.dtype, device="cpu")
            into = entries.setdefault(layout.keys[inverse], zeros)
            if layout.by_rows:
                entries.setdefault(SHARDS, 1)
                into = view.of(into)
            into[:, : rows.shape[1]].copy_(rows)
    return states if keeps else None


@contextmanager
def consolidating(
    states: States, consolidated: dict[Tensor, dict[str, Any]] | None
) -> Iterator[None]:
    """Replace the states of some parameters by those in which nothing is divided.

    Raises:
        RuntimeError: they have not been collected.
    """
    if consolidated is None:
        raise RuntimeError(
            "the curvature is divided among the processes (divide_curvature=True), and this one "
            "has a part of it: call optimizer.consolidate_state_dict(to=RANK) on all processes "
            "after the last step, then state_dict() on that rank; with "
            "torch.distributed.checkpoint, to=None and state_dict() on all"
        )
    divided = {parameter: states[parameter] for parameter in consolidated}
    states.update(consolidated)
    try:
        yield
    finally:
        states.update(divided)
