"""Damped inverses of the new factors of all layers at once.

Blocks of one size from all layers are inverted by one batched Cholesky factorisation. A few large kernel launches
replace hundreds of small ones, which is the purpose of the split (Chen et al. 2021, section 3.3). If several processes
train together, each block is summed over them and inverted by its owner, which sends it to all.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.precision import ieee_float32
from torch_thor.curvature.processes import Processes

# The factors of the damping that are tried until a block is positive definite.
DAMPING_RAISES = (1.0, 10.0, 100.0)
# The result, in the place of an index of DAMPING_RAISES, for a block that is not positive definite with any of them.
_NOT_POSITIVE = len(DAMPING_RAISES)


@dataclass
class Inverse:
    """The damped inverses of the blocks of one tensor.

    Args:
        blocks: ``(M + damping I)⁻¹`` of each block M, row-major; undefined if ``failed``.
        raised: whether the damping of a block had to be raised.
        failed: whether a block was not positive definite even then, or its inverse is not finite.
    """

    blocks: Tensor
    raised: bool = False
    failed: bool = False


@dataclass
class NewFactor:
    """A factor to sum over the processes, to average with the factor in use, and to invert.

    Args:
        factor: the share of this process; :func:`invert_` replaces it by the averaged factor.
        damping: the number that is added to the diagonal, of each group (``√(λ/T)``).
        in_use: the factor in use; None if there is none.
        decay: the weight of the factor in use in the running average.
        keeps: for each group, whether it keeps the factor in use; empty if none does.

    After :func:`invert_`, ``inverse`` is the damped inverse; ``raised`` tells whether the damping of a block had to be
    raised, and ``failed`` whether a block was not positive definite even then, or its inverse is not finite.
    """

    factor: BlockDiagonal
    damping: Sequence[float]
    in_use: BlockDiagonal | None = None
    decay: float = 0.0
    keeps: Sequence[bool] = ()
    inverse: BlockDiagonal = field(init=False)
    raised: bool = field(default=False, init=False)
    failed: bool = field(default=False, init=False)

    def average_(self, part: int, own: slice) -> Tensor:
        """Replace blocks by the running average with those in use.

        Args:
            part: which of the tensors of the factor.
            own: the blocks of it that this process owns; they have been summed.

        Returns:
            The own blocks, a view.
        """
        blocks = self.factor.parts()[part]
        new = blocks[own]
        if self.in_use is not None:
            old = self.in_use.parts()[part][own]
            if any(self.keeps):
                keeps = torch.tensor(self.keeps, device=new.device).repeat_interleave(len(blocks) // len(self.keeps))
                new.copy_(torch.where(keeps[own, None, None], old, new))
            if self.decay:
                new.lerp_(old, self.decay)
        return new


def invert_(factors: Sequence[NewFactor], processes: Processes) -> None:
    """Sum, average and invert factors, and store the results in them.

    Args:
        factors: the factors, of the same layers on every process.
        processes: the processes that refresh together. With several, all of them get all factors and inverses.
    """
    places = [(factor, i) for factor in factors for i in range(len(factor.factor.parts()))]
    parts = [factor.factor.parts()[i] for factor, i in places]
    bounds, rank = processes.deal_out(parts), processes.rank
    owned = [slice(of_processes[rank], of_processes[rank + 1]) for of_processes in bounds]
    processes.sum_to_owners_(parts, bounds)
    damped = []
    for (factor, i), part, own in zip(places, parts, owned, strict=True):
        damping = part.new_tensor(factor.damping).repeat_interleave(len(part) // len(factor.damping))
        damped.append((factor.average_(i, own), damping[own]))
    results, inverses = damped_inverses(damped), []
    for part, own, result in zip(parts, owned, results, strict=True):
        inverse = result.blocks
        if len(inverse) < len(part):
            inverse = torch.zeros_like(part)
            inverse[own] = result.blocks
        inverses.append(inverse)
    flags = [flag for result in results for flag in (result.raised, result.failed)]
    of_all = iter([max(of_processes) for of_processes in zip(*processes.gather(flags), strict=True)])
    processes.share_([*parts, *inverses], [*bounds, *bounds])
    shared = iter(inverses)
    for factor in factors:
        factor.inverse = factor.factor.with_parts([next(shared) for _ in factor.factor.parts()])
        for _ in factor.factor.parts():
            factor.raised |= bool(next(of_all))
            factor.failed |= bool(next(of_all))


def damped_inverses(damped: Sequence[tuple[Tensor, Tensor]]) -> list[Inverse]:
    """Invert the blocks of many tensors, in one batch for each block size.

    Args:
        damped: pairs of blocks ``(count, s, s)`` and the number that is added to the diagonal of each, ``(count,)``.

    Returns:
        One result per pair, in order.
    """
    results = [Inverse(blocks) for blocks, _ in damped]
    batches: defaultdict[tuple[int, torch.dtype, torch.device], list[int]] = defaultdict(list)
    for i, (blocks, _) in enumerate(damped):
        if len(blocks):
            batches[blocks.shape[-1], blocks.dtype, blocks.device].append(i)
    levels: list[Tensor] = []  # for each batch, the index of the damping raise with which each block was inverted
    highest: list[Tensor] = []
    for (_, _, device), members in batches.items():
        blocks_of, damping_of = zip(*[damped[i] for i in members], strict=True)
        with ieee_float32(device.type):
            inverse, level = _invert_batch(torch.cat(blocks_of), torch.cat(damping_of))
        levels.append(level)
        highest.append(level.amax().to(levels[0].device))
        for i, own in zip(members, inverse.split([len(blocks) for blocks in blocks_of]), strict=True):
            # A copy, because a view would keep the whole batch alive, and would be saved with all of it. Row-major,
            # which LAPACK's results are not: checkpoints may lose strides, on which the rounding of products depends.
            results[i].blocks = own.clone(memory_format=torch.contiguous_format)
    if highest and any(torch.stack(highest).tolist()):  # one host–device synchronisation for all batches
        for members, level in zip(batches.values(), levels, strict=True):
            _note_raises([results[i] for i in members], level)
    return results


def _note_raises(results: Sequence[Inverse], level: Tensor) -> None:
    """Record for each tensor of a batch whether damping was raised and whether the inversion failed."""
    of_results = level.split([len(result.blocks) for result in results])
    worst = torch.stack([of_result.amax() for of_result in of_results]).tolist()
    for result, level_of in zip(results, worst, strict=True):
        result.raised = level_of > 0
        result.failed = level_of == _NOT_POSITIVE


def _invert_batch(blocks: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses ``(count, s, s)`` and, for each block, the index of the damping raise that worked."""
    damped = blocks.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    factor, info = _cholesky(damped)
    bad = info.nonzero().flatten()  # a host–device synchronisation, once per batch; most often it is empty
    if not len(bad):
        inverse = _from_cholesky(factor)
        return inverse, (~inverse.isfinite().flatten(1).all(-1)).int() * _NOT_POSITIVE
    level = torch.zeros_like(info)
    for attempt in range(1, len(DAMPING_RAISES)):
        retry = blocks[bad]
        retry.diagonal(dim1=-2, dim2=-1).add_((damping[bad] * DAMPING_RAISES[attempt])[:, None])
        factor[bad], info[bad] = _cholesky(retry)
        level[bad] = attempt
        bad = info.nonzero().flatten()
        if not len(bad):
            break
    # cholesky_inverse raises for the whole batch if one factor is incomplete, with a zero on its diagonal
    good, inverse = info == 0, torch.zeros_like(factor)
    if bool(good.any()):
        inverse[good] = _from_cholesky(factor[good])
    good = good & inverse.isfinite().flatten(1).all(-1)
    return inverse, torch.where(good, level, _NOT_POSITIVE)


def _from_cholesky(factor: Tensor) -> Tensor:
    if factor.shape[-1] > 1:
        return torch.cholesky_inverse(factor)
    return factor.square().reciprocal()


def _cholesky(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors and, for each block, 0 or a positive number if it is not positive definite."""
    if blocks.shape[-1] > 1:
        factor, info = torch.linalg.cholesky_ex(blocks)
        return factor, info
    # LAPACK would be called for each 1 x 1 block, of which an embedding has as many as tokens
    return blocks.sqrt(), (~(blocks > 0)).flatten().int()


def relative_damping(trace: float, size: int, damping: float, dtype: torch.dtype) -> float:
    """Return the damping of a factor relative to its mean diagonal.

    Args:
        trace: tr(M).
        size: n, the number of rows of M.
        damping: λ.
        dtype: the dtype of M.

    Returns:
        ``λ · tr(M) / n``; λ itself for a factor of zeros (of a layer whose inputs are zeros), and for one whose
        elements are so small that they have lost most of their digits.
    """
    mean, numbers = trace / size, torch.finfo(dtype)
    return damping * mean if abs(mean) > numbers.tiny / numbers.eps else damping
