"""``THOR(..., fisher="sampled")`` in training loops of all kinds; what its factors are stands in tests/curvature."""

import copy
import gc
import weakref
from typing import ClassVar

import pytest
import torch
from test_state import round_trip
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tiny
from comparing import having
from tiny import assert_same, batches, mlp, weights
from torch_thor import THOR

OPTIONS = {"lr": 0.02, "damping": 0.1, "split_dim": 4, "update_interval": 3, "fisher": "sampled"}


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


def make(attributes=None, **options):
    torch.manual_seed(2)
    model = mlp()
    return model, having(THOR(model, **{**OPTIONS, **options}), **(attributes or {}))


def step(model, optimizer, x, labels, **options):
    """The loop of the documentation."""
    logits = model(x)
    optimizer.sample_fisher(logits, **options)
    F.cross_entropy(logits, labels).backward()
    optimizer.step()
    optimizer.zero_grad()


def train(model, optimizer, stream, **options):
    for x, labels in stream:
        step(model, optimizer, x, labels, **options)


def assert_one_step_equals(model, optimizer, x, labels, **tolerance):
    """Weights and factors are those of the ordinary loop."""
    twin, its = make()
    step(twin, its, x, labels, distribution=fixed)
    assert_same_factors(optimizer, its, **tolerance)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def factors(optimizer):
    return {
        f"{name}.{which}": factor
        for name, layer in optimizer.curvature.items()
        if layer.refreshes
        for which, factor in zip(("A", "G", "T"), (*layer.factors(), torch.tensor(layer.rows_per_term)), strict=True)
    }


def assert_same_factors(left, right, **tolerance):
    ours, its = factors(left), factors(right)
    assert ours.keys() == its.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], its[name], **(tolerance or {"rtol": 1e-12, "atol": 1e-14}), msg=name)


# ---- what it leaves alone -----------------------------------------------------------------------------------------


def test_gradients_and_random_numbers_are_as_without_it():
    """Also no gradient of a weight is even computed, and the training loss's graph is still whole."""
    model, optimizer = make()
    [(x, labels)] = batches(1)
    computed = []
    for parameter in model.parameters():
        parameter.register_hook(computed.append)
    logits = model(x)
    state = torch.get_rng_state()
    optimizer.sample_fisher(logits)
    assert torch.equal(torch.get_rng_state(), state)
    assert not computed
    ours = torch.autograd.grad(F.cross_entropy(logits, labels), [*model.parameters()])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_same(list(ours), list(torch.autograd.grad(F.cross_entropy(model(x), labels), [*model.parameters()])))


def test_between_refreshes_nothing_is_drawn_and_nothing_is_needed():
    model, optimizer = make()
    stream = batches(3)
    train(model, optimizer, stream[:1])
    calls = []

    def distribution(logits):
        calls.append(1)
        return Categorical(logits=logits)

    train(model, optimizer, stream[1:2], distribution=distribution)
    F.cross_entropy(model(stream[2][0]), stream[2][1]).backward()
    optimizer.step()
    assert not calls
    train(model, optimizer, stream[:1], distribution=distribution)
    assert calls == [1]


def test_passes_that_are_not_sampled_leave_nothing_behind():
    """Not the activations of a pass that is dropped, nor anything of an evaluation."""
    model, optimizer = make()
    [(x, labels)] = batches(1)
    seen = []
    handle = model[1].register_forward_hook(lambda _m, _i, output: seen.append(weakref.ref(output)))
    model(x)
    gc.collect()
    assert seen[0]() is None
    handle.remove()
    with torch.no_grad():
        optimizer.sample_fisher(model(x))
    step(model, optimizer, x, labels, distribution=fixed)
    assert_one_step_equals(model, optimizer, x, labels, rtol=0, atol=0)


