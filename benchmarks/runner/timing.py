"""The step times of optimizers, measured in turns: the machine's changes affect all alike."""

import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim

from benchmarks.runner.machine import synchronize

SPAN = 10  # rounds, of which one has a refresh
RATE = 1e-6  # where steps are timed: the weights hardly change, so that none diverges


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
    """Return a function that takes a whole training step: all passes, and the optimizer's step."""

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()

    return step


def state_bytes(optimizer: optim.Optimizer) -> int:
    """Return the bytes of all tensors in the state of an optimizer."""
    return _bytes(dict(optimizer.state))


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_bytes, value)) if isinstance(value, (list, tuple)) else 0


def median_ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of two step times within a round."""
    return statistics.median(own / other for own, other in zip(seconds, base, strict=True))


def time_optimizers(
    makers: Mapping[str, Callable[[], tuple[nn.Module, optim.Optimizer]]],
    take_step: Callable[[nn.Module, optim.Optimizer, Any], object],
    batch: Callable[[], Any],
    spans: int,
) -> dict[str, Any]:
    """Time the steps of optimizers in turns; ours refreshes once in ten steps, apart from the rest.

    Args:
        makers: Make network and optimizer, by name.
        take_step: Trains on a batch.
        batch: Returns the batch of a round.
        spans: The number of spans of ten rounds.

    Returns:
        ``milliseconds``, means of each span, and ``state_bytes``, a parameter, both by name; the
        steps in which NAME refreshes are those of ``NAME refresh``.
    """
    now: list[Any] = []

    def step(model: nn.Module, optimizer: optim.Optimizer) -> None:
        take_step(model, optimizer, now[-1])
        synchronize()

    steps, optimizers, weights = {}, {}, {}
    for name, make in makers.items():
        torch.manual_seed(0)
        model, optimizer = make()
        for group in optimizer.param_groups:
            group["lr"] = RATE
            if "update_interval" in group:
                group["update_interval"] = SPAN
            if "trace_thresholds" in group:
                group["trace_thresholds"] = (0.0, 0.0)  # or weights that stay need no inversion
        optimizers[name] = optimizer
        weights[name] = sum(parameter.numel() for parameter in model.parameters())
        steps[name] = partial(step, model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the learning rate is small
        times = take_turns(
            steps,
            SPAN * spans,
            warm_up=SPAN,
            prepare=lambda: now.__setitem__(slice(None), [batch()]),
            name_of=lambda name: (
                f"{name} refresh" if getattr(optimizers[name], "last_refresh", ()) else name
            ),
        )
    return {
        "milliseconds": {name: _means(own, spans) for name, own in times.items()},
        "state_bytes": {
            name: round(state_bytes(optimizer) / weights[name], 2)
            for name, optimizer in optimizers.items()
        },
    }


def _means(times: Sequence[float], spans: int) -> list[float]:
    """Return milliseconds: the mean in each span, in which one of ten steps may be missing."""
    size = len(times) // spans
    means = (statistics.fmean(times[i : i + size]) for i in range(0, len(times), size))
    return [round(1000 * mean, 3) for mean in means]


def milliseconds(times: Mapping[str, Any], name: str, base: str) -> float:
    """Return the milliseconds of a step: the median ratio to the base's, times its median."""
    own, other = times["milliseconds"][name], times["milliseconds"][base]
    return float(median_ratio(own, other) * statistics.median(other))


def seconds_at(
    times: Mapping[str, Any], name: str, base: str, curve: Sequence[Sequence[float]]
) -> list[float]:
    """Return the seconds of training up to each point of (step, value, refreshes so far)."""
    own = milliseconds(times, name, base)
    again = f"{name} refresh"
    refresh = milliseconds(times, again, base) if again in times["milliseconds"] else own
    return [(own * (step - refreshes) + refresh * refreshes) / 1000 for step, _, refreshes in curve]
