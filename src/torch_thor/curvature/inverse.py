"""Damped inverses of the new factors of all layers at once.

Blocks of one size from all layers are inverted by one batched Cholesky factorisation. A few large
kernels replace hundreds of small kernels, which is the purpose of the split (Chen et al. 2021,
section 3.3). If several processes train together, each block is summed over them and inverted by
its owner, which sends it to all.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from torch_thor.curvature.blocks import Blocks, ieee_float32, to_device
from torch_thor.curvature.communication import SINGLE_PROCESS, Bounds, Processes
from torch_thor.curvature.layer import Factor
from torch_thor.curvature.layout import Owners

# The factors of the damping that are tried until a block is positive definite.
DAMPING_RAISES = (1.0, 10.0, 100.0)
# The result, in the place of an index of DAMPING_RAISES, for a block that is not positive definite
# with any of them, or has no finite inverse.
NOT_POSITIVE = len(DAMPING_RAISES)


@dataclass
class NewFactor:
    """A new factor, to sum over the processes, to average with the factor in use, and to invert."""

    factor: Factor
    sums: Blocks  # of the blocks of all processes; overwritten
    damping: Sequence[float]  # the number that is added to the diagonal, of each group
    # what this process keeps of the factor in use; None if it is not needed
    in_use: Blocks | None = None
    decay: float = 0.0  # the weight of the factor in use in the running average
    # for each group, whether it keeps the factor in use; empty if none does
    keeps: Sequence[bool] = ()
    # for each group, whether the identity takes the place of its inverse; empty if it never does
    plain: Sequence[bool] = ()
    # what invert_() finds: of each run, the blocks that this process keeps
    blocks: list[Tensor] = field(default_factory=list)
    inverses: list[Tensor] = field(default_factory=list)
    level: int = 0  # the highest damping raise of a block, as an index, or NOT_POSITIVE


@dataclass(eq=False)
class _Run:
    """The blocks of one size of a new factor."""

    new: NewFactor
    index: int
    owners: Owners | None
    sums: Tensor  # of the rows of all processes; in the end what this process keeps
    inverted: slice = field(init=False)  # which of them this process inverts
    blocks: Tensor = field(init=False)  # these
    inverses: Tensor = field(init=False)


def invert_(new: Sequence[NewFactor], processes: Processes = SINGLE_PROCESS) -> None:
    """Sum, average and invert factors; each has its blocks and inverses then, on all processes."""
    runs = [
        _Run(factor, i, factor.factor.layout.owners, part)
        for factor in new
        for i, part in enumerate(factor.sums.parts)
    ]
    parts = [run.sums for run in runs]
    bounds: Bounds = [(0, len(part)) for part in parts]
    if processes.count > 1:
        fixed = [None if run.owners is None else run.owners.bounds[run.index] for run in runs]
        bounds = processes.assign(parts, fixed)
        processes.sum_to_owners_(parts, bounds)
    for run, of_ranks in zip(runs, bounds, strict=True):
        run.inverted = slice(of_ranks[processes.rank], of_ranks[processes.rank + 1])
        run.blocks = run.sums[run.inverted]
    keeps = _marked(runs, [run.new.keeps for run in runs])
    for run in runs:
        if run.new.in_use is not None and len(run.blocks):
            _average_(run, run.new.in_use.parts, keeps.get(run))
    damping = _of_blocks(runs, [run.new.damping for run in runs])
    inverses, levels = invert_own([run.blocks for run in runs], damping)
    for run, inverse, level in zip(runs, inverses, levels, strict=True):
        run.inverses, run.new.level = inverse, max(run.new.level, level)
    for run, plain in _marked(runs, [run.new.plain for run in runs]).items():
        identity = torch.eye(run.inverses.shape[-1], device="cpu").to(run.inverses)
        run.inverses = torch.where(plain, identity, run.inverses)
    if processes.count > 1:
        _share_(new, runs, bounds, processes)
    for run in runs:
        run.new.blocks.append(run.sums)
        run.new.inverses.append(run.inverses)


def _of_blocks(runs: Sequence[_Run], numbers: Sequence[Sequence[float]]) -> list[Tensor]:
    """Return, from the numbers of each run's groups, those of the blocks that are inverted here."""
    alike: defaultdict[tuple[torch.device, torch.dtype], list[list[float]]] = defaultdict(list)
    for run, of_groups in zip(runs, numbers, strict=True):
        block_sizes = run.new.sums.block_sizes
        rows, neighbours = block_sizes.rows // block_sizes.groups, block_sizes.runs[run.index]
        firsts = range(neighbours.first, neighbours.last, neighbours.size)[run.inverted]
        of_blocks = [of_groups[first // rows] for first in firsts]
        alike[run.sums.device, run.sums.dtype].append(of_blocks)
    sent = {
        place: iter(to_device(list(chain(*of_runs)), *place).split(list(map(len, of_runs))))
        for place, of_runs in alike.items()
    }
    return [next(sent[run.sums.device, run.sums.dtype]) for run in runs]


def _marked(runs: Sequence[_Run], marks: Sequence[Sequence[bool]]) -> dict[_Run, Tensor]:
    """Return, of the runs with marked groups, which blocks belong to them: ``(count, 1, 1)``."""
    of_runs = {run: of_groups for run, of_groups in zip(runs, marks, strict=True) if any(of_groups)}
    of_blocks = _of_blocks(list(of_runs), list(of_runs.values()))
    return {run: flags[:, None, None] > 0 for run, flags in zip(of_runs, of_blocks, strict=True)}


def _average_(run: _Run, in_use: Sequence[Tensor], keeps: Tensor | None) -> None:
    """Average the blocks that are inverted here with those in use; some keep those in use."""
    # where processes keep parts, there are only the blocks that are inverted here
    old = (
        in_use[run.index][run.inverted]
        if run.owners is None
        else in_use[run.owners.local_runs.index(run.index)]
    )
    if keeps is not None:
        run.blocks.copy_(torch.where(keeps, old, run.blocks))
    if run.new.decay:
        run.blocks.lerp_(old, run.new.decay)


def _share_(
    new: Sequence[NewFactor], runs: Sequence[_Run], bounds: Bounds, processes: Processes
) -> None:
    """Send blocks, inverses and failures to all processes that keep them, and drop the rest."""
    levels = processes.gather([factor.level for factor in new])
    for factor, of_ranks in zip(new, zip(*levels, strict=True), strict=True):
        factor.level = int(max(of_ranks))
    shared: list[tuple[Tensor, Sequence[int]]] = []
    of_rows: list[Tensor] = []  # which other processes keep as well
    for run, of_run in zip(runs, bounds, strict=True):
        inverses = torch.zeros_like(run.sums, memory_format=torch.contiguous_format)
        inverses[run.inverted] = run.inverses
        run.inverses = inverses
        if run.owners is None:
            shared += (run.sums, of_run), (run.inverses, of_run)
            continue
        kept = run.owners.local(run.index)
        run.sums, run.inverses = run.sums[kept], run.inverses[kept]
        if run.owners.has_replicas:
            of_rows += run.sums, run.inverses
    processes.share_([part for part, _ in shared], [of_run for _, of_run in shared])
    if of_rows:  # the first of them has inverted all
        first = [(0, *[len(part)] * processes.count) for part in of_rows]
        processes.share_(of_rows, first, "replicas")


def invert_own(
    blocks: Sequence[Tensor], damping: Sequence[Tensor]
) -> tuple[list[Tensor], list[int]]:
    """Invert blocks in one batch for each size; return the highest damping raise of each tensor."""
    alike: defaultdict[tuple[int, torch.dtype, torch.device], list[int]] = defaultdict(list)
    for i, part in enumerate(blocks):
        if len(part):
            alike[part.shape[-1], part.dtype, part.device].append(i)
    batches = [
        (torch.cat([blocks[i] for i in members]), torch.cat([damping[i] for i in members]))
        for members in alike.values()
    ]
    # on an accelerator with the first damping only, and without a look
    results = [_invert_batch(*batch, retries=batch[0].device.type == "cpu") for batch in batches]
    highest = [levels.amax() for _, levels in results]
    # one host–device synchronisation for all batches
    on_one_device = [level.to(highest[0].device) for level in highest]
    raised = torch.stack(on_one_device).tolist() if highest else []
    inverses, worst = list(blocks), [0] * len(blocks)
    for members, batch, (inverted, levels), level in zip(
        alike.values(), batches, results, raised, strict=True
    ):
        if level and batch[0].device.type != "cpu":
            inverted, levels = _invert_batch(*batch)
        counts = [len(blocks[i]) for i in members]
        for i, inverse, of_blocks in zip(
            members, inverted.split(counts), levels.split(counts), strict=True
        ):
            inverses[i] = inverse
            worst[i] = int(of_blocks.amax()) if level else 0
    return inverses, worst


def inverse_of(blocks: Blocks, damping: float) -> Blocks | None:
    """Return the damped inverse of a factor on this process.

    It is None if a block is not positive definite.
    """
    numbers = [part.new_full((len(part),), damping) for part in blocks.parts]
    inverses, levels = invert_own(blocks.parts, numbers)
    if NOT_POSITIVE in levels:
        return None
    result = Blocks(blocks.block_sizes, torch.zeros_like(blocks.rows))
    for into, inverse in zip(result.parts, inverses, strict=True):
        into.copy_(inverse)
    return result


def _invert_batch(
    blocks: Tensor, damping: Tensor, *, retries: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the inverses ``(count, s, s)``, and of each block the index of its damping raise.

    Without ``retries`` only the first damping is tried, and no result is looked at, for which the
    host would wait.
    """
    size = blocks.shape[-1]
    if size == 1:
        return _invert_numbers(blocks.flatten(), damping)
    identity = torch.eye(size, dtype=blocks.dtype, device=blocks.device)
    with ieee_float32(blocks.device.type):
        damped = blocks.clone()
        damped.diagonal(dim1=-2, dim2=-1).add_(damping[:, None])
        factor, info = torch.linalg.cholesky_ex(damped)
        level = torch.zeros_like(info)
        if retries:
            for attempt in range(1, len(DAMPING_RAISES)):
                bad = info.nonzero().flatten()  # empty as a rule
                if len(bad):
                    damped = blocks[bad]
                    more = damping[bad] * DAMPING_RAISES[attempt]
                    damped.diagonal(dim1=-2, dim2=-1).add_(more[:, None])
                    factor[bad], info[bad] = torch.linalg.cholesky_ex(damped)
                    level[bad] = attempt
            # cholesky_inverse raises for the whole batch if one factor is incomplete, with a zero
            # on its diagonal
            factor[info != 0] = identity
            inverse = torch.cholesky_inverse(factor)
        else:  # cholesky_inverse would look whether it has succeeded
            complete = torch.where(info[:, None, None] == 0, factor, identity)
            root = torch.linalg.solve_triangular(complete, identity.expand_as(factor), upper=False)
            inverse = torch.bmm(root.mT, root)
    failed = (info != 0) | ~inverse.isfinite().flatten(1).all(-1)
    return inverse, torch.where(failed, NOT_POSITIVE, level)


def _invert_numbers(numbers: Tensor, damping: Tensor) -> tuple[Tensor, Tensor]:
    """Do the same for blocks of one number, without LAPACK for each token of an embedding."""
    damped = torch.stack([numbers + raised * damping for raised in DAMPING_RAISES])
    level = (damped > 0).int().argmax(0)  # the first that is positive; 0 if none is
    inverse = damped.gather(0, level[None])[0].sqrt().square().reciprocal()  # not finite if none is
    return inverse[:, None, None], torch.where(inverse.isfinite(), level, NOT_POSITIVE).int()


def relative_damping(trace: float, size: int, damping: float, dtype: torch.dtype) -> float:
    """Return the damping of a factor relative to its mean diagonal."""
    mean, numbers = trace / size, torch.finfo(dtype)
    return damping * mean if abs(mean) > numbers.tiny / numbers.eps else damping
