"""The start of several processes: whether all of them are about to do the same, before the first collective.

A process that enters a collective of another form than the others waits for them without end. So each process writes
what it is about to do into the store that `torchrun` has opened, and rank 0 compares.

The store may still contain what the processes of an earlier start have written (`torchrun --max-restarts`). So each
process says a word of its own, rank 0 repeats the words together with the name of this start, and only what contains
this name counts.
"""

import datetime
import json
import secrets
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
_ANSWER = "answer"


def facts_of(recipe: Recipe, **options: object) -> dict[str, str]:
    """Return what must be the same on all processes.

    Args:
        recipe: The recipe.
        options: Other options by name.

    Returns:
        Options, and the keys of the recipe. A digest stands for values that were resolved, which may be secret.
    """
    facts = {key: str(one) for key, one in options.items()}
    for key, value in flat_values(recipe).items():
        if not covers(OWN, key):
            resolved = any(is_inside(key, written) for written in recipe.written)
            facts[key] = f"a value with the digest {digest({key: str(value)})[:8]}" if resolved else str(value)
    return facts


def join(store: Any, rank: int, world: int, facts: Mapping[str, str], seconds: float = SECONDS) -> str:
    """Wait for all processes, and check that they are about to do the same.

    Args:
        store: The store of `torchrun`, or another `torch.distributed.Store`.
        rank: The rank of this process.
        world: The number of processes.
        facts: What must be the same on all of them, beside their number and the versions.
        seconds: How long to wait for the others.

    Returns:
        The name of this start, which no other start has and all processes know.

    Raises:
        UserError: On rank 0 if a process has other facts or has not started in time, and on a process that has waited
            in vain for rank 0.
        ElsewhereError: On the other ranks, if rank 0 has found a difference.
    """
    versions = {"torch": torch.__version__, "torch-thor": __version__}
    own = {"number of processes": str(world), **versions, **facts}
    return _follow(store, rank, own, seconds) if rank else _lead(store, world, own, seconds)


def _lead(store: Any, world: int, own: Mapping[str, str], seconds: float) -> str:
    """Compare the facts of all other ranks with those of rank 0, as soon as they are there."""
    name = secrets.token_hex(8)
    words: dict[str, str] = {}
    missing, deadline = set(range(1, world)), time.monotonic() + seconds
    try:
        while missing:
            heard = {str(rank): store.get(_word(rank)).decode() for rank in missing if store.check([_word(rank)])}
            if heard.items() - words.items():
                words |= heard
                store.set(_ANSWER, json.dumps({"start": name, "words": words}))
            for rank in [rank for rank in missing if store.check([_facts(rank, name)])]:
                _check_same(rank, json.loads(store.get(_facts(rank, name))), own)
                missing.remove(rank)
            names = ", ".join(map(str, sorted(missing)))
            require(
                not missing or time.monotonic() < deadline,
                f"rank {names} of {world} processes has not started in {seconds:.0f} s: see what it has printed, and "
                "check that it can reach the others",
            )
            time.sleep(_PAUSE if missing else 0)
    except UserError as error:
        store.set(_verdict(name), str(error))
        raise
    store.set(_verdict(name), "")
    return name


def _follow(store: Any, rank: int, own: Mapping[str, str], seconds: float) -> str:
    """Tell rank 0 the facts of this process, and wait for what it has found."""
    word, deadline = secrets.token_hex(8), time.monotonic() + seconds + 60
    store.set(_word(rank), word)
    while True:
        answer = json.loads(store.get(_ANSWER)) if store.check([_ANSWER]) else {"words": {}}
        if answer["words"].get(str(rank)) == word:
            break
        require(
            time.monotonic() < deadline,
            f"rank 0 has not answered in {seconds + 60:.0f} s: see what it has printed, and check that rank {rank} can "
            "reach it and that both have the same number of processes",
        )
        time.sleep(_PAUSE)
    name: str = answer["start"]
    store.set(_facts(rank, name), json.dumps(own))
    try:
        store.wait([_verdict(name)], datetime.timedelta(seconds=seconds + 60))
    except RuntimeError as error:
        raise UserError(f"rank 0 no longer answers: see what it has printed ({error})") from error
    if verdict := store.get(_verdict(name)).decode():
        raise ElsewhereError(verdict)
    return name


def _word(rank: int) -> str:
    return f"word/{rank}"


def _facts(rank: int, start: str) -> str:
    return f"facts/{start}/{rank}"


def _verdict(start: str) -> str:
    return f"verdict/{start}"


def _check_same(rank: int, facts: Mapping[str, str], first: Mapping[str, str]) -> None:
    key = next((key for key in {**first, **facts} if facts.get(key) != first.get(key)), None)
    if key is not None:
        raise UserError(
            f"rank {rank} has {key}={facts.get(key, 'nothing')}, and rank 0 has {key}={first.get(key, 'nothing')}: "
            "start all processes with the same versions, recipe and options"
        )
