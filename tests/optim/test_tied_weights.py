"""One parameter in several modules: one documented treatment, and one step. More on who shares: test_inspection.py."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from comparing import compare
from tiny import assert_same, cross_entropy, weights
from torch_thor import THOR, ThorMuon


class Shared(nn.Module):
    """Two modules of one weight, with an activation between them; a language model has no head."""

    def __init__(self, first, second, head=None, *, second_first=False):
        super().__init__()
        if second_first:
            self.second = second
        self.first, self.second, self.head = first, second, head
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.parts(x)[0]

    def parts(self, x):
        y = self.first(x)
        seen = [("first", x, y)]
        x = torch.tanh(y)
        y = self.second(x)
        seen.append(("second", x, y))
        if self.head is not None:
            x = torch.tanh(y).flatten(1)
            y = self.head(x)
            seen.append(("head", x, y))
        return y, seen


def parts(model, x):
    return model.parts(x)


def stream(count, shape):
    """Of tokens for a language model, or of features."""
    if shape is None:
        return [(torch.randint(7, (5, 3)), cross_entropy(torch.randint(7, (5, 3)))) for _ in range(count)]
    return [(torch.randn(5, *shape).double(), cross_entropy(torch.randint(3, (5,)))) for _ in range(count)]


def covered(optimizer):
    return {entry.name: entry for entry in optimizer.coverage()}


SETTINGS = {
    "defaults": {"update_interval": 2},
    "everything": {"update_interval": 2, "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3, "split_dim": 3},
    "no_momentum": {"momentum": 0.0, "update_interval": 1},
}
TIED = {
    "plain": lambda: Shared(nn.Embedding(7, 4), nn.Linear(4, 7)),
    "no bias": lambda: Shared(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)),
    "decoder first": lambda: Shared(nn.Embedding(7, 4), nn.Linear(4, 7), second_first=True),
    "padding": lambda: Shared(nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 7)),
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", TIED)
def test_decoder_that_is_the_embedding(name, settings):
    """Statistics of the embedding's use; the gradient is that of both uses; the decoder's bias is plain."""
    model, known = TIED[name]().double(), {"preconditioned": ["first"]}
    optimizer, _ = compare(model, stream(10, None), forward=parts, reference_options=known, **SETTINGS[settings])
    assert set(optimizer.curvature) == {"first"}
    entries = covered(optimizer)
    one, other = ("second", "first") if name == "decoder first" else ("first", "second")
    assert f"{other}.weight" not in entries  # listed once
    assert f"{other}.weight" in entries[f"{one}.weight"].note
    assert (entries[f"{one}.weight"].kind, entries[f"{one}.weight"].factor_sizes) == ("Embedding", (7, 4))
    if name != "no bias":
        assert "first" in entries["second.bias"].reason


# name: (model, shape of one input)
ONE_GEOMETRY = {
    "linear": lambda: (Shared(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)), (5,)),
    "linear_one_bias": lambda: (Shared(nn.Linear(5, 5), nn.Linear(5, 5, bias=False), nn.Linear(5, 3)), (5,)),
    "conv_other_stride": lambda: (
        Shared(nn.Conv1d(2, 2, 3, padding=1), nn.Conv1d(2, 2, 3, stride=2, dilation=2), nn.Linear(2, 3)), (2, 5)
    ),
    "transposed": lambda: (
        Shared(nn.ConvTranspose1d(2, 2, 3), nn.ConvTranspose1d(2, 2, 3, stride=2, padding=1), nn.Linear(26, 3)), (2, 5)
    ),
    "hugging_face": lambda: (Shared(Conv1D(5, 5), Conv1D(5, 5), nn.Linear(5, 3)), (5,)),
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ONE_GEOMETRY)
def test_modules_of_one_geometry_pool_their_rows(name, settings):
    """Each has its own rows (and its own stride), the factors are of all of them; both biases are solved with G."""
    model, shape = ONE_GEOMETRY[name]()
    known = {"pooled": {"first": ["second"]}}
    optimizer, _ = compare(
        model.double(), stream(6, shape), forward=parts, reference_options=known, **SETTINGS[settings]
    )
    assert set(optimizer.curvature) == {"first", "head"}
    assert "second.weight" in covered(optimizer)["first.weight"].note
    assert all(entry.preconditioned for entry in covered(optimizer).values())


@pytest.mark.parametrize("optimizer", [THOR, ThorMuon])
def test_tied_after_the_optimizer_was_made(optimizer):
    """An error before anything moves: its factors would be those of one layer alone."""
    for steps in (0, 2):
        for model, shape in ((TIED["plain"](), None), ONE_GEOMETRY["linear"]()):
            model.double()
            model.second.weight = nn.Parameter(model.first.weight.detach().clone())
            made, batches = optimizer(model, update_interval=1), stream(3, shape)
            for x, loss in batches[:steps]:
                loss(model(x)).backward()
                made.step()
                made.zero_grad()
            model.second.weight = model.first.weight
            before, (x, loss) = weights(model), batches[2]
            loss(model(x)).backward()
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match=r"'\w+.weight' and '\w+.weight' are one parameter.* then make the"
                ):
                    made.step()
            assert_same(weights(model), before)
