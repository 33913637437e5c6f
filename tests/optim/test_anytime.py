"""ThorMuon(anytime=True): z takes the steps, x is their average, and parameters hold y between.

The first steps: tests/test_readable_reference.py.
"""

import copy
from functools import partial

import pytest
import torch
from test_state import EVERY_WAY
from torch.optim.lr_scheduler import LambdaLR

from tiny import assert_same, backward, batches, mlp, train, weights
from torch_thor import ThorMuon

STREAM = batches(8)


def made(build=mlp, **options):
    model = build()
    return model, ThorMuon(model, **{"lr": 0.05, "update_interval": 2, "anytime": True, **options})


def last_steps(model, optimizer):
    return {name: optimizer.state[p]["z"].clone() for name, p in model.named_parameters()}


def averages(model, optimizer):
    """Return x, which the parameters hold in the evaluation mode."""
    before = weights(model)
    optimizer.eval()
    found = weights(model)
    optimizer.train()
    for name, value in weights(model).items():
        torch.testing.assert_close(value, before[name], rtol=1e-12, atol=1e-14)
    return found


def beta(steps):
    return 1 - 0.2 * min(1.0, 100 / steps) ** 0.3


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12)


def test_steps_are_averaged_with_the_weights_of_their_squared_rates():
    """β grows after 100 steps. The first rate and another are 0."""
    rates = [0.0, *(0.05 * (1 - step / 200) for step in range(129)), 0.0, 0.01]
    model, optimizer = made(lr=1.0)
    scheduler = LambdaLR(optimizer, lambda step: rates[min(step, len(rates) - 1)])
    total, average = 0.0, weights(model)
    for step, (rate, batch) in enumerate(zip(rates, batches(len(rates)), strict=True), 1):
        assert optimizer.param_groups[0]["lr"] == rate
        train(model, optimizer, [batch])
        scheduler.step()
        total += rate**2
        z = last_steps(model, optimizer)
        for name, x in average.items():
            x.lerp_(z[name], rate**2 / max(total, 1e-300))
        y = {name: z[name].lerp(average[name], beta(step)) for name in z}
        assert_close(weights(model), y)
    assert_close(averages(model, optimizer), average)
    assert optimizer.param_groups[0]["lr_squares"] == pytest.approx(total)


def test_gradients_are_taken_at_y_and_decay_and_bound_act_on_z():
    """A step equals the step of a plain ThorMuon with the weights z and the gradients of y."""
    options = {"weight_decay": 0.3, "max_update_ratio": 0.01, "update_interval": 100}
    model, optimizer = made(**options)
    train(model, optimizer, STREAM[:4])
    z = last_steps(model, optimizer)
    twin = mlp()
    plain = ThorMuon(twin, lr=0.05, **options)
    train(twin, plain, STREAM[:1])
    plain.load_state_dict(optimizer.state_dict())
    backward(model, STREAM[4])
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(z[name])
            parameter.grad = model.get_parameter(name).grad.clone()
    optimizer.step()
    plain.step()
    assert_close(last_steps(model, optimizer), weights(twin))


@pytest.mark.parametrize("way", EVERY_WAY)
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_resumed_run_equals_a_run_that_was_not_stopped(way, evaluates):
    (model, optimizer), (other, again) = made(), made()
    train(model, optimizer, STREAM[:3])
    if evaluates:
        optimizer.eval()
    with torch.no_grad():
        torch._foreach_zero_(list(other.parameters()))
    way((model, optimizer), (other, again))
    assert_same(weights(other), weights(model))
    for each in (optimizer, again):
        each.train()
    for each in ((model, optimizer), (other, again)):
        train(*each, STREAM[3:])
    assert_same(weights(other), weights(model))
    assert_same(again.state_dict(), optimizer.state_dict())


def test_the_option_may_be_switched_on_and_off_at_a_checkpoint():
    """Only z is added to the state."""
    (model, plain), (twin, optimizer) = made(anytime=False), made()
    train(model, plain, STREAM[:3])
    twin.load_state_dict(model.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    for each in ((model, plain), (twin, optimizer)):
        train(*each, STREAM[3:4])
    assert_close(weights(twin), weights(model))  # the first step of an average is all of it
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert optimizer.state[q].keys() - plain.state[p].keys() == {"z"}
    plain.load_state_dict(optimizer.state_dict())
    model.load_state_dict(twin.state_dict())
    train(model, plain, STREAM[4:5])
    assert not any("z" in state for state in plain.state.values())


def test_a_step_in_the_evaluation_mode_is_an_error():
    model, optimizer = made()
    backward(model, STREAM[0])
    optimizer.step()
    optimizer.eval()
    before = copy.deepcopy((weights(model), optimizer.state_dict()))
    backward(model, STREAM[1])
    with pytest.raises(RuntimeError, match=r"because optimizer.eval\(\) was called: call optimiz"):
        optimizer.step()
    assert_same((weights(model), optimizer.state_dict()), before)
    optimizer.train()
    optimizer.step()
    # without the option they do nothing, because trainers call them
    model, plain = made(anytime=False)
    train(model, plain, STREAM[:2])
    before = weights(model)
    plain.eval()
    plain.step()
    plain.train()
    assert_same(weights(model), before)


def test_parameters_of_bfloat16_lose_nothing_of_the_average():
    """z and x are float32, and the parameters are y, rounded."""
    model, optimizer = made(partial(mlp, dtype=torch.bfloat16))
    train(model, optimizer, batches(120, dtype=torch.bfloat16))
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert (state["z"].dtype, state["x"].dtype) == (torch.float32, torch.float32), name
        y = torch.lerp(state["x"], state["z"], 1 - beta(120))
        assert torch.equal(parameter, y.bfloat16())
    optimizer.eval()
    for parameter in model.parameters():
        assert torch.equal(parameter, optimizer.state[parameter]["x"].bfloat16())
