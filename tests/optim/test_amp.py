"""Mixed precision: factors stay float32 and unscaled, and a step that the scaler skips leaves no
trace.
"""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, cross_entropy, mlp, train, twins, weights
from torch_thor import THOR

STREAM = batches(8, dtype=torch.float32)
HALF = torch.bfloat16, torch.float16


pair = partial(twins, THOR, partial(mlp, dtype=torch.float32))


def scaler_of(scale=1024.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def step(model, optimizer, batch, scaler=None, *, unscale=False, clip=None, parts=1):
    """One step of the usual recipe, with a scaler or without."""
    scaler = scaler or scaler_of(enabled=False)
    for x, labels in zip(*(whole.chunk(parts) for whole in batch), strict=True):
        scaler.scale(cross_entropy(labels)(model(x)) / parts).backward()
    if unscale:
        scaler.unscale_(optimizer)
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# ----------------------------------------------------------------------------------------- autocast


def test_half_precision_of_the_passes_or_of_the_whole_model():
    """Weights keep their dtype; factors, inverses and momentum are float32, and near those of
    float32.
    """
    for dtype, whole in product(HALF, (False, True)):
        model, _, twin, exact = pair(update_interval=2)
        model = model.to(dtype) if whole else model
        optimizer = THOR(model, update_interval=2)
        for x, labels in STREAM[:3]:
            with torch.autocast("cpu", dtype=dtype, enabled=not whole):
                output = model(x.to(dtype) if whole else x)
            assert output.dtype == dtype
            cross_entropy(labels)(output if whole else output.float()).backward()
            optimizer.step()
            optimizer.zero_grad()
        train(twin, exact, STREAM[:3])
        for name, layer in optimizer.curvature.items():
            other = exact.curvature[name]
            for ours, its in zip(
                (*layer.factors(), *layer.inverses()),
                (*other.factors(), *other.inverses()),
                strict=True,
            ):
                assert ours.dtype == torch.float32
                assert (ours - its).norm() < 0.1 * its.norm(), (dtype, whole, name)
        for ours, its in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.dtype == (dtype if whole else torch.float32)
            assert optimizer.state[ours]["momentum_buffer"].dtype == torch.float32
            assert (ours.float() - its).norm() < 0.1 * its.norm()


def test_a_step_or_a_backward_pass_inside_autocast_does_not_lose_precision():
    """Some loops wrap it all. Torch's own products run in bfloat16 there; every A, and the last G,
    need none.
    """
    for inside in ("step", "backward"):
        model, optimizer, twin, plain = pair(update_interval=1)
        for x, labels in STREAM[: 3 if inside == "step" else 1]:
            loss = cross_entropy(labels)(model(x))
            with torch.autocast("cpu", torch.bfloat16, enabled=inside == "backward"):
                loss.backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=inside == "step"):
                optimizer.step()
            optimizer.zero_grad()
            train(twin, plain, [(x, labels)])
        for name, layer in optimizer.curvature.items():
            (A, G), (other_A, other_G) = layer.factors(), plain.curvature[name].factors()
            assert torch.equal(A, other_A)
            assert torch.equal(G, other_G) or (inside == "backward" and name != "4")
        if inside == "step":
            assert_same(weights(model), weights(twin))


# --------------------------------------------------------------------------------------- GradScaler

# options of THOR, of the scaler, and of each step
SCALED = [
    ({"weight_decay": 0.1, "kl_clip": 1e-3}, {}, {}),
    ({"update_interval": 1}, {"scale": 2.0, "growth_interval": 1}, {}),
    ({"update_interval": 1}, {"scale": 2.0**60}, {}),  # its square would overflow
    ({}, {}, {"parts": 2}),
    ({}, {"enabled": False}, {}),
    ({}, {}, {"unscale": True, "clip": 0.1}),
    ({"update_interval": 100}, {}, {"unscale": True}),
    ({}, {}, {"now and then": 2}),  # `grad_scale` of a finished step must not linger
]


