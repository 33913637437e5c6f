"""What may go wrong in training: no NaN ever reaches a weight, and nothing fails in silence."""

import copy
import warnings

import pytest
import torch
from torch import nn

from comparing import having
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import THOR

STREAM = batches(6, dtype=torch.float32)


def model_and_twin():
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    return model, twin


def spoil(model, value):
    """Puts a number that is none into one gradient, as a burst loss would."""
    model[2].weight.grad[0, 0] = value


# ------------------------------------------------------------------------- gradients that are not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nonfinite_gradient_raises_before_anything_changes(bad, value):
    model, twin = model_and_twin()
    optimizer, other = THOR(model, update_interval=2), THOR(twin, update_interval=2)
    train(model, optimizer, STREAM[:bad])
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    cross_entropy(STREAM[bad][1])(model(5 * STREAM[bad][0])).backward()
    spoil(model, value)
    with pytest.raises(FloatingPointError, match=r"2\.weight"):
        optimizer.step()
    assert_same(weights(model), before)
    assert str(optimizer.state_dict()) == str(state)
    optimizer.zero_grad()
    train(model, optimizer, STREAM[bad:])
    train(twin, other, STREAM)
    assert_same(weights(model), weights(twin))


def test_message_names_the_step_and_the_way_out():
    model, _ = model_and_twin()
    optimizer = THOR(model)
    train(model, optimizer, STREAM[:3])
    cross_entropy(STREAM[3][1])(model(STREAM[3][0])).backward()
    spoil(model, torch.nan)
    with pytest.raises(FloatingPointError, match=r"step 3") as caught:
        optimizer.step()
    assert 'nonfinite="skip"' in str(caught.value)


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_nonfinite_gradient_skipped_and_counted(bad):
    model, twin = model_and_twin()
    optimizer = having(THOR(model, update_interval=2), nonfinite="skip")
    other = THOR(twin, update_interval=2)
    assert optimizer.skipped_steps == 0
    for step, (x, labels) in enumerate(STREAM):
        if step == bad:
            for value in (torch.nan, torch.inf):
                cross_entropy(labels)(model(3 * x)).backward()
                spoil(model, value)
                optimizer.step()
                optimizer.zero_grad()
        train(model, optimizer, [(x, labels)])
    train(twin, other, STREAM)
    assert optimizer.skipped_steps == 2
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_refused_step_drops_its_statistics(nonfinite):
    """Also where the loop zeroes the gradients by itself and tells the optimizer nothing."""
    model, twin = model_and_twin()
    optimizer, other = having(THOR(model), nonfinite=nonfinite), THOR(twin)
    cross_entropy(STREAM[0][1])(model(STREAM[0][0])).backward()
    spoil(model, torch.nan)
    if nonfinite == "skip":
        optimizer.step()
    else:
        with pytest.raises(FloatingPointError):
            optimizer.step()
    for parameter in model.parameters():
        parameter.grad.zero_()
    train(model, optimizer, STREAM[1:3])
    train(twin, other, STREAM[1:3])
    assert_same(weights(model), weights(twin))


def test_nonfinite_gradient_of_a_plain_parameter():
    model = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3))
    optimizer = THOR(model)
    model(STREAM[0][0]).sum().backward()
    model[1].bias.grad[0] = torch.nan
    before = weights(model)
    with pytest.raises(FloatingPointError, match=r"1\.bias"):
        optimizer.step()
    assert_same(weights(model), before)


# ---------------------------------------------------------------------------- factors that are not finite


def overflowing(x):
    """Inputs whose squares leave float32, with a loss small enough for finite gradients: A is inf, ∇W is not."""
    return x * 1e25


