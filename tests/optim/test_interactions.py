"""Experts, recurrent layers and other inner layers, under what else happens to a training: two things at a time."""

import pytest
import torch
from test_sampled_fisher import fixed
from test_state_of_inner_layers import STREAM, build
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from tiny import assert_same, cross_entropy, train, weights
from torch_thor import THOR, ThorMuon

MUON = {"lr": 0.02, "damping": 0.1, "split_dim": 3, "update_interval": 2}
OPTIONS = {**MUON, "trace_thresholds": (0.0, 0.0)}


class Bypass(nn.Module):
    """Uses the weight of a linear layer without calling it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return F.linear(x, self.inner.weight, self.inner.bias)


def freeze(model):
    """Experts whose biases are trained, a recurrent weight in the middle, and a convolution."""
    for frozen in (model.experts.weight, model.rnn.weight_hh_l0, model.conv.weight):
        frozen.requires_grad_(False)


def bypass(model):
    model.head = Bypass(model.head)


# what becomes of the model, and how many of its layers then refresh
CHANGES = {"trained": (lambda model: None, 14), "frozen": (freeze, 11), "uncalled": (bypass, 13)}


def two(change="trained", optimizer=THOR, **options):
    """The same model twice, each with its optimizer."""
    made = []
    for _ in range(2):
        model = build().double()
        CHANGES[change][0](model)
        made.append((model, optimizer(model, **options)))
    return made


def in_parts(model, optimizer, stream, cuts):
    """Micro-batches of unlike sizes: in some of them there is no token for an expert."""
    for x, labels in stream:
        for start, stop in zip((0, *cuts), (*cuts, len(x)), strict=True):
            output = model(x[start:stop])
            if optimizer.fisher == "sampled":
                optimizer.sample_fisher(output, fixed)
            (cross_entropy(labels[start:stop])(output) * (stop - start) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_close(left, right, rtol=1e-9, atol=1e-12):
    for name, value in weights(left).items():
        torch.testing.assert_close(value, right.get_parameter(name).detach(), rtol=rtol, atol=atol)


@pytest.mark.filterwarnings("ignore:Thor.*, step:RuntimeWarning", "ignore:THOR, step:RuntimeWarning")
@pytest.mark.parametrize("method", ["empirical", "sampled", "thor_muon"])
@pytest.mark.parametrize("change", CHANGES)
def test_micro_batches_equal_one_batch(change, method):
    muon = method == "thor_muon"
    options = {"optimizer": ThorMuon, **MUON} if muon else {"fisher": method, **OPTIONS}
    (model, optimizer), (twin, other) = two(change, **options)
    in_parts(model, optimizer, STREAM, cuts=(1, 2))
    in_parts(twin, other, STREAM, cuts=())
    # a direction that is lost in rounding (of a softmax's gradient) comes out of the orthogonalisation as 1e-9
    assert_close(model, twin, **({"rtol": 1e-7, "atol": 1e-8} if muon else {}))
    refreshes = [layer.refreshes for layer in optimizer.curvature.values()]
    assert refreshes == [layer.refreshes for layer in other.curvature.values()]
    used = [count for count in refreshes if count]
    assert len(used) == CHANGES[change][1] - muon  # ThorMuon has no diagonal factors, as of an embedding
    assert muon or used == [3] * len(used)


def test_sampled_labels_that_are_the_training_labels():
    """Two backward passes through experts, and through recurrent layers that run step by step: rows count once."""
    (model, sampled), (twin, empirical) = two(**OPTIONS)
    sampled = THOR(model, **OPTIONS, fisher="sampled")
    for x, _ in STREAM:
        output = model(x)
        sampled.sample_fisher(output, fixed)
        labels = fixed(output).sample()
        F.cross_entropy(output, labels).backward()
        F.cross_entropy(twin(x), labels).backward()
        for optimizer in (sampled, empirical):
            optimizer.step()
            optimizer.zero_grad()
        assert_close(model, twin)
    for name, layer in sampled.curvature.items():
        assert layer.refreshes == empirical.curvature[name].refreshes == 3
        assert layer.rows_per_term == empirical.curvature[name].rows_per_term


PRUNED = {"experts": "weight", "cell": "weight_hh", "rnn": "weight_ih_l0", "head": "weight"}


def words(steps):
    """Batches in which every expert has a token: so a step's factors hang on nothing before it."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(steps):
        x = torch.randint(9, (4, 5), generator=generator)
        x[0, :4] = torch.arange(4)
        yield x, torch.randint(5, (4,), generator=generator)


@pytest.mark.filterwarnings("ignore:THOR.*:RuntimeWarning")
@pytest.mark.parametrize("name", PRUNED)
def test_pruning_one_weight_of_a_module(name):
    """From the step after it the run is that of a THOR which was made for the pruned model."""
    options = {**OPTIONS, "update_interval": 1, "momentum": 0.0}
    stream = list(words(6))
    for steps in (0, 1, 2):
        (model, optimizer), (twin, _) = two(**options)
        train(model, optimizer, stream[:steps])
        for one in (model, twin):
            prune.l1_unstructured(one.get_submodule(name), PRUNED[name], 0.4)
        train(model, optimizer, stream[steps : steps + 1])
        twin.load_state_dict(model.state_dict())
        other = THOR(twin, **options)
        train(model, optimizer, stream[steps + 1 :])
        train(twin, other, stream[steps + 1 :])
        assert len(optimizer.curvature) == CHANGES["trained"][1] - 1
        assert optimizer.curvature.keys() == other.curvature.keys()
        assert_same(weights(model), weights(twin))


WRAPPERS = {
    "data-parallel": nn.DataParallel,
    "sequential": nn.Sequential,
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("made", ["before THOR", "after THOR"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers(wrapper, made):
    """Who calls the model makes no difference, whether or not it had been called when THOR was made."""
    torch._dynamo.reset()
    model, twin = build().double(), build().double()
    if made == "before THOR":
        wrapped = WRAPPERS[wrapper](model)
        wrapped(STREAM[0][0]).sum().backward()
        model.zero_grad()
        optimizer = THOR(model, **OPTIONS)
    else:
        optimizer = THOR(model, **OPTIONS)
        wrapped = WRAPPERS[wrapper](model)
    train(wrapped, optimizer, STREAM)
    train(twin, THOR(twin, **OPTIONS), STREAM)
    assert_same(weights(model), weights(twin))
    torch._dynamo.reset()
