"""Matrices whose rows are divided among processes (FSDP2), orthogonalised as a whole: each of them at one process.

Every process sends its rows of a matrix to the owner of the matrix, which orthogonalises it and sends the rows back.
All matrices of a step take two all-to-all collectives together. Each process sends about as many elements in each of
them as it holds itself. Matrices are dealt out by their cost, the most expensive first, each to the process with the
least work so far.
"""

import heapq
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.matrices import PlainMatrix
from torch_thor.curvature.polar import unit_polars
from torch_thor.curvature.shards import RowShards


@dataclass
class DividedMatrix:
    """A weight, or the rows of one that belong to a layer, whose rows are divided among processes."""

    own: Tensor  # `(own rows, …)`, the direction of the rows of this process, contiguous; overwritten by the result
    bounds: tuple[int, ...]  # process r holds the rows from index r to index r + 1 of this list
    geometry: Kind | PlainMatrix  # converts the whole into matrices

    @property
    def sides(self) -> tuple[int, int, int]:
        """The number of matrices, and their smaller and larger side."""
        kind = self.geometry
        return kind.groups, min(kind.outputs, kind.inputs), max(kind.outputs, kind.inputs)


def orthogonalise_whole_(matrices: Sequence[DividedMatrix], shards: RowShards, rows: int | None) -> None:
    """Replace matrices by their polar factors, or those of their blocks, each scaled to norm 1."""
    count, rank = shards.count, shards.source
    owned = deal_out(tuple(one.sides for one in matrices), rows, count)
    by_owner = list(itertools.chain(*owned))
    to_owners = [sum(matrices[i].own.numel() for i in of_owner) for of_owner in owned]
    of_processes = [_rows_of(matrices, owned[rank], process) for process in range(count)]
    sent = torch.cat([matrices[i].own.flatten() for i in by_owner])
    whole = _assembled([matrices[i] for i in owned[rank]], shards.exchange(sent, to_owners, of_processes), count)
    _orthogonalise_(whole, [matrices[i].geometry for i in owned[rank]], rows)
    parts = []
    for process in range(count):
        for i, one in zip(owned[rank], whole, strict=True):
            parts.append(one[matrices[i].bounds[process] : matrices[i].bounds[process + 1]].flatten())
    results = shards.exchange(torch.cat(parts) if parts else sent[:0], of_processes, to_owners)
    for i, result in zip(by_owner, results.split([matrices[i].own.numel() for i in by_owner]), strict=True):
        matrices[i].own.copy_(result.view_as(matrices[i].own))


@lru_cache(maxsize=64)
def deal_out(sides: tuple[tuple[int, int, int], ...], rows: int | None, processes: int) -> tuple[tuple[int, ...], ...]:
    """Deal out matrices to processes by their cost, longest processing time first."""
    costs = [groups * small * large * min(rows or small, small) for groups, small, large in sides]
    loads = [(0, process) for process in range(processes)]
    found: list[list[int]] = [[] for _ in range(processes)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, process = heapq.heappop(loads)
        found[process].append(i)
        heapq.heappush(loads, (load + costs[i], process))
    return tuple(tuple(sorted(of_process)) for of_process in found)


def _rows_of(matrices: Sequence[DividedMatrix], owned: Iterable[int], process: int) -> int:
    """Return the number of elements of some matrices that a process holds."""
    found = 0
    for i in owned:
        one = matrices[i]
        found += (one.bounds[process + 1] - one.bounds[process]) * one.own.shape[1:].numel()
    return found


def _assembled(matrices: Sequence[DividedMatrix], received: Tensor, processes: int) -> list[Tensor]:
    """Return whole matrices, in the shape of the weight, from the rows of all processes, in the processes' order."""
    whole = [received.new_empty((one.bounds[-1], *one.own.shape[1:])) for one in matrices]
    first = 0
    for process in range(processes):
        for one, into in zip(matrices, whole, strict=True):
            part = into[one.bounds[process] : one.bounds[process + 1]]
            part.copy_(received[first : first + part.numel()].view_as(part))
            first += part.numel()
    return whole


def _orthogonalise_(whole: Sequence[Tensor], geometries: Sequence[Kind | PlainMatrix], rows: int | None) -> None:
    """Replace whole weights by polar factors of norm 1."""
    matrices = [geometry.to_matrix(tensor) for tensor, geometry in zip(whole, geometries, strict=True)]
    wide = [matrix.mT if matrix.shape[1] > matrix.shape[2] else matrix for matrix in matrices]
    for i, unit in enumerate(unit_polars(wide, rows)):
        wide[i].copy_(unit)  # a view of the matrix
        geometries[i].from_matrix_(matrices[i], whole[i])
