"""Which matrices a weight is, also of some of its rows, and what can be told of them beforehand."""

import pytest
import torch
from torch import nn

from torch_thor.curvature.geometry import Geometry, matrix_of

LINEAR = Geometry(1, 4, 6)
# (geometry, shape of the weight)
CASES = [
    (LINEAR, (4, 6)),
    (LINEAR, (4, 2, 3)),
    (Geometry(1, 4, 6, transposed=True), (6, 4)),
    (Geometry(3, 4, 6), (3, 4, 6)),
    (Geometry(2, 3, 5), (6, 5)),
    (Geometry(1, 4, 6, taps=2), (3, 4, 2)),
    (Geometry(2, 3, 4, taps=2), (4, 3, 2)),
    (Geometry(1, 1, 6, taps=2), (3, 1, 2)),
    (Geometry(1, 4, 2, taps=2), (1, 4, 2)),
]


@pytest.mark.parametrize(("geometry", "shape"), CASES)
def test_matrices_and_back(geometry, shape):
    weight = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    matrix = geometry.to_matrix(weight)
    assert geometry.is_view == (matrix.data_ptr() == weight.data_ptr() and matrix.is_contiguous())
    assert geometry.is_by_rows(shape) == (
        matrix.shape == (1, len(weight), weight[0].numel())
        and torch.equal(matrix[0], weight.flatten(1))
    )
    if geometry.taps:  # column = (input of the group, tap), the weight is (inputs, outputs, taps)
        group, output = geometry.groups - 1, geometry.outputs - 1
        source = group * geometry.inputs // geometry.taps
        assert matrix[group, output, 1] == weight[source, output, 1]
    for changed in (matrix + 100, torch.stack([matrix, matrix + 200])[1]):  # also a view of another
        geometry.from_matrix_(changed, weight)
        assert torch.equal(geometry.to_matrix(weight), changed)
    written = torch.empty_like(weight)
    geometry.write_(changed, written)
    assert torch.equal(written, weight)


@pytest.mark.parametrize(("geometry", "shape"), CASES)
def test_two_rows_of_a_weight_are_the_same_numbers(geometry, shape):
    weight = torch.arange(torch.Size(shape).numel()).view(shape)
    matrix, few = geometry.to_matrix(weight), geometry.of_rows(len(weight), 2)
    assert geometry.of_rows(len(weight), len(weight)) is geometry
    if geometry.groups == 2:  # of a grouped convolution
        assert few is None
    elif geometry.is_by_rows(shape) or geometry.groups == 3:
        first = matrix[:, :2] if geometry.groups == 1 else matrix[:2]
        assert torch.equal(few.to_matrix(weight[:2]), first)
    elif len(weight) > 1:  # inputs of a transposed convolution
        assert torch.equal(few.to_matrix(weight[:2]), matrix[..., : 2 * geometry.taps])


def test_parameters_without_a_kind():
    rows, plain = torch.randn(4, 6), nn.Module()
    for module, parameter, geometry in (
        (plain, rows, LINEAR),
        (plain, torch.randn(2, 4, 6), Geometry(2, 4, 6)),
        (grouped := nn.Conv1d(4, 6, 3, groups=2), grouped.weight, Geometry(2, 3, 6)),
        (
            turned := nn.ConvTranspose2d(6, 4, 2, groups=2),
            turned.weight,
            Geometry(2, 2, 12, taps=4),
        ),
        (tokens := nn.Embedding(3, 4), tokens.weight, None),
        (plain, torch.randn(1, 6), None),
        (plain, rows.to(torch.int64), None),
    ):
        assert matrix_of(module, "weight", parameter) == geometry
