"""``THOR(..., fisher="sampled")`` in training loops of all kinds; what its factors are stands in
tests/curvature.
"""

import copy
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tiny
from comparing import having
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


class Recorded(Categorical):
    """Keeps what it has drawn."""

    found: ClassVar = []

    def sample(self, sample_shape=()):
        self.found.append(super().sample(sample_shape))
        return self.found[-1]


def recorded(logits):
    return Recorded(logits=logits)


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
    """Of each batch: ``f`` forward pass (``x`` of other data, ``i`` of infinite data, ``1`` to
    ``4`` of a quarter, ``c`` of a copied model, ``r`` with reentrant checkpoints), ``e``
    evaluation, ``s`` sample_fisher(), ``b`` backward pass (``B`` of an infinite loss), ``u``
    unscale, ``o`` step, ``z`` optimizer.zero_grad(), ``m`` model.zero_grad().
    """
    factors = {"x": 5.0, "i": float("inf"), "B": float("inf")}
    calls = {"c": copy.deepcopy(model), "r": Checkpointed(model, True)}
    for x, labels in stream:
        for event in events:
            if event in "fxicr":
                data = (factors.get(event, 1.0) * x).requires_grad_(event == "r")
                logits, truth, share = calls.get(event, call or model)(data), labels, 1.0
            elif event in "1234":
                logits, truth, share = (
                    model(x.chunk(4)[int(event) - 1]),
                    labels.chunk(4)[int(event) - 1],
                    0.25,
                )
            elif event == "e":
                with torch.no_grad():
                    optimizer.sample_fisher(model(5 * x))
            elif event == "s":
                optimizer.sample_fisher(logits, **{"distribution": fixed, **drawn})
            elif event in "bB":
                loss = factors.get(event, 1.0) * share * F.cross_entropy(logits, truth)
                (scaler.scale(loss) if scaler else loss).backward()
            elif event == "u":
                scaler.unscale_(optimizer)
            elif event == "o" and scaler:
                scaler.step(optimizer)
                scaler.update()
            elif event == "o":
                optimizer.step()
            else:
                {"z": optimizer, "m": model}[event].zero_grad()


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
# what happens to each batch, the options of play() and the attributes of the optimizer, the
# tolerance
LOOPS = [
    *((events, {}, {}, EXACT) for events in ("zfsbo", "fszbo", "efsboz", "xsbmfsboz", "xsbzfsboz")),
    ("isbozfsBozfsboz", {}, {"nonfinite": "skip"}, EXACT),
    ("fsboz", {"call": lambda model: Checkpointed(model, False)}, {}, EXACT),
    ("fsboz", {"call": lambda model: torch.compile(model, backend="aot_eager")}, {}, ROUNDED),
    *(("1sb2sb3sb4sboz", {}, {"loss_terms": terms}, ROUNDED) for terms in (None, 8)),
    *(
        (e, {"scaler": lambda _: torch.amp.GradScaler("cpu", 1024.0)}, {}, ROUNDED)
        for e in ("fsboz", "fsbuoz")
    ),
]


def test_every_loop_takes_the_steps_of_the_ordinary_one():
    """On refresh steps and between them; and the steps are others than with the empirical
    Fisher.
    """
    twin, other = make()
    train(twin, other, STREAM)
    for events, options, attributes, tolerance in LOOPS:
        model, optimizer = make()
        having(optimizer, **attributes)
        play(
            events,
            model,
            optimizer,
            STREAM,
            **{name: build(model) for name, build in options.items()},
        )
        assert optimizer.skipped_steps == (2 * len(STREAM) if attributes.get("nonfinite") else 0)
        assert_close(weights(model), weights(twin), (events, options), **tolerance)
        assert_close(factors(optimizer), factors(other), (events, options), **tolerance)
    third, empirical = make(fisher="empirical")
    tiny.train(third, empirical, STREAM)
    assert not torch.equal(third[0].weight, twin[0].weight)


def test_autocast():
    """The likelihood is taken in float32, wherever it is asked for; the rest in what the model ran
    in.
    """
    [(x, labels)] = batches(1, size=64, dtype=torch.float32)
    seen, found = [], []

    def distribution(logits):
        seen.append(logits.dtype)
        return Fixed(logits=logits)

    for dtype, inside in (
        (None, False),
        (torch.bfloat16, True),
        (torch.float16, True),
        (torch.float16, False),
    ):
        model = make()[0].float()
        optimizer = THOR(model, **OPTIONS)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits = model(x)
            with torch.autocast("cpu", enabled=inside):
                optimizer.sample_fisher(logits, distribution)
        assert logits.dtype == (dtype or torch.float32)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()
        found.append(factors(optimizer))
        assert_close(found[-1], found[0], (dtype, inside), rtol=0.05, atol=0.01)
    assert seen == [torch.float32] * 4


