"""Factors from sampled labels: loops over what was drawn, and curvlinops for their expectation."""

import pytest
import torch
from torch.distributions import Bernoulli, Categorical, Normal
from torch.nn import functional as F

from comparing import DAMPING, assert_matches_reference, curvlinops_factors
from tiny import conv_model, mlp
from torch_thor import THOR


class Known(Categorical):
    """A prediction whose labels are not drawn but given."""

    def __init__(self, logits, labels):
        super().__init__(logits=logits)
        self.labels = labels

    def sample(self, sample_shape=()):
        return self.labels


def sampled(
    model, x, *, output=lambda y: y, distribution="categorical", seed=0, split_dim=4, **options
):
    """THOR with sampled labels after one step that moves nothing."""
    optimizer = THOR(model, lr=0.0, damping=DAMPING, fisher="sampled", split_dim=split_dim)
    y = model(x)
    optimizer.sample_fisher(output(y), distribution, seed=seed, **options)
    y.square().mean().backward()  # the training loss has no say
    optimizer.step()
    return optimizer


MASK = torch.tensor([[True, True, False], [True, False, False]])


def whole(y):
    return y


def classes(y):
    return Categorical(logits=y)


def vectors(*leading):
    return lambda: (mlp(), torch.randn(*leading, 5, dtype=torch.float64))


def cross_entropy(y, t):
    return F.cross_entropy(y, t, reduction="sum")


def gaussian(y):
    return Normal(y, 0.5)


def moments(y):
    return y[:, 0], y[:, 1]


def normal_of_moments(y):
    return Normal(y[0], (0.5 * y[1]).exp())


def nll_of_moments(y, t):
    return (0.5 * ((y[:, 0] - t) ** 2 * (-y[:, 1]).exp() + y[:, 1])).sum()


# name: model and input, what is predicted, its distribution, loss terms, the log-likelihood of what
# was drawn
PREDICTIONS = {
    "images": (lambda: conv_model("stride"), whole, classes, 3, cross_entropy),
    "tokens": (vectors(2, 3), whole, classes, 3, lambda y, t: cross_entropy(y[MASK], t[MASK])),
    "means": (vectors(8), whole, gaussian, 24, lambda y, t: 2 * (y - t).pow(2).sum()),
    "means-and-variances": (vectors(8), moments, normal_of_moments, 8, nll_of_moments),
}


@pytest.mark.parametrize("name", PREDICTIONS)
def test_known_labels_give_what_explicit_loops_give(name):
    make, output, distribution, terms, nll = PREDICTIONS[name]
    (model, x), drawn = make(), []

    def recorded(y):
        found = distribution(y)
        draw = found.sample
        found.sample = lambda *args: drawn.append(draw(*args)) or drawn[-1]
        return found

    mask = MASK if name == "tokens" else None
    optimizer = sampled(model, x, output=output, distribution=recorded, mask=mask)
    options = {"terms": terms, "scale": 1, "split_dim": 4, "optimizer": optimizer}
    assert_matches_reference(model, x, lambda y: nll(y, drawn[0]), **options)


@pytest.mark.parametrize(
    ("name", "dim", "leading", "distribution"),
    [
        ("categorical", None, (8,), classes),
        ("categorical", 1, (2, 4), lambda y: Categorical(logits=y.movedim(1, -1))),
        ("bernoulli", None, (8,), lambda y: Bernoulli(logits=y)),
        ("normal", None, (8,), lambda y: Normal(y, 1.0)),
    ],
)
def test_a_name_draws_what_its_distribution_draws(name, dim, leading, distribution):
    model, x = vectors(*leading)()
    named = sampled(model, x, distribution=name, seed=4, dim=dim)
    given = sampled(model, x, distribution=distribution, seed=4)
    for ours, its in zip(named.curvature.values(), given.curvature.values(), strict=True):
        assert ours.rows_per_term == its.rows_per_term
        torch.testing.assert_close(ours.factors(), its.factors(), rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
def test_curvlinops_exact_fisher_is_the_expectation():
    """One datum and each of its labels in turn, weighted by its probability."""
    for model, x in (vectors(1)(), conv_model("stride", batch=1)):
        inputs, grads = curvlinops_factors(model, x, torch.zeros(1, dtype=torch.long), "type-2")
        expected = dict.fromkeys(grads, 0.0)
        for label, p in enumerate(model(x).softmax(-1)[0].tolist()):
            known = lambda y, label=label: Known(y, torch.tensor([label]))  # noqa: E731
            optimizer = sampled(model, x, distribution=known, split_dim=None)
            assert set(optimizer.curvature) == set(grads)
            for name, curvature in optimizer.curvature.items():
                A, G = curvature.factors()
                torch.testing.assert_close(A, inputs[name], rtol=1e-9, atol=1e-12)
                expected[name] = expected[name] + p * curvature.rows_per_term * G
            optimizer.zero_grad()
        for name, G in expected.items():
            torch.testing.assert_close(G, grads[name], rtol=1e-9, atol=1e-12)
