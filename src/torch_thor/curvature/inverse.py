"""Damped inverses of the new factors of all layers at once.

Blocks of one size from all layers are inverted by one batched Cholesky factorisation. A few large
kernel launches replace hundreds of small ones, which is the purpose of the split (Chen et al. 2021,
section 3.3). If several processes train together, each block is summed over them and inverted by
its owner, which sends it to all.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks, has_values, ieee_float32, to_device
from torch_thor.curvature.communication import ALONE, Bounds, Processes
from torch_thor.curvature.factor import Factor

# The factors of the damping that are tried until a block is positive definite.
DAMPING_RAISES = (1.0, 10.0, 100.0)
# The result, in the place of an index of DAMPING_RAISES, for a block that is not positive definite
# with any of them.
_NOT_POSITIVE = len(DAMPING_RAISES)


@dataclass
class NewFactor:
    """A new factor, to sum over the processes, to average with the one in use, and to invert."""

    factor: Factor
    sums: Blocks  # of the blocks of all processes; overwritten
    damping: Sequence[float]  # the number that is added to the diagonal, of each group
    # what this process holds of the factor in use; None if there is none
    in_use: Blocks | None = None
    decay: float = 0.0  # the weight of the factor in use in the running average
    # for each group, whether it keeps the factor in use; empty if none does
    keeps: Sequence[bool] = ()
    # for each group, whether the identity takes the place of its inverse
    plain: Sequence[bool] = ()
    # what invert_() finds: of each run, the blocks that this process keeps
    blocks: list[Tensor] = field(default_factory=list)
    inverses: list[Tensor] = field(default_factory=list)
    raised: bool = False  # whether the damping of a block had to be raised
    # whether a block was not positive definite with the highest damping, or has no finite inverse
    failed: bool = False


def invert_(new: Sequence[NewFactor], processes: Processes = ALONE) -> None:
    """Sum, average and invert factors; each has its blocks and inverses then, on all processes."""
    runs = [(one, run) for one in new for run in range(len(one.sums.cut.runs))]
    parts = [one.sums.parts[run] for one, run in runs]
    bounds: Bounds = [(0, len(part)) for part in parts]
    if processes.count > 1:
        owners = [(one.factor.layout.owners, run) for one, run in runs]
        bounds = processes.deal_out(
            parts, [None if of is None else of.bounds[run] for of, run in owners]
        )
        processes.sum_to_owners_(parts, bounds)
    owned = [slice(of_ranks[processes.rank], of_ranks[processes.rank + 1]) for of_ranks in bounds]
    of_runs = runs, parts, owned
    keeps = _flags_of_blocks([one.keeps for one, _ in runs], *of_runs)
    without_inverse = _flags_of_blocks([one.plain for one, _ in runs], *of_runs)
    damping = _of_blocks([one.damping for one, _ in runs], *of_runs)
    blocks = [
        _averaged(one, run, own, kept)
        for (one, run), own, kept in zip(runs, owned, keeps, strict=True)
    ]
    inverses, levels = invert_own(blocks, damping)
    for i, (one, _) in enumerate(runs):
        one.raised = one.raised or levels[i] > 0
        one.failed = one.failed or levels[i] == _NOT_POSITIVE
        plain = without_inverse[i]
        if plain is not None:
            identity = torch.eye(inverses[i].shape[-1]).to(inverses[i])
            inverses[i] = torch.where(plain[:, None, None], identity, inverses[i])
    if processes.count > 1:
        for i, own in enumerate(owned):
            of_all = torch.zeros_like(parts[i], memory_format=torch.contiguous_format)
            of_all[own] = inverses[i]
            inverses[i] = of_all
        _share_(new, runs, parts, inverses, bounds, processes)
    for (one, _), part, inverse in zip(runs, parts, inverses, strict=True):
        one.blocks.append(part)
        one.inverses.append(inverse)


def _of_blocks(
    numbers: Sequence[Sequence[float]],
    runs: Sequence[tuple[NewFactor, int]],
    parts: Sequence[Tensor],
    owned: Sequence[slice],
) -> list[Tensor]:
    """Return the number of the group of each own block, for each run; given are those of groups."""
    together: defaultdict[tuple[torch.device, torch.dtype], list[float]] = defaultdict(list)
    lengths: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for of_groups, (one, index), part, own in zip(numbers, runs, parts, owned, strict=True):
        cut = one.sums.cut
        run, rows = cut.runs[index], max(1, cut.rows // cut.groups)
        groups = [first // rows for first in range(run.first, run.last, run.size)][own]
        together[part.device, part.dtype] += [of_groups[group] for group in groups]
        lengths[part.device, part.dtype].append(len(groups))
    sent = {key: to_device(of_all, *key).split(lengths[key]) for key, of_all in together.items()}
    numbers_of = {key: iter(of_runs) for key, of_runs in sent.items()}
    return [next(numbers_of[part.device, part.dtype]) for part in parts]


def _flags_of_blocks(
    flags: Sequence[Sequence[bool]],
    runs: Sequence[tuple[NewFactor, int]],
    parts: Sequence[Tensor],
    owned: Sequence[slice],
) -> list[Tensor | None]:
    """Return whether each own block is one of the marked groups; None where no group is marked."""
    if not any(any(of) for of in flags):  # as a rule: only experts may be marked
        return [None] * len(runs)
    numbers = [
        of or [False] * one.sums.cut.groups for of, (one, _) in zip(flags, runs, strict=True)
    ]
    marked = _of_blocks(numbers, runs, parts, owned)
    return [of_run > 0 if any(of) else None for of_run, of in zip(marked, flags, strict=True)]


def _averaged(of: NewFactor, index: int, own: slice, keeps: Tensor | None) -> Tensor:
    """Return own blocks of a run, averaged with those in use."""
    owners, new = of.factor.layout.owners, of.sums.parts[index][own]
    if of.in_use is None or not len(new):
        return new
    if owners is None:
        old = of.in_use.parts[index][own]
    else:  # it has the own blocks alone, of those runs that have any
        source = owners.source
        before = sum(of_run[source] < of_run[source + 1] for of_run in owners.bounds[:index])
        old = of.in_use.parts[before]
    if keeps is not None:
        new.copy_(torch.where(keeps[:, None, None], old, new))
    if of.decay:
        new.lerp_(old, of.decay)
    return new


def _share_(
    new: Sequence[NewFactor],
    runs: Sequence[tuple[NewFactor, int]],
    parts: list[Tensor],
    inverses: list[Tensor],
    bounds: Bounds,
    processes: Processes,
) -> None:
    """Send blocks, inverses and failures to all processes that keep them."""
    # What is not kept is dropped.
    flags = processes.gather([flag for one in new for flag in (one.raised, one.failed)])
    any_of = iter([any(of_ranks) for of_ranks in zip(*flags, strict=True)])
    for one in new:
        one.raised, one.failed = next(any_of), next(any_of)
    shared = [i for i, (one, _) in enumerate(runs) if one.factor.layout.owners is None]
    processes.share_(
        [of[i] for i in shared for of in (parts, inverses)],
        [bounds[i] for i in shared for _ in range(2)],
    )
    of_rows: list[Tensor] = []  # which other processes hold as well
    for i, (one, run) in enumerate(runs):
        owners = one.factor.layout.owners
        if owners is not None:
            kept = owners.held(run)
            parts[i], inverses[i] = parts[i][kept], inverses[i][kept]
            if owners.has_replicas:
                of_rows += parts[i], inverses[i]
    if of_rows:  # the first of them has inverted all
        first = [(0, *[len(part)] * processes.count) for part in of_rows]
        processes.share_(of_rows, first, "replicas")


def invert_own(
    blocks: Sequence[Tensor], damping: Sequence[Tensor]
) -> tuple[list[Tensor], list[int]]:
    """Invert blocks in one batch for each size; return the highest damping raise of each tensor."""
    alike: defaultdict[tuple[int, torch.dtype, torch.device], list[int]] = defaultdict(list)
    for i, one in enumerate(blocks):
        if len(one):
            alike[one.shape[-1], one.dtype, one.device].append(i)
    batches = [
        _Batch(torch.cat([blocks[i] for i in of]), torch.cat([damping[i] for i in of]))
        for of in alike.values()
    ]
    for batch in batches:
        batch.invert()
    looked_at = [batch for batch in batches if has_values(batch.blocks)]
    highest = [batch.levels.amax().to(looked_at[0].blocks.device) for batch in looked_at]
    # one host–device synchronisation for all batches
    raised = dict(zip(looked_at, torch.stack(highest).tolist() if highest else [], strict=True))
    inverses, worst = list(blocks), [0] * len(blocks)
    for batch, members in zip(batches, alike.values(), strict=True):
        level = raised.get(batch, 0)
        if level:
            batch.raise_damping()
        counts = [len(blocks[i]) for i in members]
        for i, own in zip(members, batch.inverses.split(counts), strict=True):
            inverses[i] = own
        if level:
            for i, own in zip(members, batch.levels.split(counts), strict=True):
                worst[i] = int(own.amax())
    return inverses, worst


@dataclass(eq=False)
class _Batch:
    """Blocks of one size that are inverted together."""

    blocks: Tensor
    damping: Tensor
    inverses: Tensor = field(init=False)
    levels: Tensor = field(init=False)  # the damping raise of each block, as an index

    def invert(self) -> None:
        """Invert the blocks; on an accelerator with the first damping alone, and without a look."""
        on_cpu = self.blocks.device.type == "cpu" and has_values(self.blocks)
        invert = _invert_batch if on_cpu else _invert_unseen
        with ieee_float32(self.blocks.device.type):
            self.inverses, self.levels = invert(self.blocks, self.damping)

    def raise_damping(self) -> None:
        """Invert the blocks again with as much damping as they need, where that was not seen."""
        if self.blocks.device.type != "cpu":
            with ieee_float32(self.blocks.device.type):
                self.inverses, self.levels = _invert_batch(self.blocks, self.damping)


def inverse_of(blocks: Blocks, damping: float) -> Blocks | None:
    """Return the damped inverse of a factor on this process.

    It is None if a block is not positive definite.
    """
    found = Blocks(blocks.cut, torch.zeros_like(blocks.rows))
    for into, part in zip(found.parts, blocks.parts, strict=True):
        with ieee_float32(part.device.type):
            inverse, level = _invert_batch(part, part.new_full((len(part),), damping))
        if bool((level == _NOT_POSITIVE).any()):
            return None
        into.copy_(inverse)
    return found


def _invert_batch(blocks: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Return the inverses ``(count, s, s)`` and the damping raise that worked."""
    # The latter is an index for each block.
    if blocks.shape[-1] == 1:
        return _invert_numbers(blocks.flatten(), damping)
    damped = blocks.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    factor, info = torch.linalg.cholesky_ex(damped)
    # a host–device synchronisation, once per batch; most often it is empty
    bad = info.nonzero().flatten()
    if not len(bad):
        inverse = torch.cholesky_inverse(factor)
        return inverse, (~inverse.isfinite().flatten(1).all(-1)).int() * _NOT_POSITIVE
    level = torch.zeros_like(info)
    for attempt in range(1, len(DAMPING_RAISES)):
        retry = blocks[bad]
        retry.diagonal(dim1=-2, dim2=-1).add_((damping[bad] * DAMPING_RAISES[attempt])[:, None])
        factor[bad], info[bad] = torch.linalg.cholesky_ex(retry)
        level[bad] = attempt
        bad = info.nonzero().flatten()
        if not len(bad):
            break
    # cholesky_inverse raises for the whole batch if one factor is incomplete, with a zero on its
    # diagonal
    good, inverse = info == 0, torch.zeros_like(factor)
    if bool(good.any()):
        inverse[good] = torch.cholesky_inverse(factor[good])
    good = good & inverse.isfinite().flatten(1).all(-1)
    return inverse, torch.where(good, level, _NOT_POSITIVE)