def test_zero_grad_may_stand_anywhere():
    twin, its = make()
    train(twin, its, batches(5))
    for when in ("before the forward pass", "before backward", "after the step"):
        model, optimizer = make()
        for x, labels in batches(5):
            if when == "before the forward pass":
                optimizer.zero_grad()
            logits = model(x)
            optimizer.sample_fisher(logits)
            loss = F.cross_entropy(logits, labels)
            if when == "before backward":
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if when == "after the step":
                optimizer.zero_grad()
        assert_same(weights(model), weights(twin))
        assert_same_factors(optimizer, its, rtol=0, atol=0)


def test_a_pass_whose_gradients_are_dropped_leaves_no_statistics():
    """Nor does it stand in for one that is missing."""
    (x, labels), second = batches(2)
    for dropped, sampled in ((0, True), (1, True), (1, False)):
        model, optimizer = make()
        logits = model(x)
        optimizer.sample_fisher(logits, fixed)
        F.cross_entropy(logits, labels).backward()
        (model, optimizer)[dropped].zero_grad()
        if sampled:
            step(model, optimizer, *second, distribution=fixed)
            assert_one_step_equals(model, optimizer, *second, rtol=0, atol=0)
        else:
            F.cross_entropy(model(second[0]), second[1]).backward()
            with pytest.raises(RuntimeError, match="this step refreshes"):
                optimizer.step()


# ---- whose labels -------------------------------------------------------------------------------------------------


def drawn(seed=0, skip=0):
    """The labels that two refreshes draw from the same predictions."""
    model, optimizer = make(lr=0.0, update_interval=2)
    Recorded.found.clear()
    torch.manual_seed(skip)  # torch's own generator has no say
    train(model, optimizer, batches(1, size=64) * 3, distribution=lambda y: Recorded(logits=y), seed=seed)
    return list(Recorded.found)


def test_labels_are_a_function_of_seed_and_step():
    (first, second), (again, _), (other, _) = drawn(), drawn(skip=5), drawn(seed=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, second)


def test_every_call_of_a_step_draws_its_own():
    """The same inputs in four micro-batches: four times the same uniform numbers would be one sample, not four."""
    model, optimizer = make()
    x = batches(1, size=32)[0][0]
    Recorded.found.clear()
    for _ in range(4):
        optimizer.sample_fisher(model(x), lambda y: Recorded(logits=y))
    assert len({tuple(labels.tolist()) for labels in Recorded.found}) == 4


def test_resumes_bit_for_bit():
    options = {"trace_thresholds": (0.02, 0.005), "factor_decay": 0.5}
    stream = batches(11)
    model, optimizer = make(**options)
    train(model, optimizer, stream, seed=3)
    for stop in (1, 3, 4):
        first, its = make(**options)
        train(first, its, stream[:stop], seed=3)
        saved = round_trip((first.state_dict(), its.state_dict()))
        second, resumed = make(**options)
        torch.manual_seed(99)  # another process
        second.load_state_dict(saved[0])
        resumed.load_state_dict(saved[1])
        train(second, resumed, stream[stop:], seed=3)
        assert_same(weights(model), weights(second))
        assert_same_factors(optimizer, resumed, rtol=0, atol=0)


# ---- training loops -----------------------------------------------------------------------------------------------


def test_gradient_accumulation_equals_the_whole_batch():
    [(x, labels)] = batches(1, size=12)
    for given in (None, 12):
        model, optimizer = make({"loss_terms": given})
        for some, truth in zip(x.chunk(3), labels.chunk(3), strict=True):
            logits = model(some)
            optimizer.sample_fisher(logits, fixed)
            (F.cross_entropy(logits, truth) / 3).backward()
        optimizer.step()
        assert_one_step_equals(model, optimizer, x, labels)


