"""What is preconditioned and what is not is said by name, for every parameter."""

import pytest
import torch
from torch import nn

import every_kind
from torch_thor import THOR, ThorMuon


def test_every_parameter_is_listed_once_and_in_order():
    model = every_kind.build()
    optimizer = THOR(model)
    entries = optimizer.coverage()
    assert [entry.name for entry in entries] == [name for name, _ in model.named_parameters()]
    for entry in entries:
        assert (entry.reason is None) == (entry.factor_sizes is not None) == entry.preconditioned
    assert str(entries).partition("\n")[2] in repr(optimizer)
    words = "damping", "MultiheadAttention", "Conv2d", "4 x 4 x 3 groups", "a normalisation layer"
    assert all(word in repr(optimizer) for word in words)


@pytest.mark.parametrize("model", [nn.Sequential(nn.LayerNorm(4)), nn.Bilinear(4, 4, 4)])
def test_nothing_to_precondition_is_an_error(model):
    with pytest.raises(ValueError, match="SGD"):
        THOR(model)


@pytest.mark.parametrize(("d_in", "d_out", "split_dim"), [(64, 64, 32), (16, 48, 128)])
def test_the_bytes_of_the_state_follow_the_formula(d_in, d_out, split_dim):
    model = nn.Linear(d_in, d_out, bias=False)
    optimizer = ThorMuon(model, lr=0.01, split_dim=split_dim)
    assert "State: none before the first step" in repr(optimizer)
    model(torch.randn(8, d_in)).square().mean().backward()
    optimizer.step()
    each = 4 + 8 * min(split_dim, d_in) / d_out
    state = f"State: {each * d_in * d_out:,.0f} bytes"
    assert f"{state}, {each:.1f} for each trained parameter\n" in repr(optimizer)
