"""Checks, before the first collective, whether all ranks train with the same process group.

A rank that enters a collective without the others waits for ever. So every optimizer, in its first step, writes the
ranks that it trains with into the store of the default group, and reads what the others have written. This is done
once per optimizer, without a collective, and is bounded by the timeout of the group.

Detected: ranks that use different groups, or none, for the same model. Not detected: a rank that never takes a step
(the others wait for it, as in a collective); and a step of the same model that some ranks take alone, as a trial, while
the others wait for them to train together (take it on every rank, or after the first step of the training).
"""

import hashlib
import time
from collections.abc import Sequence
from typing import Any

from torch import distributed as dist
from torch import nn

from torch_thor.torch_internals import default_store

ALONE = "alone"

# How long a rank waits for the announcements of ranks outside of its group, which may want to train with it. Such ranks
# see its own announcement in any case.
LISTEN_SECONDS = 5.0

_PAUSE_SECONDS = 0.01  # the pause between two queries whether all ranks of the group are there, doubled each time
_LOOK_SECONDS = 0.01  # the time per rank until the announcements of all ranks are read, doubled each time


def fingerprint(model: nn.Module) -> str:
    """Return a short text that distinguishes models that are trained at the same time."""
    text = "\n".join(f"{name} {tuple(p.shape)}" for name, p in model.named_parameters())
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:16]


class Announcement:
    """Writes the choice of one optimizer into the store, and compares it with those of the other ranks."""

    def __init__(self, store: Any, rank: int, world: int, members: Sequence[int] | None, model: str) -> None:
        self._store, self._rank, self._world, self._model = store, rank, world, model
        self._members = [rank] if members is None else list(members)
        self._outsiders = world > len(self._members)
        self._choice = f"{ALONE} {rank}" if members is None else " ".join(map(str, members))
        # The choice is written first, and counted before the try, so that a rank that sees the try can read the choice.
        store.set(f"torch_thor/last/{model}/{rank}", self._choice)
        self._mine = self._count("settled", self._choice, rank) + 1
        if self._count("chosen", self._choice, rank) < self._mine:  # not counted yet by an earlier try that failed
            self._count("chosen", self._choice, rank, add=1)
            self._add(f"chosen/{self._choice}", 1)
        self._tries = self._count("tries", model, rank, add=1)
        self._add(f"tries/{model}", 1)

    def settle(self) -> None:
        """Wait until all ranks of the group have announced the same group."""
        start = time.monotonic()
        limit = self._store.timeout.total_seconds()
        pause, look_at = _PAUSE_SECONDS, start + _LOOK_SECONDS * self._world
        while True:
            here = self._all_announced()
            heard = here and (self._outsiders_announced() or time.monotonic() > start + LISTEN_SECONDS)
            if not here and time.monotonic() > start + limit:
                raise RuntimeError(
                    f"rank {self._rank} trains with {_words(self._choice)}, and not all of them have come to a step of "
                    f"THOR in {self._store.timeout}: give process_group= the processes that step it together, or False "
                    f"where every process trains a model of its own"
                )
            if time.monotonic() >= look_at or (heard and self._outsiders):
                self._check_choices()
                look_at = time.monotonic() + 2 * (look_at - start)  # ever more seldom: it takes one query per rank
            if heard:
                self._count("settled", self._choice, self._rank, add=1)
                return
            time.sleep(pause)
            pause = min(2 * pause, 1.0)

    def _all_announced(self) -> bool:
        # the sum is enough, because no member chooses again before all have settled this choice
        return self._add(f"chosen/{self._choice}", 0) >= self._mine * len(self._members)

    def _outsiders_announced(self) -> bool:
        return not self._outsiders or self._add(f"tries/{self._model}", 0) >= self._tries * self._world

    def _check_choices(self) -> None:
        """Raise if a rank has made another choice for this model."""
        for rank in range(self._world):
            if rank == self._rank or self._count("tries", self._model, rank) < self._tries:
                continue
            if rank in self._members:
                differs = self._count("chosen", self._choice, rank) < self._mine
            else:
                differs = self._rank in _ranks(self._choice_of(rank), rank)
            if differs:
                raise RuntimeError(self._difference(rank))

    def _difference(self, rank: int) -> str:
        return (
            f"the ranks do not train with the same processes: rank {self._rank} has {_words(self._choice)}, "
            f"rank {rank} has {_words(self._choice_of(rank))}. Give process_group= alike on all of them: the "
            f"group whose gradients are averaged, None for the default group, False where every process trains "
            f"a model of its own"
        )

    def _choice_of(self, rank: int) -> str:
        return str(self._store.get(f"torch_thor/last/{self._model}/{rank}").decode())

    def _count(self, what: str, of: str, rank: int, add: int = 0) -> int:
        return self._add(f"{what}/{of}/of {rank}", add)

    def _add(self, key: str, number: int) -> int:
        return int(self._store.add(f"torch_thor/{key}", number))  # a missing key counts as 0


def _ranks(choice: str, rank: int) -> list[int]:
    return [rank] if choice.startswith(ALONE) else [int(r) for r in choice.split()]


def _words(choice: str) -> str:
    return (
        "process_group=False" if choice.startswith(ALONE) else f"a process group of ranks {choice.replace(' ', ', ')}"
    )


def announce(group: Any, model: nn.Module) -> None:
    """Announce the processes that this one trains with, and check that the others announce the same."""
    world = dist.get_world_size()
    members = None
    if group is not False:
        members = list(range(world)) if group is None else sorted(dist.get_process_group_ranks(group))
    store = default_store()
    if store is not None:  # MPI has none
        Announcement(store, dist.get_rank(), world, members, fingerprint(model)).settle()
