"""What may go wrong in training: no NaN ever reaches a weight, and nothing fails in silence."""

import warnings

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, train, twins, weights
from torch_thor import THOR

STREAM = batches(1)
PLAIN = {"momentum": 0.0, "max_update_ratio": None}


def told_by(optimizer):
    """The warnings of one step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(w.message) for w in caught]


# ------------------------------------------------------------------ factors that cannot be inverted

BAD = {
    # squares leave the range: A is inf
    "its new factors hold NaN or inf": lambda dtype: (
        torch.finfo(dtype).max ** 0.7 * torch.randn(4, 3, dtype=dtype)
    ),
    # two inputs that are always the same, in powers of two: the factorisation of A ends in an exact
    # zero
    "a block was not positive definite at": lambda dtype: (
        2.0**40 * torch.tensor([[1, 1, 1], [-1, -1, 1], [1, 1, -1], [-1, -1, -1]], dtype=dtype)
    ),
}
# batches, good and bad, where a refresh is due in every second step; what is told in which step;
# refreshes
RUNS = [
    # due until it has succeeded
    ("bbgbb", {0: "it takes its plain gradient", 4: "the last good inverse stays"}, 1),
    ("ggbgbggbb", {2: "the last good inverse stays"}, 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("what", BAD)
def test_the_last_good_inverse_stays_or_the_gradient_is_plain(what, dtype):
    """Each said once, by name; healthy layers refresh beside it; no exception is raised."""
    for kinds, expected, refreshes in RUNS:
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2)]).to(dtype)
        optimizer = THOR(model, update_interval=2, trace_thresholds=(0.0, 0.0), **PLAIN)
        curvature, told = optimizer.curvature["0"], {}
        for step, kind in enumerate(kinds):
            x = BAD[what](dtype) if kind == "b" else torch.randn(4, 3, dtype=dtype)
            kept = [*curvature.factors(), *curvature.inverses()] if curvature.refreshes else None
            (
                model[0](x).mean() / x.abs().max() + model[1](torch.randn(4, 3, dtype=dtype)).mean()
            ).backward()
            gradient, weight = model[0].weight.grad.clone(), model[0].weight.detach().clone()
            told.update((step, message) for message in told_by(optimizer))
            optimizer.zero_grad()
            if kind == "b":
                natural = kept[3] @ gradient @ kept[2] if kept else gradient
                torch.testing.assert_close(
                    model[0].weight.detach(), weight - 0.05 * natural, rtol=1e-5, atol=1e-7
                )
                assert not kept or all(
                    map(torch.equal, kept, [*curvature.factors(), *curvature.inverses()])
                )
        assert [one.refreshes for one in optimizer.curvature.values()] == [
            refreshes,
            (len(kinds) + 1) // 2,
        ]
        assert told.keys() == expected.keys(), kinds
        for step, outcome in expected.items():
            assert all(words in told[step] for words in (f"step {step}, layer '0'", what, outcome))


# ------------------------------------------------------------------------ layers without statistics


def test_a_step_without_gradients_is_silent():
    """Also where the others belong to another optimizer: the two of a GAN take turns; and where
    they are zeros.
    """
    model, optimizer, _, _ = twins(THOR)
    part = THOR([*model[0].parameters(), *model[2].parameters()], model=model)
    before = weights(model)
    assert not told_by(optimizer)
    model[4](torch.randn(4, 6).double()).sum().backward()
    assert not told_by(part)
    assert_same(weights(model), before)
    model, optimizer, _, _ = twins(THOR, update_interval=1)
    train(model, optimizer, STREAM[:1])
    optimizer.zero_grad(set_to_none=False)
    assert not told_by(optimizer)
    assert {curvature.refreshes for curvature in optimizer.curvature.values()} == {1}
