"""Cutting a block-diagonal matrix smaller keeps what lies in the new blocks and drops the rest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torch_thor.curvature import BlockDiagonal, BlockLayout, LayerCurvature, ParameterView
from torch_thor.curvature.kinds import kind_of


def matrix_of(groups, size, block):
    matrix = BlockDiagonal.zeros(BlockLayout.of(groups, size, block), dtype=torch.float64, device=torch.device("cpu"))
    matrix.add_second_moment_(torch.randn(groups, size, 3, dtype=torch.float64))
    return matrix


def masked(dense, block):
    """The dense matrix, zero where row and column belong to different blocks."""
    index = torch.arange(len(dense)) // block
    return torch.where(index[:, None] == index[None, :], dense, torch.zeros_like(dense))


@given(groups=st.integers(1, 3), size=st.integers(1, 13), split=st.integers(1, 14))
def test_a_whole_matrix_can_be_cut_anywhere(groups, size, split):
    whole = matrix_of(groups, size, None)
    cut = whole.cut(split)
    assert cut.layout == BlockLayout.of(groups, size, split)
    assert [tuple(part.shape) for part in cut.parts()] == [shape for shape in cut.layout.shapes if shape]
    for small, dense in zip(cut.dense(), whole.dense(), strict=True):
        assert torch.equal(small, masked(dense, split))


@given(groups=st.integers(1, 3), size=st.integers(1, 40), split=st.integers(1, 4), times=st.integers(1, 4))
def test_blocks_can_be_cut_by_a_divisor(groups, size, split, times):
    blocks = matrix_of(groups, size, split * times)
    cut = blocks.cut(split)
    assert cut.layout == BlockLayout.of(groups, size, split)
    for small, dense in zip(cut.dense(), blocks.dense(), strict=True):
        assert torch.equal(small, masked(dense, split))


def test_cuts_that_do_not_fall_together_are_refused():
    with pytest.raises(ValueError, match="blocks of 6 cannot be cut into blocks of 4"):
        matrix_of(1, 13, 6).cut(4)


def test_nothing_to_cut():
    matrix = matrix_of(2, 5, None)
    assert matrix.cut(None) is matrix
    assert matrix.cut(5) is matrix
    assert matrix.cut(100) is matrix


def test_gathered_sums_are_cut_with_the_split_dimension():
    module, group = nn.Linear(7, 5).double(), {"split_dim": None}
    view = ParameterView(module, "weight")
    view.bind(None, group)
    layer = LayerCurvature("fc", kind_of(module), view, [])
    assert layer.statistics.gathered() is None
    x, g = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    layer.statistics.gather(layer.kind, x, g)
    group["split_dim"] = 3
    layer.statistics.cut()
    a, b = layer.statistics.gathered()
    torch.testing.assert_close(a.dense()[0], masked(x.T @ x, 3))
    torch.testing.assert_close(b.dense()[0], masked(g.T @ g, 3))
    layer.statistics.gather(layer.kind, x, g)  # a second micro-batch finds blocks of the new size
    torch.testing.assert_close(layer.statistics.gathered()[0].dense()[0], masked(2 * x.T @ x, 3))
