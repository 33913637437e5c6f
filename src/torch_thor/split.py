"""The hardware-aware choice of the split dimension (Chen et al. 2021, section 3.3).

Large blocks lose little of a factor, and small blocks are fast to invert. Both effects are measured
for one model on one device, and the split dimension is chosen where the two curves cross.

The sample batch runs through a copy of the model. The unsplit factors of a layer are computed when
its last gradient is there, and are dropped when their losses are known. So if every layer is called
once, those of one layer exist at a time.
"""

import copy
import math
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_thor.capture.gathering import as_rows
from torch_thor.capture.hooks import ModuleCalls
from torch_thor.capture.inspection import hooks_of, inspect
from torch_thor.curvature.blocks import Blocks, BlockSizes, factor_dtype, ieee_float32
from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.layer import SIDES, LayerCurvature
from torch_thor.curvature.polar import unit_polars
from torch_thor.optim.registry import WITH_CURVATURE
from torch_thor.torch_internals import tree_map

MAX_LOSS = 0.01  # a factor counts as preserved if it loses a smaller share of its spectral norm
LARGEST = 8192  # the largest block that is tried, which limits a block of a large factor to 256 MB
# the factors that an optimizer splits
FACTORS = {name: kind.form.factor_names for name, kind in WITH_CURVATURE.items()}
LossFn = Callable[..., Tensor]
Losses = dict[str, dict[str, tuple[float, ...]]]


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
        losses: by layer name and by ``"A"`` or ``"G"`` (THOR only), the spectral loss
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
    ``model.train()`` first to see the statistics of training). The model and torch's random
    generators do not change. Beside the copy and the activations, the unsplit factors of one layer
    are in memory at a time; measuring times needs a few times the memory of the factors of all
    layers. On a CPU, networks of the size of ResNet-50 take minutes.

    Args:
        model: the model. Weights that have been trained for a while are more representative than
            initial weights.
        sample_batch: ``(inputs, targets)``, or only the inputs. Inputs are a tensor, a tuple of
            arguments or a mapping of keyword arguments. It should hold a few dozen typical
            examples; random noise has other factors.
        device: the device to run and to measure on; None for the model's. A model on another
            device is copied.
        loss_fn: ``loss_fn(output, targets)``, or ``loss_fn(output)`` if there are no targets.
            None: the cross entropy of the output (or of its ``.logits``), without targets for
            labels drawn from the model's prediction.
        optimizer: the optimizer to choose for, ``"thor"`` or ``"thor-muon"``. ThorMuon has the
            only factor A, and cuts the matrices that it orthogonalises into as many rows: the time
            is that to invert all blocks and to orthogonalise once.

    Returns:
        The choice and the measurements from which it was made.

    Raises:
        ValueError: the model has no layer that is preconditioned, the batch gives none of them a
            gradient, a factor is not finite, or ``optimizer`` is neither of the two.
    """
    if optimizer not in FACTORS:
        raise ValueError(f"optimizer={optimizer!r} splits no factors; give {' or '.join(FACTORS)}")
    observer = Observer(model, device, FACTORS[optimizer])
    split_dims = candidates(observer.layers.values())
    losses = observer.spectral_losses(sample_batch, loss_fn, split_dims)
    return choose(observer.layers, losses, split_dims)


def candidates(layers: Collection[LayerCurvature]) -> tuple[int, ...]:
    """Return the block sizes to try: 1, powers of two from 16, and the largest factor's size."""
    largest = min(max(rows for _, rows in _sizes(layers)), LARGEST)
    powers = [2**k for k in range(4, LARGEST.bit_length())]
    return tuple(dict.fromkeys([1, *(size for size in powers if size < largest), largest]))


def choose(
    layers: Mapping[str, LayerCurvature], losses: Losses, split_dims: Sequence[int]
) -> SplitChoice:
    """Measure the times of inversion, and choose the candidate nearest to the crossing."""
    first, *_ = layers.values()
    dtype, device = factor_dtype(first.weight.dtype), first.weight.device
    seconds = inverse_seconds(_sizes(layers.values()), split_dims, dtype=dtype, device=device)
    if first.g is None:
        kinds = [layer.kind for layer in layers.values()]
        shapes = [(kind.groups, kind.outputs, kind.inputs) for kind in kinds]
        orthogonal = orthogonal_seconds(shapes, split_dims, dtype=dtype, device=device)
        seconds = tuple(map(sum, zip(seconds, orthogonal, strict=True)))
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
        device=device_name(device),
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


