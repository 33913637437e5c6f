"""Rows count if the loss of the step reached them: passes that train nothing leave A as it was."""

from functools import partial

import pytest
import torch
from torch import nn

from torch_thor import THOR, ThorMuon

every_optimizer = pytest.mark.parametrize(
    "make",
    [
        partial(THOR, split_dim=None, factor_decay=0.0, trace_thresholds=(0.0, 0.0)),
        partial(ThorMuon, split_dim=None, factor_decay=0.0),
    ],
    ids=["THOR", "ThorMuon"],
)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def data(seed, rows=8):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed)).double()


def moment(*parts):
    rows = torch.cat(parts)
    return rows.T @ rows / len(rows)


def train(model, x):
    model(x).square().mean().backward()


def factor_of(optimizer, layer="0"):
    """The statistics of the inputs of a layer."""
    return optimizer.curvature[layer].factors()[0]


def evaluates_with_gradients(model):
    model(data(1))


def takes_a_gradient_of_the_input(model):
    x = data(1).requires_grad_()
    torch.autograd.grad(model(x).sum(), x)


@every_optimizer
@pytest.mark.parametrize("meanwhile", [evaluates_with_gradients, takes_a_gradient_of_the_input])
def test_a_pass_that_trains_nothing_leaves_no_rows(make, meanwhile):
    model = net()
    optimizer = make(model, update_interval=1)
    meanwhile(model)
    train(model, data(2))
    meanwhile(model)
    optimizer.step()
    torch.testing.assert_close(factor_of(optimizer), moment(data(2)), rtol=1e-12, atol=0)


class NormOfIdentity(nn.Module):
    """DoRA sends an identity matrix through its adapter, and detaches what comes out."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        norm = self.inner(torch.eye(4, dtype=x.dtype)).detach().norm(dim=0)
        return self.inner(x) / norm


@every_optimizer
def test_a_weight_that_is_used_to_find_a_norm_is_no_row(make):
    model = nn.Sequential(NormOfIdentity(), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = make(model, update_interval=1)
    train(model, data(2))
    optimizer.step()
    torch.testing.assert_close(factor_of(optimizer, "0.inner"), moment(data(2)))


def test_a_residual_of_derivatives_counts_all_points():
    """As in a physics-informed loss. Only in A: the outputs have no gradients for G."""
    model = net()
    optimizer = ThorMuon(model, update_interval=1, split_dim=None, factor_decay=0.0)
    inside, edge = data(1, 16).requires_grad_(), data(2)
    [slope] = torch.autograd.grad(model(inside).sum(), inside, create_graph=True)
    (slope.square().mean() + model(edge).square().mean()).backward()
    optimizer.step()
    torch.testing.assert_close(factor_of(optimizer), moment(inside.detach(), edge))


@every_optimizer
def test_calls_of_other_sizes_count_by_their_rows(make):
    """THOR takes all rows; ThorMuon, whose A needs no gradient, takes a share of a large batch."""
    long, short = torch.randn(8192, 4).double(), 10 * torch.randn(256, 4).double()
    model = net()
    optimizer = make(model, update_interval=1)
    for x in (long, short):
        (model(x).square().sum() / 8448).backward()
    optimizer.step()
    factor, wanted = factor_of(optimizer), moment(long, short)
    least, most = (0.0, 1e-12) if isinstance(optimizer, THOR) else (1e-6, 0.1)
    assert least <= (factor - wanted).norm() / wanted.norm() < most


@pytest.mark.parametrize(("sequences", "length"), [(1024, 8), (128, 64), (1676, 89)])
def test_rows_of_flattened_sequences_are_of_all_positions(sequences, length):
    """The first token is the same in every sequence, and long."""
    x = torch.randn(sequences, length, 4).double()
    x[:, 0] = 10.0
    for rows in (x, x.flatten(0, 1)):
        model = net()
        optimizer = ThorMuon(model, update_interval=1, split_dim=None, factor_decay=0.0)
        train(model, rows)
        optimizer.step()
        factor, wanted = factor_of(optimizer), moment(x.flatten(0, 1))
        assert (factor - wanted).norm() < 0.25 * wanted.norm()
