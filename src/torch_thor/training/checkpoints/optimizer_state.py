"""The state of an optimizer by parameter name, for checkpoints that are written or read by divided networks.

Other checkpoints contain `optimizer.state_dict()`, which numbers the parameters. Such a state is converted when it is
loaded into a divided network, and the state of a divided network when it is loaded into a whole one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training.checkpoints.checkpoint import Checkpoint
from torch_thor.training.checkpoints.parts import empty_tensors, read_parts
from torch_thor.training.engine import parallel, sharding
from torch_thor.training.errors import UserError

_PREFIX = "optimizer."
_TENSOR = "(a tensor)"  # stands in the plain values for a tensor, which is stored on its own


def split_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the state of the optimizer of a divided network. Every process must call it.

    Args:
        model: The network.
        optimizer: Its optimizer.

    Returns:
        The plain values, with the options of each group, and the tensors by name, of which each process has its part.
    """
    state = _by_name(model, optimizer)
    tensors = {
        _key(name, key): value
        for name, values in state["state"].items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }
    plain = {
        name: {key: _TENSOR if isinstance(value, Tensor) else value for key, value in values.items()}
        for name, values in state["state"].items()
    }
    return {"state": plain, "param_groups": state["param_groups"]}, tensors


def load_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: Checkpoint, state: dict[str, Any]
) -> None:
    """Load the state of the optimizer from a checkpoint. Every process must call it.

    Args:
        model: The network, divided or not. Unless both it and the checkpoint are whole, its weights must be loaded
            afterwards, because torch makes the state of the optimizer in a step whose learning rate is 0.
        optimizer: Its optimizer, before its first step.
        saved: The checkpoint, divided or not.
        state: The state of the optimizer in the file for everything but the weights.

    Raises:
        UserError: If the state belongs to another network.
    """
    if not (saved.is_divided or sharding.is_divided(model)):
        optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    own = _by_name(model, optimizer)["state"]
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    with parallel.agreed():
        given = _read(saved, state, own) if saved.is_divided else _named(optimizer, state, names.__getitem__)
    options = StateDictOptions(full_state_dict=not saved.is_divided)
    with parallel.agreed():
        try:
            set_optimizer_state_dict(model, optimizer, given, options=options)
        except (ValueError, KeyError, RuntimeError) as error:
            raise UserError(
                f"{saved.path}: the state of the optimizer does not fit ({error}): continue with the same parallel= "
                "and the same number of processes, or start another run with weights="
            ) from error


def _by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    if isinstance(optimizer, CurvatureOptimizer):
        optimizer.consolidate_state_dict(to=None)
    return dict(get_optimizer_state_dict(model, optimizer))


def _key(name: str, key: str) -> str:
    return f"{_PREFIX}{name}/{key}"


def _read(saved: Checkpoint, plain: dict[str, Any], own: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Read the tensors that belong to the plain values of a divided checkpoint."""
    whole = empty_tensors(saved.path, _PREFIX)
    state: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for name, values in plain["state"].items():
        state[name] = dict(values)
        for key, value in values.items():
            if value == _TENSOR:
                like = own.get(name, {}).get(key)
                place = like if isinstance(like, Tensor) and like.shape == whole[_key(name, key)].shape else None
                tensors[_key(name, key)] = state[name][key] = whole[_key(name, key)] if place is None else place
    read_parts(saved.path, tensors)
    return {"state": state, "param_groups": plain["param_groups"]}


def _named(
    optimizer: torch.optim.Optimizer, numbered: dict[str, Any], name_of: Callable[[Tensor], str]
) -> dict[str, Any]:
    """Replace the numbers of parameters by their names, and make the keys of the groups."""
    for group, given in zip(optimizer.param_groups, numbered["param_groups"], strict=False):
        for key, value in given.items():
            group.setdefault(key, value)  # torch loads only keys that are there, and schedules have added some
    names = [name_of(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in numbered["param_groups"]]
    return {"state": {names[number]: values for number, values in numbered["state"].items()}, "param_groups": groups}
