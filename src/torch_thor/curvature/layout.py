"""Where the blocks of a factor are: its rows, where they are cut, and who keeps which blocks.

One factor belongs to the rows of the weight: G, or A if the weight has the inputs first. Its
tensors have the rows of the weight, so layers that are rows of one weight share them. If the weight
is divided (FSDP2), they are divided in the same way, and blocks end at the boundaries of the shards
too: every process preconditions its own rows without those of another process, and a checkpoint of
some processes can be loaded on others. Every other factor is held by all processes, unless
curvature is divided (``divide_curvature``): then only the owner of a block, which inverts it, keeps
it and its inverse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from torch_thor.curvature.blocks import Cut
from torch_thor.curvature.communication import ALONE, Processes
from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.view import ParameterView, RowShards, bounds_within


@dataclass(frozen=True)
class Owners:
    """Which process inverts which blocks of a factor, where each keeps a part of them alone."""

    # of run i, process r owns the blocks from bounds[i][r] to bounds[i][r + 1]
    bounds: tuple[tuple[int, ...], ...]
    # the owner of the blocks that this process keeps: itself, or a process that holds the same rows
    source: int
    has_replicas: bool = False  # whether other processes keep the same blocks
    processes: Processes = field(default=ALONE, repr=False, compare=False)  # with the others

    @classmethod
    def of_shards(cls, cut: Cut, shards: RowShards, rows: slice | None) -> "Owners":
        """Return the owners of a factor whose rows are divided like those of the weight."""
        starts = bounds_within(shards.bounds, rows)
        bounds = tuple(
            tuple(min(max(start - run.first, 0) // run.size, run.count) for start in starts)
            for run in cut.runs
        )
        return cls(bounds, shards.source, shards.has_replicas)

    def local(self, run: int) -> slice:
        """Return the blocks of a run that this process keeps."""
        return slice(self.bounds[run][self.source], self.bounds[run][self.source + 1])

    @cached_property
    def local_runs(self) -> list[int]:
        """The runs of which this process keeps blocks."""
        kept = map(self.local, range(len(self.bounds)))
        return [run for run, blocks in enumerate(kept) if blocks.start < blocks.stop]

    def local_parts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the blocks of a factor that this process keeps, from those of all processes."""
        return [parts[run][self.local(run)] for run in self.local_runs]


@dataclass(frozen=True)
class Layout:
    """The blocks of a factor, for all processes and for this one."""

    cut: Cut  # the blocks of all processes
    local: Cut  # those that this process keeps
    owners: Owners | None  # who keeps which; None if every process keeps all
    by_rows: bool  # whether its tensors have the rows of the weight
    keys: tuple[str, str]  # of the factor and of its inverse, in the state of the weight
    # of these tensors; if the weight is divided, the rows of all processes
    shape: tuple[int, int]
    split_dim: Any  # the option that it was made for
    is_partitioned: bool  # whether processes keep parts of it alone, and not by rows of the weight


def cut_of(
    side: str, kind: Kind, view: ParameterView, bounds: tuple[int, ...] | None = None
) -> Cut:
    """Return where the rows of all processes are cut for the present ``split_dim``.

    The latter may have been changed since the view was bound. ``bounds``: of the shards of the
    weight, if they are not those of the view.
    """
    rows, split = kind.inputs if side == "A" else kind.outputs, _split_dim(side, kind, view)
    bounds = view.shards.bounds if bounds is None and view.shards is not None else bounds
    if bounds is not None and _is_of_rows(side, kind, view):
        return Cut.of(rows, split, edges=bounds_within(bounds, view.rows))
    return Cut.of(rows, split, kind.groups)


def layout_of(
    side: str, kind: Kind, view: ParameterView, prefix: str = "", owners: Owners | None = None
) -> Layout:
    """Return the layout of a factor.

    Args:
        side: ``"A"`` or ``"G"``.
        kind: the kind of the layer.
        view: its weight, with the options of its group and its shards.
        prefix: put before the names of tensors that have no rows of the weight.
        owners: the owners of the blocks, if curvature is divided.
    """
    cut, is_partitioned = cut_of(side, kind, view), owners is not None
    by_rows = not is_partitioned and _is_of_rows(side, kind, view)
    if view.shards is not None and by_rows:
        owners = Owners.of_shards(cut, view.shards, view.rows)
    local = cut if owners is None else cut.local(owners.bounds, owners.source)
    key = side if by_rows else prefix + side
    rows, width = (view.shape[0] if by_rows else local.rows), cut.width
    # The width is the same for all layers that are rows of one weight, and not as the cut has it:
    # the blocks of all shards may have one row, and not those of a later division.
    if by_rows:
        split = _split_dim(side, kind, view)
        width = view.most_rows if split is None else min(split, view.most_rows)
    keys, split_dim = (key, key + "_inverse"), view.options.get("split_dim")
    return Layout(cut, local, owners, by_rows, keys, (rows, width), split_dim, is_partitioned)


def _split_dim(side: str, kind: Kind, view: ParameterView) -> int | None:
    """Return the number of rows of a block; None for what is no number, which a step refuses."""
    split = 1 if side == "A" and kind.diagonal_input else view.options.get("split_dim")
    return split if isinstance(split, int) and split > 0 else None


def _is_of_rows(side: str, kind: Kind, view: ParameterView) -> bool:
    """Return whether a factor belongs to the rows of the weight."""
    is_side = side == ("A" if kind.transposed else "G")
    return is_side and why_not_by_rows(kind, view.shape) is None


def why_not_by_rows(kind: Kind, shape: tuple[int, ...]) -> str | None:
    """Return why a layer cannot be preconditioned if the rows of its weight are divided."""
    if kind.routed or kind.groups > 1:
        return (
            f"the weight is divided among processes, and has {kind.groups} groups with factors of "
            "their own"
        )
    if kind.geometry.is_by_rows(shape):
        return None
    return (
        "the weight is divided among processes by its first dimension, which is no dimension of "
        "its matrix"
    )
