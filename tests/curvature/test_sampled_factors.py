"""Factors from sampled labels: their expectation in closed form, explicit loops over known labels, and curvlinops."""

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal, Poisson
from torch.nn import functional as F

from comparing import DAMPING, assert_matches_reference, curvlinops_factors
from tiny import batches, conv_model, cross_entropy, mlp
from torch_thor import THOR


class Known(Categorical):
    """A prediction whose labels are not drawn but given."""

    def __init__(self, logits, labels):
        super().__init__(logits=logits)
        self.labels = labels

    def sample(self, sample_shape=()):
        return self.labels


class Recorder:
    """A distribution that remembers what was drawn from it."""

    def __init__(self, make):
        self.make, self.drawn = make, None

    def __call__(self, output):
        distribution = self.make(output)
        draw = distribution.sample

        def sample(*args):
            self.drawn = draw(*args)
            return self.drawn

        distribution.sample = sample
        return distribution


def sampled(model, x, loss, *, output=lambda y: y, distribution="categorical", seed=0, dim=None, mask=None, **options):
    """THOR with sampled labels after one step that moves nothing; the training loss is another one."""
    optimizer = THOR(model, lr=0.0, damping=DAMPING, fisher="sampled", **options)
    y = model(x)
    optimizer.sample_fisher(output(y), distribution, seed=seed, dim=dim, mask=mask)
    loss(y).backward()
    optimizer.step()
    return optimizer


def softmax_moment(logits):
    """The mean over rows of diag(p) − p pᵀ: E[g gᵀ] of a softmax over its own labels."""
    p = logits.softmax(-1)
    return torch.diag(p.mean(0)) - p.T @ p / len(p)


