"""Which passes count; N, the number of loss terms: the leading dimension of the first input."""

import warnings

import pytest
import torch
from torch import nn

from comparing import having
from tiny import mlp, twins
from torch_thor import THOR, ThorMuon

N, L, D = 6, 5, 4

# ``+`` a forward pass, ``e`` an evaluation, ``b`` the backward pass of the latest ``+``, ``z``
# optimizer.zero_grad(), ``f`` the end of the step; and the number of forward passes that count
PASSES = {
    "+": 0, "e": 0, "+b": 1, "+be": 1, "+zb": 1, "+b+b": 2, "++b": 1, "+b+zb": 1, "+z+b": 1,
    "+b+": 1, "+bz": 0, "+b+z": 0, "+zbz": 0, "+fb": 1, "+bf": 0, "+bf+b": 1,
}  # fmt: skip


@pytest.mark.parametrize("method", [THOR, ThorMuon])
def test_which_passes_count(method):
    for events, count in PASSES.items():
        model, output = mlp(dtype=torch.float32), None
        optimizer = method(model)
        for event in events:
            if event == "+":
                output = model(torch.randn(4, 5))
            elif event == "e":
                with torch.no_grad():
                    model(torch.randn(4, 5))
            elif event == "b":
                output.square().sum().backward()
            elif event == "z":
                optimizer.zero_grad()
            else:
                optimizer._curvature.capture.discard()
        rows = {layer.statistics.rows for layer in optimizer.curvature.values()}
        assert rows == {4 * count}, events


# ---- N -------------------------------------------------------------------------------------------


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


TOKENS = torch.arange(N * L).reshape(N, L) % 11
VECTORS, SEQUENCES = torch.randn(N, D), torch.randn(N, L, D)
MODELS = {  # the function, its first layers, the input
    "mlp": (plain, (), VECTORS),
    "sequences": (plain, (), SEQUENCES),
    "positions": (with_positions, ("words", "positions"), TOKENS),
}


def build(name):
    torch.manual_seed(0)
    forward, first, x = MODELS[name]
    layers = {layer: nn.Embedding(11, D) for layer in first}
    model = Forward(forward, **layers, body=linear(), head=linear())
    return model.double(), x.double() if x.is_floating_point() else x


def found(optimizer):
    return optimizer.param_groups[0]["last_loss_terms"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("passes", [1, 3])
def test_the_true_number_without_a_warning(name, passes):
    model, x = build(name)
    optimizer = THOR(model, lr=0.0)
    for _ in range(passes):
        (model(x).square().mean() / passes).backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="THOR: N = ")
        optimizer.step()
    assert found(optimizer) == N * passes


@pytest.mark.parametrize(("given", "expected"), [(None, N), (30, 30)])
def test_layers_that_disagree_are_said_once(given, expected):
    """A head on the rows of all sequences: 6 or 30? The number that was taken is named."""
    flattened = lambda m, x: m["head"](torch.tanh(m["body"](x)).flatten(0, 1))  # noqa: E731
    model = Forward(flattened, body=linear(), head=linear())
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


def assert_same_factors(optimizer, other):
    for name, curvature in optimizer.curvature.items():
        wanted = other.curvature[name]
        assert curvature.rows_per_term == wanted.rows_per_term
        torch.testing.assert_close(curvature.factors(), wanted.factors())


def two_losses():
    """(an optimizer, two losses of one forward pass)"""
    model, x = build("mlp")
    optimizer = THOR(model, lr=0.0, split_dim=None)
    h = model(x)
    return optimizer, h[:, :2].square().sum(1).mean(), h[:, 2:].pow(3).sum(1).mean()


@pytest.mark.parametrize("times", [0, 1, 2])
def test_backward_passes_through_one_forward(times):
    """N and all factors belong to the sum of the losses; zero_grad() drops those before it."""
    optimizer, first, second = two_losses()
    together, its_first, its_second = two_losses()
    for _ in range(times or 1):
        first.backward(retain_graph=True)
    if not times:
        optimizer.zero_grad()
    second.backward()
    (times * its_first + its_second).backward()
    for each in (optimizer, together):
        each.step()
        assert found(each) == N
    assert_same_factors(optimizer, together)


@pytest.mark.parametrize("masked", [(), (0,), (0, 1), (1, 2, 3)])
def test_accumulation_equals_the_whole_batch(masked):
    """Also where the gradient of a whole micro-batch is zero."""
    model, optimizer, twin, other = twins(THOR, lr=0.0)
    x, keep = torch.randn(32, 5).double(), torch.ones(32, 1).double()
    for i in range(4):
        part = slice(8 * i, 8 * i + 8)
        keep[part] = float(i not in masked)
        ((keep[part] * model(x[part])).square().sum() / 32).backward()
    ((keep * twin(x)).square().sum() / 32).backward()
    optimizer.step()
    other.step()
    assert found(optimizer) == found(other) == 32
    assert {curvature.rows_per_term for curvature in optimizer.curvature.values()} == {1}
    assert_same_factors(optimizer, other)
