"""Batches and parameters at the edge: each has a defined outcome."""

import copy
import itertools

import pytest
import torch
from torch import nn

from tiny import assert_same, weights
from torch_thor import THOR, ThorMuon


def step(model, optimizer, x, loss=lambda y: y.square().mean()):
    loss(model(x)).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_batch_without_rows_changes_nothing_and_the_refresh_waits():
    """Empty, or nothing but padding: gradients are zeros, and old inverses stay."""
    x = torch.randint(7, (4, 6))
    for size, loss, refreshes in itertools.product((0, 4), (torch.sum, torch.mean), (0, 1)):
        model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)).double()
        optimizer = THOR(model, update_interval=1, trace_thresholds=(0.0, 0.0), momentum=0.0)
        for _ in range(refreshes):
            step(model, optimizer, x)
        before = weights(model)
        kept = copy.deepcopy(optimizer.curvature["1"].factors() if refreshes else ())
        optimizer.row_mask = torch.zeros(size, 6, dtype=torch.bool)
        step(model, optimizer, x[:size], lambda y, loss=loss: 0 * loss(y))
        assert_same(weights(model), before)
        assert_same(optimizer.curvature["1"].factors() if refreshes else (), kept)
        optimizer.row_mask = torch.arange(6).lt(4).expand(4, 6)
        step(model, optimizer, x)
        for layer in optimizer.curvature.values():
            assert (layer.refreshes, layer.rows_per_term) == (refreshes + 1, 4.0)


SPARSE = {
    "no momentum": (THOR, {"momentum": 0.0}),
    "nesterov, decay": (THOR, {"nesterov": True, "weight_decay": 0.1}),
    "clip": (THOR, {"kl_clip": 1e-3}),
    "left out": (THOR, {"layers": "-0"}),
    "muon": (ThorMuon, {}),
}


@pytest.mark.filterwarnings("ignore:ThorMuon preconditions")
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_equal_dense_ones(name):
    """Of an embedding; made by hand, also of what is none."""
    make, options = SPARSE[name]

    def trained(sparse, of_all=False):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Embedding(9, 4, sparse=sparse, padding_idx=0), nn.LayerNorm(4), nn.Linear(4, 3)
        ).double()
        optimizer = make(model, update_interval=2, split_dim=3, **options)
        for _ in range(5):
            model(torch.randint(6, (4, 3))).square().mean().backward()
            assert model[0].weight.grad.is_sparse == sparse
            for parameter in model.parameters() if of_all else ():
                parameter.grad = parameter.grad.to_sparse()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    dense = trained(False)
    for one in (trained(True), trained(True, of_all=True)):
        for key, value in dense.items():
            torch.testing.assert_close(one[key], value, rtol=1e-12, atol=1e-14, msg=key)