def _sizes(layers: Collection[LayerCurvature]) -> list[tuple[int, int]]:
    """Return (groups, rows) of every factor that is not diagonal, as A of an embedding is."""
    return [
        (layer.kind.groups, layer.kind.inputs if side == "A" else layer.kind.outputs)
        for side in SIDES
        for layer in layers
        if side in layer.factor_names and not (side == "A" and layer.kind.diagonal_input)
    ]


# ---- what a split loses --------------------------------------------------------------------------


class Observer:
    """Runs a copy of a model, gathers its layers' statistics and measures their spectral losses."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        factor_names: tuple[str, ...] = SIDES,
    ) -> None:
        self._model = copy.deepcopy(model) if device is None else copy.deepcopy(model).to(device)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        layers = inspect(self._model, trained, inputs_alone="G" not in factor_names).layers
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no layer that is preconditioned with Kronecker "
                "factors and trained, so there is nothing to split; give a model with linear "
                "layers or convolutions that require gradients"
            )
        self._device = trained[0].device
        self.layers = {name: LayerCurvature(layer, factor_names) for name, layer in layers.items()}
        for layer in self.layers.values():
            layer.bind(layer.laid_out(replace(layer.weight_view, options={"split_dim": LARGEST})))
        self._split_dims: Sequence[int] = ()
        self._waiting: Counter[str] = Counter()  # the calls that have no gradient yet
        self._losses: Losses = {}
        self._hooks = hooks_of(layers, self.layers)
        self.gathering = set(self.layers.values())

    def watch(self, layer: LayerCurvature, kind: Kind, x: Tensor, output: Any) -> None:
        """Gather a layer's rows when the gradient of its output has been computed."""
        if not (isinstance(output, Tensor) and output.requires_grad and torch.is_grad_enabled()):
            return
        x = as_rows(x)
        self._waiting[layer.name] += 1

        def on_gradient(g: Tensor) -> None:
            rows = as_rows(g)
            layer.statistics.gather(kind, x, rows.shape if layer.g is None else rows)
            self._waiting[layer.name] -= 1
            if not self._waiting[layer.name]:
                self._finish(layer)

        output.register_hook(on_gradient)

    def spectral_losses(
        self, sample_batch: Any, loss_fn: LossFn | None, split_dims: Sequence[int]
    ) -> Losses:
        """Run the sample batch forward and backward, and return the spectral losses."""
        self._split_dims = split_dims
        devices = [] if self._device.type == "cpu" else [self._device]
        calls = ModuleCalls(self)
        with torch.random.fork_rng(devices, device_type=self._device.type), torch.enable_grad():
            calls.listen(self._hooks)
            try:
                loss_of(self._model, sample_batch, loss_fn, self._device).backward()
            finally:
                calls.close()
        # layers of which a call has received no gradient
        for layer in self.layers.values():
            self._finish(layer)
        if not self._losses:
            raise ValueError(
                "the loss of the sample batch has no gradient in any layer that is "
                "preconditioned; give sample_batch= and loss_fn= with a loss that depends on the "
                "output of the model"
            )
        return {name: self._losses[name] for name in self.layers if name in self._losses}

    def _finish(self, layer: LayerCurvature) -> None:
        factors = layer.statistics.take(loss_terms=1) or ()
        for side, factor in zip(layer.factor_names, factors, strict=False):
            if side == "A" and layer.kind.diagonal_input:
                continue
            if not bool(factor.rows.isfinite().all()):
                raise ValueError(
                    f"factor {side} of layer {layer.name!r} holds NaN or inf; check the model and "
                    "its sample batch"
                )
            of_layer = self._losses.setdefault(layer.name, {})
            of_layer[side] = spectral_losses(factor, self._split_dims)


