"""The layout of a split factor: blocks of one size from index 0, the last of which may be smaller."""

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class BlockLayout:
    """The sizes of a block-diagonal matrix."""

    groups: int  # the number of independent matrices (the groups of a convolution, else 1)
    size: int  # `n`, the number of rows of one matrix
    block: int  # `s`, the number of rows of one block, at most `n`

    @classmethod
    def of(cls, groups: int, size: int, split_dim: int | None) -> "BlockLayout":
        """Return the layout for a split dimension."""
        return cls(groups, size, size if split_dim is None else min(split_dim, size))

    @cached_property
    def full_blocks(self) -> int:
        """The number of blocks of size ``block`` in one matrix."""
        return self.size // self.block

    @cached_property
    def covered(self) -> int:
        """The number of rows of one matrix that are in these blocks."""
        return self.full_blocks * self.block

    @cached_property
    def tail(self) -> int:
        """The number of rows of the last, smaller block; 0 if there is none."""
        return self.size - self.covered

    @cached_property
    def shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int] | None]:
        """The shapes of ``blocks``, ``(groups * k, s, s)``, and ``tail``, ``(groups, r, r)`` or None."""
        blocks = (self.groups * self.full_blocks, self.block, self.block)
        return blocks, (self.groups, self.tail, self.tail) if self.tail else None