def test_labels_are_a_function_of_seed_step_and_call():
    """Two refreshes with the same predictions; then the same inputs in four micro-batches: four
    samples, not one.
    """

    def drawn(seed, skip):
        model, optimizer = make(lr=0.0, update_interval=2)
        Recorded.found.clear()
        torch.manual_seed(skip)  # torch's own generator has no say
        train(model, optimizer, batches(1, size=64) * 3, distribution=recorded, seed=seed)
        return list(Recorded.found)

    (first, second), (again, _), (other, _) = drawn(0, skip=0), drawn(0, skip=5), drawn(1, skip=0)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)
    model, optimizer = make()
    Recorded.found.clear()
    play("fsfsfsfs", model, optimizer, batches(1, size=32), distribution=recorded)
    assert len({tuple(labels.tolist()) for labels in Recorded.found}) == 4
    model, optimizer = make()
    Recorded.found.clear()
    # and none between refreshes
    for events, draws in (("fsboz", 1), ("fsboz", 1), ("fboz", 1), ("fsboz", 2)):
        play(events, model, optimizer, STREAM[:1], distribution=recorded)
        assert len(Recorded.found) == draws


def test_no_labels_are_no_rows():
    """All masked or in an empty batch: the refresh waits, with a warning."""
    for size in (8, 0):
        model, optimizer = make()
        logits = model(STREAM[0][0][:size])
        optimizer.sample_fisher(logits, mask=torch.zeros(size, dtype=torch.bool))
        logits.square().sum().backward()
        with pytest.warns(RuntimeWarning, match="saw no rows"):
            optimizer.step()
        optimizer.zero_grad()
        assert not factors(optimizer)
        train(model, optimizer, STREAM[:1])
        assert optimizer.curvature["0"].refreshes == 1


def test_two_optimizers_of_one_model():
    """The one's sampled pass brings nothing to the other, whose statistics are those of the
    training loss.
    """
    model, (x, labels) = mlp(), STREAM[0]
    options = {"model": model, "lr": 0.0}
    pair = [
        THOR(model[0].parameters(), fisher="sampled", **options),
        THOR(model[2:].parameters(), **options),
    ]
    alone = [THOR(model, lr=0.0, fisher=fisher) for fisher in ("sampled", "empirical")]
    for together in (pair, alone[:1], alone[1:]):
        logits = model(x)
        if together[0].fisher == "sampled":
            together[0].sample_fisher(logits, fixed)
        F.cross_entropy(logits, labels).backward()
        for optimizer in together:
            optimizer.step()
        model.zero_grad()
    for optimizer, other in zip(pair, alone, strict=True):
        found = factors(optimizer)
        assert_close(found, {name: factors(other)[name] for name in found})


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


def test_arguments_that_are_wrong():
    for message, arguments in ARGUMENTS.items():
        model, optimizer = make()
        logits = model(STREAM[0][0])
        with pytest.raises(ValueError, match=message):
            optimizer.sample_fisher(**{"output": logits, **arguments(logits)})


# what happens to a batch
MISUSES = {
    "fbo": r"sample_fisher\(output\).*between the forward pass and loss.backward",
    "fsbzfbo": "this step refreshes",
    "fss": r"twice.*once",
    "fbs": r"after loss.backward.*between",
    "csfbo": r"depends on no layer.*copied model",
    "rsbo": r"use_reentrant=True.*use_reentrant=False",
}


def test_calls_at_the_wrong_time():
    """Nothing has changed, and the next step is that of an optimizer to which it has not
    happened.
    """
    twin, its = make()
    train(twin, its, STREAM[1:2])
    for events, message in MISUSES.items():
        model, optimizer = make()
        before = weights(model)
        with pytest.raises(RuntimeError, match=message):
            play(events, model, optimizer, STREAM[:1])
        assert_same(weights(model), before)
        optimizer.zero_grad()
        train(model, optimizer, STREAM[1:2])
        assert_close(weights(model), weights(twin), events, rtol=0, atol=0)
    with pytest.raises(FloatingPointError):
        play("isbo", model, optimizer, STREAM[:1])
    with pytest.raises(RuntimeError, match=r'empirical.*leave the call out.*fisher="sampled"'):
        train(*make(fisher="empirical"), STREAM)


def test_a_layer_that_the_prediction_does_not_depend_on():
    model, (x, labels) = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 2)]).double(), STREAM[0]
    optimizer, scores = THOR(model, fisher="sampled"), model[0](x)
    optimizer.sample_fisher(scores)
    (F.cross_entropy(scores, labels) + model[1](x).square().mean()).backward()
    with pytest.warns(
        RuntimeWarning, match=r"'1'.*sample_fisher\(\) does not depend on it.*layers="
    ):
        optimizer.step()
    assert {name: layer.refreshes for name, layer in optimizer.curvature.items()} == {
        "0": 1,
        "1": 0,
    }
