"""What a golden run leaves behind, as plain values that a JSON file holds to the last bit."""

import hashlib

import torch
from torch import Tensor

DIGITS_OF_CHECKSUM = 16  # of 64: plenty to tell a change, and the files stay small


def outcome(settings, steps, scores, optimizer, model):
    """What was asked for, the way of a training, and its end: all that a redesign must not change.

    Each of `steps` is (its number from 1, its loss, the events of the trace rule in it).
    """
    return {
        "settings": settings,
        "losses": [float(loss).hex() for _, loss, _ in steps],
        "refreshes": [
            f"{step} {event.layer} {event.decision.value} "
            f"{'-' if event.trace is None else event.trace.hex()}"
            for step, _, events in steps
            for event in events
        ],
        "evaluations": [
            f"{score.step} {score.metrics['loss'].hex()} {score.metrics['top1'].hex()}"
            for score in scores
        ],
        "optimizer": dict(_flat(optimizer.state_dict(), "")),
        "model": dict(_flat(model.state_dict(), "")),
    }


def _described(tensor):
    """Dtype, shape, strides, and the beginning of the SHA-256 of the numbers."""
    numbers = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    checksum = hashlib.sha256(numbers).hexdigest()[:DIGITS_OF_CHECKSUM]
    kind = str(tensor.dtype).removeprefix("torch.")
    return f"{kind} {list(tensor.shape)} strides {list(tensor.stride())} sha256 {checksum}"


def _flat(value, key):
    if isinstance(value, Tensor):
        yield key, _described(value)
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _flat(part, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list | tuple) and any(isinstance(part, dict | Tensor) for part in value):
        for number, part in enumerate(value):
            yield from _flat(part, f"{key}.{number}")
    else:
        is_plain = value is None or isinstance(value, bool | int | float | str)
        yield key, value if is_plain else repr(value)
