"""Where the blocks of a factor are: its rows, where they are cut, and who keeps which blocks.

One factor belongs to the rows of the weight: G, or A if the weight has the inputs first. Its
tensors have the rows of the weight, so layers that are rows of one weight share them. If the weight
is divided (FSDP2), they are divided in the same way, and blocks end at the boundaries of the shards
too: every process preconditions its own rows without those of another process, and a checkpoint of
some processes can be loaded on others. Every other factor is held by all processes.
"""

from dataclasses import dataclass
from functools import cached_property

from torch_thor.curvature.blocks import BlockSizes
from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.view import ParameterView, RowShards, bounds_within


@dataclass(frozen=True)
class Owners:
    """Which process keeps and inverts which blocks of a factor of divided rows."""

    # of run i, process r owns the blocks from bounds[i][r] to bounds[i][r + 1]
    bounds: tuple[tuple[int, ...], ...]
    # the owner of the blocks that this process keeps: itself, or a process that holds the same rows
    source: int
    has_replicas: bool = False  # whether other processes keep the same blocks

    @classmethod
    def of_shards(cls, block_sizes: BlockSizes, shards: RowShards, rows: slice | None) -> "Owners":
        """Return the owners of a factor whose rows are divided like those of the weight."""
        starts = bounds_within(shards.bounds, rows)
        bounds = tuple(
            tuple(min(max(start - run.first, 0) // run.size, run.count) for start in starts)
            for run in block_sizes.runs
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


@dataclass(frozen=True)
class Layout:
    """The blocks of a factor, for all processes and for this process."""

    block_sizes: BlockSizes  # the blocks of all processes
    local: BlockSizes  # those that this process keeps
    owners: Owners | None  # who keeps which, where rows are divided; None if all keep all
    by_rows: bool  # whether its tensors have the rows of the weight
    keys: tuple[str, str]  # of the factor and of its inverse, in the state of the weight
    # of these tensors; if the weight is divided, the rows of all processes
    shape: tuple[int, int]


def block_sizes_of(
    side: str, kind: Kind, view: ParameterView, bounds: tuple[int, ...] | None = None
) -> BlockSizes:
    """Return where the rows of all processes are cut for the present ``split_dim``.

    The latter may have been changed since the view was bound. ``bounds``: of the shards of the
    weight, if they are not those of the view.
    """
    rows, split = kind.inputs if side == "A" else kind.outputs, _split_dim(side, kind, view)
    bounds = view.shards.bounds if bounds is None and view.shards is not None else bounds
    if bounds is not None and _is_of_rows(side, kind, view):
        return BlockSizes.of(rows, split, edges=bounds_within(bounds, view.rows))
    return BlockSizes.of(rows, split, kind.groups)


def layout_of(side: str, kind: Kind, view: ParameterView, prefix: str = "") -> Layout:
    """Return the layout of a factor.

    Args:
        side: ``"A"`` or ``"G"``.
        kind: the kind of the layer.
        view: its weight, with the options of its group and its shards.
        prefix: put before the names of tensors that have no rows of the weight.
    """
    block_sizes, by_rows, owners = (
        block_sizes_of(side, kind, view),
        _is_of_rows(side, kind, view),
        None,
    )
    if view.shards is not None and by_rows:
        owners = Owners.of_shards(block_sizes, view.shards, view.rows)
    local = block_sizes if owners is None else block_sizes.local(owners.bounds, owners.source)
    key = side if by_rows else prefix + side
    rows, width = (view.shape[0] if by_rows else local.rows), block_sizes.width
    # The width is the same for all layers that are rows of one weight, and not as the cut has it:
    # the blocks of all shards may have one row, and not those of a later division.
    if by_rows:
        split = _split_dim(side, kind, view)
        width = view.most_rows if split is None else min(split, view.most_rows)
    keys = key, key + "_inverse"
    return Layout(block_sizes, local, owners, by_rows, keys, (rows, width))


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
    if kind.has_own_rows or kind.groups > 1:
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
