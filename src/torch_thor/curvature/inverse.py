"""Damped inverses of the new factors of all layers at once.

Blocks of one size from all layers are inverted by one batched Cholesky factorisation. A few large kernel launches
replace hundreds of small ones, which is the purpose of the split (Chen et al. 2021, section 3.3). If several processes
train together, each block is summed over them and inverted by its owner, which sends it to all.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks
from torch_thor.curvature.factor import Factor
from torch_thor.curvature.precision import ieee_float32
from torch_thor.curvature.processes import ALONE, Processes

# The factors of the damping that are tried until a block is positive definite.
DAMPING_RAISES = (1.0, 10.0, 100.0)
# The result, in the place of an index of DAMPING_RAISES, for a block that is not positive definite with any of them.
_NOT_POSITIVE = len(DAMPING_RAISES)


@dataclass
class NewFactor:
    """A new factor, to sum over the processes, to average with the one in use, and to invert."""

    factor: Factor
    sums: Blocks  # of the blocks of all processes; overwritten
    damping: Sequence[float]  # the number that is added to the diagonal, of each group
    in_use: Blocks | None = None  # what this process holds of the factor in use; None if there is none
    decay: float = 0.0  # the weight of the factor in use in the running average
    keeps: Sequence[bool] = ()  # for each group, whether it keeps the factor in use; empty if none does
    plain: Sequence[bool] = ()  # for each group, whether the identity takes the place of its inverse
    pieces: list["_Piece"] = field(default_factory=list)

    @property
    def raised(self) -> bool:
        """Whether the damping of a block had to be raised."""
        return any(piece.raised for piece in self.pieces)

    @property
    def failed(self) -> bool:
        """Whether a block was not positive definite with the highest damping, or its inverse is not finite."""
        return any(piece.failed for piece in self.pieces)

    def store(self) -> None:
        """Write the factor and its inverse into the state."""
        for inverse in (False, True):
            found = [piece.inverse if inverse else piece.blocks for piece in self.pieces]
            held = [blocks for blocks in found if len(blocks)]
            for into, blocks in zip(self.factor.read(inverse=inverse).parts, held, strict=True):
                into.copy_(blocks)


class _Piece:
    """The blocks of one run of a new factor."""

    def __init__(self, of: NewFactor, run: int) -> None:
        self.blocks = of.sums.parts[run]
        owners = of.factor.owners
        self.kept = None if owners is None else owners.held(run)  # the blocks that this process keeps; None for all
        self.fixed = None if owners is None else owners.bounds[run]  # the owners of the blocks, if they are known
        self.replicas = None if owners is None else owners.replicas
        self.raised = self.failed = False
        self._of, self._run, self._old = of, run, None
        self.inverse = self.blocks
        if of.in_use is not None and (self.kept is None or self.kept.start < self.kept.stop):
            before = [p for p in of.pieces if p.kept is None or p.kept.start < p.kept.stop]
            self._old = of.in_use.parts[len(before)]

    def average_(self, own: slice) -> tuple[Tensor, Tensor]:
        """Replace own blocks by their running average with those in use; return them, and the damping of each."""
        of, new = self._of, self.blocks[own]
        groups = of.sums.cut.groups_of(of.sums.cut.runs[self._run])[own].to(new.device)
        if self._old is not None and len(new):
            old = self._old if self.kept is not None else self._old[own]
            if any(of.keeps):
                keeps = torch.tensor(of.keeps, device=new.device)[groups]
                new.copy_(torch.where(keeps[:, None, None], old, new))
            if of.decay:
                new.lerp_(old, of.decay)
        self._plain = torch.tensor(of.plain, device=new.device)[groups] if any(of.plain) else None
        return new, new.new_tensor(of.damping)[groups]

    def take(self, inverse: Tensor) -> None:
        """Take the inverses of the own blocks."""
        if self._plain is not None:
            identity = torch.eye(inverse.shape[-1], dtype=inverse.dtype, device=inverse.device)
            inverse = torch.where(self._plain[:, None, None], identity, inverse)
        self.inverse = inverse


def invert_(new: Sequence[NewFactor], processes: Processes = ALONE) -> None:
    """Sum, average and invert factors; :meth:`NewFactor.store` has the results, on all processes."""
    for one in new:
        for run in range(len(one.sums.cut.runs)):
            one.pieces.append(_Piece(one, run))
    pieces = [piece for one in new for piece in one.pieces]
    owned = [slice(None)] * len(pieces)
    if processes.count > 1:
        parts = [piece.blocks for piece in pieces]
        bounds = processes.deal_out(parts, [piece.fixed for piece in pieces])
        processes.sum_to_owners_(parts, bounds)
        owned = [slice(of_ranks[processes.rank], of_ranks[processes.rank + 1]) for of_ranks in bounds]
    invert_own_([(piece, *piece.average_(own)) for piece, own in zip(pieces, owned, strict=True)])
    if processes.count == 1:
        return
    flags = processes.gather([flag for piece in pieces for flag in (piece.raised, piece.failed)])
    any_of = iter([any(of_ranks) for of_ranks in zip(*flags, strict=True)])
    shared: list[Tensor] = []
    shared_bounds: list[Sequence[int]] = []
    for piece, own, of_ranks in zip(pieces, owned, bounds, strict=True):
        piece.raised, piece.failed = next(any_of), next(any_of)
        of_all = torch.zeros_like(piece.blocks, memory_format=torch.contiguous_format)
        of_all[own] = piece.inverse
        piece.inverse = of_all
        if piece.kept is None:
            shared += [piece.blocks, of_all]
            shared_bounds += [of_ranks, of_ranks]
    processes.share_(shared, shared_bounds)
    groups: dict[int, tuple[object, list[Tensor]]] = {}
    for piece in pieces:
        if piece.kept is not None:
            piece.blocks, piece.inverse = piece.blocks[piece.kept], piece.inverse[piece.kept]
            if piece.replicas is not None:
                own_parts = groups.setdefault(id(piece.replicas), (piece.replicas, []))[1]
                own_parts.extend((piece.blocks, piece.inverse))
    for replicas, own_parts in groups.values():
        processes.share_with_replicas_(own_parts, replicas)


def invert_own_(damped: Sequence[tuple[Any, Tensor, Tensor]]) -> None:
    """Invert blocks in one batch for each size: of things that ``take`` inverses, blocks, and the damping of each."""
    batches: defaultdict[tuple[int, torch.dtype, torch.device], list[tuple[Any, Tensor, Tensor]]] = defaultdict(list)
    for one, blocks, damping in damped:
        if len(blocks):
            batches[blocks.shape[-1], blocks.dtype, blocks.device].append((one, blocks, damping))
        else:
            one.take(blocks)
    levels: list[Tensor] = []  # for each batch, the index of the damping raise with which each block was inverted
    for key, members in batches.items():
        _, blocks_of, damping_of = zip(*members, strict=True)
        with ieee_float32(key[-1].type):
            inverse, level = _invert_batch(torch.cat(blocks_of), torch.cat(damping_of))
        levels.append(level)
        for (one, _, _), own in zip(members, inverse.split([len(b) for b in blocks_of]), strict=True):
            one.take(own)
    highest = [level.amax().to(levels[0].device) for level in levels]
    if highest and any(torch.stack(highest).tolist()):  # one host–device synchronisation for all batches
        for members, level in zip(batches.values(), levels, strict=True):
            of_members = level.split([len(blocks) for _, blocks, _ in members])
            worst = torch.stack([of_member.amax() for of_member in of_members]).tolist()
            for (one, *_), level_of in zip(members, worst, strict=True):
                one.raised, one.failed = level_of > 0, level_of == _NOT_POSITIVE


def inverse_of(blocks: Blocks, damping: float) -> Blocks | None:
    """Return the damped inverse of a factor on this process; None if a block is not positive definite."""
    found = Blocks(blocks.cut, torch.zeros_like(blocks.rows))
    for into, part in zip(found.parts, blocks.parts, strict=True):
        with ieee_float32(part.device.type):
            inverse, level = _invert_batch(part, part.new_full((len(part),), damping))
        if bool((level == _NOT_POSITIVE).any()):
            return None
        into.copy_(inverse)
    return found


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
