"""Step times of several optimizers, taken in turns so that changes in the machine's speed affect all of them alike."""

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
    """Time one step of each, round after round.

    Each round has an order of its own, drawn with a fixed seed: a step finds the caches as the one before it left them,
    and in a fixed order that would always be the same one.

    Args:
        steps: What is timed, by name.
        rounds: How many are counted.
        warm_up: Rounds before them that are not.
        prepare: Called before each round, outside of what is timed.
        name_of: Called after a counted step with its name; gives the name that its time is counted for.
        clock: Gives the seconds.

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
    """Make a whole training step.

    Args:
        loss: The forward pass.
        optimizer: Of the model.

    Returns:
        Forward, backward, step, and gradients set to zero.
    """

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Compute how many times as long one thing takes as another.

    Args:
        seconds: One a round.
        base: Of what it is compared with, in the same rounds.

    Returns:
        The median of the ratios within a round.
    """
    return statistics.median(own / other for own, other in zip(seconds, base, strict=True))
