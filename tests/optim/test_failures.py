"""What may go wrong in training: no NaN ever reaches a weight, and nothing fails in silence."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

from comparing import having
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(6, dtype=torch.float32)
BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])
PLAIN = {"momentum": 0.0, "max_update_ratio": None}


def pair(make=THOR, **options):
    """(a model, its optimizer, another model with the same weights, its optimizer)."""
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    return model, make(model, **options), twin, make(twin, **options)


def backward(model, batch):
    cross_entropy(batch[1])(model(batch[0])).backward()


def told_by(optimizer):
    """The warnings of one step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(w.message) for w in caught]


# ------------------------------------------------------------------------- gradients that are not finite


@BOTH
def test_nonfinite_gradient_is_refused_or_skipped_before_anything_changes(make):
    """Also where the loop zeroes the gradients by itself and tells the optimizer nothing: statistics are dropped."""
    for bad, nonfinite in itertools.product((0, 1, 2), ("raise", "skip")):
        model, optimizer, twin, other = pair(make, update_interval=2)
        optimizer.nonfinite = nonfinite
        train(model, optimizer, STREAM[:bad])
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        for value, name in ((torch.nan, "2.weight"), (torch.inf, "2.weight"), (-torch.inf, "4.bias")):
            backward(model, (5 * STREAM[bad][0], STREAM[bad][1]))
            model.get_parameter(name).grad.view(-1)[0] = value  # as by a burst loss
            if nonfinite == "skip":
                optimizer.step()
            else:
                with pytest.raises(FloatingPointError, match=rf"step {bad}: .*{name}.*nonfinite = \"skip\""):
                    optimizer.step()
            assert_same(weights(model), before)
            assert str(optimizer.state_dict()) == str(state)
            optimizer.zero_grad() if bad else model.zero_grad(set_to_none=False)
        assert optimizer.skipped_steps == (3 if nonfinite == "skip" else 0)
        train(model, optimizer, STREAM[bad:])
        train(twin, other, STREAM)
        assert_same(weights(model), weights(twin), f"{nonfinite} in step {bad}")


# ---------------------------------------------------------------------------- factors that are not finite


def show_overflow(model, x, labels):
    """Inputs whose squares leave float32, with a loss small enough for finite gradients: A is inf, ∇W is not."""
    (cross_entropy(labels)(model(x * 1e25)) * 1e-25).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_infinite_factor_keeps_the_last_good_inverse():
    """Said once; healthy layers refresh beside it. Without one: the plain gradient, and the layer stays due."""

    def interval(step):  # in step 1 only the layer that stayed due refreshes
        return 1 if step else 2

    model, optimizer, _, _ = pair(update_interval=interval, trace_thresholds=(0.0, 0.0), **PLAIN)
    curvature, told = optimizer.curvature["0"], []
    for step, batch in enumerate(STREAM):
        bad = step in (0, 3, 4, 5)
        factors = [*curvature.factors(), *curvature.inverses()] if curvature.refreshes else None
        before, refreshes = model[0].weight.detach().clone(), curvature.refreshes
        show_overflow(model, *batch) if bad else backward(model, batch)
        grad = model[0].weight.grad.clone()
        told += [(step, message) for message in told_by(optimizer)]
        optimizer.zero_grad()
        assert curvature.refreshes == refreshes + (not bad)
        if bad:
            natural = grad if step == 0 else factors[3] @ grad @ factors[2]
            torch.testing.assert_close(model[0].weight.detach(), before - 0.05 * natural, rtol=1e-5, atol=1e-7)
            assert not step or all(map(torch.equal, factors, [*curvature.factors(), *curvature.inverses()]))
    refreshes = [layer.refreshes for layer in optimizer.curvature.values()]
    assert refreshes == [2, 3, 3]  # in steps 4 and 5 the others see what they saw in step 3
    assert [(step, f"step {step}, layer '0'" in message) for step, message in told] == [(0, True), (3, True)]


# ---------------------------------------------------------------------- factors that are not positive definite


def test_more_damping_saves_a_block():
    """Between hopeless and healthy there are dampings that work only when raised; none gives NaN."""
    outcomes = set()
    for scale, exponent in [(1e4, -16), *((100.0, exponent) for exponent in range(-9, 3))]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(24, 4, bias=False))
        optimizer = THOR(model, lr=1e-6, damping=10.0**exponent, split_dim=None)
        model(scale * torch.randn(3, 24)).square().mean().backward()  # 21 eigenvalues are zero up to rounding
        messages = told_by(optimizer)
        assert model[0].weight.isfinite().all()
        refreshed = optimizer.curvature["0"].refreshes == 1
        outcomes.add((refreshed, bool(messages)))
        for inverse in optimizer.curvature["0"].inverses() if refreshed else ():
            assert inverse.isfinite().all()
            assert torch.linalg.eigvalsh(inverse.double()).min() > -1e-6 * inverse.norm()
    assert outcomes == {(True, False), (True, True), (False, True)}, "healthy, raised, hopeless; none in silence"


