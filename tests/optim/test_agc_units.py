"""Units of many parameters, clipped in batches."""

import numpy as np
import pytest
import torch
from torch import nn

from reference.agc import clipped, gradients_of, rows_of_dim_0
from torch_thor import adaptive_clip_grad_
from torch_thor.optim import agc_units as units


@pytest.mark.parametrize("at_a_time", [1, 50, 10**6])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_a_whole_network_equals_the_loops(foreach, at_a_time, monkeypatch):
    """Many shapes, some of one unit size; in batches of one, of a few and of all."""
    monkeypatch.setattr(units, "_NUMBERS_AT_A_TIME", at_a_time)
    model = nn.Sequential(
        nn.Linear(6, 4), nn.LayerNorm(6), nn.Linear(6, 6), nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, (1, 2)), nn.PReLU(),
        nn.Linear(6, 5), nn.Embedding(3, 6), nn.MultiheadAttention(6, 2),
    ).double()  # fmt: skip
    model.token = nn.Parameter(torch.randn(1, 1, 6).double())
    gradients_of(model, scale=2.0)
    expected, count = {}, 0
    for name, p in model.named_parameters():
        expected[name], more = clipped(p.detach().numpy(), p.grad.numpy(), rows_of_dim_0(p.shape), 0.4, 1e-3)
        count += more
    found = adaptive_clip_grad_(model, 0.4, exclude=(), foreach=foreach)
    for name, p in model.named_parameters():
        np.testing.assert_allclose(p.grad.numpy(), expected[name], rtol=1e-12, atol=1e-15, err_msg=name)
    total = sum(len(p) if p.dim() > 1 else 1 for p in model.parameters())
    assert (int(found.clipped), found.units) == (count, total)
    assert 0.1 < count / total < 0.9
