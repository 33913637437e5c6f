"""The four steps that choose a split dimension, and their result."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from torch_thor.curvature.blocks import factor_dtype
from torch_thor.curvature.layer import SIDES, LayerCurvature
from torch_thor.optim.registry import WITH_CURVATURE
from torch_thor.split.observe import LARGEST, Losses, LossFn, Observer
from torch_thor.split.timing import device_name, inverse_seconds, orthogonal_seconds

# a factor counts as preserved if it loses less than this share of its spectral norm
MAX_LOSS = 0.01
# the factors that an optimizer splits
FACTORS = {name: kind.form.factor_names for name, kind in WITH_CURVATURE.items()}


@dataclass(frozen=True)
class SplitChoice:
    """A split dimension, and the measurements from which it was chosen.

    Args:
        split_dim: the candidate nearest to the crossing, for ``THOR(model, split_dim=...)``.
        crossing: the block size at which the two curves cross; None if they do not, so that the
            largest candidate is chosen.
        candidates: the block sizes that were tried, increasing from 1 to the size of the largest
            factor (at most 8192).
        performance: for each candidate ``p_1 / p_s``, which decreases with s.
        information: for each candidate the share of factors that lose less than 1 % of their
            spectral norm, which increases with s.
        seconds: for each candidate ``p_s``, the median time to invert all blocks of the model once,
            and for ThorMuon to orthogonalise its matrices.
        losses: by layer name and by ``"A"`` or ``"G"`` (of THOR alone), the spectral loss
            ``1 - |Â|₂ / |A|₂`` for each candidate.
        device: the name of the device, with the number of threads of a CPU, on which the times were
            measured.
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
        """Return the fields as JSON values, by their names."""
        return asdict(self)


def choose_split_dim(
    model: nn.Module,
    sample_batch: Any,
    device: torch.device | str | None = None,
    *,
    loss_fn: LossFn | None = None,
    optimizer: str = "thor",
) -> SplitChoice:
    """Choose the split dimension for a model on a device (Chen et al. 2021, section 3.3).

    For each candidate ``SplitChoice`` has the share of factors that blocks of this size preserve,
    which increases with the size, and the performance, which decreases. The choice is the candidate
    nearest to the crossing of the two curves, on the logarithmic axis on which candidates are
    evenly spaced.

    A copy of the model runs forward and backward once, in the current mode of the model (call
    ``model.train()`` first to see the statistics of training). The parameters, gradients, buffers,
    hooks, mode and device of the model do not change, and neither do torch's random generators.
    Beside the copy and the activations, the unsplit factors of one layer are in memory at a time;
    measuring times needs a few times the memory of the factors of all layers. On a CPU, networks of
    the size of ResNet-50 take minutes.

    Args:
        model: the model. Weights that have been trained for a while are more representative than
            initial ones.
        sample_batch: ``(inputs, targets)``, or the inputs alone. Inputs are a tensor, a tuple of
            arguments or a mapping of keyword arguments. It should hold a few dozen typical
            examples; random noise has other factors.
        device: the device to run and to measure on; None for that of the model. A model on another
            device is copied.
        loss_fn: ``loss_fn(output, targets)``, or ``loss_fn(output)`` if the inputs are given alone.
            None: the cross entropy of the output (or of its ``.logits``), without targets for
            labels drawn from the model's prediction.
        optimizer: the optimizer to choose for, ``"thor"`` or ``"thor-muon"``. ThorMuon has the
            factor A alone, and cuts the matrices that it orthogonalises into as many rows: the time
            is that to invert all blocks and to orthogonalise once.

    Returns:
        The choice and the measurements from which it was made.

    Raises:
        ValueError: the model has no layer that is preconditioned, the batch gives none of them a
            gradient, a factor is not finite, or ``optimizer`` is neither of the two.
    """
    if optimizer not in FACTORS:
        raise ValueError(f"optimizer={optimizer!r} splits no factors; give {' or '.join(FACTORS)}")
    where = (
        torch.device(device)
        if device is not None
        else next((p.device for p in model.parameters()), None)
    )
    if where is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters, so there is nothing to split; give a model "
            "with layers"
        )
    observer = Observer(model, where, FACTORS[optimizer])
    split_dims = candidates(observer.layers.values())
    return choose(
        observer.layers, observer.spectral_losses(sample_batch, loss_fn, split_dims), split_dims
    )


def candidates(layers: Collection[LayerCurvature]) -> tuple[int, ...]:
    """Return the block sizes to try: 1, powers of two from 16, and the largest factor's size."""
    largest = min(max(rows for _, rows in _sizes(layers)), LARGEST)
    powers = [2**k for k in range(4, LARGEST.bit_length())]
    return tuple(dict.fromkeys([1, *(size for size in powers if size < largest), largest]))


def _sizes(layers: Collection[LayerCurvature]) -> list[tuple[int, int]]:
    """Return (groups, rows) of every factor that is not diagonal, as A of an embedding is."""
    factors = [
        (layer.kind, side) for side in SIDES for layer in layers if side in layer.factor_names
    ]
    return [
        (kind.groups, kind.inputs if side == "A" else kind.outputs)
        for kind, side in factors
        if not (side == "A" and kind.diagonal_input)
    ]


def _seconds(layers: Collection[LayerCurvature], split_dims: Sequence[int]) -> tuple[float, ...]:
    """Measure the time of the work that depends on the split dimension, for each candidate."""
    first = next(iter(layers))
    dtype, device = factor_dtype(first.weight.dtype), first.weight.device
    inverting = inverse_seconds(_sizes(layers), split_dims, dtype=dtype, device=device)
    if first.g is not None:
        return inverting
    shapes = [(layer.kind.groups, layer.kind.outputs, layer.kind.inputs) for layer in layers]
    orthogonal = orthogonal_seconds(shapes, split_dims, dtype=dtype, device=device)
    return tuple(map(sum, zip(inverting, orthogonal, strict=True)))


def choose(
    layers: Mapping[str, LayerCurvature], losses: Losses, split_dims: Sequence[int]
) -> SplitChoice:
    """Measure the times of inversion, and choose the candidate nearest to the crossing."""
    seconds = _seconds(layers.values(), split_dims)
    performance = tuple(seconds[0] / each for each in seconds)
    kept = [
        [loss < MAX_LOSS for loss in factor]
        for layer in losses.values()
        for factor in layer.values()
    ]
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
        device=device_name(next(iter(layers.values())).weight.device),
    )


def find_crossing(
    split_dims: Sequence[int], performance: Sequence[float], information: Sequence[float]
) -> float | None:
    """Return the block size where performance and information are equal.

    It is interpolated in log2 of the size.
    """
    margins = [p - i for p, i in zip(performance, information, strict=True)]
    left = max(index for index, margin in enumerate(margins) if margin >= 0)
    if left == len(margins) - 1:
        return None
    share = margins[left] / (margins[left] - margins[left + 1])
    low, high = math.log2(split_dims[left]), math.log2(split_dims[left + 1])
    return float(2 ** (low + share * (high - low)))


def nearest(split_dims: Sequence[int], crossing: float) -> int:
    """Return the candidate nearest to the crossing, in log2 of the size."""
    return min(split_dims, key=lambda size: abs(math.log2(size) - math.log2(crossing)))
