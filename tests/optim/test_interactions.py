"""Layers of all kinds, under what else happens to a training: two things at a time."""

import itertools

import pytest
import torch
from test_sampled_fisher import fixed
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from comparing import having
from every_kind import build, stream
from tiny import assert_same, cross_entropy, train, weights
from torch_thor import THOR, ThorMuon, choose_split_dim

STREAM = stream()
MUON = {"lr": 0.02, "damping": 0.1, "split_dim": 3, "update_interval": 2}
OPTIONS = {**MUON, "trace_thresholds": (0.0, 0.0)}
TERMS = STREAM[0][1].numel()

pytestmark = pytest.mark.filterwarnings("ignore:THOR.*:RuntimeWarning", "ignore:Thor.*:RuntimeWarning")


class Bypass(nn.Module):
    """Uses the weight of a layer without calling it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x @ self.inner.weight + self.inner.bias


def freeze(model):
    """Experts whose biases are trained, a recurrent weight in the middle, and a convolution."""
    for frozen in (model.experts.weight, model.rnn.weight_hh_l0, model.standardised.weight):
        frozen.requires_grad_(False)


def bypass(model):
    model.head = Bypass(model.head)


# what becomes of the model, and how many of its layers then refresh
CHANGES = {"trained": (lambda model: None, 25), "frozen": (freeze, 22), "uncalled": (bypass, 24)}


def two(change="trained", optimizer=THOR, **options):
    """The same model twice, each with its optimizer."""
    made = []
    for _ in range(2):
        model = build().double()
        CHANGES[change][0](model)
        made.append((model, having(optimizer(model, **options), loss_terms=TERMS)))
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


@pytest.mark.parametrize("change", CHANGES)
def test_micro_batches_equal_one_batch(change):
    for method in ("empirical", "sampled", "muon"):
        muon = method == "muon"
        options = {"optimizer": ThorMuon, **MUON} if muon else {"fisher": method, **OPTIONS}
        (model, optimizer), (twin, other) = two(change, **options)
        in_parts(model, optimizer, STREAM, cuts=(1, 2))
        in_parts(twin, other, STREAM, cuts=())
        # a direction that is lost in rounding (of a softmax's gradient) comes out of the orthogonalisation as 1e-9
        assert_close(model, twin, **({"rtol": 1e-7, "atol": 1e-8} if muon else {}))
        refreshes = [layer.refreshes for layer in optimizer.curvature.values()]
        assert refreshes == [layer.refreshes for layer in other.curvature.values()]
        used = [count for count in refreshes if count]
        assert len(used) == CHANGES[change][1] - 2 * muon, method  # ThorMuon has no diagonal factors
        assert muon or used == [3] * len(used), method


def test_sampled_labels_that_are_the_training_labels():
    """Two backward passes through experts, and through recurrent layers that run step by step: rows count once."""
    (model, _), (twin, empirical) = two(**OPTIONS)
    sampled = having(THOR(model, **OPTIONS, fisher="sampled"), loss_terms=TERMS)
    for x, _ in STREAM:
        output = model(x)
        sampled.sample_fisher(output, fixed)
        labels = fixed(output).sample()
        for one, optimizer in ((output, sampled), (twin(x), empirical)):
            F.cross_entropy(one.flatten(0, 1), labels.flatten()).backward()
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
        x, labels = torch.randint(9, (2, 4, 5), generator=generator)
        x[0, :4] = torch.arange(4)
        yield x, labels


@pytest.mark.parametrize("name", PRUNED)
def test_pruning_one_weight_of_a_module(name):
    """From the step after it the run is that of a THOR which was made for the pruned model."""
    options = {**OPTIONS, "update_interval": 1, "momentum": 0.0}
    batches = list(words(5))
    for steps in (0, 2):
        (model, optimizer), (twin, _) = two(**options)
        train(model, optimizer, batches[:steps])
        for one in (model, twin):
            prune.l1_unstructured(one.get_submodule(name), PRUNED[name], 0.4)
        train(model, optimizer, batches[steps : steps + 1])
        twin.load_state_dict(model.state_dict())
        other = having(THOR(twin, **options), loss_terms=TERMS)
        for one, its in ((model, optimizer), (twin, other)):
            train(one, its, batches[steps + 1 :])
        assert len(optimizer.curvature) == CHANGES["trained"][1] - 1
        assert optimizer.curvature.keys() == other.curvature.keys()
        assert_same(weights(model), weights(twin))


def test_wrappers():
    """Who calls the model makes no difference, whether or not it had been called when THOR was made."""
    _, (twin, other) = two(**OPTIONS)
    train(twin, other, STREAM)
    wrappers = (nn.DataParallel, nn.Sequential, lambda model: torch.compile(model, backend="eager"))
    for wrap, before in itertools.product(wrappers, (False, True)):
        torch._dynamo.reset()
        model = build().double()
        if before:
            wrapped = wrap(model)
            wrapped(STREAM[0][0]).sum().backward()
            model.zero_grad()
        optimizer = having(THOR(model, **OPTIONS), loss_terms=TERMS)
        train(wrapped if before else wrap(model), optimizer, STREAM)
        assert_same(weights(model), weights(twin), f"{wrap}, {before=}")
    torch._dynamo.reset()


def test_the_split_can_be_chosen():
    chosen = choose_split_dim(build(), STREAM[0], loss_fn=lambda output, labels: F.cross_entropy(output.mT, labels))
    assert chosen.split_dim >= 1
