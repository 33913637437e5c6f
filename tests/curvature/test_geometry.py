"""Which matrices a weight is, also of some of its rows, and what can be told of them beforehand."""

import pytest
import torch
from torch import nn

from torch_thor.curvature.geometry import Geometry, matrix_of

LINEAR, IN_OUT = Geometry(1, 4, 6), Geometry(1, 4, 6, transposed=True)
# (geometry, shape of the weight)
CASES = [
    (LINEAR, (4, 6)),
    (LINEAR, (4, 2, 3)),
    (IN_OUT, (6, 4)),
    (Geometry(3, 4, 6), (3, 4, 6)),
    (Geometry(2, 3, 5), (6, 5)),
    (Geometry(1, 4, 6, taps=2), (3, 4, 2)),
    (Geometry(2, 3, 4, taps=2), (4, 3, 2)),
    (Geometry(1, 1, 6, taps=2), (3, 1, 2)),
    (Geometry(1, 4, 2, taps=2), (1, 4, 2)),
]


def entry(geometry, matrix, group, output, column):
    """An entry of the matrix of a group, by the rule in words."""
    one = matrix[group].mT if geometry.transposed else matrix[group]
    return one[output, column]


@pytest.mark.parametrize(("geometry", "shape"), CASES)
def test_matrices_and_back(geometry, shape):
    weight = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    matrix = geometry.to_matrix(weight)
    assert geometry.is_view == (matrix.data_ptr() == weight.data_ptr() and matrix.is_contiguous())
    assert entry(geometry, matrix, 0, 0, 0) == 0
    if geometry.taps:  # column = (input of the group, tap), the weight is (inputs, outputs, taps)
        group, output, source, tap = geometry.groups - 1, geometry.outputs - 1, 0, 1
        inputs = geometry.inputs // geometry.taps
        expected = weight[group * inputs + source, output, tap]
        assert entry(geometry, matrix, group, output, source * geometry.taps + tap) == expected
    for changed in (matrix + 100, torch.stack([matrix, matrix + 200])[1]):  # also a view of another
        geometry.from_matrix_(changed, weight)
        assert torch.equal(geometry.to_matrix(weight), changed)
    written = torch.empty_like(weight)
    geometry.write_(changed, written)
    assert torch.equal(written, weight)


@pytest.mark.parametrize(("geometry", "shape"), CASES)
def test_rows_of_a_weight(geometry, shape):
    """Of two of its rows the matrices are the same numbers, where they are any."""
    weight = torch.arange(torch.Size(shape).numel()).view(shape)
    matrix = geometry.to_matrix(weight)
    assert geometry.is_by_rows(shape) == (
        matrix.shape == (1, len(weight), weight[0].numel())
        and torch.equal(matrix[0], weight.flatten(1))
    )
    few = geometry.of_rows(len(weight), 2)
    assert geometry.of_rows(len(weight), len(weight)) is geometry
    if geometry.groups == 2:  # of a grouped convolution
        assert few is None
    elif geometry.is_by_rows(shape) or geometry.groups == 3:
        first = matrix[:, :2] if geometry.groups == 1 else matrix[:2]
        assert torch.equal(few.to_matrix(weight[:2]), first)
    elif len(weight) > 1:  # inputs of a transposed convolution
        assert torch.equal(few.to_matrix(weight[:2]), matrix[..., : 2 * geometry.taps])


def test_parameters_without_a_kind():
    rows, cube = torch.randn(4, 6), torch.randn(2, 4, 6)
    plain = nn.Module()
    transposed = nn.ConvTranspose2d(6, 4, 2, groups=2)
    assert matrix_of(plain, "weight", rows) == LINEAR
    assert matrix_of(plain, "any", cube) == Geometry(2, 4, 6)
    grouped = nn.Conv1d(4, 6, 3, groups=2)
    assert matrix_of(grouped, "weight", grouped.weight) == Geometry(2, 3, 6)
    assert matrix_of(transposed, "weight", transposed.weight) == Geometry(2, 2, 12, taps=4)
    tokens, vector = nn.Embedding(3, 4), torch.randn(1, 6)
    assert matrix_of(tokens, "weight", tokens.weight) is None
    assert matrix_of(plain, "weight", vector) is None
    assert matrix_of(plain, "weight", rows.to(torch.int64)) is None


def test_several_projections_have_other_outputs():
    assert IN_OUT.with_outputs(2) == Geometry(1, 2, 6, transposed=True)
    assert IN_OUT.with_rows(2) == Geometry(1, 4, 2, transposed=True)
    assert LINEAR.with_rows(2) == LINEAR.with_outputs(2) == Geometry(1, 2, 6)
