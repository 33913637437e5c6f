"""``THOR(..., fisher="sampled")`` in training loops; its factors: tests/curvature."""

import pytest
import torch
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tiny
from tiny import assert_same, batches, mlp, weights
from torch_thor import THOR

OPTIONS = {"lr": 0.02, "damping": 0.1, "split_dim": 4, "update_interval": 3, "fisher": "sampled"}
STREAM = batches(5)


class Fixed(Categorical):
    """A prediction whose label is the least likely class, whatever else is in the batch."""

    def sample(self, sample_shape=()):
        return self.logits.argmin(-1)


def fixed(logits):
    return Fixed(logits=logits)


def make(**options):
    torch.manual_seed(2)
    model = mlp()
    return model, THOR(model, **{**OPTIONS, **options})


def train(model, optimizer, stream, distribution=fixed, call=None, scaler=None):
    """The loop of the documentation."""
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for x, labels in stream:
        logits = (call or model)(x)
        optimizer.sample_fisher(logits, distribution)
        scaler.scale(F.cross_entropy(logits, labels)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def zeroed_before_the_backward_pass(model, optimizer):
    for x, labels in STREAM:
        logits = model(x)
        optimizer.sample_fisher(logits, fixed)
        optimizer.zero_grad()
        F.cross_entropy(logits, labels).backward()
        optimizer.step()


def evaluated(model, optimizer):
    for batch in STREAM:
        with torch.no_grad():
            optimizer.sample_fisher(model(5 * batch[0]))
        train(model, optimizer, [batch])


def checkpointed(model, optimizer):
    def call(x):
        return model[4](checkpoint(model[:4], x, use_reentrant=False))

    train(model, optimizer, STREAM, call=call)


def compiled(model, optimizer):
    train(model, optimizer, STREAM, call=torch.compile(model, backend="aot_eager"))


def scaled(model, optimizer):
    train(model, optimizer, STREAM, scaler=torch.amp.GradScaler("cpu", 1024.0))


def factors(optimizer):
    return [
        (*layer.factors(), torch.tensor(layer.rows_per_term))
        for layer in optimizer.curvature.values()
        if layer.refreshes
    ]


@pytest.mark.parametrize(
    "loop",
    [zeroed_before_the_backward_pass, evaluated, checkpointed, compiled, scaled],
)
def test_every_loop_takes_the_steps_of_the_ordinary_loop(loop):
    model, optimizer = make()
    loop(model, optimizer)
    twin, other = make()
    train(twin, other, STREAM)
    torch.testing.assert_close(weights(model), weights(twin), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(factors(optimizer), factors(other), rtol=1e-9, atol=1e-11)
    third, empirical = make(fisher="empirical")
    tiny.train(third, empirical, STREAM)
    assert not torch.equal(third[0].weight, twin[0].weight)


def test_gradients_and_random_numbers_stay_as_they_are():
    """No gradient of a weight is even computed, and the graph of the training loss is whole."""
    model, optimizer = make()
    (x, labels), computed = STREAM[0], []
    for parameter in model.parameters():
        parameter.register_hook(computed.append)
    logits, state = model(x), torch.get_rng_state()
    optimizer.sample_fisher(logits)
    assert torch.equal(torch.get_rng_state(), state)
    assert not computed
    assert all(parameter.grad is None for parameter in model.parameters())
    gradients = [
        torch.autograd.grad(F.cross_entropy(y, labels), [*model.parameters()])
        for y in (logits, model(x))
    ]
    assert_same(*gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_likelihood_is_taken_in_float32_inside_autocast(dtype):
    [(x, labels)] = batches(1, size=64, dtype=torch.float32)
    found = []

    def distribution(logits):
        assert logits.dtype == torch.float32
        return Fixed(logits=logits)

    for enabled in (False, True):
        model = make()[0].float()
        optimizer = THOR(model, **OPTIONS)
        with torch.autocast("cpu", dtype, enabled=enabled):
            logits = model(x)
            optimizer.sample_fisher(logits, distribution)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        found.append(factors(optimizer))
    torch.testing.assert_close(*found, rtol=0.05, atol=0.01)


def drawn(stream, skip=0, seed=0, **options):
    """The labels that are drawn for each batch of a refresh."""
    model, optimizer = make(**options)
    found = []

    class Recorded(Categorical):
        def sample(self, sample_shape=()):
            found.append(super().sample(sample_shape))
            return found[-1]

    torch.manual_seed(skip)  # torch's own generator has no say
    for x, labels in stream:
        for _ in range(2):  # micro-batches with the same inputs
            logits = model(x)
            optimizer.sample_fisher(logits, lambda y: Recorded(logits=y), seed=seed)
            F.cross_entropy(logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [tuple(labels.tolist()) for labels in found]


def test_labels_are_a_function_of_seed_step_and_call():
    """Also with the same predictions in two refreshes; none are drawn between refreshes."""
    stream = batches(1, size=64) * 3
    labels = drawn(stream, lr=0.0, update_interval=2)
    assert drawn(stream, skip=5, lr=0.0, update_interval=2) == labels
    others = drawn(stream, seed=1, lr=0.0, update_interval=2)
    assert len({*labels, *others}) == len([*labels, *others]) == 8


def test_a_batch_without_labels_has_no_rows_and_the_refresh_waits():
    model, optimizer = make()
    logits = model(STREAM[0][0])
    optimizer.sample_fisher(logits, mask=torch.zeros(8, dtype=torch.bool))
    logits.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not factors(optimizer)
    train(model, optimizer, STREAM[:1])
    assert optimizer.curvature["0"].refreshes == 1


ARGUMENTS = {
    "requires no gradient.*not detached": lambda y: {"output": y.detach()},
    "'softmax': must be one of 'categorical', 'bernoulli', 'normal', or a callable": lambda y: {
        "distribution": "softmax"
    },
    r"dim=None.*\(1, 8, 3\).*dim=1.*dim=-1": lambda y: {"output": y[None]},
    r"torch.int64 \(8,\).*bool.*labels != -100": lambda y: {"mask": y.argmax(-1)},
    "type tuple.*output.logits": lambda y: {"output": (y,)},
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_wrong_arguments_are_refused(message):
    model, optimizer = make()
    logits = model(STREAM[0][0])
    with pytest.raises(ValueError, match=message):
        optimizer.sample_fisher(**{"output": logits, **ARGUMENTS[message](logits)})


def test_calls_at_the_wrong_time_are_refused():
    model, optimizer = make()
    logits = model(STREAM[0][0])
    optimizer.sample_fisher(logits)
    with pytest.raises(RuntimeError, match=r"twice.*once"):
        optimizer.sample_fisher(logits)
    model, optimizer = make()
    logits = model(STREAM[0][0])
    logits.square().sum().backward()
    with pytest.raises(RuntimeError, match=r"after loss.backward.*between"):
        optimizer.sample_fisher(logits)
    with pytest.raises(RuntimeError, match=r'empirical.*leave the call out.*fisher="sampled"'):
        train(*make(fisher="empirical"), STREAM)
