"""Matrices with rows divided among processes (FSDP2), each orthogonalised whole at one process.

Every process sends its rows of a matrix to the owner of the matrix, which orthogonalises it and
sends the rows back. All matrices of a step take two all-to-all collectives together. Each process
sends about as many elements in each of them as it holds itself. Matrices are dealt out by their
cost, the most expensive first, each to the process with the least work so far.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_thor.curvature.communication import Processes
from torch_thor.curvature.geometry import Geometry
from torch_thor.curvature.polar import unit_polars
from torch_thor.curvature.view import RowShards
from torch_thor.distributed.assignment import assign_matrices


@dataclass
class ShardedMatrix:
    """A weight, or a layer's part of it, whose rows are divided among processes."""

    # `(local rows, …)`, the direction of the rows of this process, contiguous; overwritten by the
    # result
    local: Tensor
    bounds: tuple[int, ...]  # process r holds the rows from index r to index r + 1 of this list
    geometry: Geometry  # converts the whole into matrices

    def cost(self, rows: int | None) -> int:
        """Return the cost of the polar factors of blocks of some rows."""
        small, large = sorted((self.geometry.outputs, self.geometry.inputs))
        return self.geometry.groups * small * large * min(rows or small, small)


def orthogonalise_gathered_(
    matrices: Sequence[ShardedMatrix], shards: RowShards, rows: int | None, processes: Processes
) -> None:
    """Replace matrices by their polar factors, or those of their blocks, each scaled to norm 1."""
    owned = assign_matrices(tuple(matrix.cost(rows) for matrix in matrices), shards.count)
    by_owner = [matrices[i] for of_owner in owned for i in of_owner]
    mine = [matrices[i] for i in owned[shards.source]]
    to_owners = [sum(matrices[i].local.numel() for i in of_owner) for of_owner in owned]
    # of each matrix the rows of each process, and for each process the elements of each matrix
    lengths = [[last - first for first, last in itertools.pairwise(m.bounds)] for m in mine]
    sizes = [
        [n * matrix.local.shape[1:].numel() for matrix, n in zip(mine, of_process, strict=True)]
        for of_process in zip(*lengths, strict=True)
    ]
    from_processes = [sum(of_process) for of_process in sizes] or [0] * shards.count
    sent = torch.cat([matrix.local.flatten() for matrix in by_owner])
    received = processes.all_to_all(sent, to_owners, from_processes, "shards")
    parts = received.split(list(itertools.chain(*sizes)))
    gathered = [
        torch.cat(parts[i :: len(mine)]).view(-1, *matrix.local.shape[1:])
        for i, matrix in enumerate(mine)
    ]
    as_matrices = [m.geometry.to_matrix(tensor) for m, tensor in zip(mine, gathered, strict=True)]
    wide = [matrix.mT if matrix.shape[1] > matrix.shape[2] else matrix for matrix in as_matrices]
    for i, unit in enumerate(unit_polars(wide, rows)):
        wide[i].copy_(unit)  # a view of the matrix
        mine[i].geometry.from_matrix_(as_matrices[i], gathered[i])
    pieces = [tensor.split(of_matrix) for tensor, of_matrix in zip(gathered, lengths, strict=True)]
    results = [piece.flatten() for of_process in zip(*pieces, strict=True) for piece in of_process]
    returned = processes.all_to_all(
        torch.cat(results) if results else sent[:0], from_processes, to_owners, "shards"
    )
    by_matrix = returned.split([matrix.local.numel() for matrix in by_owner])
    for matrix, result in zip(by_owner, by_matrix, strict=True):
        matrix.local.copy_(result.view_as(matrix.local))
