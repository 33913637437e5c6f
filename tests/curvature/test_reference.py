"""The oracle is itself checked against arithmetic done by hand; its rows, against autograd in the
tests of kinds.
"""

import numpy as np
import pytest
import torch
from torch import nn

from reference import Curvature, Factors, ReferenceTHOR, damped, keep_blocks, second_moment


def test_moments_blocks_and_damping_by_hand():
    np.testing.assert_array_equal(
        second_moment(np.array([[1.0, 2.0], [3.0, 4.0]])), [[5.0, 7.0], [7.0, 10.0]]
    )
    blocks = keep_blocks(np.arange(1.0, 10.0).reshape(3, 3), 2)
    np.testing.assert_array_equal(blocks, [[1.0, 2.0, 0.0], [4.0, 5.0, 0.0], [0.0, 0.0, 9.0]])
    np.testing.assert_array_equal(damped(np.eye(2), 0.36, 4.0), 1.3 * np.eye(2))


def test_direction_by_hand():
    """A = 2, G = diag(1, 3), λ = 1, T = 4: √(λ/T) = 1/2, so d = ∇ / (4 · 2.5 · (1.5, 3.5))."""
    curvature = Curvature()
    curvature.refresh(
        Factors([np.array([[2.0]])], [np.diag([1.0, 3.0])], 4.0), 1.0, (0.0, 0.0), 0.0
    )
    np.testing.assert_allclose(curvature.weight_direction(np.array([[1.5], [7.0]])), [[0.1], [0.2]])
    np.testing.assert_allclose(curvature.bias_direction(np.array([1.5, 7.0])), [0.25, 0.5])


def test_one_step_by_hand():
    """One weight, two data: everything follows with pencil and paper.

    w = 1, x = (1, 3), loss = mean of (w x)² / 2: g of a term is w x = (1, 3), A = G = (1 + 9) / 2 =
    5, ∇ = 5. λ = 1, T = 1: d = 5 / 6 / 6, w = 1 − 0.36 · 5 / 36 = 0.95.
    """
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).double()
    nn.init.ones_(model[0].weight)
    reference = ReferenceTHOR(model, lr=0.36, damping=1.0, max_update_ratio=None)
    x = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    reference.step((x, lambda output: (output**2).mean() / 2))
    assert reference.model[0].weight.item() == pytest.approx(0.95, abs=1e-15)
