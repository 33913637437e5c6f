"""One parameter in several modules: one documented treatment, and one step."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from comparing import compare
from tiny import assert_same, cross_entropy, weights
from torch_thor import THOR, ThorMuon


def covered(optimizer):
    """Parameter name -> entry."""
    return {entry.name: entry for entry in optimizer.coverage()}


def parts(model, x):
    return model.parts(x)


class Tied(nn.Module):
    """Input embedding and output layer are one matrix, as in BERT and GPT-2."""

    def __init__(self, *, bias=True, decoder_first=False, padding_idx=None):
        super().__init__()
        if decoder_first:
            self.decoder = nn.Linear(4, 7, bias=bias)
        self.embedding = nn.Embedding(7, 4, padding_idx=padding_idx)
        self.body = nn.Linear(4, 4)
        if not decoder_first:
            self.decoder = nn.Linear(4, 7, bias=bias)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.parts(x)[0]

    def parts(self, x):
        e = self.embedding(x)
        h = self.body(e)
        t = torch.tanh(h)
        y = self.decoder(t)
        return y, [("embedding", x, e), ("body", e, h), ("decoder", t, y)]


def tokens(count):
    return [(torch.randint(7, (5, 3)), cross_entropy(torch.randint(7, (5, 3)))) for _ in range(count)]


SETTINGS = {
    "defaults": {"update_interval": 2},
    "everything": {"update_interval": 2, "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3, "split_dim": 3},
    "no_momentum": {"momentum": 0.0, "update_interval": 1},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"decoder_first": True}, {"padding_idx": 2}], ids=str)
def test_decoder_that_is_the_embedding(options, settings):
    """Statistics of the embedding's use; the gradient is that of both uses; the decoder's bias is plain."""
    known = {"preconditioned": ["embedding", "body"]}
    model = Tied(**options).double()
    optimizer, _ = compare(model, tokens(10), forward=parts, reference_options=known, **SETTINGS[settings])
    assert set(optimizer.curvature) == {"embedding", "body"}
    entries = covered(optimizer)
    first, second = ("decoder", "embedding") if options.get("decoder_first") else ("embedding", "decoder")
    assert f"{second}.weight" not in entries  # listed once
    entry = entries[f"{first}.weight"]
    assert entry.preconditioned
    assert (entry.kind, entry.factor_sizes) == ("Embedding", (7, 4))
    assert f"{second}.weight" in entry.note
    if options.get("bias", True):
        assert not entries["decoder.bias"].preconditioned
        assert "embedding" in entries["decoder.bias"].reason


def test_tied_weight_takes_one_step():
    """Huge damping: the step is ∇ / λ once, whatever the number of names."""
    model = Tied().double()
    optimizer = THOR(model, lr=0.1 * 1e16, damping=1e16, momentum=0.0)
    [(x, loss)] = tokens(1)
    loss(model(x)).backward()
    weight, grad = model.decoder.weight.detach().clone(), model.decoder.weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(model.decoder.weight.detach(), weight - 0.1 * grad, rtol=1e-6, atol=1e-9)
    assert model.decoder.weight is model.embedding.weight


class Shared(nn.Module):
    """Two modules of one weight, with an activation between them."""

    def __init__(self, first, second, head):
        super().__init__()
        self.first, self.second, self.head = first, second, head
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.parts(x)[0]

    def parts(self, x):
        y1 = self.first(x)
        x2 = torch.tanh(y1)
        y2 = self.second(x2)
        x3 = torch.tanh(y2).flatten(1)
        y3 = self.head(x3)
        return y3, [("first", x, y1), ("second", x2, y2), ("head", x3, y3)]


def features(count, *shape):
    return [(torch.randn(5, *shape).double(), cross_entropy(torch.randint(3, (5,)))) for _ in range(count)]


# name: (model, shape of one input)
ONE_GEOMETRY = {
    "linear": lambda: (Shared(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)), (5,)),
    "linear_one_bias": lambda: (Shared(nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)), (5,)),
    "conv_other_stride": lambda: (
        Shared(nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, stride=2, dilation=2), nn.Linear(2, 3)),
        (2, 5),
    ),
    "transposed": lambda: (
        Shared(nn.ConvTranspose1d(2, 2, 3), nn.ConvTranspose1d(2, 2, 3, stride=2, padding=1), nn.Linear(26, 3)),
        (2, 5),
    ),
    "hugging_face": lambda: (Shared(Conv1D(5, 5), Conv1D(5, 5), nn.Linear(5, 3)), (5,)),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ONE_GEOMETRY)
def test_modules_of_one_geometry_pool_their_rows(name, settings):
    """Each has its own rows (and its own stride), the factors are of all of them; both biases are solved with G."""
    model, shape = ONE_GEOMETRY[name]()
    known = {"pooled": {"first": ["second"]}}
    optimizer, _ = compare(
        model.double(), features(6, *shape), forward=parts, reference_options=known, **SETTINGS[settings]
    )
    assert set(optimizer.curvature) == {"first", "head"}
    entries = covered(optimizer)
    assert "second.weight" in entries["first.weight"].note
    assert all(entry.preconditioned for entry in entries.values())


def test_weight_and_bias_shared():
    """The bias, of two modules too, gets the same treatment or says why not: it takes one step either way."""
    model = Shared(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    model.second.bias = model.first.bias
    optimizer = THOR(model)
    entry = covered(optimizer)["first.bias"]
    [(x, loss)] = features(1, 5)
    loss(model(x)).backward()
    bias, grad = model.first.bias.detach().clone(), model.first.bias.grad.clone()
    optimizer.step()
    assert not entry.preconditioned
    assert "shared" in entry.reason
    torch.testing.assert_close(model.first.bias.detach(), bias - 0.05 * grad)


# name: (model, shape of one input)
UNLIKE = {
    "convolution_and_its_transpose": lambda: (
        Shared(nn.Conv1d(2, 4, 3), nn.ConvTranspose1d(4, 2, 3), nn.Linear(10, 3)),
        (2, 5),
    ),
    "linear_and_its_transpose": lambda: (Shared(nn.Linear(5, 5), Conv1D(5, 5), nn.Linear(5, 3)), (5,)),
    "unlike_groups": lambda: (
        Shared(nn.Conv1d(2, 4, 1, groups=2), nn.ConvTranspose1d(4, 1, 1), nn.Linear(5, 3)),
        (2, 5),
    ),
    "no_layer": lambda: (Shared(nn.Linear(5, 5), Doubled(5, 5), nn.Linear(5, 3)), (5,)),
}


class Doubled(nn.Linear):
    """A layer that uses its weight in a way of its own."""

    def forward(self, x):
        return nn.functional.linear(x, 2 * self.weight, self.bias)


def test_unlike_modules_of_one_weight_are_plain_and_listed():
    for make in UNLIKE.values():
        model, shape = make()
        optimizer, _ = compare(
            model.double(), features(4, *shape), forward=parts, reference_options={"preconditioned": ["head"]}
        )
        assert set(optimizer.curvature) == {"head"}
        entries = covered(optimizer)
        assert "'first.weight', 'second.weight'" in entries["first.weight"].reason
        assert not any(entries[bias].preconditioned for bias in ("first.bias", "second.bias"))


def test_embedding_tied_to_something_else_is_plain():
    """Two embeddings of one table pool their rows; an embedding and a convolution could not agree."""
    model = nn.ModuleDict({"one": nn.Embedding(7, 4), "two": nn.Embedding(7, 4), "head": nn.Linear(4, 3)})
    model["two"].weight = model["one"].weight
    assert set(THOR(model).curvature) == {"one", "head"}
    model = nn.ModuleDict({"one": nn.Embedding(7, 4), "two": Doubled(4, 7), "head": nn.Linear(4, 3)})
    model["two"].weight = model["one"].weight
    assert set(THOR(model).curvature) == {"head"}


def test_attention_that_shares_its_projections_is_plain():
    """Albert-like sharing of a part of an attention: no pair of factors is known for it."""
    model = nn.ModuleDict({"one": nn.MultiheadAttention(4, 2), "two": nn.MultiheadAttention(4, 2)})
    model["two"].in_proj_weight = model["one"].in_proj_weight
    optimizer = THOR(model)
    assert set(optimizer.curvature) == {"one.out_proj", "two.out_proj"}
    entries = covered(optimizer)
    assert "'two.in_proj_weight'" in entries["one.in_proj_weight"].reason
    assert not entries["one.in_proj_bias"].preconditioned


@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
@pytest.mark.parametrize("tied", ["linear", "embedding"])
def test_tied_after_the_optimizer_was_made(tied, optimizer):
    """An error before anything moves: its factors would be those of one layer alone."""
    for steps in (0, 2):
        model = (Tied() if tied == "embedding" else ONE_GEOMETRY["linear"]()[0]).double()
        first, second = ("embedding", "decoder") if tied == "embedding" else ("first", "second")
        one, other = model.get_submodule(first), model.get_submodule(second)
        other.weight = nn.Parameter(one.weight.detach().clone())
        made = optimizer(model, update_interval=1)
        stream = tokens(3) if tied == "embedding" else features(3, 5)
        for x, loss in stream[:steps]:
            loss(model(x)).backward()
            made.step()
            made.zero_grad()
        other.weight = one.weight
        before, (x, loss) = weights(model), stream[2]
        loss(model(x)).backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"'\w+.weight' and '\w+.weight' are one parameter.* then make the"):
                made.step()
        assert_same(weights(model), before)
