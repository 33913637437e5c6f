"""``THOR(..., fisher="sampled")`` in training loops; its factors: tests/curvature."""

import gc
import weakref

import pytest
import torch
from torch import nn
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


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        return self.model[4](checkpoint(self.model[:4], x, use_reentrant=self.reentrant))


def make(**options):
    torch.manual_seed(2)
    model = mlp()
    return model, THOR(model, **{**OPTIONS, **options})


def play(events, model, optimizer, stream, call=None, scaler=None, **drawn):
    """Of each batch: ``f`` forward pass (``x`` of other data, ``1`` to ``4`` of a quarter, ``r`` by
    reentrant checkpoints), ``e`` evaluation, ``s`` sample_fisher(), ``b`` backward pass, ``u``
    unscale, ``o`` step, ``z`` optimizer.zero_grad().
    """
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    for x, labels in stream:
        for event in events:
            if event in "fxr":
                data = (5.0 * x if event == "x" else x).requires_grad_(event == "r")
                called = Checkpointed(model, True) if event == "r" else call or model
                logits, truth, share = called(data), labels, 1.0
            elif event in "1234":
                quarter, truth = (each.chunk(4)[int(event) - 1] for each in (x, labels))
                logits, share = model(quarter), 0.25
            elif event == "e":
                with torch.no_grad():
                    optimizer.sample_fisher(model(5 * x))
            elif event == "s":
                optimizer.sample_fisher(logits, **{"distribution": fixed, **drawn})
            elif event == "b":
                scaler.scale(share * F.cross_entropy(logits, truth)).backward()
            elif event == "u":
                scaler.unscale_(optimizer)
            elif event == "o":
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.zero_grad()


def train(model, optimizer, stream, **drawn):
    """The loop of the documentation."""
    play("fsboz", model, optimizer, stream, **drawn)


def factors(optimizer):
    return {
        f"{name}.{which}": factor
        for name, layer in optimizer.curvature.items()
        if layer.refreshes
        for which, factor in zip(
            ("A", "G", "T"), (*layer.factors(), torch.tensor(layer.rows_per_term)), strict=True
        )
    }


def assert_close(ours, its, case=None, rtol=1e-12, atol=1e-14):
    torch.testing.assert_close(ours, its, rtol=rtol, atol=atol, msg=lambda text: f"{case}: {text}")


def test_it_leaves_alone_gradients_random_numbers_and_what_is_dropped():
    """No gradient of a weight is even computed, and the training loss's graph is still whole."""
    model, optimizer = make()
    (x, labels), computed, seen = STREAM[0], [], []
    for parameter in model.parameters():
        parameter.register_hook(computed.append)
    with model[1].register_forward_hook(lambda _m, _i, output: seen.append(weakref.ref(output))):
        model(x)
    gc.collect()
    assert seen[0]() is None
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


EXACT, ROUNDED = {"rtol": 0, "atol": 0}, {"rtol": 1e-9, "atol": 1e-11}
SCALER = {"scaler": lambda _: torch.amp.GradScaler("cpu", 1024.0)}
# what happens to each batch, the options of play(), loss_terms, the tolerance
LOOPS = [
    *((events, {}, None, EXACT) for events in ("zfsbo", "fszbo", "efsboz")),
    ("xsbzfsboz", {}, None, EXACT),
    ("fsboz", {"call": lambda model: Checkpointed(model, False)}, None, EXACT),
    ("fsboz", {"call": lambda model: torch.compile(model, backend="aot_eager")}, None, ROUNDED),
    *(("1sb2sb3sb4sboz", {}, terms, ROUNDED) for terms in (None, 8)),
    *((events, SCALER, None, ROUNDED) for events in ("fsboz", "fsbuoz")),
]


def test_every_loop_takes_the_steps_of_the_ordinary_one():
    """On refresh steps and between them; with the empirical Fisher the steps are others."""
    twin, other = make()
    train(twin, other, STREAM)
    for events, options, terms, tolerance in LOOPS:
        model, optimizer = make()
        optimizer.loss_terms = terms
        options = {name: build(model) for name, build in options.items()}
        play(events, model, optimizer, STREAM, **options)
        assert_close(weights(model), weights(twin), (events, options), **tolerance)
        assert_close(factors(optimizer), factors(other), (events, options), **tolerance)
    third, empirical = make(fisher="empirical")
    tiny.train(third, empirical, STREAM)
    assert not torch.equal(third[0].weight, twin[0].weight)


