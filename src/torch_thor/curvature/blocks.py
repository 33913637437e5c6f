"""One representation of every factor, and the precision of products.

A factor is represented by rows, cut into runs of equal square blocks.

A factor of n rows is block-diagonal. Row i of its tensor ``(n, width)`` holds row i of its block,
from the first column of the block on, and zeros where the block is narrower than the widest.
Blocks end at every ``split_dim`` rows, and where a group (of a grouped convolution, an expert) or a
shard of the weight (FSDP2) ends. So rows can be divided among processes like those of the weight,
saved, and divided differently when they are loaded. A diagonal factor has width 1. Only the blocks
are ever computed and stored; :meth:`Blocks.dense` is for users to look at.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks of one size: rows ``first`` to ``last``."""

    first: int
    last: int
    count: int
    size: int

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        """Return a view of these rows, which are one dimension of a tensor: ``(count, size)``."""
        rows = tensor.narrow(dim, self.first, self.last - self.first)
        blocks: Tensor = rows.unflatten(dim, (self.count, self.size))
        return blocks


@dataclass(frozen=True)
class BlockSizes:
    """Where the rows of a factor are cut into blocks."""

    # (count, size) of the blocks of each run, in the order of rows
    blocks: tuple[tuple[int, int], ...]
    groups: int = 1  # independent matrices of equally many rows, which follow each other

    @classmethod
    @cache  # what is computed of a cut is then computed once
    def of(
        cls, rows: int, split_dim: int | None, groups: int = 1, edges: tuple[int, ...] = ()
    ) -> "BlockSizes":
        """Return the cut of ``groups`` matrices of some rows.

        Blocks end at the rows ``edges``, too.
        """
        if split_dim == 1:
            return cls(((groups * rows, 1),), groups)
        sizes: list[int] = []
        for start, stop in itertools.pairwise(
            sorted({*edges, *range(0, groups * rows + 1, max(rows, 1))})
        ):
            most = stop - start if split_dim is None else split_dim
            sizes += [min(most, stop - first) for first in range(start, stop, most)]
        return cls.of_sizes(sizes, groups)

    @classmethod
    def of_sizes(cls, sizes: Iterable[int], groups: int = 1) -> "BlockSizes":
        """Return the cut into blocks of these sizes, in the order of rows."""
        return cls(
            tuple((len(list(same)), size) for size, same in itertools.groupby(sizes)), groups
        )

    @property
    def sizes(self) -> list[int]:
        """The size of every block."""
        return [size for count, size in self.blocks for _ in range(count)]

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The runs of equal blocks."""
        lasts = list(itertools.accumulate(count * size for count, size in self.blocks))
        return tuple(
            Run(last - count * size, last, count, size)
            for last, (count, size) in zip(lasts, self.blocks, strict=True)
        )

    @cached_property
    def rows(self) -> int:
        """The number of rows of all groups together."""
        return sum(count * size for count, size in self.blocks)

    @cached_property
    def width(self) -> int:
        """The number of rows of the largest block."""
        return max((size for _, size in self.blocks), default=1)

    @cached_property
    def is_diagonal(self) -> bool:
        """Whether all blocks are numbers."""
        return self.width == 1

    @cached_property
    def one_group(self) -> "BlockSizes":
        """The cut of one group; all have the same."""
        sizes = self.sizes
        return BlockSizes.of_sizes(sizes[: len(sizes) // self.groups])

    def times(self, count: int) -> "BlockSizes":
        """Return the cut of several matrices with this cut, as groups of one."""
        return BlockSizes.of_sizes(self.sizes * count, self.groups * count)

    def local(self, bounds: Sequence[Sequence[int]], process: int) -> "BlockSizes":
        """Return the cut of the blocks that a process keeps.

        Of run i these are the blocks from ``bounds[i][process]`` on.
        """
        counts = (of_run[process + 1] - of_run[process] for of_run in bounds)
        return BlockSizes(
            tuple((n, size) for n, (_, size) in zip(counts, self.blocks, strict=True) if n)
        )


@dataclass(eq=False)
class Blocks:
    """A block-diagonal matrix, or one for each group.

    It consists of rows ``(n, at least width)``, and of where they are cut.
    """

    block_sizes: BlockSizes
    rows: Tensor

    @cached_property
    def parts(self) -> list[Tensor]:
        """The blocks of each run, ``(count, size, size)``, as views of the rows."""
        return [run.of(self.rows[:, : run.size], 0) for run in self.block_sizes.runs]

    @cached_property
    def of_groups(self) -> list[Tensor]:
        """The blocks of each run of one group, for all groups, ``(groups · count, size, size)``."""
        rows = self.rows.unflatten(0, (self.block_sizes.groups, -1))
        return [
            run.of(rows[..., : run.size], 1).flatten(0, 1)
            for run in self.block_sizes.one_group.runs
        ]

    def add_second_moment_(self, samples: Tensor, weight: float = 1.0) -> None:
        """Add ``weight · Σ x xᵀ``, block by block, over the columns of ``samples``.

        The shape of ``samples`` is ``(groups, n, samples)``.
        """
        samples = samples.flatten(0, 1)
        if self.block_sizes.is_diagonal:
            self.rows[:, 0].add_(samples.square().sum(-1), alpha=weight)
            return
        for run, part in zip(self.block_sizes.runs, self.parts, strict=True):
            of_run = run.of(samples, 0)
            add_product_(part, of_run, of_run.mT, scale=weight)

    def group(self, index: int) -> "Blocks":
        """Return the matrix of one group, a view."""
        return Blocks(
            self.block_sizes.one_group, self.rows.unflatten(0, (self.block_sizes.groups, -1))[index]
        )

    def scale_groups_(self, scales: Tensor) -> None:
        """Multiply the matrix of each group by a number."""
        self.rows.unflatten(0, (self.block_sizes.groups, -1)).mul_(scales[:, None, None])

    def traces(self) -> Tensor:
        """Return the trace of each group's matrix, ``(groups,)``."""
        groups, width = self.block_sizes.groups, self.block_sizes.width
        size = self.block_sizes.rows // groups
        if self.block_sizes != BlockSizes.of(size, width, groups):  # one matrix, cut at shards
            sums = [part.diagonal(dim1=-2, dim2=-1).sum() for part in self.parts]
            return torch.stack(sums).sum()[None] if sums else self.rows.new_zeros(1)
        rows, full = self.rows.unflatten(0, (groups, size)), size // width * width
        heads = rows[:, :full, :width].unflatten(1, (-1, width)).diagonal(dim1=-2, dim2=-1)
        traces: Tensor = heads.reshape(groups, -1).sum(-1)
        if full < size:
            traces = traces + rows[:, full:, : size - full].diagonal(dim1=-2, dim2=-1).sum(-1)
        return traces

    def left_multiply(self, matrix: Tensor) -> Tensor:
        """Return ``self @ matrix`` for a matrix ``(groups, n, columns)``."""
        flat = matrix.flatten(0, 1)
        if self.block_sizes.is_diagonal:
            # rows may be wider: other processes' blocks are larger
            return (self.rows[:, :1] * flat).view_as(matrix)
        if (
            self.block_sizes.groups > 1
            and len(self.block_sizes.runs) > 1
            and self.rows.device.type != "cpu"
        ):
            # few large kernels, for which parts of matrices are copied
            result = torch.empty_like(matrix, memory_format=torch.contiguous_format)
            for run, part in zip(self.block_sizes.one_group.runs, self.of_groups, strict=True):
                into = run.of(result, 1)
                into.copy_(product(part, run.of(matrix, 1).flatten(0, 1)).view_as(into))
            return result
        # here and below not Run.of, which would cost an ordinary step a few percent
        solved = [
            product(part, flat[run.first : run.last].view(run.count, run.size, -1)).flatten(0, 1)
            for run, part in zip(self.block_sizes.runs, self.parts, strict=True)
        ]
        return (solved[0] if len(solved) == 1 else torch.cat(solved)).view(matrix.shape)

    def write_right_product_(self, matrix: Tensor, scale: float, into: Tensor) -> None:
        """Compute ``into ← scale * matrix @ self`` without a temporary.

        The tensors have the shape ``(groups, m, n)``. Even NaN is overwritten.
        """
        groups, size = self.block_sizes.groups, matrix.shape[-1]
        if self.block_sizes.is_diagonal:
            # rows may be wider, as in left_multiply
            diagonal = self.rows[:, 0].view(groups, 1, size)
            into.zero_().addcmul_(matrix, diagonal, value=scale)
        elif self.block_sizes.width == size:  # one block for each group
            add_product_(into, matrix, self.parts[0], 0.0, scale)
        elif groups > 1 and self.rows.device.type != "cpu":  # few large kernels
            for run, part in zip(self.block_sizes.one_group.runs, self.of_groups, strict=True):
                target = run.of(into, -1).transpose(1, 2)
                columns = run.of(matrix, -1).transpose(1, 2).flatten(0, 1)
                solved = product(columns, part).view(target.shape)
                target.copy_(solved if scale == 1.0 else solved * scale)
        else:  # one batched product per run, because the strides do not allow a single product
            for index in range(groups):
                group = self if groups == 1 else self.group(index)
                for run, part in zip(group.block_sizes.runs, group.parts, strict=True):
                    rows, shape = slice(run.first, run.last), (run.count, run.size)
                    columns = matrix[index, :, rows].unflatten(-1, shape).transpose(0, 1)
                    target = into[index, :, rows].unflatten(-1, shape).transpose(0, 1)
                    add_product_(target, columns, part, 0.0, scale)

    def dense(self) -> list[Tensor]:
        """Return the full matrix of each group, with zeros outside of the blocks."""
        groups = map(self.group, range(self.block_sizes.groups))
        return [torch.block_diag(*itertools.chain.from_iterable(group.parts)) for group in groups]


