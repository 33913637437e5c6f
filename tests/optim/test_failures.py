"""What may go wrong in training: no NaN ever reaches a weight, and nothing fails in silence."""

import copy
import warnings

import pytest
import torch
from torch import nn

from comparing import having
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(6, dtype=torch.float32)
BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])


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
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_nonfinite_gradient_is_refused_or_skipped_before_anything_changes(nonfinite, make):
    """Also where the loop zeroes the gradients by itself and tells the optimizer nothing: statistics are dropped."""
    for bad in (0, 1, 2):
        model, optimizer, twin, other = pair(make, update_interval=2)
        optimizer.nonfinite = nonfinite
        train(model, optimizer, STREAM[:bad])
        before, state = weights(model), copy.deepcopy(optimizer.state_dict())
        for value in (torch.nan, torch.inf, -torch.inf):
            backward(model, (5 * STREAM[bad][0], STREAM[bad][1]))
            model[2].weight.grad[0, 0] = value  # as by a burst loss
            if nonfinite == "skip":
                optimizer.step()
            else:
                with pytest.raises(FloatingPointError, match=rf"step {bad}: .*2\.weight.*nonfinite = \"skip\""):
                    optimizer.step()
            assert_same(weights(model), before)
            assert str(optimizer.state_dict()) == str(state)
            optimizer.zero_grad() if bad else model.zero_grad(set_to_none=False)
        assert optimizer.skipped_steps == (3 if nonfinite == "skip" else 0)
        train(model, optimizer, STREAM[bad:])
        train(twin, other, STREAM)
        assert_same(weights(model), weights(twin))


@BOTH
def test_nonfinite_gradient_of_a_plain_parameter(make):
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    optimizer = make(model)
    model(STREAM[0][0]).sum().backward()
    model[1].bias.grad[0] = torch.nan
    before = weights(model)
    with pytest.raises(FloatingPointError, match=r"1\.bias"):
        optimizer.step()
    assert_same(weights(model), before)


# ---------------------------------------------------------------------------- factors that are not finite


def show_overflow(model, x, labels):
    """Inputs whose squares leave float32, with a loss small enough for finite gradients: A is inf, ∇W is not."""
    (cross_entropy(labels)(model(x * 1e25)) * 1e-25).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_infinite_factor_keeps_the_last_good_inverse():
    """Said once; healthy layers refresh beside it."""
    model, optimizer, _, _ = pair(update_interval=1, momentum=0.0, trace_thresholds=(0.0, 0.0), max_update_ratio=None)
    train(model, optimizer, STREAM[:2])
    curvature, messages = optimizer.curvature["0"], []
    factors, (A, G) = curvature.factors(), (inverse.clone() for inverse in curvature.inverses())
    for batch in STREAM[2:5]:
        show_overflow(model, *batch)
        before, grad = model[0].weight.detach().clone(), model[0].weight.grad.clone()
        messages += told_by(optimizer)
        optimizer.zero_grad()
        torch.testing.assert_close(curvature.factors()[0], factors[0])
        torch.testing.assert_close(curvature.inverses(), (A, G))
        torch.testing.assert_close(model[0].weight.detach(), before - 0.05 * G @ grad @ A, rtol=1e-5, atol=1e-7)
    assert curvature.refreshes == 2
    assert optimizer.curvature["2"].refreshes > 2
    [message] = messages
    assert "step 2, layer '0'" in message