def test_loss_terms_are_the_labels_unless_given():
    for given, expected in ((None, 6 / 4), (12, 6 / 12)):
        model, optimizer = make({"loss_terms": given})
        x, mask = torch.randn(2, 3, 5).double(), torch.tensor([[True, True, False], [True, True, False]])
        logits = model(x)
        optimizer.sample_fisher(logits, dim=-1, mask=mask)
        F.cross_entropy(logits[mask], torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()
        assert optimizer.curvature["0"].rows_per_term == expected


def test_a_gradient_scaler_does_not_scale_the_sampled_pass():
    [(x, labels)] = batches(1)
    for unscaled_first in (False, True):
        model, optimizer = make()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        logits = model(x)
        optimizer.sample_fisher(logits, fixed)
        scaler.scale(F.cross_entropy(logits, labels)).backward()
        if unscaled_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        assert_one_step_equals(model, optimizer, x, labels)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """The likelihood is taken in float32, wherever it is asked for; the rest in what the model ran in."""
    [(x, labels)] = batches(1, size=64, dtype=torch.float32)
    seen = []

    def distribution(logits):
        seen.append(logits.dtype)
        return Fixed(logits=logits)

    optimizers = []
    for enabled, inside in ((False, True), (True, True), (True, False)):
        model = make()[0].float()
        optimizers.append(THOR(model, **OPTIONS))
        with torch.autocast("cpu", dtype, enabled=enabled):
            logits = model(x)
        with torch.autocast("cpu", dtype, enabled=enabled and inside):
            optimizers[-1].sample_fisher(logits, distribution)
        assert logits.dtype == (dtype if enabled else torch.float32)
        F.cross_entropy(logits.float(), labels).backward()
        optimizers[-1].step()
        assert_same_factors(optimizers[-1], optimizers[0], rtol=0.05, atol=0.01)
    assert seen == [torch.float32] * 3


def test_a_step_that_is_skipped_leaves_no_statistics():
    [(x, labels)] = batches(1)
    model, optimizer = make({"nonfinite": "skip"})
    before = weights(model)
    step(model, optimizer, x * float("nan"), labels)
    logits = model(x)
    optimizer.sample_fisher(logits, fixed)
    (F.cross_entropy(logits, labels) * float("inf")).backward()
    optimizer.step()
    assert optimizer.skipped_steps == 2
    assert_same(before, weights(model))
    optimizer.zero_grad()
    step(model, optimizer, x, labels, distribution=fixed)
    assert_one_step_equals(model, optimizer, x, labels, rtol=0, atol=0)
    model, optimizer = make()
    with pytest.raises(FloatingPointError):
        step(model, optimizer, x * float("nan"), labels)


def test_an_excluded_class_is_never_drawn():
    model, optimizer = make()
    x = batches(1, size=64)[0][0]
    Recorded.found.clear()
    logits = model(x).masked_fill(torch.tensor([False, True, False]), -torch.inf)
    optimizer.sample_fisher(logits, lambda y: Recorded(logits=y))
    assert set(Recorded.found[0].tolist()) == {0, 2}
    logits.logsumexp(-1).mean().backward()
    optimizer.step()
    assert all(torch.isfinite(factor).all() for factor in factors(optimizer).values())


def test_no_labels_are_no_rows():
    """Every label masked, or an empty batch: the refresh waits, with the warning of every batch without rows."""
    for size in (8, 0):
        x = batches(1)[0][0][:size]
        model, optimizer = make()
        logits = model(x)
        optimizer.sample_fisher(logits, mask=torch.zeros(len(x), dtype=torch.bool))
        logits.square().sum().backward()
        with pytest.warns(RuntimeWarning, match="saw no rows"):
            optimizer.step()
        optimizer.zero_grad()
        assert optimizer.curvature["0"].refreshes == 0
        step(model, optimizer, *batches(1)[0])
        assert optimizer.curvature["0"].refreshes == 1


class Checkpointed(nn.Module):
    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        return self.model[4](checkpoint(self.model[:4], x, use_reentrant=self.reentrant))


def test_activation_checkpointing():
    """Reentrant ones, through which torch cannot go, are one error."""
    [(x, labels)] = batches(1)
    model, optimizer = make()
    step(Checkpointed(model, False), optimizer, x, labels, distribution=fixed)
    assert_one_step_equals(model, optimizer, x, labels, rtol=0, atol=0)
    model, optimizer = make()
    with pytest.raises(RuntimeError, match=r"use_reentrant=True.*use_reentrant=False"):
        step(Checkpointed(model, True), optimizer, x.requires_grad_(), labels)


def test_compiled_model():
    """And it is another training than with the empirical Fisher."""
    stream = batches(7)
    model, optimizer = make()
    train(torch.compile(model, backend="aot_eager"), optimizer, stream, distribution=fixed)
    twin, its = make()
    train(twin, its, stream, distribution=fixed)
    assert_same_factors(optimizer, its, rtol=1e-9, atol=1e-11)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    third, its = make(fisher="empirical")
    tiny.train(third, its, stream)
    assert not torch.equal(third[0].weight, twin[0].weight)


class Everything(nn.Module):
    """Tokens, attention, a module that runs twice, a branch that joins late, in-place functions, a skipped layer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(7, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.twice = nn.Linear(6, 6)
        self.late = nn.Sequential(nn.Conv1d(3, 6, 1), nn.ReLU(inplace=True), nn.BatchNorm1d(6))
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 4)

    def forward(self, tokens, signal):
        x = self.tokens(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.frozen(self.twice(torch.tanh_(self.twice(x))))
        return self.head(x.mean(1) + self.late(signal).mean(-1))


def test_every_layer_of_a_graph_is_reached_once():
    """With the training labels as samples, every factor is that of the empirical Fisher: no row missing, none twice."""

    class Known(Categorical):
        def sample(self, sample_shape=()):
            return labels

    generator = torch.Generator().manual_seed(1)
    tokens, labels = (torch.randint(high, size, generator=generator) for high, size in ((7, (8, 5)), (4, (8,))))
    signal = torch.randn(8, 3, 2, generator=generator, dtype=torch.float64)
    torch.manual_seed(1)
    model = Everything().double()
    optimizers = []
    for fisher in ("empirical", "sampled"):
        optimizer = THOR(model, lr=0.0, fisher=fisher, split_dim=4)
        logits = model(tokens, signal)
        if fisher == "sampled":
            optimizer.sample_fisher(logits, lambda y: Known(logits=y))
        F.cross_entropy(logits, labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizers.append(optimizer)
        del optimizer
    assert len(factors(optimizers[0])) == 3 * 8
    assert_same_factors(*optimizers)


@pytest.mark.parametrize("fisher", ["empirical", "sampled"])
def test_rows_of_padding_leave_the_factors(fisher):
    """With `row_mask`, and labels masked alike, the factors are those of the tokens that count alone."""
    torch.manual_seed(4)
    model, x, keep = mlp(), torch.randn(2, 3, 5).double(), torch.tensor([[True, True, False], [True, False, False]])
    optimizers = []
    for some, mask in ((x, keep), (x[keep], None)):
        optimizer = having(THOR(model, lr=0.0, fisher=fisher, split_dim=4), loss_terms=3)
        optimizer.row_mask = mask
        logits = model(some)
        if fisher == "sampled":
            optimizer.sample_fisher(logits, fixed, mask=mask)
        logits = logits if mask is None else logits[mask]
        F.cross_entropy(logits, fixed(logits).sample()).backward()
        optimizer.step()
        optimizers.append(optimizer)
        model.zero_grad()
    assert_same_factors(*optimizers)


def test_two_optimizers_of_one_model():
    """The one's sampled pass brings nothing to the other, whose statistics are those of the training loss."""

    def stepped(**parts):
        pair = [THOR(p.parameters(), model=model, lr=0.0, split_dim=4, fisher=fisher) for fisher, p in parts.items()]
        logits = model(x)
        if "sampled" in parts:
            pair[0].sample_fisher(logits, fixed)
        F.cross_entropy(logits, labels).backward()
        for optimizer in pair:
            optimizer.step()
        model.zero_grad()
        return {name: value for optimizer in pair for name, value in factors(optimizer).items()}

    model, [(x, labels)] = mlp(), batches(1)
    together = stepped(sampled=model[0], empirical=model[2:])
    alone = {fisher: stepped(**{fisher: model}) for fisher in ("sampled", "empirical")}
    for name, value in together.items():
        wanted = alone["sampled" if name.startswith("0") else "empirical"][name]
        torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-14)


