"""Mixed precision: factors stay float32 and unscaled, and a step that the scaler skips leaves no trace."""

import copy

import pytest
import torch
from torch import nn

from comparing import having
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import THOR

STREAM = batches(8, dtype=torch.float32)


def pair(**options):
    """Two equal float32 models, each with its THOR."""
    model, twin = mlp(dtype=torch.float32), mlp(dtype=torch.float32)
    twin.load_state_dict(model.state_dict())
    return model, THOR(model, **options), twin, THOR(twin, **options)


def scaler_of(scale=1024.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def scaled_step(model, optimizer, scaler, x, labels):
    scaler.scale(cross_entropy(labels)(model(x))).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def spoiled(x):
    """Data whose gradients are not finite."""
    x = x.clone()
    x[0, 0] = torch.inf
    return x


def all_state(optimizer):
    return copy.deepcopy(optimizer.state_dict())


# ----------------------------------------------------------------------------------------- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_factors_and_weights_in_float32(dtype):
    model, optimizer, twin, exact = pair(update_interval=2)
    for x, labels in STREAM[:4]:
        with torch.autocast("cpu", dtype=dtype):
            output = model(x)
        assert output.dtype == dtype
        cross_entropy(labels)(output.float()).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(twin, exact, STREAM[:4])
    for name, curvature in optimizer.curvature.items():
        for ours, theirs in (
            (curvature.factors(), exact.curvature[name].factors()),
            (curvature.inverses(), exact.curvature[name].inverses()),
        ):
            for side, other in zip(ours, theirs, strict=True):
                assert side.dtype == torch.float32
                assert (side - other).norm() < 0.05 * other.norm()
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_step_inside_autocast_does_not_lose_precision():
    """Some loops wrap the whole step; our products must not run in bfloat16 there."""
    model, optimizer, twin, plain = pair(update_interval=1)
    for x, labels in STREAM[:3]:
        cross_entropy(labels)(model(x)).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
        optimizer.zero_grad()
        train(twin, plain, [(x, labels)])
    assert_same(weights(model), weights(twin))


def test_backward_inside_autocast_does_not_lose_precision():
    """Torch's own products run in bfloat16 there; every A, and G of the last layer, do not depend on them."""
    model, optimizer, twin, plain = pair()
    x, labels = STREAM[0]
    loss = cross_entropy(labels)(model(x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    optimizer.step()
    train(twin, plain, [(x, labels)])
    for name, curvature in optimizer.curvature.items():
        (A, G), (other_A, other_G) = curvature.factors(), plain.curvature[name].factors()
        assert torch.equal(A, other_A)
        if name == "4":
            assert torch.equal(G, other_G)


def test_input_written_over_under_autocast():
    """Autograd saves a bfloat16 copy there and notices nothing; the rows must not come from the new contents."""
    model, optimizer, _, _ = pair()
    x, labels = STREAM[0]
    x = x.clone()
    A = x.T @ x / len(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(x)
    x.mul_(100)
    try:
        cross_entropy(labels)(output.float()).backward()
    except RuntimeError as error:
        assert "in place" in str(error)  # noqa: PT017
    else:
        optimizer.step()
        torch.testing.assert_close(optimizer.curvature["0"].factors()[0], A, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(dtype):
    """Weights keep their dtype; factors, inverses and momentum are float32."""
    _, _, twin, exact = pair(update_interval=2)
    half = copy.deepcopy(twin).to(dtype)
    optimizer = THOR(half, update_interval=2)
    train(half, optimizer, [(x.to(dtype), labels) for x, labels in STREAM[:3]])
    train(twin, exact, STREAM[:3])
    for name, curvature in optimizer.curvature.items():
        for side, other in zip(curvature.factors(), exact.curvature[name].factors(), strict=True):
            assert side.dtype == torch.float32
            assert (side - other).norm() < 0.1 * other.norm()
        assert all(side.dtype == torch.float32 for side in curvature.inverses())
    for parameter, other in zip(half.parameters(), twin.parameters(), strict=True):
        assert parameter.dtype == dtype
        assert optimizer.state[parameter]["momentum_buffer"].dtype == torch.float32
        assert (parameter.float() - other).norm() < 0.1 * other.norm()


def test_small_updates_are_not_lost_in_bfloat16_momentum():
    """1 + 2⁻⁹ is 1 in bfloat16: the buffer must hold what the weight cannot."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False)).bfloat16()
    optimizer = THOR(model, lr=0.0, momentum=0.5, damping=1e6)
    for scale in (1.0, 2.0**-9):
        (model(torch.ones(1, 1, dtype=torch.bfloat16)) * scale).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    buffer = optimizer.state[model[0].weight]["momentum_buffer"].item()
    single = (1 / (1 + 1e3)) ** 2
    assert buffer == pytest.approx(0.5 * single + single * 2.0**-9, rel=1e-5)


# --------------------------------------------------------------------------------------- GradScaler


def test_scaled_run_equals_the_unscaled_one():
    """A scale that is a power of two changes no bit in float32, if everything is unscaled."""
    model, optimizer, twin, plain = pair(update_interval=2, weight_decay=0.1, kl_clip=1e-3)
    scaler = scaler_of()
    for x, labels in STREAM:
        scaled_step(model, optimizer, scaler, x, labels)
    train(twin, plain, STREAM)
    assert_same(weights(model), weights(twin))
    assert_same(all_state(optimizer), all_state(plain))


def test_growing_scale():
    model, optimizer, twin, plain = pair(update_interval=1)
    scaler = scaler_of(2.0, growth_interval=1)
    for x, labels in STREAM:
        scaled_step(model, optimizer, scaler, x, labels)
    assert scaler.get_scale() == 2.0 ** (1 + len(STREAM))
    train(twin, plain, STREAM)
    assert_same(weights(model), weights(twin))


def test_large_scale_does_not_overflow_the_factors():
    """2⁶⁰ squared would: the factors must come out as without a scale."""
    model, optimizer, twin, plain = pair(update_interval=1)
    scaler = scaler_of(2.0**60)
    for x, labels in STREAM[:3]:
        scaled_step(model, optimizer, scaler, x, labels)
    train(twin, plain, STREAM[:3])
    assert optimizer.curvature["0"].refreshes == 3
    assert_same(weights(model), weights(twin))


def test_scaled_micro_batches():
    model, optimizer, twin, plain = pair(update_interval=2)
    scaler = scaler_of()
    for x, labels in STREAM[:4]:
        for half in (slice(0, 4), slice(4, 8)):
            scaler.scale(cross_entropy(labels[half])(model(x[half])) / 2).backward()
            (cross_entropy(labels[half])(twin(x[half])) / 2).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize("with_scaler", [False, True])
def test_skipped_step_leaves_no_trace(bad, with_scaler):
    """Refresh due or not: weights, state, clock and statistics are those of a run without the bad batch."""
    model, optimizer, twin, plain = pair(update_interval=2, factor_decay=0.5)
    scaler = scaler_of()
    if with_scaler:
        optimizer.grad_scaler = scaler
    for step, (x, labels) in enumerate(STREAM):
        if step == bad:
            before, state = weights(model), all_state(optimizer)
            scaled_step(model, optimizer, scaler, spoiled(x), labels)
            assert_same(weights(model), before)
            assert_same(all_state(optimizer), state)
            assert scaler.get_scale() == 512.0
        scaled_step(model, optimizer, scaler, x, labels)
    train(twin, plain, STREAM)
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("with_scaler", [False, True])
def test_skipped_step_drops_its_statistics(with_scaler):
    """Also where the loop drops the gradients by itself and tells the optimizer nothing."""
    model, optimizer, twin, plain = pair(update_interval=1)
    scaler = scaler_of()
    if with_scaler:
        optimizer.grad_scaler = scaler
    x, labels = STREAM[0]
    scaler.scale(cross_entropy(labels)(model(x))).backward()
    model[4].bias.grad[0] = torch.inf  # the rows are sound, the gradient is not
    scaler.step(optimizer)
    scaler.update()
    model.zero_grad()
    scaled_step(model, optimizer, scaler, *STREAM[1])
    train(twin, plain, [STREAM[1]])
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("attached", ["argument", "attribute", "not at all"])
def test_clipping_after_unscale(attached):
    """The usual recipe: unscale, clip the norm, step."""
    model, optimizer, twin, plain = pair(update_interval=2)
    scaler = scaler_of()
    if attached == "argument":
        optimizer = having(THOR(model, update_interval=2), grad_scaler=scaler)
    elif attached == "attribute":
        optimizer.grad_scaler = scaler
    for x, labels in STREAM:
        scaler.scale(cross_entropy(labels)(model(x))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        cross_entropy(labels)(twin(x)).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
    assert_same(weights(model), weights(twin))


def test_attached_scaler_without_unscale():
    model, _, twin, plain = pair(update_interval=2)
    scaler = scaler_of()
    optimizer = having(THOR(model, update_interval=2), grad_scaler=scaler)
    for x, labels in STREAM:
        scaled_step(model, optimizer, scaler, x, labels)
    train(twin, plain, STREAM)
    assert_same(weights(model), weights(twin))


def test_unscaled_by_a_stranger_is_an_error_on_a_refresh_step():
    """The statistics are scaled by a number nobody can tell; guessing would ruin the step in silence."""
    model, optimizer, _, _ = pair(update_interval=2)
    before = weights(model)
    x, labels = STREAM[0]
    (1024 * cross_entropy(labels)(model(x))).backward()
    for parameter in model.parameters():
        parameter.grad /= 1024
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), None  # as GradScaler leaves them after unscale_
    with pytest.raises(RuntimeError, match="grad_scaler"):
        optimizer.step()
    assert_same(weights(model), before)


def test_unscale_without_the_scaler_is_fine_between_refreshes():
    model, optimizer, twin, plain = pair(update_interval=100)
    scaler = scaler_of()
    scaled_step(model, optimizer, scaler, *STREAM[0])
    for x, labels in STREAM[1:4]:
        scaler.scale(cross_entropy(labels)(model(x))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train(twin, plain, STREAM[:4])
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("attach", [False, True])
def test_disabled_scaler(attach):
    model, _, twin, plain = pair(update_interval=2)
    scaler = scaler_of(enabled=False)
    optimizer = having(THOR(model, update_interval=2), grad_scaler=scaler if attach else None)
    for x, labels in STREAM:
        scaled_step(model, optimizer, scaler, x, labels)
    train(twin, plain, STREAM)
    assert_same(weights(model), weights(twin))


def test_float16_autocast_with_a_scaler_trains():
    """The full recipe, with a scale that overflows at first: it comes down, and the loss falls."""
    model, optimizer, _, _ = pair(update_interval=4)
    scaler = scaler_of(2.0**24)
    losses = []
    x, labels = STREAM[0]
    for _ in range(40):
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(x)
        loss = cross_entropy(labels)(output.float())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert scaler.get_scale() < 2.0**24
    assert optimizer.curvature["0"].refreshes >= 1
    assert losses[-1] < 0.5 * losses[0]


def test_scaler_and_plain_backward_in_turn():
    """`grad_scale` of a finished step must not linger."""
    model, optimizer, twin, plain = pair(update_interval=1)
    scaler = scaler_of()
    for step, (x, labels) in enumerate(STREAM[:4]):
        if step % 2:
            train(model, optimizer, [(x, labels)])
        else:
            scaled_step(model, optimizer, scaler, x, labels)
    train(twin, plain, STREAM[:4])
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("wrong", ["lr", "loss_terms"])
def test_scale_goes_when_a_step_raises(wrong, unscaled):
    """The steps after it, without a scaler, are those of an optimizer that has never had one."""
    model, optimizer, twin, plain = pair(update_interval=2)
    scaler, (x, labels) = scaler_of(), STREAM[0]
    scaler.scale(cross_entropy(labels)(model(x))).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    sound = optimizer.param_groups[0]["lr"]
    if wrong == "lr":
        optimizer.param_groups[0]["lr"] = -1.0
    else:
        optimizer.loss_terms = 0
    with pytest.raises(ValueError, match="must be"):
        scaler.step(optimizer)
    optimizer.param_groups[0]["lr"], optimizer.loss_terms = sound, None
    optimizer.zero_grad()
    train(model, optimizer, STREAM[:3])
    train(twin, plain, STREAM[:3])
    assert_same(weights(model), weights(twin))