def show_overflow(model, x, labels):
    (cross_entropy(labels)(model(overflowing(x))) * 1e-25).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_infinite_factor_keeps_the_last_good_inverse():
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=1, momentum=0.0)
    train(model, optimizer, STREAM[:2])
    curvature = optimizer.curvature["0"]
    factors, inverses, refreshes = curvature.factors(), curvature.inverses(), curvature.refreshes
    A, G = (inverse.clone() for inverse in inverses)
    show_overflow(model, *STREAM[2])
    before, grad = model[0].weight.detach().clone(), model[0].weight.grad.clone()
    with pytest.warns(RuntimeWarning, match=r"step 2.*'0'"):
        optimizer.step()
    torch.testing.assert_close(curvature.factors()[0], factors[0])
    torch.testing.assert_close(curvature.inverses(), (A, G))
    assert curvature.refreshes == refreshes
    torch.testing.assert_close(model[0].weight.detach(), before - 0.05 * G @ grad @ A, rtol=1e-5, atol=1e-7)


def test_infinite_factor_is_reported_once():
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=1)
    train(model, optimizer, STREAM[:1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, labels in STREAM[1:5]:
            show_overflow(model, x, labels)
            optimizer.step()
            optimizer.zero_grad()
    assert len([w for w in caught if "'0'" in str(w.message)]) == 1


def test_infinite_factor_at_first_takes_the_plain_gradient_and_stays_due():
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=100, momentum=0.0)
    show_overflow(model, *STREAM[0])
    before, grad = model[0].weight.detach().clone(), model[0].weight.grad.clone()
    with pytest.warns(RuntimeWarning, match="'0'"):
        optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close(model[0].weight.detach(), before - 0.05 * grad)
    assert optimizer.curvature["0"].refreshes == 0
    model.load_state_dict({name: value.clone() for name, value in mlp(dtype=torch.float32).state_dict().items()})
    train(model, optimizer, STREAM[1:2])
    assert optimizer.curvature["0"].refreshes == 1
    assert torch.isfinite(optimizer.curvature["0"].inverses()[0]).all()


def test_healthy_layers_refresh_beside_a_sick_one():
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=1, trace_thresholds=(0.0, 0.0))
    train(model, optimizer, STREAM[:1])
    show_overflow(model, *STREAM[1])
    with pytest.warns(RuntimeWarning, match="'0'"):
        optimizer.step()
    assert optimizer.curvature["0"].refreshes == 1
    assert optimizer.curvature["2"].refreshes == 2


# ---------------------------------------------------------------------- factors that are not positive definite


def near_singular(scale):
    """3 rows of 24 numbers: 21 eigenvalues are zero up to rounding, which is far larger than the damping."""
    return scale * torch.randn(3, 24)


def run_near_singular(scale, damping, steps=1):
    model = nn.Sequential(nn.Linear(24, 4, bias=False))
    optimizer = THOR(model, lr=1e-6, damping=damping, update_interval=1, split_dim=None, momentum=0.0)
    caught = []
    for _ in range(steps):
        model(near_singular(scale)).square().mean().backward()
        with warnings.catch_warnings(record=True) as some:
            warnings.simplefilter("always")
            optimizer.step()
        caught += some
        optimizer.zero_grad()
    return model, optimizer, [str(w.message) for w in caught]


def test_indefinite_block_at_first_takes_the_plain_gradient():
    model, optimizer, messages = run_near_singular(1e4, 1e-16)
    assert model[0].weight.isfinite().all()
    assert optimizer.curvature["0"].refreshes == 0
    assert len(messages) == 1
    assert "'0'" in messages[0]


