"""How a factor is cut: into blocks of one size from index 0, the last of which may be smaller."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BlockLayout:
    """How a factor is cut.

    Args:
        groups: number of independent matrices (the groups of a convolution, else 1).
        size: ``n``, rows of one matrix.
        block: ``s``, rows of one block, at most ``n``.
    """

    groups: int
    size: int
    block: int

    @classmethod
    def of(cls, groups: int, size: int, split_dim: int | None) -> "BlockLayout":
        """Return the layout for a split dimension.

        Args:
            groups: number of independent matrices.
            size: rows of one matrix.
            split_dim: largest block, or None for one block per matrix.

        Returns:
            The layout.
        """
        return cls(groups, size, size if split_dim is None else min(split_dim, size))

    @cached_property
    def full_blocks(self) -> int:
        """Blocks of size ``block`` in one matrix."""
        return self.size // self.block

    @cached_property
    def covered(self) -> int:
        """Rows of one matrix that the full blocks cover."""
        return self.full_blocks * self.block

    @cached_property
    def tail(self) -> int:
        """Rows of the last, smaller block; 0 if there is none."""
        return self.size - self.covered

    @cached_property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
        """The shapes of ``blocks``, ``(groups * k, s, s)``, and ``tail``, ``(groups, r, r)`` or None."""
        blocks = (self.groups * self.full_blocks, self.block, self.block)
        return blocks, (self.groups, self.tail, self.tail) if self.tail else None
