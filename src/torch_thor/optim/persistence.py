"""State dicts of THOR and ThorMuon: loaded completely or not at all, whole although curvature may be divided."""

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_thor.capture.patterns import some
from torch_thor.curvature.factor import collected
from torch_thor.curvature.layer import SHARDS
from torch_thor.intervals import Constant, Geometric, Piecewise, UpdateInterval
from torch_thor.optim.checkpoint import StateDict, check_loaded, loading
from torch_thor.optim.options import check
from torch_thor.optim.plan import Plan
from torch_thor.optim.saved_rows import fit_loaded_rows
from torch_thor.optim.step import plan_now

if TYPE_CHECKING:
    from torch_thor.optim.base import CurvatureOptimizer

# ---- intervals: a state dict holds no functions, but the text of a schedule -----------------------------------------

_CALLABLE = "callable"  # stands for a callable that is not a schedule of this package
_SCHEDULES: dict[str, Any] = {schedule.__name__: schedule for schedule in (Constant, Piecewise, Geometric)}


def plain_interval(interval: UpdateInterval) -> int | str:
    """Return an interval in the form in which a state dict stores it."""
    if not callable(interval):
        return interval
    return repr(interval) if type(interval) in _SCHEDULES.values() else _CALLABLE


def _loaded_interval(plain: Any, own: UpdateInterval) -> Any:
    """Return the interval to use after loading; the text of a schedule is parsed and not executed."""
    if plain_interval(own) == _CALLABLE or plain == _CALLABLE:
        return own
    if not isinstance(plain, str):
        return plain
    try:
        call = ast.parse(plain, mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError("not a call of a class with keywords")
        return _SCHEDULES[call.func.id](**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
    except (SyntaxError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"update_interval={plain!r} in the state dict is no known schedule ({', '.join(_SCHEDULES)}); set "
            f"group['update_interval'] in the state dict to a whole number or to one of them"
        ) from error


# ---- loading --------------------------------------------------------------------------------------------------------


def load(optimizer: "CurvatureOptimizer", load_plainly: Callable[[StateDict], None], state_dict: StateDict) -> None:
    """Load a state dict; if an error is raised, nothing has changed."""
    plan = plan_now(optimizer)
    divided = [(factor, factor.divided) for layer in plan.layers.values() for factor in layer.stored]
    needed = [key for key in optimizer.defaults if key != "differentiable"]  # torch adds it to them when it loads

    def bind() -> None:
        plan.group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        plan.bind(optimizer.state)

    try:
        with loading(optimizer, load_plainly, state_dict, needed=needed) as groups:
            for group, own in groups:
                group["update_interval"] = _loaded_interval(group["update_interval"], own["update_interval"])
                check(type(optimizer), group)
            for factor, _ in divided:
                factor.divided = None  # loaded tensors are whole; the next step divides them
            bind()
            fit_loaded_rows(optimizer.param_groups, optimizer.state, plan, relative=optimizer.relative_damping)
            _check_layers(optimizer, plan)
            check_loaded(optimizer.state, plan.parameters(optimizer.param_groups), plan.name, plan.layers.values())
    except BaseException:
        for factor, owners in divided:
            factor.divided = owners
        bind()
        raise
    optimizer._whole = None
    optimizer._capture.discard()
    optimizer._capture.listen()


def _check_layers(optimizer: "CurvatureOptimizer", plan: Plan) -> None:
    """Check that the loaded state has all entries of the layers that are preconditioned here, and no others."""
    present = [one for one in plan.left_out if one.weight.present is not None]  # the others are pruned
    saved = [one.name for one in present if f"{one.prefix}refreshes" in optimizer.state.get(one.weight.parameter, {})]
    layers = [layer for layer in plan.layers.values() if layer.state]
    missing = {layer.name: layer.missing_entries() for layer in layers}
    lacking = [f"{keys[-1]} of layer {name!r}" for name, keys in missing.items() if keys]
    if saved or lacking:
        differences = [f"it has factors of {some(saved)}, which layers= leaves out here"] if saved else []
        differences += [f"it lacks {some(lacking)}"] if lacking else []
        raise ValueError(
            f"the state dict was saved with other preconditioned layers, or is not whole: {', and '.join(differences)}."
            f" Make the optimizer with the layers= that it was saved with, or let it start anew"
        )
    for layer in layers:
        if layer.refreshes and not layer.rows_per_term > 0:
            raise ValueError(
                f"layer {layer.name!r}: rows_per_term={layer.rows_per_term!r} in the state dict must be a number > 0 "
                f"where there are factors; load an earlier checkpoint"
            )


# ---- curvature that is divided among processes ----------------------------------------------------------------------


def is_divided(optimizer: "CurvatureOptimizer") -> bool:
    """Return whether processes keep parts of the curvature alone."""
    return any(factor.divided for layer in optimizer._plan.layers.values() for factor in layer.stored)


def consolidate(optimizer: "CurvatureOptimizer", to: int | None) -> None:
    """Collect the curvature that is divided among the processes, for the next state dict."""
    optimizer._whole = None
    plan = plan_now(optimizer)
    if not is_divided(optimizer):
        return
    keeps = to is None or optimizer.distributed.processes(plan).rank == to
    whole: dict[Tensor, dict[str, Any]] = {}
    factors = [(layer.weight_view, factor) for layer in plan.layers.values() for factor in layer.stored]
    for view, factor in factors:
        owners = factor.divided
        for inverse in (False, True) if owners is not None else ():
            rows, own = collected([factor], inverse=inverse)[0].rows, factor.key(inverse)
            if not keeps:
                continue
            entries = whole.setdefault(view.parameter, dict(optimizer.state[view.parameter]))
            entries.pop(own)
            factor.divided = None  # to find its place in a state that is not divided
            key, shape = factor.key(inverse), factor.shapes()[factor.key(inverse)]
            factor.divided = owners
            into = entries.setdefault(key, torch.zeros(shape, dtype=rows.dtype))
            if factor.of_rows:
                entries.setdefault(SHARDS, 1)
                into = view.of(into)
            into[:, : rows.shape[1]].copy_(rows)
    if keeps:
        optimizer._whole = whole


@contextmanager
def whole_state(optimizer: "CurvatureOptimizer") -> Iterator[None]:
    """Replace the state by one in which nothing is divided; RuntimeError if it was not collected."""
    if not is_divided(optimizer):
        yield
        return
    if optimizer._whole is None:
        raise RuntimeError(
            "the curvature is divided among the processes (divide_curvature=True), and this one has a part of it: call "
            "optimizer.consolidate_state_dict(to=RANK) on all processes after the last step, then state_dict() on that "
            "rank; with torch.distributed.checkpoint, to=None and state_dict() on all"
        )
    divided = {parameter: optimizer.state[parameter] for parameter in optimizer._whole}
    optimizer.state.update(optimizer._whole)
    try:
        yield
    finally:
        optimizer.state.update(divided)
