"""N, the number of loss terms: the leading dimension of the first layer's input."""

import warnings

import pytest
import torch
from torch import nn

from comparing import having
from tiny import twins
from torch_thor import THOR

N, L, D = 6, 5, 4


class Forward(nn.Module):
    """Layers by name, and a forward given as a function of them and of the input."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)
        self._forward = forward

    def forward(self, x):
        return self._forward(self.layers, x)


def linear():
    return nn.Linear(D, D)


def plain(m, x):
    return m["head"](torch.tanh(m["body"](x)))


def with_positions(m, x):
    """The embeddings of GPT-2 and BERT, whose positions have no batch dimension."""
    return m["head"](torch.tanh(m["body"](m["words"](x) + m["positions"](torch.arange(L)))).mean(1))


def through_windows(m, x):
    """The layers between see other numbers of rows, as windows and experts do."""
    return m["head"](m["body"](m["in"](x).reshape(-1, 1, D)).view(x.shape).mean(1))


TOKENS = torch.arange(N * L).reshape(N, L) % 11
VECTORS, SEQUENCES = torch.randn(N, D), torch.randn(N, L, D)
MODELS = {  # the function, its first layers, the input
    "mlp": (plain, (), VECTORS),
    "sequences": (plain, (), SEQUENCES),
    "positions": (with_positions, ("words", "positions"), TOKENS),
    "windows": (through_windows, ("in",), SEQUENCES),
}


def build(name):
    torch.manual_seed(0)
    forward, first, x = MODELS[name]
    layers = {layer: linear() if layer == "in" else nn.Embedding(11, D) for layer in first}
    model = Forward(forward, **layers, body=linear(), head=linear())
    return model.double(), x.double() if x.is_floating_point() else x


def found(optimizer):
    return optimizer.param_groups[0]["last_loss_terms"]


@pytest.mark.parametrize("name", MODELS)
def test_the_true_number_without_a_warning(name):
    """Of one pass and of three."""
    model, x = build(name)
    optimizer = THOR(model, lr=0.0, update_interval=2, trace_thresholds=(1e-9, 0.0))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="THOR: N = ")
        for passes in (1, 1, 3):
            for _ in range(passes):
                (model(x).square().mean() / passes).backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.last_refresh:
                assert found(optimizer) == N * passes


def test_layers_that_disagree_are_said_once():
    """A head on the rows of all sequences: 6 or 30? The number that was taken is named."""
    flattened = lambda m, x: m["head"](torch.tanh(m["body"](x)).flatten(0, 1))  # noqa: E731
    model = Forward(flattened, body=linear(), head=linear())
    for given, expected in ((None, N), (30, 30)):
        optimizer = having(THOR(model, update_interval=1), loss_terms=given)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model(SEQUENCES).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        said = [str(w.message) for w in caught]
        assert len(said) == (given is None)
        assert all(word in text for text in said for word in ("N = 6", "30", "loss_terms"))
        assert found(optimizer) == expected


# -------------------------------------------------------------------------- several backward passes


def two_losses():
    """(an optimizer, two losses of one forward pass)"""
    model, x = build("mlp")
    optimizer = THOR(model, lr=0.0, split_dim=None)
    h = model(x)
    return optimizer, h[:, :2].square().sum(1).mean(), h[:, 2:].pow(3).sum(1).mean()


def assert_same_factors(optimizer, other):
    for name, curvature in optimizer.curvature.items():
        wanted = other.curvature[name]
        if wanted.refreshes:
            assert curvature.rows_per_term == wanted.rows_per_term
            torch.testing.assert_close(curvature.factors(), wanted.factors())


@pytest.mark.parametrize("times", [0, 1, 2])
def test_backward_passes_through_one_forward(times):
    """N and all factors are those of the sum of the losses; zero_grad() drops those before it."""
    optimizer, one, other = two_losses()
    together, its_one, its_other = two_losses()
    for _ in range(times or 1):
        one.backward(retain_graph=True)
    if not times:
        optimizer.zero_grad()
    other.backward()
    (times * its_one + its_other).backward()
    for each in (optimizer, together):
        each.step()
        assert found(each) == N
    assert_same_factors(optimizer, together)


# --------------------------------------------------- micro-batches whose gradient is zero somewhere


class Gained(nn.Module):
    """A residual branch behind a gain of zero, as of ReZero and zero-initialised norms."""

    def __init__(self):
        super().__init__()
        self.body, self.branch, self.head = linear(), linear(), linear()
        nn.init.zeros_(self.head.bias)
        self.gain = nn.Parameter(torch.zeros(()))
        self.mask = 1.0

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.mask * self.head(h + self.gain * self.branch(h))


class ZeroNorm(Gained):
    """No weight has a gradient, because a gain before the head is zero; the head's bias has."""

    def forward(self, x):
        return self.mask * (self.head(self.gain * self.branch(torch.tanh(self.body(x)))) + x)


@pytest.mark.parametrize("kind", [Gained, ZeroNorm])
def test_accumulation_equals_the_whole_batch(kind):
    """Also where a layer's gradient, or a whole micro-batch's, is zero."""
    for masked in ((), (0,), (1,), (0, 1), (1, 2, 3)):
        model, optimizer, twin, other = twins(THOR, lambda: kind().double(), lr=0.0)
        x, keep = torch.randn(32, D).double(), torch.ones(32, 1).double()
        for i in range(4):
            part = slice(8 * i, 8 * i + 8)
            keep[part] = model.mask = float(i not in masked)
            (model(x[part]).square().sum() / 32).backward()
        twin.mask = keep
        (twin(x).square().sum() / 32).backward()
        optimizer.step()
        other.step()
        assert found(optimizer) == found(other) == 32, masked
        assert {c.rows_per_term for c in optimizer.curvature.values() if c.refreshes} == {1}
        assert_same_factors(optimizer, other)