def block_of_rows(block_sizes: BlockSizes) -> Tensor:
    """Return the first row of the block of each row, and the row after its last, ``(rows, 2)``."""
    bounds = [
        (first, first + run.size)
        for run in block_sizes.runs
        for first in range(run.first, run.last, run.size)
        for _ in range(run.size)
    ]
    return torch.tensor(bounds, dtype=torch.long, device="cpu").view(-1, 2)


def reblock(rows: Tensor, before: BlockSizes, after: BlockSizes) -> Tensor:
    """Return rows for other blocks. What is between the old blocks is zero."""
    blocks = [block_of_rows(block_sizes).to(rows.device) for block_sizes in (before, after)]
    starts, ends = ([each[:, i : i + 1] for each in blocks] for i in (0, 1))
    column = starts[1] + torch.arange(rows.shape[1], device=rows.device)  # of the full matrix
    kept = (column >= starts[0]) & (column < ends[0]) & (column < ends[1])
    source = (column - starts[0]).clamp(0, rows.shape[1] - 1)
    return torch.where(kept, rows.gather(1, source), 0.0)


# ---- products ------------------------------------------------------------------------------------

# The number of multiplications from which oneDNN is faster in spite of its overhead (about 10
# microseconds).
_LARGE_PRODUCT = 2**20
# The setting that allows oneDNN to use bfloat16, which it does only on processors with matrix tiles
# (AMX).
_ONEDNN = "bf16"