def loss_of(
    model: nn.Module, sample_batch: Any, loss_fn: LossFn | None, device: torch.device
) -> Tensor:
    """Run a model on a batch, as ``choose_split_dim`` takes it, and return its loss."""
    has_targets = isinstance(sample_batch, tuple | list) and len(sample_batch) == 2
    inputs, targets = tree_map(
        lambda leaf: leaf.to(device) if hasattr(leaf, "to") else leaf,
        tuple(sample_batch) if has_targets else (sample_batch, None),
    )
    if isinstance(inputs, Mapping):
        output = model(**inputs)
    else:
        output = model(*(inputs if isinstance(inputs, tuple | list) else (inputs,)))
    if loss_fn is not None:
        return loss_fn(output) if targets is None else loss_fn(output, targets)
    scores = getattr(output, "logits", output)
    if targets is None:
        if not (isinstance(scores, Tensor) and scores.dim() == 2):
            raise ValueError(
                "without targets the model must return class scores (N, classes), from which "
                "labels are drawn; pass sample_batch=(inputs, targets), or loss_fn="
            )
        targets = torch.multinomial(scores.detach().float().softmax(-1), 1)[:, 0]
    return F.cross_entropy(scores, targets)


def spectral_losses(matrix: Blocks, split_dims: Sequence[int]) -> tuple[float, ...]:
    """Return ``L = 1 - |Â|₂ / |A|₂`` for several block sizes of Â."""
    unsplit = _norm(matrix.parts)
    norms = torch.stack(
        [_norm([c for part in matrix.parts for c in _cut(part, size)]) for size in split_dims]
    )
    losses = torch.where(unsplit == 0, torch.zeros_like(norms), 1 - norms / unsplit)
    return tuple(losses.clamp(0, 1).tolist())