def test_infinite_factor_at_first_takes_the_plain_gradient_and_stays_due():
    model, optimizer, _, _ = pair(update_interval=100, momentum=0.0, max_update_ratio=None)
    show_overflow(model, *STREAM[0])
    before, grad = model[0].weight.detach().clone(), model[0].weight.grad.clone()
    [message] = told_by(optimizer)
    assert "'0'" in message
    optimizer.zero_grad()
    torch.testing.assert_close(model[0].weight.detach(), before - 0.05 * grad)
    assert optimizer.curvature["0"].refreshes == 0
    model.load_state_dict(mlp(dtype=torch.float32).state_dict())
    train(model, optimizer, STREAM[1:2])
    assert optimizer.curvature["0"].refreshes == 1
    assert torch.isfinite(optimizer.curvature["0"].inverses()[0]).all()


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("before", [0, 1])
def test_a_factorisation_that_ends_in_a_zero_leaves_the_step_by_no_exception(before, dtype):
    """With an inverse from before: that one stays. Without: the plain gradient. Said once, by name; others refresh."""
    # two inputs that are always the same, in powers of two: the factorisation of A ends in an exact zero
    singular = 2.0**40 * torch.tensor([[1, 1, 1], [-1, -1, 1], [1, 1, -1], [-1, -1, -1]]).to(dtype)
    model = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2)]).to(dtype)

    def loss(x):
        return model[0](x).mean() + model[1](torch.randn(4, 3, dtype=dtype)).mean()

    options = {"update_interval": 1, "trace_thresholds": (0.0, 0.0), "max_update_ratio": None}
    optimizer = THOR(model, lr=1e-12, momentum=0.0, **options)
    for _ in range(before):
        loss(torch.randn(4, 3, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = []
    for _ in range(3):
        kept = optimizer.curvature["0"].inverses() if before else None
        loss(singular).backward()
        gradient, weight = model[0].weight.grad.clone(), model[0].weight.detach().clone()
        told += told_by(optimizer)
        optimizer.zero_grad()
        natural = kept[1] @ gradient @ kept[0] if before else gradient
        torch.testing.assert_close(model[0].weight.detach(), weight - 1e-12 * natural)
        assert optimizer.curvature["0"].refreshes == before
    assert optimizer.curvature["1"].refreshes == 3 + before
    [message] = told
    assert "layer '0'" in message
    assert "positive definite" in message
    assert ("the last good inverse stays" if before else "it takes its plain gradient") in message


@BOTH
@pytest.mark.parametrize("scale", [1e5, 1e8])
def test_regression_with_large_targets(scale, make):
    """Diverging or not, as lr has it: no exception of a factorisation, and no NaN."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = having(make(model, update_interval=1, max_update_ratio=None), nonfinite="skip")
        for _ in range(30):
            (model(torch.randn(4, 8)) - scale * torch.randn(4, 3)).square().mean().backward()
            told_by(optimizer)
            optimizer.zero_grad()
        assert all(p.isfinite().all() for p in model.parameters())


# -------------------------------------------------------------------------------- layers without statistics


@BOTH
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_gradients_without_a_pass_on_a_refresh_step_are_told_the_mistake(steps, make):
    """Set by hand, or of the step before; nothing has changed, and the next real step refreshes."""
    model, optimizer, twin, other = pair(make, update_interval=1)
    for batch in STREAM[:steps]:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    if steps < 2:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(RuntimeError, match=r"layers 0, 2, 4 have gradients and no statistics") as caught:
        optimizer.step()
    for words in (
        "step() was called again",
        "without a forward pass",
        "Call loss.backward()",
        "zero_grad()",
        "layers=",
    ):
        assert words in str(caught.value)
    assert_same(weights(model), before)
    assert str(optimizer.state_dict()) == str(state)
    optimizer.zero_grad()
    train(model, optimizer, STREAM[steps:])
    train(twin, other, STREAM)
    assert_same(weights(model), weights(twin))


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


@BOTH
def test_flat_parameters_are_answered_with_what_to_use_in_the_place_of_zero(make):
    """DeepSpeed's ZeRO and bf16 optimizers put one flat float32 tensor into each group, and set its gradient."""
    model, optimizer, _, _ = pair(make)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer.param_groups[0]["params"] = [flat]
    backward(model, STREAM[0])
    flat.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    before = flat.detach().clone()
    with pytest.raises(RuntimeError, match=r"flat tensors.*ZeRO.*fully_shard, then the optimizer.*DistributedDataPara"):
        optimizer.step()
    assert torch.equal(flat, before)


def test_gradient_by_hand_between_refreshes_is_preconditioned():
    model, optimizer, _, _ = pair(update_interval=100, momentum=0.0, max_update_ratio=None)
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
