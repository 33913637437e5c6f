"""Sparse gradients of embeddings."""

import pytest
import torch
from torch import nn

from tiny import weights
from torch_thor import THOR, ThorMuon

CASES = {
    "THOR": (THOR, {"nesterov": True, "weight_decay": 0.1}),
    "kl_clip": (THOR, {"kl_clip": 1e-3}),
    "left out": (THOR, {"layers": "-0"}),
    "ThorMuon": (ThorMuon, {}),
}


@pytest.mark.filterwarnings("ignore:ThorMuon preconditions")
@pytest.mark.parametrize("case", CASES)
def test_steps_with_sparse_gradients_equal_steps_with_dense_gradients(case):
    make, options = CASES[case]
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(9, 4, sparse=sparse, padding_idx=0), nn.LayerNorm(4), nn.Linear(4, 3)
        ).double()
        optimizer = make(model, update_interval=2, split_dim=3, **options)
        for _ in range(5):
            model(torch.randint(6, (4, 3))).square().mean().backward()
            assert model[0].weight.grad.is_sparse == sparse
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