def test_a_scaled_run_equals_the_unscaled_one():
    """A scale that is a power of two changes no bit in float32, if everything is unscaled, attached
    or not.
    """
    for (options, scaling, steps), attached in product(SCALED, (False, True)):
        model, optimizer, twin, plain = pair(**{"update_interval": 2, **options})
        scaler, how = scaler_of(**scaling), dict(steps)
        every = how.pop("now and then", 1)
        optimizer.grad_scaler = scaler if attached and every == 1 else None
        for i, batch in enumerate(STREAM):
            step(model, optimizer, batch, scaler if i % every == 0 else None, **how)
            step(twin, plain, batch, **{**how, "unscale": False})
        case = f"{options} {scaling} {steps} {attached}"
        assert_same(weights(model), weights(twin), case)
        assert_same(optimizer.state_dict(), plain.state_dict(), case)
        assert ("growth_interval" not in scaling) or scaler.get_scale() == 2.0 ** (1 + len(STREAM))


def test_skipped_step_leaves_no_trace():
    """Refresh due or not; also where the rows are sound, and the loop drops the gradients without
    the optimizer.
    """
    for bad, attached, sound in product((0, 1, 2), (False, True), (False, True)):
        model, optimizer, twin, plain = pair(update_interval=2, factor_decay=0.5)
        scaler = scaler_of()
        optimizer.grad_scaler = scaler if attached else None
        for i, (x, labels) in enumerate(STREAM):
            if i == bad:
                before, state = weights(model), copy.deepcopy(optimizer.state_dict())
                scaler.scale(
                    cross_entropy(labels)(model(x * (5 if sound else torch.inf)))
                ).backward()
                model[4].bias.grad[0] = torch.inf
                scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
                assert_same(weights(model), before)
                assert_same(optimizer.state_dict(), state)
                assert scaler.get_scale() == 512.0
            step(model, optimizer, (x, labels), scaler)
        train(twin, plain, STREAM)
        assert_same(weights(model), weights(twin), f"{bad} {attached} {sound}")


def test_lightning_may_clip():
    """It refuses optimizers that unscale; ours takes gradients either way."""
    optimizer = pair()[1]
    for asker, answer in (
        ("lightning_fabric.x", False),
        ("pytorch_lightning.x", False),
        ("torch.amp.grad_scaler", True),
    ):
        names = {"__name__": asker, "optimizer": optimizer}
        exec("found = getattr(optimizer, '_step_supports_amp_scaling', False)", names)
        assert names["found"] is answer


def test_unscaled_by_a_stranger_is_an_error_on_a_refresh_step():
    """The statistics are scaled by a number nobody can tell; guessing would ruin the step in
    silence.
    """
    model, optimizer, _, _ = pair()
    before = weights(model)
    (1024 * cross_entropy(STREAM[0][1])(model(STREAM[0][0]))).backward()
    for parameter in model.parameters():
        parameter.grad /= 1024
    # as GradScaler leaves them after unscale_
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), None
    with pytest.raises(RuntimeError, match="grad_scaler"):
        optimizer.step()
    assert_same(weights(model), before)


def test_scale_goes_when_a_step_raises():
    """The steps after it, without a scaler, are those of an optimizer that has never had one."""
    for unscale, wrong in product((False, True), ({"lr": -1.0}, {"loss_terms": 0})):
        model, optimizer, twin, plain = pair(update_interval=2)
        sound = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"], optimizer.loss_terms = (
            wrong.get("lr", sound),
            wrong.get("loss_terms"),
        )
        with pytest.raises(ValueError, match="must be"):
            step(model, optimizer, STREAM[0], scaler_of(), unscale=unscale)
        optimizer.param_groups[0]["lr"], optimizer.loss_terms = sound, None
        optimizer.zero_grad()
        train(model, optimizer, STREAM[:3])
        train(twin, plain, STREAM[:3])
        assert_same(weights(model), weights(twin))
