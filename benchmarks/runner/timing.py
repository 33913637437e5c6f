"""The step times of several optimizers, measured in turns.

So changes of the machine's speed affect all alike.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, optim


def take_turns(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    warm_up: int = 1,
    prepare: Callable[[], Any] | None = None,
    name_of: Callable[[str], str] = lambda name: name,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Time one step of each function in every round.

    The order is drawn anew in each round, with a fixed seed: a step depends on the state in which
    the previous one has left the caches, and in a fixed order the previous one would always be the
    same.

    Args:
        steps: The functions to time, by name.
        rounds: The number of rounds that count.
        warm_up: The number of rounds before them, which do not count.
        prepare: Called before each round, not timed.
        name_of: Called with the name after a step that counts; returns the name under which its
            time is recorded.
        clock: Returns the time in seconds.

    Returns:
        Seconds by name, one number per round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    shuffle, order = random.Random(0).shuffle, list(steps)
    for turn in range(warm_up + rounds):
        if prepare is not None:
            prepare()
        shuffle(order)
        for name in order:
            step = steps[name]
            started = clock()
            step()
            took = clock() - started
            if turn >= warm_up:
                seconds.setdefault(name_of(name), []).append(took)
    return seconds


def training_step(loss: Callable[[], Tensor], optimizer: optim.Optimizer) -> Callable[[], None]:
    """Return a function that takes a whole training step.

    Args:
        loss: Runs the forward pass and returns the loss.
        optimizer: The optimizer of the model.

    Returns:
        A function that runs forward and backward pass, steps the optimizer, and resets the
        gradients.
    """

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def state_bytes(optimizer: optim.Optimizer) -> int:
    """Return the bytes of all tensors in the state of an optimizer."""
    return _bytes(dict(optimizer.state))


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, (list, tuple))
        else ()
    )
    return sum(map(_bytes, parts))


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Return the ratio of two step times.

    Args:
        seconds: The time in each round.
        base: The time of the baseline in the same rounds.

    Returns:
        The median over rounds of the ratio within a round.
    """
    return statistics.median(own / other for own, other in zip(seconds, base, strict=True))