def _invert_unseen(blocks: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same on an accelerator, with the first damping alone and no look at a result."""
    if blocks.shape[-1] == 1:
        return _invert_numbers(blocks.flatten(), damping)
    damped = blocks.clone()
    damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
    factor, info = torch.linalg.cholesky_ex(damped)
    identity = torch.eye(blocks.shape[-1], dtype=blocks.dtype, device=blocks.device).expand_as(
        factor
    )
    # cholesky_inverse would look whether it has succeeded
    root = torch.linalg.solve_triangular(
        torch.where(info[:, None, None] == 0, factor, identity), identity, upper=False
    )
    inverse = torch.bmm(root.mT, root)
    failed = (info != 0) | ~inverse.isfinite().flatten(1).all(-1)
    return inverse, failed.int() * _NOT_POSITIVE


def _invert_numbers(numbers: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same for blocks of one number."""
    # LAPACK would be called for each token of an embedding.
    damped = torch.stack([numbers + raised * damping for raised in DAMPING_RAISES])
    level = (damped > 0).int().argmax(0)  # the first that is positive; 0 if none is
    inverse = damped.gather(0, level[None])[0].sqrt().square().reciprocal()  # not finite if none is
    return inverse[:, None, None], torch.where(inverse.isfinite(), level, _NOT_POSITIVE).int()


def relative_damping(trace: float, size: int, damping: float, dtype: torch.dtype) -> float:
    """Return the damping of a factor relative to its mean diagonal."""
    mean, numbers = trace / size, torch.finfo(dtype)
    return damping * mean if abs(mean) > numbers.tiny / numbers.eps else damping