# ---- what is wrong is one error -----------------------------------------------------------------------------------


def test_a_refresh_without_samples():
    [(x, labels)] = batches(1)
    model, optimizer = make()
    before = weights(model)
    F.cross_entropy(model(x), labels).backward()
    with pytest.raises(RuntimeError, match=r"sample_fisher\(output\).*between the forward pass and loss.backward"):
        optimizer.step()
    assert_same(before, weights(model))
    optimizer.zero_grad()
    step(model, optimizer, x, labels)


MISUSES = {
    "requires no gradient.*not detached": lambda y: {"output": y.detach()},
    "'softmax': must be one of 'categorical', 'bernoulli', 'normal', or a callable": lambda y: {
        "distribution": "softmax"
    },
    "callable that makes a torch.distributions.Distribution": lambda y: {"distribution": lambda y: y.softmax(-1)},
    r"dim=None.*\(1, 8, 3\).*dim=1.*dim=-1": lambda y: {"output": y[None]},
    r"dim=2.*\(8, 3\)": lambda y: {"dim": 2},
    "dim=1.*categorical.*leave it out": lambda y: {"distribution": "normal", "dim": 1},
    r"torch.int64 \(8,\).*bool.*labels != -100": lambda y: {"mask": y.argmax(-1)},
    r"torch.bool \(8, 3\).*\(8,\)": lambda y: {"mask": torch.ones(8, 3, dtype=torch.bool)},
    "type tuple.*output.logits": lambda y: {"output": (y,)},
}


