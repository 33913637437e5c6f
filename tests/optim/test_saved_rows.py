"""State dicts of sharded trainings, whose factors of rows are cut where shards end."""

import copy

import pytest
import torch
from torch import nn

from tiny import assert_same
from torch_thor import THOR


class Model(nn.Module):
    """Seven rows (a block and a tail), an embedding, and three layers that are rows of one weight."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(9, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.rows = nn.Linear(6, 7)

    def forward(self, words):
        x = self.tokens(words)
        return self.rows(self.attention(x, x, x, need_weights=False)[0])


def made():
    torch.manual_seed(0)
    model = Model().double()
    return model, THOR(model, split_dim=4)


def train(model, optimizer):
    words = torch.randint(9, (5, 3), generator=torch.Generator().manual_seed(1))
    nn.functional.cross_entropy(model(words).mean(1), words[:, 0] % 7).backward()
    optimizer.step()


def saved_by_four_processes(factor):
    """A model after a step, the state dict of its optimizer with a factor of four shards, and its place in it."""
    model, optimizer = made()
    train(model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    rows = next(i for i, p in enumerate(optimizer.param_groups[0]["params"]) if p is model.rows.weight)
    saved["state"][rows].update(row_shards=4, G=factor.clone(), G_inverse=factor.clone())
    return optimizer, saved, rows


def test_blocks_of_another_number_of_shards_are_cut_and_inverted_again():
    """Four shards of seven rows have two each; one process has blocks of four and of three rows."""
    old = torch.zeros(7, 4, dtype=torch.float64)
    for first in (0, 2, 4):
        old[first : first + 2, :2] = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64) + first
    old[6, 0] = 3.0
    _, saved, _ = saved_by_four_processes(old)
    twin, other = made()
    other.load_state_dict(saved)
    assert other.state[twin.rows.weight]["row_shards"] == 1
    layer = other.curvature["rows"]
    whole = torch.block_diag(old[0:2, :2], old[2:4, :2], old[4:6, :2], old[6:7, :1])
    assert torch.equal(layer.factors()[1], whole)
    damping = (other.param_groups[0]["damping"] / layer.rows_per_term) ** 0.5
    wanted = torch.linalg.inv(whole + damping * torch.eye(7, dtype=torch.float64))
    torch.testing.assert_close(layer.inverses()[1], wanted)


def test_blocks_that_cannot_be_inverted_are_refused_and_nothing_is_loaded():
    optimizer, saved, _ = saved_by_four_processes(-100 * torch.ones(7, 4, dtype=torch.float64))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"layer 'rows': G was saved with 4 shards, and its blocks for .* cannot be"):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), before)


def test_a_factor_of_another_split_is_refused():
    optimizer, saved, rows = saved_by_four_processes(torch.ones(7, 4, dtype=torch.float64))
    saved["state"][rows].update(row_shards=1, G=torch.ones(7, 3, dtype=torch.float64))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"split_dim=4: G of layer 'rows' has shape \(7, 3\) and needs \(7, 4\)"):
        optimizer.load_state_dict(saved)
    assert_same(optimizer.state_dict(), before)
