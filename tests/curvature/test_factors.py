"""Factors and damped inverses of one refresh, against dense float64 algebra and against curvlinops."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from comparing import DAMPING, assert_matches_reference, curvlinops_factors, refreshed
from tiny import CONVOLUTIONS, batches, conv_model, cross_entropy, mlp
from torch_thor import THOR


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    for split_dim in (None, 5, 128):
        model, x = conv_model(name)
        assert_matches_reference(model, x, cross_entropy(torch.tensor([0, 2, 1])), terms=3, split_dim=split_dim)


def test_fully_connected():
    [(x, labels)] = batches(1)
    for split_dim in (None, 1, 2, 4, 6, 7, 8):
        for bias in (True, False):
            assert_matches_reference(mlp(bias=bias), x, cross_entropy(labels), terms=8, split_dim=split_dim)


def test_leading_dimensions_and_single_samples():
    """(N, ..., d): every vector is a row, the first dimension counts the loss terms; without one it is one term."""
    for leading in ((3, 4), (2, 3, 2), (1, 5), (6, 1)):
        x = torch.randn(*leading, 5, dtype=torch.float64)
        loss = cross_entropy(torch.randint(3, leading))
        assert_matches_reference(mlp(), x, loss, terms=leading[0], split_dim=4)
    convolution = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, 2)).double()
    for model, size in ((mlp(), (5,)), (convolution, (2, 4, 5))):
        x = torch.randn(size, dtype=torch.float64)
        assert_matches_reference(model, x, lambda y: (y**3).sum(), terms=1, split_dim=None)


def test_summed_loss_is_not_scaled():
    [(x, labels)] = batches(1)

    def loss(output):
        return nn.functional.cross_entropy(output, labels, reduction="sum")

    assert_matches_reference(mlp(), x, loss, terms=8, scale=1, split_dim=None, loss_reduction="sum")


def test_given_numbers_of_loss_terms():
    """A language model averages over tokens: g is 12 times the gradient and T is 1. Assigned between steps."""
    model, x = mlp(), torch.randn(3, 4, 5, dtype=torch.float64)
    loss = cross_entropy(torch.randint(3, (3, 4)))
    optimizer = THOR(model, lr=0.0, damping=DAMPING, split_dim=None, update_interval=1, trace_thresholds=(0.0, 0.0))
    for said, terms in ((None, 3), (12, 12), (lambda: 6, 6)):
        optimizer.loss_terms = said
        optimizer.zero_grad()
        loss(model(x)).backward()
        optimizer.step()
        assert_matches_reference(model, x, loss, terms=terms, split_dim=None, optimizer=optimizer)


class Twice(nn.Module):
    """One layer used twice in one forward, between others."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)
        self.shared = nn.Linear(4, 4)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(torch.tanh(self.first(x)))))))


def twice_by_hand(model, x):
    """The forward of `Twice`, with what goes in and out of every use."""
    y1 = model.first(x)
    x2 = torch.tanh(y1)
    y2 = model.shared(x2)
    x3 = torch.tanh(y2)
    y3 = model.shared(x3)
    x4 = torch.tanh(y3)
    y4 = model.last(x4)
    return y4, [("first", x, y1), ("shared", x2, y2), ("shared", x3, y3), ("last", x4, y4)]


