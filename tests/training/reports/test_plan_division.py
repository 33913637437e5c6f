"""The division of the curvature is that of an optimizer."""

import pytest
import torch
from torch import nn

from torch_thor import THOR
from torch_thor.training.reports.plan_division import curvature_of, share_of


def model():
    return nn.Sequential(nn.Linear(300, 130), nn.ReLU(), nn.Linear(130, 10))


def attention():
    """Three layers are rows of one weight."""
    return nn.TransformerEncoderLayer(300, 2, 20, batch_first=True)


@pytest.mark.parametrize("make", [model, attention])
def test_the_size_of_the_state_is_that_of_an_optimizer(make):
    trained = make()
    optimizer = THOR(trained)
    found = curvature_of(trained, optimizer.curvature.values())
    trained(torch.randn(4, 3, 300)).square().mean().backward()
    optimizer.step()
    state = [item for entries in optimizer.state.values() for item in entries.items()]
    curvature = sum(value.nbytes for key, value in state if set(key.split("_")) & {"A", "G"})
    factors = [factor for layer in optimizer.curvature.values() for factor in layer.stored]
    # gathered in full, with as many columns as the largest block
    statistics = sum(4 * factor.cut.rows * factor.cut.width for factor in factors)
    assert (found.layers, found.state_bytes, found.statistics_bytes) == (
        len(optimizer.curvature),
        curvature,
        statistics,
    )
    assert found.gradient_bytes == sum(p.grad.nbytes for p in trained.parameters())
    assert found.parameters == sum(p.numel() for p in trained.parameters())


def test_shares():
    """Blocks of 128, 128, 44 (A), 128, 2 (G), 128, 2 (A) and 10 (G)."""
    layers, unsplit = (list(THOR(model(), split_dim=size).curvature.values()) for size in (128, None))
    alone, two, many = (share_of(layers, unsplit, 800, n) for n in (1, 2, 64))
    assert (alone.blocks, alone.imbalance, alone.sent, alone.gradients_sent) == (8, 1.0, 0, 0)
    assert (two.gradients_sent, many.blocks) == (800, 1)
    assert 0 < two.sent < two.sent_unsplit
    assert two.imbalance < 1.1 < many.imbalance