def test_arguments_that_are_wrong():
    for message, arguments in MISUSES.items():
        model, optimizer = make()
        logits = model(batches(1)[0][0])
        with pytest.raises(ValueError, match=message):
            optimizer.sample_fisher(**{"output": logits, **arguments(logits)})


def test_calls_at_the_wrong_time():
    model, optimizer = make()
    logits = model(batches(1)[0][0])
    optimizer.sample_fisher(logits)
    with pytest.raises(RuntimeError, match=r"twice.*once"):
        optimizer.sample_fisher(logits)
    model, optimizer = make()
    logits = model(batches(1)[0][0])
    logits.sum().backward()
    with pytest.raises(RuntimeError, match=r"after loss.backward.*between"):
        optimizer.sample_fisher(logits)
    with pytest.raises(RuntimeError, match=r'empirical.*leave the call out.*fisher="sampled"'):
        make(fisher="empirical")[1].sample_fisher(logits)


def test_a_layer_that_the_prediction_does_not_depend_on():
    class Aux(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.aux = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(4, 2)

        def forward(self, x):
            x = torch.tanh(self.body(x))
            return self.head(x), self.aux(x)

    model = Aux().double()
    optimizer = THOR(model, fisher="sampled")
    [(x, labels)] = batches(1)
    scores, other = model(x)
    optimizer.sample_fisher(scores)
    (F.cross_entropy(scores, labels) + other.square().mean()).backward()
    with pytest.warns(RuntimeWarning, match=r"'aux'.*sample_fisher\(\) does not depend on it.*layers="):
        optimizer.step()
    assert {name: layer.refreshes for name, layer in optimizer.curvature.items()} == {"body": 1, "head": 1, "aux": 0}


def test_the_output_of_a_copy():
    """A copied model runs in the place of the one that THOR has, and the loss adds to the gradients of both."""
    model, optimizer = make()
    [(x, labels)] = batches(1)
    optimizer.sample_fisher(copy.deepcopy(model)(x))
    F.cross_entropy(model(x), labels).backward()
    with pytest.raises(RuntimeError, match=r"depends on no layer.*copied model"):
        optimizer.step()
