"""State dicts of THOR and ThorMuon: loaded completely or not at all, whole although curvature may be divided."""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_thor.capture.layers import Layer
from torch_thor.capture.patterns import some
from torch_thor.curvature.factor import collected
from torch_thor.curvature.layer import SHARDS, LayerCurvature
from torch_thor.intervals import Constant, Geometric, Piecewise, UpdateInterval
from torch_thor.optim.checkpoint import (
    StateDict,
    check_moments,
    check_origin,
    load_checked,
    options_of,
    restore_tensors,
    restored_on_error,
)
from torch_thor.optim.options import check
from torch_thor.optim.saved_rows import fit_loaded_rows

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
    plan, label = optimizer._plan_now(), type(optimizer).__name__
    own, groups = options_of(optimizer.param_groups), optimizer.param_groups
    layers = list(plan.layers.values())
    remedy = (
        f"Momentum, learning rate and schedule of another optimizer mean nothing to {label}: load the model's weights, "
        f"and let {label} start anew"
    )

    def check_it(given: StateDict) -> None:
        needed = [key for key in optimizer.defaults if key != "differentiable"]  # torch adds it to them when it loads
        check_origin(given, label, needed, remedy)

    try:
        with _undivided(layers), restored_on_error(optimizer):
            saved = load_checked(optimizer, load_plainly, state_dict, check_it)
            groups = optimizer.param_groups
            for group, kept in zip(groups, own, strict=True):
                group["update_interval"] = _loaded_interval(group["update_interval"], kept["update_interval"])
                check(type(optimizer), group)
            restore_tensors(optimizer.state, groups, saved)
            plan.group_of = {id(p): group for group in groups for p in group["params"]}
            plan.bind(optimizer.state)
            fit_loaded_rows(optimizer.state, groups, plan, relative=optimizer.relative_damping)
            _check_selection(layers, plan.left_out, optimizer.state)
            _check_factors(layers)
            check_moments(optimizer.state, groups, plan.name)
        optimizer._whole = None
    finally:
        plan.group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        plan.bind(optimizer.state)
    optimizer._capture.discard()
    optimizer._capture.listen()


@contextmanager
def _undivided(layers: Iterable[LayerCurvature]) -> Iterator[None]:
    """Take whole tensors as the state from here on, unless the block raises an error."""
    before = [(factor, factor.divided) for layer in layers for factor in layer.stored]
    for factor, _ in before:
        factor.divided = None
    try:
        yield
    except BaseException:
        for factor, owners in before:
            factor.divided = owners
        raise


def _check_selection(
    layers: Iterable[LayerCurvature], left_out: Iterable[Layer], states: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """Check that the loaded state was saved with the same ``layers=``."""
    present = [one for one in left_out if one.weight.is_there]  # the others are pruned
    saved = [one.name for one in present if f"{one.prefix}refreshes" in states.get(one.weight.parameter, {})]
    lacking = [layer.name for layer in layers if layer.state and f"{layer.prefix}refreshes" not in layer.state]
    if saved or lacking:
        differences = [f"it has factors of {some(saved)}, which layers= leaves out here"] if saved else []
        differences += [f"it has no factors of {some(lacking)}, which are preconditioned here"] if lacking else []
        raise ValueError(
            f"the state dict was saved with other preconditioned layers: {', and '.join(differences)}. Make the "
            f"optimizer with the layers= that it was saved with, or let it start anew"
        )


def _check_factors(layers: Iterable[LayerCurvature]) -> None:
    """Check that the loaded state of each layer is complete, and that its tensors have the shapes that it needs."""
    for layer in layers:
        missing = layer.missing_entries()
        if missing:
            raise ValueError(
                f"layer {layer.name!r}: the state dict has a part of its state, and not {some(missing)}; load one that "
                f"is whole, or let the optimizer start anew"
            )
        misfit = layer.misfitting_entry()
        if misfit is not None:
            key, needed = misfit
            found = layer.state[key]
            raise ValueError(
                f"layer {layer.name!r}: {key} in the state dict has shape "
                f"{tuple(found.shape) if isinstance(found, Tensor) else found!r}, this model and split_dim need "
                f"{needed}; load it into the model and with the split_dim that it was saved with"
            )
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
    plan = optimizer._plan_now()
    if not is_divided(optimizer):
        return
    keeps = to is None or optimizer.distributed.processes(plan.device).rank == to
    found: dict[int, dict[str, Tensor]] = {}
    for layer in plan.layers.values():
        view = layer.weight_view
        for factor in [factor for factor in layer.stored if factor.divided is not None]:
            for inverse in (False, True):
                rows = collected([factor], inverse=inverse)[0].rows
                if not keeps:
                    continue
                entries = found.setdefault(id(view.parameter), {})
                owners, factor.divided = factor.divided, None  # its place in a state that is not divided
                key, (length, width) = factor.key(inverse), factor.shapes()[factor.key(inverse)]
                factor.divided = owners
                whole = entries.setdefault(key, torch.zeros((length, width), dtype=rows.dtype))
                into = view.of(whole) if len(whole) != len(rows) else whole
                into[:, : rows.shape[1]].copy_(rows)
    if keeps:
        optimizer._whole = _steps(optimizer), found


def _steps(optimizer: "CurvatureOptimizer") -> list[int]:
    return [int(group["step"]) for group in optimizer.param_groups]


@contextmanager
def whole_state(optimizer: "CurvatureOptimizer") -> Iterator[None]:
    """Replace the state by one in which nothing is divided; RuntimeError if it was not collected."""
    whole, state = optimizer._whole, optimizer.state
    if not is_divided(optimizer):
        yield
        return
    if whole is None or whole[0] != _steps(optimizer):
        raise RuntimeError(
            "the curvature is divided among the processes (divide_curvature=True), and this one has a part of it: call "
            "optimizer.consolidate_state_dict(to=RANK) on all processes after the last step, then state_dict() on that "
            "rank; with torch.distributed.checkpoint, to=None and state_dict() on all"
        )
    replaced: dict[Tensor, Any] = {}
    for parameter in optimizer._plan.parameters(optimizer.param_groups):
        entries, of_all = state.get(parameter), whole[1].get(id(parameter))
        if entries is None or of_all is None:
            continue
        layers = [share.layer for share in optimizer._plan.shares(parameter) if share.is_weight]
        divided = [factor for layer in layers for factor in layer.stored if factor.divided is not None]
        keys = {factor.key(inverse) for factor in divided for inverse in (False, True)}
        replaced[parameter] = entries
        state[parameter] = {key: value for key, value in entries.items() if key not in keys} | of_all
        if any(factor.of_rows for factor in divided):
            state[parameter].setdefault(SHARDS, 1)
    try:
        yield
    finally:
        state.update(replaced)
