"""The start of several processes: whether all of them are about to do the same, before the first collective.

A process that enters a collective of another form than the others waits for them without end. So each process writes
what it is about to do into the store of the process group, and the first one compares them.
"""

import datetime
import json
import time
from collections.abc import Mapping
from typing import Any

import torch

from torch_thor import __version__
from torch_thor.training.checksums import digest
from torch_thor.training.config.recipe import Recipe
from torch_thor.training.config.recipe_values import covers, flat_values, is_inside
from torch_thor.training.errors import ElsewhereError, UserError, require

SECONDS = 600.0  # for all processes to start, which takes long where they import from a network share
# keys that may differ between machines
OWN = ("data.root", "data.cache", "data.download", "data.workers.", "weights", "name", "about", "reaches")
_PAUSE = 0.05


def facts_of(recipe: Recipe, **options: object) -> dict[str, str]:
    """Return what must be the same on all processes.

    Args:
        recipe: The recipe.
        options: Other options by name.

    Returns:
        Versions, options, and the keys of the recipe. A digest stands for values that were resolved, which may be
        secret.
    """
    facts = {"torch": torch.__version__, "torch-thor": __version__, **{key: str(one) for key, one in options.items()}}
    for key, value in flat_values(recipe).items():
        if not covers(OWN, key):
            resolved = any(is_inside(key, written) for written in recipe.written)
            facts[key] = f"a value with the digest {digest({key: str(value)})[:8]}" if resolved else str(value)
    return facts


def compare(store: Any, rank: int, world: int, facts: Mapping[str, str], seconds: float = SECONDS) -> None:
    """Wait for all processes, and check that they are about to do the same.

    Args:
        store: The store of the process group, or another `torch.distributed.Store`.
        rank: The rank of this process.
        world: The number of processes.
        facts: What must be the same on all of them.
        seconds: How long to wait for the others.

    Raises:
        UserError: On rank 0 if a process has other facts or has not started in time, and on a process that has others
            than rank 0 or has waited in vain for it.
        ElsewhereError: On the other ranks, if rank 0 has found a difference.
    """
    own = {"number of processes": str(world), **facts}
    store.set(_key(rank), json.dumps(own))
    if rank:
        _hear(store, rank, own, seconds)
        return
    try:
        _look(store, world, own, seconds)
    except UserError as error:
        store.set(_VERDICT, str(error))
        raise
    store.set(_VERDICT, "")


_VERDICT = "torch_thor/start/verdict"


def _key(rank: int) -> str:
    return f"torch_thor/start/{rank}"


def _look(store: Any, world: int, own: Mapping[str, str], seconds: float) -> None:
    """Compare the facts of all other ranks with those of rank 0, as soon as they are there."""
    missing, deadline = list(range(1, world)), time.monotonic() + seconds
    while missing:
        for rank in [rank for rank in missing if store.check([_key(rank)])]:
            _check_same(rank, json.loads(store.get(_key(rank))), own)
            missing.remove(rank)
        names = ", ".join(map(str, missing))
        require(
            not missing or time.monotonic() < deadline,
            f"rank {names} of {world} processes has not started in {seconds:.0f} s: see what it has printed, and check "
            "that it can reach the others",
        )
        if missing:
            time.sleep(_PAUSE)


def _hear(store: Any, rank: int, own: Mapping[str, str], seconds: float) -> None:
    """Wait for what rank 0 has found."""
    try:
        store.wait([_VERDICT], datetime.timedelta(seconds=seconds + 60))
    except RuntimeError as error:
        raise UserError(
            f"rank 0 has not started in {seconds + 60:.0f} s: see what it has printed, and check that rank {rank} can "
            "reach it"
        ) from error
    if verdict := store.get(_VERDICT).decode():
        raise ElsewhereError(verdict)
    _check_same(rank, own, json.loads(store.get(_key(0))))  # rank 0 does not know ranks above its number of processes


def _check_same(rank: int, facts: Mapping[str, str], first: Mapping[str, str]) -> None:
    key = next((key for key in {**first, **facts} if facts.get(key) != first.get(key)), None)
    if key is not None:
        raise UserError(
            f"rank {rank} has {key}={facts.get(key, 'nothing')}, and rank 0 has {key}={first.get(key, 'nothing')}: "
            "start all processes with the same versions, recipe and options"
        )