def test_indefinite_block_keeps_the_last_good_inverse():
    model = nn.Sequential(nn.Linear(24, 4, bias=False))
    optimizer = THOR(model, lr=1e-6, damping=1.0, update_interval=1, split_dim=None)
    model(near_singular(1.0)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    A, G = (inverse.clone() for inverse in optimizer.curvature["0"].inverses())
    optimizer.param_groups[0]["damping"] = 1e-16
    model(near_singular(1e4)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match=r"'0'.*positive definite"):
        optimizer.step()
    assert optimizer.curvature["0"].refreshes == 1
    torch.testing.assert_close(optimizer.curvature["0"].inverses(), (A, G))
    assert model[0].weight.isfinite().all()


def test_more_damping_saves_a_block():
    """Between hopeless and healthy there are dampings that work only when raised; none gives NaN."""
    outcomes = set()
    for exponent in range(-9, 3):
        torch.manual_seed(5)
        model, optimizer, messages = run_near_singular(100.0, 10.0**exponent)
        assert model[0].weight.isfinite().all()
        refreshed = optimizer.curvature["0"].refreshes == 1
        outcomes.add((refreshed, bool(messages)))
        if refreshed:
            for inverse in optimizer.curvature["0"].inverses():
                assert inverse.isfinite().all()
                assert torch.linalg.eigvalsh(inverse.double()).min() > -1e-6 * inverse.norm()
    assert (True, False) in outcomes, "healthy"
    assert (True, True) in outcomes, "raised"
    assert (False, False) not in outcomes, "failed in silence"


def singular(scale):
    """Two inputs that are always the same, in powers of two: the factorisation of A ends in an exact zero."""
    signs = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, 1.0], [1.0, 1.0, -1.0], [-1.0, -1.0, -1.0]])
    return scale * signs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("before", [0, 1])
def test_a_factorisation_that_ends_in_a_zero_leaves_the_step_by_no_exception(before, dtype):
    """With an inverse from before: that one stays. Without: the plain gradient. Said once, by name; others refresh."""
    model = nn.ModuleList([nn.Linear(3, 2, bias=False), nn.Linear(3, 2)]).to(dtype)

    def loss(x):
        return model[0](x).mean() + model[1](torch.randn(4, 3, dtype=dtype)).mean()

    optimizer = THOR(model, lr=1e-12, momentum=0.0, update_interval=1, trace_thresholds=(0.0, 0.0), kl_clip=None)
    for _ in range(before):
        loss(torch.randn(4, 3, dtype=dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    told = []
    for _ in range(3):
        kept = optimizer.curvature["0"].inverses() if before else None
        loss(singular(2.0**40).to(dtype)).backward()
        gradient, weight = model[0].weight.grad.clone(), model[0].weight.detach().clone()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        optimizer.zero_grad()
        told += [str(w.message) for w in caught]
        natural = kept[1] @ gradient @ kept[0] if before else gradient
        torch.testing.assert_close(model[0].weight.detach(), weight - 1e-12 * natural)
        assert optimizer.curvature["0"].refreshes == before
    assert optimizer.curvature["1"].refreshes == 3 + before
    [message] = told
    assert "'0'" in message
    assert ("the last good inverse stays" if before else "it takes its plain gradient") in message


@pytest.mark.parametrize("scaling", [None, "spectral"])
@pytest.mark.parametrize("scale", [1e5, 1e8])
def test_regression_with_large_targets(scale, scaling):
    """Diverging or not, as lr has it: no exception of a factorisation, and no NaN."""
    for seed in range(4):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = THOR(model, scaling=scaling, update_interval=1, kl_clip=None, nonfinite="skip")
        for _ in range(30):
            (model(torch.randn(4, 8)) - scale * torch.randn(4, 3)).square().mean().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            optimizer.zero_grad()
        assert all(p.isfinite().all() for p in model.parameters())


# -------------------------------------------------------------------------------- layers without statistics


def test_gradient_set_by_hand_on_a_refresh_step_is_an_error():
    """No rows came with it: every layer is named, nothing has changed, and the next real step refreshes."""
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=100)
    before = weights(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match=r"layers 0, 2, 4 have gradients and no statistics.*skip="):
        optimizer.step()
    assert_same(weights(model), before)
    assert not optimizer.state
    optimizer.zero_grad()
    train(model, optimizer, STREAM[:1])
    assert [curvature.refreshes for curvature in optimizer.curvature.values()] == [1, 1, 1]


@pytest.mark.parametrize("scaling", [None, "spectral"])
@pytest.mark.parametrize("mistake", ["step() twice", "no forward pass"])
def test_a_step_without_a_backward_pass_of_its_own_is_told_the_mistake(mistake, scaling):
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=1, scaling=scaling)
    cross_entropy(STREAM[0][1])(model(STREAM[0][0])).backward()
    optimizer.step()
    if mistake == "no forward pass":
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"layers 0, 2, 4 have gradients and no statistics") as caught:
        optimizer.step()
    for words in ("step() was called again", "without a forward pass", "Call loss.backward()", "zero_grad()", "skip="):
        assert words in str(caught.value)
    assert_same(weights(model), before)