def test_a_factorisation_that_ends_in_a_zero_leaves_the_step_by_no_exception():
    """With an inverse from before: that one stays. Without: the plain gradient. Said once, by name; others refresh."""
    for dtype, before in itertools.product((torch.float32, torch.float64), (0, 1)):
        # two inputs that are always the same, in powers of two: the factorisation of A ends in an exact zero
        singular = 2.0**40 * torch.tensor([[1, 1, 1], [-1, -1, 1], [1, 1, -1], [-1, -1, -1]]).to(dtype)
        model = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2)]).to(dtype)
        optimizer = THOR(model, lr=1e-12, update_interval=1, trace_thresholds=(0.0, 0.0), **PLAIN)
        told = []
        for step in range(before + 3):
            x = torch.randn(4, 3, dtype=dtype) if step < before else singular
            kept = optimizer.curvature["0"].inverses() if before and step else None
            (model[0](x).mean() + model[1](torch.randn(4, 3, dtype=dtype)).mean()).backward()
            gradient, weight = model[0].weight.grad.clone(), model[0].weight.detach().clone()
            told += told_by(optimizer)
            optimizer.zero_grad()
            if step >= before:
                natural = kept[1] @ gradient @ kept[0] if before else gradient
                torch.testing.assert_close(model[0].weight.detach(), weight - 1e-12 * natural)
        assert [optimizer.curvature[name].refreshes for name in ("0", "1")] == [before, 3 + before]
        [message] = told
        outcome = "the last good inverse stays" if before else "it takes its plain gradient"
        assert all(words in message for words in ("layer '0'", "positive definite", outcome))


@BOTH
def test_regression_with_large_targets(make):
    """Diverging or not, as lr has it: no exception of a factorisation, and no NaN."""
    for scale, seed in itertools.product((1e5, 1e8), (0, 1)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = having(make(model, update_interval=1, max_update_ratio=None), nonfinite="skip")
        for _ in range(30):
            (model(torch.randn(4, 8)) - scale * torch.randn(4, 3)).square().mean().backward()
            told_by(optimizer)
            optimizer.zero_grad()
        assert all(p.isfinite().all() for p in model.parameters()), (scale, seed)


# -------------------------------------------------------------------------------- layers without statistics


def test_a_second_step_without_a_pass_is_an_error_on_refresh_steps():
    model, optimizer, _, _ = pair(update_interval=1)
    backward(model, STREAM[0])
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"layers 0, 2, 4 have gradients and no statistics"):
        optimizer.step()


def test_a_step_without_gradients_is_silent():
    """Also where the others belong to another optimizer: the two of a GAN take turns; and where they are zeros."""
    model, optimizer, _, _ = pair()
    part = THOR([*model[0].parameters(), *model[2].parameters()], model=model)
    before = weights(model)
    assert not told_by(optimizer)
    model[4](torch.randn(4, 6)).sum().backward()
    assert not told_by(part)
    assert_same(weights(model), before)
    model, optimizer, _, _ = pair(update_interval=1)
    train(model, optimizer, STREAM[:1])
    optimizer.zero_grad(set_to_none=False)
    assert not told_by(optimizer)
    assert {curvature.refreshes for curvature in optimizer.curvature.values()} == {1}


def test_gradient_by_hand_between_refreshes_is_preconditioned():
    model, optimizer, _, _ = pair(update_interval=100, **PLAIN)
    train(model, optimizer, STREAM[:1])
    A, G = optimizer.curvature["2"].inverses()
    before = model[2].weight.detach().clone()
    grad = torch.randn_like(before)
    model[2].weight.grad = grad.clone()
    optimizer.step()
    torch.testing.assert_close(model[2].weight.detach(), before - 0.05 * G @ grad @ A)


@BOTH
def test_a_pass_that_raises_leaves_a_working_optimizer(make):
    """Out of memory, a bug in a user's function: catch, zero_grad, go on."""

    class Burst(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("out of memory")

    model, optimizer, twin, other = pair(make)
    x, labels = STREAM[1]
    hidden = model[2](Burst.apply(model[1](model[0](x))))
    with pytest.raises(RuntimeError, match="out of memory"):
        cross_entropy(labels)(model[4](torch.tanh(hidden))).backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(3, 9))
    train(model, optimizer, STREAM[:3])
    train(twin, other, STREAM[:3])
    assert_same(weights(model), weights(twin))