class Siamese(nn.Module):
    """Its first layer is used twice, which does not double the terms."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Linear(5, 4)

    def forward(self, x):
        return self.tower(x) * self.tower(x.flip(0))


def siamese_by_hand(model, x):
    y1, y2 = model.tower(x), model.tower(x.flip(0))
    return y1 * y2, [("tower", x, y1), ("tower", x.flip(0), y2)]


def test_layer_used_twice_has_the_rows_of_both_uses():
    [(x, labels)] = batches(1)
    for model, loss, forward in (
        (Twice(), cross_entropy(labels), twice_by_hand),
        (Siamese(), lambda output: (output**2).mean(0).sum(), siamese_by_hand),
    ):
        assert_matches_reference(model.double(), x, loss, terms=8, split_dim=None, forward=forward)


def test_split_as_large_as_the_matrix_is_no_split():
    for name in ("plain", "groups", "depthwise", "same_even_kernel"):
        results = []
        for split_dim in (None, 1000):
            torch.manual_seed(3)
            model, x = conv_model(name)
            optimizer = refreshed(model, x, cross_entropy(torch.tensor([0, 2, 1])), split_dim=split_dim)
            results.append([(layer.factors(), layer.inverses()) for layer in optimizer.curvature.values()])
        torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


VIEWS = {
    "slice": lambda x: x[:, 1:3, 1:, 1:-1],
    "steps": lambda x: x[::2, ::2, ::2],
    "transposed": lambda x: x.transpose(2, 3),
    "channels_last": lambda x: x[:, :2].contiguous(memory_format=torch.channels_last),
    "expanded": lambda x: x[:1, :2].expand(3, -1, -1, -1),
    "constant_images": lambda x: x[:, :2, :1, :1].expand(-1, -1, 5, 6),
    "gapped_batch": lambda x: x.flatten(0, 1)[1::3].unflatten(0, (2, 2)),
}


@pytest.mark.parametrize("view", VIEWS)
def test_convolution_of_a_view(view):
    """Patches are looked up by strides; whatever the strides of the input are, they are the same patches."""
    x = VIEWS[view](torch.randn(3, 4, 6, 7, dtype=torch.float64))
    for padding in (0, 1):
        model = nn.Sequential(nn.Conv2d(x.shape[1], 3, (2, 3), stride=(1, 2), padding=padding)).double()
        assert_matches_reference(model, x, lambda output: (output**3).mean(), terms=len(x), split_dim=5)


@given(
    leading=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    split_dim=st.one_of(st.none(), st.integers(1, 9)),
    bias=st.booleans(),
)
def test_any_linear(leading, sizes, split_dim, bias):
    model = nn.Sequential(nn.Linear(*sizes, bias=bias)).double()
    x = torch.randn(*leading, sizes[0], dtype=torch.float64)
    loss = lambda output: (output**3).sum() / leading[0]  # noqa: E731
    assert_matches_reference(model, x, loss, terms=leading[0], split_dim=split_dim)


pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@given(
    batch=st.integers(1, 3),
    size=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    groups=st.sampled_from([1, 1, 2, 3]),
    widths=pairs,
    kernel_size=pairs,
    stride=pairs,
    dilation=pairs,
    padding=st.one_of(st.sampled_from(["same", "valid"]), st.tuples(st.integers(0, 2), st.integers(0, 2))),
    padding_mode=st.sampled_from(["zeros", "reflect", "replicate", "circular"]),
    split_dim=st.one_of(st.none(), st.integers(1, 12)),
    bias=st.booleans(),
)
def test_any_convolution(batch, size, groups, widths, padding, stride, split_dim, **options):
    model = nn.Sequential(
        nn.Conv2d(
            groups * widths[0],
            groups * widths[1],
            padding=padding,
            stride=(1, 1) if padding == "same" else stride,
            groups=groups,
            **options,
        )
    ).double()
    x = torch.randn(batch, groups * widths[0], *size, dtype=torch.float64)
    try:
        positions = model(x)[0, 0].numel()
    except RuntimeError:  # the kernel does not fit, or the padding is larger than its mode allows
        assume(False)
    assume(positions > 0)
    loss = lambda output: (output**3).sum() / batch  # noqa: E731
    assert_matches_reference(model, x, loss, terms=batch, split_dim=split_dim)


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["linear", "plain", "stride", "uneven", "dilation", "same"])
def test_curvlinops_agrees(kind):
    """Its input factor is our A; its gradient factor is Σ g gᵀ / N, hence T · G."""
    if kind == "linear":
        model, [(x, labels)] = mlp(), batches(1)
    else:
        (model, x), labels = conv_model(kind), torch.tensor([0, 2, 1])
    inputs, grads = curvlinops_factors(model, x, labels, "empirical")
    optimizer = refreshed(model, x, cross_entropy(labels), split_dim=None)
    assert set(inputs) == set(optimizer.curvature)
    for name, curvature in optimizer.curvature.items():
        A, G = curvature.factors()
        torch.testing.assert_close(A, inputs[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(curvature.rows_per_term * G, grads[name], rtol=1e-9, atol=1e-12)