def test_a_step_without_gradients_is_silent_where_the_others_belong_to_another_optimizer():
    """As in the training of a GAN, whose optimizers take turns."""
    model, _ = model_and_twin()
    optimizer = THOR([*model[0].parameters(), *model[2].parameters()], model=model)
    model[4](torch.randn(4, 6)).sum().backward()
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert_same(weights(model), before)


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_flat_parameters_are_answered_with_what_to_use_in_the_place_of_zero(scaling):
    """DeepSpeed's ZeRO and bf16 optimizers put one flat float32 tensor into each group, and set its gradient."""
    model, _ = model_and_twin()
    optimizer = THOR(model, scaling=scaling)
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer.param_groups[0]["params"] = [flat]
    cross_entropy(STREAM[0][1])(model(STREAM[0][0])).backward()
    flat.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
    before = flat.detach().clone()
    with pytest.raises(RuntimeError, match=r"'0\.weight'.*flat.*ZeRO.*fully_shard, then THOR.*DistributedDataParallel"):
        optimizer.step()
    assert torch.equal(flat, before)


def test_zero_gradients_without_statistics_are_no_error():
    """What a layer that was not used has under zero_grad(set_to_none=False)."""
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=1)
    train(model, optimizer, STREAM[:1])
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert [curvature.refreshes for curvature in optimizer.curvature.values()] == [1, 1, 1]


def test_gradient_by_hand_between_refreshes_is_preconditioned():
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=100, momentum=0.0, kl_clip=None)
    train(model, optimizer, STREAM[:1])
    A, G = optimizer.curvature["2"].inverses()
    before = model[2].weight.detach().clone()
    grad = torch.randn_like(before)
    model[2].weight.grad = grad.clone()
    optimizer.step()
    torch.testing.assert_close(model[2].weight.detach(), before - 0.05 * G @ grad @ A)


def test_no_gradient_at_all_is_no_trouble():
    model, _ = model_and_twin()
    optimizer = THOR(model)
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert_same(weights(model), before)


def test_backward_that_raises_leaves_a_working_optimizer():
    """Out of memory, a bug in a user's function: catch, zero_grad, go on."""

    class Burst(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("out of memory")

    model, twin = model_and_twin()
    optimizer, other = THOR(model), THOR(twin)
    x, labels = STREAM[1]
    hidden = model[2](Burst.apply(model[1](model[0](x))))
    with pytest.raises(RuntimeError, match="out of memory"):
        cross_entropy(labels)(model[4](torch.tanh(hidden))).backward()
    optimizer.zero_grad()
    train(model, optimizer, STREAM[:3])
    train(twin, other, STREAM[:3])
    assert_same(weights(model), weights(twin))


def test_forward_that_raises_leaves_a_working_optimizer():
    model, twin = model_and_twin()
    optimizer, other = THOR(model), THOR(twin)
    with pytest.raises(RuntimeError, match="shape"):
        model(torch.randn(3, 9))
    train(model, optimizer, STREAM[:3])
    train(twin, other, STREAM[:3])
    assert_same(weights(model), weights(twin))


def step(model, optimizer):
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()


def test_parameter_replaced_behind_the_optimizer_is_named():
    """The model then trains a tensor that no group has: a named error, and not a KeyError of a number."""
    model, _ = model_and_twin()
    optimizer = THOR(model, update_interval=1)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
    message = r"'0\.weight' is in none of the optimizer's parameter groups"
    with pytest.raises(RuntimeError, match=message):  # in backward on a refresh step, else in step()
        step(model, optimizer)