@pytest.mark.parametrize(
    ("dtype", "inside"),
    [(torch.bfloat16, True), (torch.float16, True), (torch.float16, False)],
)
def test_autocast(dtype, inside):
    """The likelihood is taken in float32, wherever it is asked for."""
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
            with torch.autocast("cpu", enabled=inside):
                optimizer.sample_fisher(logits, distribution)
        assert logits.dtype == (dtype if enabled else torch.float32)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        found.append(factors(optimizer))
    assert_close(*found, rtol=0.05, atol=0.01)


def drawn(events="fsboz", size=64, times=1, skip=0, seed=0, **options):
    """The labels that are drawn for a batch that is played some times."""
    model, optimizer = make(**options)
    found = []

    class Recorded(Categorical):
        def sample(self, sample_shape=()):
            found.append(super().sample(sample_shape))
            return found[-1]

    torch.manual_seed(skip)  # torch's own generator has no say
    stream = batches(1, size) * times
    own = {"distribution": lambda logits: Recorded(logits=logits), "seed": seed}
    play(events, model, optimizer, stream, **own)
    return [tuple(labels.tolist()) for labels in found]


def test_labels_are_a_function_of_seed_step_and_call():
    """Also with the same predictions in two refreshes, or the same inputs in micro-batches."""
    still = {"lr": 0.0, "update_interval": 2, "times": 3}
    first, second = drawn(**still)
    assert drawn(skip=5, **still) == [first, second]
    assert len({first, second, *drawn(seed=1, **still)}) == 4
    assert len(set(drawn("fsfsfsfs", size=32))) == 4
    # none between refreshes: of these four steps the first and the last refresh
    assert len(drawn(times=4)) == 2


@pytest.mark.parametrize("size", [8, 0])
def test_no_labels_are_no_rows(size):
    """All masked or in an empty batch: the refresh waits."""
    model, optimizer = make()
    logits = model(STREAM[0][0][:size])
    optimizer.sample_fisher(logits, mask=torch.zeros(size, dtype=torch.bool))
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
    "callable that makes a torch.distributions.Distribution": lambda y: {
        "distribution": lambda y: y.softmax(-1)
    },
    r"dim=None.*\(1, 8, 3\).*dim=1.*dim=-1": lambda y: {"output": y[None]},
    r"dim=2.*\(8, 3\)": lambda y: {"dim": 2},
    "dim=1.*categorical.*leave it out": lambda y: {"distribution": "normal", "dim": 1},
    r"torch.int64 \(8,\).*bool.*labels != -100": lambda y: {"mask": y.argmax(-1)},
    r"torch.bool \(8, 3\).*\(8,\)": lambda y: {"mask": torch.ones(8, 3, dtype=torch.bool)},
    "type tuple.*output.logits": lambda y: {"output": (y,)},
}


@pytest.mark.parametrize("message", ARGUMENTS)
def test_arguments_that_are_wrong(message):
    model, optimizer = make()
    logits = model(STREAM[0][0])
    with pytest.raises(ValueError, match=message):
        optimizer.sample_fisher(**{"output": logits, **ARGUMENTS[message](logits)})


# what happens to a batch
MISUSES = {
    "fss": r"twice.*once",
    "fbs": r"after loss.backward.*between",
    "rsbo": r"use_reentrant=True.*use_reentrant=False",
}


@pytest.mark.parametrize("events", MISUSES)
def test_calls_at_the_wrong_time(events):
    """Nothing has changed, and the next step is that of an optimizer that they did not reach."""
    (twin, its), (model, optimizer) = make(), make()
    before = weights(model)
    with pytest.raises(RuntimeError, match=MISUSES[events]):
        play(events, model, optimizer, STREAM[:1])
    assert_same(weights(model), before)
    optimizer.zero_grad()
    for each in ((model, optimizer), (twin, its)):
        train(*each, STREAM[1:2])
    assert_same(weights(model), weights(twin))
    with pytest.raises(RuntimeError, match=r'empirical.*leave the call out.*fisher="sampled"'):
        train(*make(fisher="empirical"), STREAM)