def test_softmax_classifier_in_expectation():
    """16 inputs, 4,000 labels each: every entry of G within five standard errors of its closed form."""
    model, draws = nn.Linear(5, 4).double(), 4000
    x = torch.randn(16, 5, dtype=torch.float64).repeat(draws, 1)
    labels = torch.zeros(len(x), dtype=torch.long)
    optimizer = sampled(nn.Sequential(model), x, cross_entropy(labels), split_dim=None)
    A, G = optimizer.curvature["0"].factors()
    torch.testing.assert_close(A, x.T @ x / len(x), rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        logits = model(x[:16])
        p = logits.softmax(-1)
        exact = softmax_moment(logits)
        outer = torch.stack([torch.einsum("ni,nj->nij", p - e, p - e) for e in torch.eye(4, dtype=torch.float64)], 1)
        mean = torch.einsum("nk,nkij->nij", p, outer)
        torch.testing.assert_close(mean.mean(0), exact, rtol=1e-12, atol=1e-14)  # all labels, weighted by p
        variance = torch.einsum("nk,nkij->nij", p, (outer - mean[:, None]).square()).mean(0)
    assert ((G - exact).abs() <= 5 * (variance / len(x)).sqrt()).all()
    empirical = THOR(nn.Sequential(model), lr=0.0, split_dim=None)
    cross_entropy(labels)(empirical.model(x)).backward()
    empirical.step()
    far = (empirical.curvature["0"].factors()[1] - exact).abs()
    assert (far > 20 * (variance / len(x)).sqrt()).any(), "the bound would not tell the empirical Fisher apart"


def test_the_training_labels_as_samples_are_the_empirical_fisher():
    """To the bit where N is a power of two, because a mean is then exactly a sum divided."""
    [(x, labels)] = batches(1)
    torch.manual_seed(3)
    model = mlp()
    one = THOR(model, lr=0.0, split_dim=4)
    loss = lambda y: -Categorical(logits=y).log_prob(labels).mean()  # noqa: E731
    loss(model(x)).backward()
    one.step()
    one.zero_grad()
    other = sampled(model, x, loss, distribution=lambda y: Known(y, labels), split_dim=4)
    for name, curvature in one.curvature.items():
        assert curvature.rows_per_term == other.curvature[name].rows_per_term
        for empirical, known in zip(curvature.factors(), other.curvature[name].factors(), strict=True):
            assert torch.equal(empirical, known)


LANGUAGE = torch.tensor([[True, True, False], [True, False, False]])


def data(*shape):
    return lambda: (mlp(), torch.randn(*shape, dtype=torch.float64))


def summed(y, t):
    return F.cross_entropy(y, t, reduction="sum")


# name: (model and input, its distribution, loss terms, the log-likelihood of what was drawn; other options)
PREDICTIONS = {
    "classes": (data(8, 5), lambda y: Categorical(logits=y), 8, summed),
    "images": (lambda: conv_model("stride"), lambda y: Categorical(logits=y), 3, summed),
    "tokens": (
        data(2, 3, 5),
        lambda y: Categorical(logits=y),
        3,
        lambda y, t: summed(y[LANGUAGE], t[LANGUAGE]),
        {"mask": LANGUAGE},
    ),
    "means": (data(8, 5), lambda y: Normal(y, 0.5), 24, lambda y, t: ((y - t) ** 2).sum() / 0.5),
    "counts": (data(8, 5), lambda y: Independent(Poisson(y.exp()), 1), 8, lambda y, t: (y.exp() - t * y).sum()),
    "means-and-variances": (
        data(8, 5),
        lambda y: Normal(y[0], (0.5 * y[1]).exp()),
        8,
        lambda y, t: (0.5 * ((y[:, 0] - t) ** 2 * (-y[:, 1]).exp() + y[:, 1])).sum(),
        {"output": lambda y: (y[:, 0], y[:, 1])},
    ),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_known_labels_give_what_explicit_loops_give(name):
    make, distribution, terms, nll, *options = PREDICTIONS[name]
    (model, x), recorder = make(), Recorder(distribution)
    options = {"distribution": recorder, "split_dim": 4, **(options[0] if options else {})}
    optimizer = sampled(model, x, lambda y: y.square().mean(), **options)
    assert_matches_reference(
        model, x, lambda y: nll(y, recorder.drawn), terms=terms, scale=1, split_dim=4, optimizer=optimizer
    )


def test_a_name_draws_what_its_distribution_draws():
    loss = lambda y: y.square().mean()  # noqa: E731
    for name, options, leading, distribution in (
        ("categorical", {}, (8,), lambda y: Categorical(logits=y)),
        ("categorical", {"dim": 1}, (2, 4), lambda y: Categorical(logits=y.movedim(1, -1))),
        ("categorical", {"dim": -1}, (2, 4), lambda y: Categorical(logits=y)),
        ("bernoulli", {}, (8,), lambda y: torch.distributions.Bernoulli(logits=y)),
        ("normal", {}, (8,), lambda y: Normal(y, 1.0)),
    ):
        model, x = mlp(), torch.randn(*leading, 5, dtype=torch.float64)
        named = sampled(model, x, loss, distribution=name, seed=4, **options)
        given = sampled(model, x, loss, distribution=distribution, seed=4)
        for ours, its in zip(named.curvature.values(), given.curvature.values(), strict=True):
            assert ours.rows_per_term == its.rows_per_term
            torch.testing.assert_close(ours.factors(), its.factors(), rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
def test_curvlinops_exact_fisher_is_the_expectation():
    """One datum and each of its labels in turn, weighted by its probability: curvlinops' ``type-2``, in every layer."""
    for model, x in ((mlp(), batches(1)[0][0]), conv_model("stride")):
        x = x[:1]
        inputs, exact = curvlinops_factors(model, x, torch.zeros(1, dtype=torch.long), "type-2")
        expected = dict.fromkeys(exact, 0.0)
        for label, p in enumerate(model(x).softmax(-1)[0].tolist()):
            known = lambda y, label=label: Known(y, torch.tensor([label]))  # noqa: E731
            optimizer = sampled(model, x, lambda y: y.square().mean(), distribution=known, split_dim=None)
            for name, curvature in optimizer.curvature.items():
                A, G = curvature.factors()
                torch.testing.assert_close(A, inputs[name], rtol=1e-9, atol=1e-12)
                expected[name] = expected[name] + p * curvature.rows_per_term * G
            optimizer.zero_grad()
        torch.testing.assert_close(expected, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
def test_curvlinops_agrees_in_the_mean_of_many_draws():
    """Eight data with 50 labels each, all layers of a network: 20 refreshes have the exact Fisher's factor for mean."""
    model, [(x, labels)] = mlp(), batches(1)
    _, exact = curvlinops_factors(model, x, labels, "type-2")
    drawn = {name: [] for name in exact}
    for seed in range(20):
        optimizer = sampled(model, x.repeat(50, 1), cross_entropy(labels.repeat(50)), seed=seed, split_dim=None)
        optimizer.zero_grad()
        for name, curvature in optimizer.curvature.items():
            drawn[name].append(curvature.factors()[1])
    for name, factors in drawn.items():
        stacked = torch.stack(factors)
        error = (stacked.mean(0) - exact[name]).abs()
        assert (error <= 5 * stacked.std(0) / len(stacked) ** 0.5).all(), name
        assert error.norm() < 0.05 * exact[name].norm(), name
