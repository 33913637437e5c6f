"""Mixed precision: factors stay float32 and unscaled; a skipped step leaves no trace."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, cross_entropy, mlp, train, twins, weights
from torch_thor import THOR, ThorMuon

STREAM = batches(8, dtype=torch.float32)
BOTH = pytest.mark.parametrize("make", [THOR, ThorMuon])
pair = partial(twins, build=partial(mlp, dtype=torch.float32))


def scaler_from(scale=1024.0, **options):
    return torch.amp.GradScaler("cpu", init_scale=scale, **options)


def step(model, optimizer, batch, scaler=None, *, clip=None, parts=1):
    """A step of the usual recipe, with or without a scaler."""
    scaler = scaler or scaler_from(enabled=False)
    for x, labels in zip(*(whole.chunk(parts) for whole in batch), strict=True):
        scaler.scale(cross_entropy(labels)(model(x)) / parts).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_half_precision_of_the_passes_or_of_the_whole_model():
    """Weights keep their dtype; all else is float32, near what float32 gives."""
    for dtype, whole in product((torch.bfloat16, torch.float16), (False, True)):
        model, _, twin, exact = pair(THOR, update_interval=2)
        model = model.to(dtype) if whole else model
        optimizer = THOR(model, update_interval=2)
        for x, labels in STREAM[:3]:
            with torch.autocast("cpu", dtype=dtype, enabled=not whole):
                output = model(x.to(dtype) if whole else x)
            cross_entropy(labels)(output if whole else output.float()).backward()
            optimizer.step()
            optimizer.zero_grad()
        train(twin, exact, STREAM[:3])
        for name, layer in optimizer.curvature.items():
            other = exact.curvature[name]
            found = (*layer.factors(), *layer.inverses())
            for ours, its in zip(found, (*other.factors(), *other.inverses()), strict=True):
                assert ours.dtype == torch.float32
                assert (ours - its).norm() < 0.1 * its.norm(), (dtype, whole, name)
        for ours, its in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.dtype == (dtype if whole else torch.float32)
            assert optimizer.state[ours]["momentum_buffer"].dtype == torch.float32
            assert (ours.float() - its).norm() < 0.1 * its.norm()


def test_a_step_inside_autocast_loses_no_precision():
    model, optimizer, twin, plain = pair(THOR, update_interval=1)
    for x, labels in STREAM[:3]:
        cross_entropy(labels)(model(x)).backward()
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.step()
        optimizer.zero_grad()
    train(twin, plain, STREAM[:3])
    assert_same(weights(model), weights(twin))


# options of the optimizer, of the scaler, and of each step
SCALED = [
    ({"update_interval": 1}, {"scale": 2.0, "growth_interval": 1}, {}),
    ({"update_interval": 1}, {"scale": 2.0**60}, {}),  # its square would overflow
    ({}, {}, {"parts": 2, "clip": 0.1}),
    ({}, {"enabled": False}, {}),
]


@BOTH
def test_a_scaled_run_equals_the_unscaled_run(make):
    """A scale that is a power of two changes no bit in float32. THOR is told of the scaler once."""
    for options, scaling, how in SCALED:
        model, optimizer, twin, plain = pair(make, **{"update_interval": 2, **options})
        scaler = scaler_from(**scaling)
        if make is THOR:
            optimizer.grad_scaler = scaler
        for batch in STREAM:
            step(model, optimizer, batch, scaler, **how)
            step(twin, plain, batch, **how)
        case = f"{options} {scaling} {how}"
        assert_same(weights(model), weights(twin), case)
        assert_same(optimizer.state_dict(), plain.state_dict(), case)


@BOTH
@pytest.mark.parametrize("bad", [0, 1])
def test_a_skipped_step_leaves_no_trace(bad, make):
    """Whether a refresh is due or not, and where only the gradients are not finite."""
    for factor in (5, torch.inf):
        model, optimizer, twin, plain = pair(make, update_interval=2, factor_decay=0.5)
        scaler = optimizer.grad_scaler = scaler_from()
        for i, (x, labels) in enumerate(STREAM):
            if i == bad:
                before, state = weights(model), copy.deepcopy(optimizer.state_dict())
                scaler.scale(cross_entropy(labels)(model(x * factor))).backward()
                model[4].bias.grad[0] = torch.inf
                scaler.step(optimizer)
                scaler.update()
                model.zero_grad()
                assert_same(weights(model), before)
                assert_same(optimizer.state_dict(), state)
            step(model, optimizer, (x, labels), scaler)
        train(twin, plain, STREAM)
        assert_same(weights(model), weights(twin), f"{factor}")


def test_a_scaler_that_thor_was_not_told_of_is_an_error_on_a_refresh():
    """The statistics are scaled by a number that THOR cannot know."""
    model, optimizer, _, _ = pair(THOR)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"set optimizer\.grad_scaler = scaler once"):
        step(model, optimizer, STREAM[0], scaler_from())
    assert_same(weights(model), before)
