"""What a golden run leaves behind, as plain values that a JSON file holds to the last bit."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.training import History

DIGITS_OF_CHECKSUM = 16  # of 64: plenty to tell a change, and the files stay small


@dataclass(frozen=True)
class Outcome:
    """The end of a training, and the way there.

    Args:
        settings: What was asked for.
        losses: Of each step, as `float.hex` writes them.
        refreshes: What each refresh decided: step (from 1), layer, decision and trace.
        evaluations: Step, loss and accuracy of each.
        optimizer: Its state dict, flat: text for a tensor (see `described`), else the value.
        model: Its state dict, in the same way.
    """

    settings: list[str]
    losses: list[str]
    refreshes: list[str]
    evaluations: list[str]
    optimizer: dict[str, Any]
    model: dict[str, Any]


def outcome(settings: list[str], record: History, optimizer: torch.optim.Optimizer, model: nn.Module) -> Outcome:
    """Write down a training.

    Args:
        settings: What was asked for.
        record: What it measured.
        optimizer: The optimizer, after the last step.
        model: The network, too.

    Returns:
        All that a redesign must leave alone.
    """
    return Outcome(
        settings,
        [float(point.loss).hex() for point in record.steps],
        [
            f"{point.step} {point.layer} {point.decision} {'-' if point.trace is None else point.trace.hex()}"
            for point in record.refreshes
        ],
        [f"{point.step} {point.loss.hex()} {point.top1.hex()}" for point in record.evaluations],
        dict(_flat(optimizer.state_dict(), "")),
        dict(_flat(model.state_dict(), "")),
    )


def described(tensor: Tensor) -> str:
    """Say what a tensor is.

    Args:
        tensor: Any, dense.

    Returns:
        Its dtype, shape, strides (strides of 1s are those of tensors of one number) and the beginning of the SHA-256
        of its numbers, in the order of its dimensions, whatever the strides.
    """
    numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    checksum = hashlib.sha256(numbers).hexdigest()[:DIGITS_OF_CHECKSUM]
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)} strides {list(tensor.stride())} sha256 {checksum}"


def _flat(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        yield key, described(value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(part, Mapping | Tensor) for part in value):
        for number, part in enumerate(value):
            yield from _flat(part, f"{key}.{number}")
    elif value is None or isinstance(value, bool | int | float | str):
        yield key, value
    else:
        yield key, repr(value)
