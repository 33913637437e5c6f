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

from torch_thor.curvature.precision import ieee_float32
from torch_thor.curvature.processes import ALONE, BlockExchange, Processes

# The factors of the damping that are tried until a block is positive definite.
DAMPING_RAISES = (1.0, 10.0, 100.0)
# The result, in the place of an index of DAMPING_RAISES, for a block that is not positive definite with any of them.
_NOT_POSITIVE = len(DAMPING_RAISES)


@dataclass(frozen=True)
class KeptBlocks:
    """The owners of blocks of which every process keeps a part alone."""

    bounds: Sequence[int]  # process r owns the blocks from index r to index r + 1 of this list
    source: int  # the process that owns those that this process keeps
    replicas: object = None  # the group of the processes that keep the same blocks as this one

    @property
    def held(self) -> slice:
        """The blocks that this process keeps."""
        return slice(self.bounds[self.source], self.bounds[self.source + 1])


@dataclass
class NewBlocks:
    """Blocks of a new factor, to sum over the processes, to average with those in use, and to invert."""

    blocks: Tensor  # `(count, s, s)`, over the rows of this process
    damping: Sequence[float]  # the number that is added to the diagonal, of each group (`√(λ/T)`)
    in_use: Tensor | None = None  # the blocks in use; None if there are none
    decay: float = 0.0  # the weight of the blocks in use in the running average
    keeps: Sequence[bool] = ()  # for each group, whether it keeps the blocks in use; empty if none does
    kept: "KeptBlocks | None" = None  # the owners of the blocks, if every process keeps a part of them alone
    inverse: Tensor = field(init=False)
    raised: bool = field(default=False, init=False)
    failed: bool = field(default=False, init=False)

    def average_(self, own: slice) -> tuple[Tensor, Tensor]:
        """Replace blocks by their running average with those in use."""
        new, of_one_group = self.blocks[own], len(self.blocks) // len(self.damping)
        if self.in_use is not None and len(new):
            in_use = self.in_use if self.kept is not None else self.in_use[own]
            if any(self.keeps):
                keeps = torch.tensor(self.keeps, device=new.device).repeat_interleave(of_one_group)[own]
                new.copy_(torch.where(keeps[:, None, None], in_use, new))
            if self.decay:
                new.lerp_(in_use, self.decay)
        return new, new.new_tensor(self.damping).repeat_interleave(of_one_group)[own]


def invert_(new: Sequence[NewBlocks], processes: Processes = ALONE) -> None:
    """Sum, average and invert blocks, and store the results in them."""
    exchange, rank = processes.exchange, processes.rank
    if exchange is not None:
        parts = [one.blocks for one in new]
        bounds = exchange.deal_out(parts, [None if one.kept is None else one.kept.bounds for one in new])
        exchange.sum_to_owners_(parts, bounds)
    damped = []
    for i, one in enumerate(new):
        own = slice(None) if exchange is None else slice(bounds[i][rank], bounds[i][rank + 1])
        damped.append((one, *one.average_(own)))
    invert_own_(damped)
    if exchange is not None:
        flags = processes.gather([flag for one in new for flag in (one.raised, one.failed)])
        any_of = iter([any(of_ranks) for of_ranks in zip(*flags, strict=True)])
        shared: list[Tensor] = []
        shared_bounds: list[Sequence[int]] = []
        for one, of_ranks in zip(new, bounds, strict=True):
            one.raised, one.failed = next(any_of), next(any_of)
            of_all = torch.zeros_like(one.blocks)
            of_all[of_ranks[rank] : of_ranks[rank + 1]] = one.inverse
            one.inverse = of_all
            if one.kept is None:
                shared += [one.blocks, of_all]
                shared_bounds += [of_ranks, of_ranks]
        exchange.share_(shared, shared_bounds)
        _keep_own([one for one in new if one.kept is not None], exchange)


def _keep_own(new: Sequence[NewBlocks], exchange: BlockExchange) -> None:
    """Keep the blocks and inverses of which this process keeps its part, from their owner."""
    groups: dict[int, tuple[object, list[Tensor]]] = {}
    for one in new:
        assert one.kept is not None
        one.blocks, one.inverse = one.blocks[one.kept.held].clone(), one.inverse[one.kept.held].clone()
        if one.kept.replicas is not None:
            groups.setdefault(id(one.kept.replicas), (one.kept.replicas, []))[1].extend((one.blocks, one.inverse))
    for replicas, parts in groups.values():
        exchange.share_with_replicas_(parts, replicas)


def invert_own_(damped: Sequence[tuple[NewBlocks, Tensor, Tensor]]) -> None:
    """Invert the blocks of this process, in one batch for each block size."""
    batches: defaultdict[tuple[int, torch.dtype, torch.device], list[NewBlocks]] = defaultdict(list)
    inputs: defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for one, blocks, damping in damped:
        one.inverse = blocks
        if len(blocks):
            batches[blocks.shape[-1], blocks.dtype, blocks.device].append(one)
            inputs[blocks.shape[-1], blocks.dtype, blocks.device].append((blocks, damping))
    levels: list[Tensor] = []  # for each batch, the index of the damping raise with which each block was inverted
    highest: list[Tensor] = []
    for key, members in batches.items():
        blocks_of, damping_of = zip(*inputs[key], strict=True)
        with ieee_float32(key[-1].type):
            inverse, level = _invert_batch(torch.cat(blocks_of), torch.cat(damping_of))
        levels.append(level)
        highest.append(level.amax().to(levels[0].device))
        first = 0
        for one in members:
            last = first + len(one.inverse)
            # A copy, because a view would keep the whole batch alive, and would be saved with all of it. Row-major,
            # which LAPACK's results are not: checkpoints may lose strides, on which the rounding of products depends.
            one.inverse = inverse[first:last].clone(memory_format=torch.contiguous_format)
            first = last
    if highest and any(torch.stack(highest).tolist()):  # one host–device synchronisation for all batches
        for members, level in zip(batches.values(), levels, strict=True):
            _note_raises(members, level)


def _note_raises(members: Sequence[NewBlocks], level: Tensor) -> None:
    """Record for each tensor of a batch whether damping was raised and whether the inversion failed."""
    of_members = level.split([len(one.inverse) for one in members])
    worst = torch.stack([of_member.amax() for of_member in of_members]).tolist()
    for one, level_of in zip(members, worst, strict=True):
        one.raised = level_of > 0
        one.failed = level_of == _NOT_POSITIVE


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
    """Return the damping of a factor relative to its mean diagonal."""
    mean, numbers = trace / size, torch.finfo(dtype)
    return damping * mean if abs(mean) > numbers.tiny / numbers.eps else damping
