"""The four steps that choose a split dimension, and their result."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.parameter_view import LARGEST
from torch_thor.curvature.precision import factor_dtype
from torch_thor.split.machine import device_name
from torch_thor.split.observe import Losses, LossFn, Observer
from torch_thor.split.timing import inverse_seconds

MAX_LOSS = 0.01  # a factor counts as kept where it loses less than this of its spectral norm


@dataclass(frozen=True)
class SplitChoice:
    """A split dimension, and what it was chosen from.

    Args:
        split_dim: the candidate nearest to the crossing, to be given to ``THOR(model, split_dim=...)``.
        crossing: where the two curves cross; None where they do not, and the largest candidate is chosen.
        candidates: the block sizes that were tried, rising from 1 to the largest factor (at most 8192).
        performance: ``p_1 / p_s`` a candidate: falls with s.
        information: the share of factors that lose less than 1 % of their spectral norm, a candidate: rises with s.
        seconds: ``p_s``, the median time to invert all blocks of the model once, a candidate.
        losses: layer name -> ``"A"`` or ``"G"`` -> the spectral loss ``1 - |Â|₂ / |A|₂`` a candidate.
        device: name of the device (and threads of the CPU) that the times belong to.
    """

    split_dim: int
    crossing: float | None
    candidates: tuple[int, ...]
    performance: tuple[float, ...]
    information: tuple[float, ...]
    seconds: tuple[float, ...]
    losses: Mapping[str, Mapping[str, tuple[float, ...]]]
    device: str

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON.

        Returns:
            The fields by name.
        """
        return asdict(self)


def choose_split_dim(
    model: nn.Module,
    sample_batch: Any,
    device: torch.device | str | None = None,
    *,
    loss_fn: LossFn | None = None,
) -> SplitChoice:
    """Choose THOR's split dimension for a model on a device (Chen et al. 2021, section 3.3).

    For candidates 1, 16, 32, ..., the largest factor: the loss of spectral norm of every factor when it is cut into
    blocks; the share of factors that lose less than 1 %, which rises with the block size; the measured time to invert
    all blocks, whose ratio ``p_1 / p_s`` falls; and the candidate nearest to where the two curves cross, on the
    logarithmic axis on which candidates are evenly spaced.

    The model runs as a copy, once forward and backward, in the mode that it is in (``model.train()`` gives what
    training sees): its parameters, gradients, buffers, hooks, mode and device stay as they are, and so do torch's
    random numbers. Beside the copy and the activations, one layer's uncut factors are in memory at a time; the times
    need those of all layers together, a few times over. On a CPU, networks the size of ResNet-50 take minutes.

    Args:
        model: the model. Weights in use (trained for a while) say more than fresh ones.
        sample_batch: ``(inputs, targets)``, or the inputs alone; inputs are a tensor, a tuple of arguments or a mapping
            of keyword arguments. A few dozen typical examples: random noise has other factors.
        device: where to run and to measure; None: where the model is. A model elsewhere is copied there, not moved.
        loss_fn: ``loss_fn(output, targets)``, or ``loss_fn(output)`` where inputs are given alone. None: cross entropy
            of the output (or of its ``.logits``); without targets, of labels drawn from the model's own prediction.

    Returns:
        The choice and everything it was made from.

    Raises:
        ValueError: the model has no layer that THOR preconditions, the batch gives none of them a gradient, or a
            factor is not finite.
    """
    where = torch.device(device) if device is not None else next((p.device for p in model.parameters()), None)
    if where is None:
        raise ValueError(f"{type(model).__name__} has no parameters, so there is nothing to split")
    observer = Observer(model, where)
    split_dims = candidates(observer.layers.values())
    losses = observer.spectral_losses(sample_batch, loss_fn, split_dims)
    return choose(observer.layers, losses, split_dims)


def candidates(layers: Iterable[LayerCurvature]) -> tuple[int, ...]:
    """Return the block sizes to try: 1, powers of two from 16, and the largest factor.

    Args:
        layers: the layers.

    Returns:
        Rising block sizes; the last one cuts nothing, or is 8192.
    """
    largest = min(max(rows for _, rows in _sizes(layers)), LARGEST)
    powers = [2**k for k in range(4, LARGEST.bit_length())]
    return tuple(dict.fromkeys([1, *(size for size in powers if size < largest), largest]))


def _sizes(layers: Iterable[LayerCurvature]) -> list[tuple[int, int]]:
    """Return (groups, rows) of every factor that is a matrix; an embedding's A is a diagonal."""
    kinds = [layer.kind for layer in layers]
    rows = [(kind.groups, kind.inputs) for kind in kinds if not kind.diagonal_input]
    return rows + [(kind.groups, kind.outputs) for kind in kinds]


def choose(layers: Mapping[str, LayerCurvature], losses: Losses, split_dims: Sequence[int]) -> SplitChoice:
    """Measure the inverses and find the crossing.

    Args:
        layers: the layers whose blocks are inverted together, by name.
        losses: their spectral losses.
        split_dims: the candidates that the losses belong to.

    Returns:
        The choice.
    """
    weight = next(iter(layers.values())).weight
    sizes = _sizes(layers.values())
    seconds = inverse_seconds(sizes, split_dims, dtype=factor_dtype(weight.dtype), device=weight.device)
    performance = tuple(seconds[0] / each for each in seconds)
    kept = [[loss < MAX_LOSS for loss in factor] for layer in losses.values() for factor in layer.values()]
    information = tuple(sum(column) / len(kept) for column in zip(*kept, strict=True))
    crossing = find_crossing(split_dims, performance, information)
    return SplitChoice(
        split_dim=split_dims[-1] if crossing is None else nearest(split_dims, crossing),
        crossing=crossing,
        candidates=tuple(split_dims),
        performance=performance,
        information=information,
        seconds=seconds,
        losses=losses,
        device=device_name(weight.device),
    )


def find_crossing(
    split_dims: Sequence[int], performance: Sequence[float], information: Sequence[float]
) -> float | None:
    """Return where falling performance meets rising information, by linear interpolation over log2 of the block size.

    Where noise makes them cross more than once, the last crossing counts: beyond it performance stays below.

    Args:
        split_dims: the candidates, rising.
        performance: ``p_1 / p_s``; starts at 1, so that information begins at or below it.
        information: the share of kept factors.

    Returns:
        A block size, not rounded; None where performance is still above, or level, at the largest candidate.
    """
    margins = [p - i for p, i in zip(performance, information, strict=True)]
    left = max(index for index, margin in enumerate(margins) if margin >= 0)
    if left == len(margins) - 1:
        return None
    share = margins[left] / (margins[left] - margins[left + 1])
    low, high = math.log2(split_dims[left]), math.log2(split_dims[left + 1])
    return float(2 ** (low + share * (high - low)))


def nearest(split_dims: Sequence[int], crossing: float) -> int:
    """Return the candidate nearest to the crossing on the axis of :func:`find_crossing`.

    Args:
        split_dims: the candidates.
        crossing: a block size.

    Returns:
        One of the candidates.
    """
    return min(split_dims, key=lambda size: abs(math.log2(size) - math.log2(crossing)))
