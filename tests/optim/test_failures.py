"""What may go wrong in training: factors without an inverse, NaN in gradients or statistics."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from tiny import assert_same, backward, batches, mlp, told, train, twins, weights
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon, check_gradients

STREAM = batches(6)
NAN, INF = float("nan"), float("inf")


# two inputs that are always the same, in powers of two: the factorisation of A ends in exactly 0
SINGULAR = 2.0**40 * torch.tensor([[1.0, 1, 1], [-1, -1, 1], [1, 1, -1], [-1, -1, -1]])
# batches, good and bad, where a refresh is due in every second step; what is told in which step;
# refreshes
RUNS = [
    # due until it has succeeded
    ("bbgbb", {0: "it takes its plain gradient", 4: "the last good inverse stays"}, 1),
    ("ggbgbggbb", {2: "the last good inverse stays"}, 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kinds", "expected", "refreshes"), RUNS)
def test_the_last_good_inverse_stays_or_the_gradient_is_plain(kinds, expected, refreshes, dtype):
    """A warning names the layer once; healthy layers refresh beside it; nothing is raised."""
    model = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2)]).to(dtype)
    options = {"trace_thresholds": (0.0, 0.0), "momentum": 0.0, "max_update_ratio": None}
    optimizer = THOR(model, update_interval=2, **options)
    (weight, curvature), heard = (model[0].weight, optimizer.curvature["0"]), {}
    for step, kind in enumerate(kinds):
        x = SINGULAR.to(dtype) if kind == "b" else torch.randn(4, 3, dtype=dtype)
        kept = [*curvature.factors(), *curvature.inverses()] if curvature.refreshes else None
        healthy = model[1](torch.randn(4, 3, dtype=dtype)).mean()
        (model[0](x).mean() / x.abs().max() + healthy).backward()
        gradient, before = weight.grad.clone(), weight.detach().clone()
        heard.update((step, message) for message in told(optimizer.step))
        optimizer.zero_grad()
        if kind == "b":
            natural = kept[3] @ gradient @ kept[2] if kept else gradient
            expected_weight = before - 0.05 * natural
            torch.testing.assert_close(weight.detach(), expected_weight, rtol=1e-5, atol=1e-7)
        if kind == "b" and kept:
            assert all(map(torch.equal, kept, [*curvature.factors(), *curvature.inverses()]))
    found = [layer.refreshes for layer in optimizer.curvature.values()]
    assert found == [refreshes, (len(kinds) + 1) // 2]
    assert heard.keys() == expected.keys()
    for step, outcome in expected.items():
        assert "layer '0': a block was not positive definite at" in heard[step]
        assert outcome in heard[step]


OPTIMIZERS = {
    "THOR": partial(THOR, update_interval=3),
    "ThorMuon": partial(ThorMuon, update_interval=3),
    "LAMB": LAMB,
    "AGCSGD": partial(AGCSGD, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters()),
}


@pytest.mark.parametrize("make", [THOR, ThorMuon])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("value", [NAN, INF, 1e300])  # the squares of the last are beyond float64
def test_a_refresh_refuses_statistics_that_are_not_finite(value, steps, make):
    """Before weights or factors have changed; later steps are as if it had never happened."""
    model, optimizer, twin, other = twins(make, update_interval=3)
    train(model, optimizer, STREAM[:steps])
    train(twin, other, STREAM[:steps])
    before = weights(model)
    x, labels = STREAM[steps]
    backward(model, (x * value, labels))
    with pytest.raises(FloatingPointError, match=r"layers 0\b.* hold NaN or inf"):
        optimizer.step()
    assert_same(weights(model), before)
    assert {layer.refreshes for layer in optimizer.curvature.values()} == {min(steps, 1)}
    optimizer.zero_grad()
    train(model, optimizer, STREAM[steps:])
    train(twin, other, STREAM[steps:])
    assert_same(weights(model), weights(twin))
    assert_same(optimizer.state_dict(), other.state_dict())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nan_in_an_ordinary_step_reaches_its_weight_as_in_torch(name):
    model = mlp()
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, STREAM[:1])
    backward(model, STREAM[1])
    model[2].weight.grad.fill_(NAN)
    optimizer.step()
    finite = {name: bool(weight.isfinite().all()) for name, weight in weights(model).items()}
    assert finite == {key: key != "2.weight" for key in finite}


@pytest.mark.parametrize("value", [NAN, -INF])
@pytest.mark.parametrize("steps", [0, 1])  # a refresh, and an ordinary step
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_check_gradients_raises_before_anything_has_changed(name, steps, value):
    model = mlp()
    optimizer = OPTIMIZERS[name](model)
    handle = check_gradients(optimizer)
    train(model, optimizer, STREAM[:steps])
    backward(model, STREAM[5])
    model[2].weight.grad[0, 0] = model[4].bias.grad[1] = value
    before = copy.deepcopy((weights(model), optimizer.state_dict()))
    named = "parameter 2 of group 0, parameter 5 of group 0" if name == "AdamW" else "2.weight, 4.b"
    with pytest.raises(FloatingPointError, match=rf"the gradients of {named}"):
        optimizer.step()
    assert_same((weights(model), optimizer.state_dict()), before)
    handle.remove()
    optimizer.step()


def test_check_gradients_takes_half_gradients_whose_norm_overflows():
    parameter = nn.Parameter(torch.zeros(300, 300, dtype=torch.float16))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    check_gradients(optimizer)
    parameter.grad = torch.full_like(parameter, 300.0)
    optimizer.step()


def test_a_step_without_gradients_is_silent():
    """Also where the gradients belong to another optimizer, as in a GAN."""
    model = mlp()
    optimizer = THOR([*model[0].parameters(), *model[2].parameters()], model=model)
    before = weights(model)
    model[4](torch.randn(4, 6).double()).sum().backward()
    assert not told(optimizer.step)
    assert_same(weights(model), before)