def _norm(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([largest_eigenvalues(part).amax() for part in parts]).amax()


def _cut(blocks: Tensor, size: int) -> list[Tensor]:
    """Return the diagonal blocks, of some size or the rest at the end, of ``(count, n, n)``."""
    starts = range(0, blocks.shape[1], size)
    squares = [blocks[:, i : i + size, i : i + size] for i in starts]
    full = [square for square in squares if square.shape[1] == min(size, blocks.shape[1])]
    return [torch.cat(full), *squares[len(full) :]]


# The relative residual at which to stop, far below the 1 % of the choice. It bounds the error,
# which is most often about its square.
TOLERANCE = 1e-3
# Enough steps even without a gap between eigenvalues: the expected relative error is below
# 0.103 (ln(n (m-1)^2) / (m-1))^2, which is 0.0007 for n = 8192 rows and m = 256 steps (Kuczynski
# and Wozniakowski, SIAM J. Matrix Anal. Appl. 1992, theorem 3.2).
MAX_STEPS = 256
_CHECK_EVERY = 8


@torch.no_grad()
def largest_eigenvalues(matrices: Tensor, tolerance: float = TOLERANCE) -> Tensor:
    """Return the largest eigenvalue of symmetric semidefinite matrices, by Lanczos' method.

    It computes all matrices of a batch at once. ``torch.lobpcg`` fails on rank-one and zero
    matrices, and a batched eigendecomposition takes hundreds of times longer.
    """
    # Every new basis vector is orthogonalised twice against all previous vectors, so that rounding
    # causes no spurious eigenvalues. The start vector is drawn from a separate random generator.
    count, n, _ = matrices.shape
    steps = min(n, MAX_STEPS)
    # λ_max / n ≤ scale ≤ λ_max: no overflow, no underflow
    scale = matrices.diagonal(dim1=-2, dim2=-1).amax(-1)
    scale = torch.where(scale > 0, scale, 1.0)[:, None]
    generator = torch.Generator("cpu").manual_seed(0)
    start = torch.randn(count, n, generator=generator, dtype=matrices.dtype, device="cpu")
    vector = F.normalize(start, dim=-1).to(matrices.device)
    basis = matrices.new_zeros(count, steps, n)
    tridiagonal = matrices.new_zeros(count, steps + 1, steps + 1)
    noise = 10 * torch.finfo(matrices.dtype).eps
    with ieee_float32(matrices.device.type):
        for step in range(steps):
            basis[:, step] = vector
            known = basis[:, : step + 1]
            image = torch.bmm(matrices, vector[:, :, None])[..., 0] / scale
            tridiagonal[:, step, step] = (image * vector).sum(-1)
            length = image.norm(dim=-1)
            for _ in range(2):
                image = image - torch.bmm(known.mT, torch.bmm(known, image[:, :, None]))[..., 0]
            rest = image.norm(dim=-1)
            if (step + 1) % _CHECK_EVERY == 0 or step + 1 == steps:
                values, vectors = torch.linalg.eigh(tridiagonal[:, : step + 1, : step + 1].cpu())
                residual = rest.cpu() * vectors[:, -1, -1].abs()
                if bool((residual <= tolerance * values[:, -1]).all()):
                    break
            # if the vectors so far span an invariant subspace, the rest is noise
            rest = torch.where(rest > noise * length, rest, 0.0)
            tridiagonal[:, step, step + 1] = tridiagonal[:, step + 1, step] = rest
            vector = torch.where(rest[:, None] > 0, image / rest[:, None], 0.0)
    return torch.mul(values[:, -1].to(matrices), scale[:, 0])


# ---- what a split costs --------------------------------------------------------------------------

REPEATS = 5  # how often each candidate is timed


def inverse_seconds(
    sizes: Sequence[tuple[int, int]],
    split_dims: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, ...]:
    """Time the inversion of the blocks of factors of some (groups, rows) as in a refresh."""

    # A refresh has a batched Cholesky factorisation per block size. Its time does not depend on the
    # values, so well-conditioned blocks are used in the place of the factors. Blocks of 1 x 1 are
    # factorised too, although a refresh computes their reciprocals in much less time: p_1 is the
    # unit of the performance curve, and must be measured with the same algorithm.
    def prepare(split_dim: int) -> Callable[[], object]:
        counts: Counter[int] = Counter()
        for groups, rows in sizes:
            for count, size in BlockSizes.of(rows, split_dim, groups).blocks:
                counts[size] += count
        batches = [
            torch.eye(size, dtype=dtype, device=device).add(1 / size).repeat(count, 1, 1)
            for size, count in counts.items()
        ]
        return lambda: [invert(batch) for batch in batches]

    with ieee_float32(device.type):
        return _medians(prepare, split_dims, device)


def invert(blocks: Tensor) -> Tensor:
    """Return the inverses of blocks."""
    return torch.cholesky_inverse(torch.linalg.cholesky_ex(blocks)[0])


def orthogonal_seconds(
    shapes: Sequence[tuple[int, int, int]],
    split_dims: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, ...]:
    """Time the polar factors of layers of some (groups, outputs, inputs) as in ThorMuon's step."""
    generator = torch.Generator(device).manual_seed(0)  # the caller's random numbers stay
    matrices = [
        torch.randn((groups, *sorted(shape)), generator=generator, dtype=dtype, device=device)
        for groups, *shape in shapes
    ]
    return _medians(lambda size: lambda: unit_polars(matrices, size), split_dims, device)


def _medians(
    prepare: Callable[[int], Callable[[], object]],
    split_dims: Sequence[int],
    device: torch.device,
) -> tuple[float, ...]:
    """Return the median of the seconds that the work which is prepared for a candidate takes."""
    # The candidates are measured in turns, so that changes in the speed of the machine affect all
    # of them alike; the first round is a warm-up.
    rounds = [
        [_seconds_of(prepare(split_dim), device) for split_dim in split_dims]
        for _ in range(1 + REPEATS)
    ]
    return tuple(statistics.median(times) for times in zip(*rounds[1:], strict=True))


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return how long a device works."""
    _synchronise(device)
    started = time.perf_counter()
    work()
    _synchronise(device)
    return time.perf_counter() - started


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return the name of a device, with the number of threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} of {platform.machine()}"
    threads = torch.get_num_threads()
    return f"{processor_name()}, {threads} thread{'s' if threads > 1 else ''}"


def processor_name() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")  # platform.processor() is empty on most Linux systems
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