def factor_dtype(parameter_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of factors, inverses and momentum for a parameter."""
    if parameter_dtype.is_complex:
        return parameter_dtype
    return torch.float64 if parameter_dtype == torch.float64 else torch.float32


# ---- devices, and what they lack -----------------------------------------------------------------


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 where the device has none."""
    try:
        torch.zeros((), device=device).to(torch.float64)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


def widened(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU where its device has none."""
    has_wide = wide_dtype(tensor.device) == torch.float64
    return (tensor if has_wide else tensor.cpu()).to(torch.float64)


@contextmanager
def ieee_float32(*device_types: str) -> Iterator[None]:
    """Run float32 matrix products in IEEE float32: no autocast, no TF32, no bfloat16 passes."""
    with ExitStack() as stack:
        for device_type in device_types:
            stack.enter_context(_ieee_float32(device_type))
        yield


@contextmanager
def _ieee_float32(device_type: str) -> Iterator[None]:
    # the stubs of torch 2.15 do not know torch.backends.mkldnn.matmul
    matmul: Any = (torch.backends.mkldnn if device_type == "cpu" else torch.backends.cuda).matmul
    has_autocast = torch.amp.is_autocast_available(device_type)
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        with torch.autocast(device_type, enabled=False) if has_autocast else nullcontext():
            yield
    finally:
        matmul.fp32_precision = "none"  # what torch.backends.fp32_precision says
        if matmul.fp32_precision != before:
            matmul.fp32_precision = before


# The devices to which numbers are sent from pinned memory; other copies wait for the device.
WITH_PINNED_MEMORY = {"cuda", "xpu"}


def to_device(numbers: Sequence[float], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return numbers of the host on a device, without waiting until it has them."""
    pinned = device.type in WITH_PINNED_MEMORY
    on_host = torch.tensor(numbers, dtype=dtype, device="cpu", pin_memory=pinned)
    return on_host.to(device, non_blocking=True)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b``, computed by the faster library.

    This must be called inside :func:`ieee_float32`.
    """
    into = a.new_empty(*a.shape[:-1], b.shape[-1])
    add_product_(into, a, b, decay=0.0)
    return into


def add_product_(
    into: Tensor, a: Tensor, b: Tensor, decay: float = 1.0, scale: float = 1.0
) -> None:
    """Compute ``into ← decay * into + scale * a @ b`` with the faster library.

    With ``decay=0`` even NaN is overwritten.
    """
    # oneDNN is a hundred times slower on a column-major result
    if into.stride(-1) != 1 and into.stride(-2) == 1:
        into, a, b = into.mT, b.mT, a.mT
    large = (
        a.dtype == torch.float32
        and a.device.type == "cpu"
        and a.numel() * b.shape[-1] >= _LARGE_PRODUCT
    )
    # oneDNN has no fast path for matrices without a contiguous dimension
    fits = large and into.stride(-1) == 1 and 1 in a.stride()[-2:] and 1 in b.stride()[-2:]
    with _onednn() if fits and _onednn_is_exact() else nullcontext():
        into.baddbmm_(a, b, beta=decay, alpha=scale)


@contextmanager
def _onednn() -> Iterator[None]:
    """Make torch multiply float32 matrices with oneDNN."""
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # as in ieee_float32
    before, matmul.fp32_precision = matmul.fp32_precision, _ONEDNN
    try:
        yield
    finally:
        matmul.fp32_precision = before


@cache
def _onednn_is_exact() -> bool:
    """Return whether oneDNN multiplies in float32 on this machine although bfloat16 is allowed."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    with _onednn():
        for rows, inner, columns in ((128, 128, 128), (128, 1024, 128), (512, 64, 512)):
            a, b = (
                torch.rand(2, *shape, generator=generator, device="cpu")
                for shape in ((rows, inner), (inner, columns))
            )
            wide = wide_dtype(a.device)
            error = torch.bmm(a, b) - torch.bmm(a.to(wide), b.to(wide))
            # bfloat16 numbers up to 1 have rounding errors up to 0.002
            if float(error.abs().max()) > 1e-6 * inner:
                return False
    return True
