"""The character model: its text, its windows and its figures, against loops written out."""

import math

import pytest
import torch
from torch import nn

from torch_thor.training import UserError, evaluate, load_recipe
from torch_thor.training.data import Shard, characters
from torch_thor.training.models import CharTransformer
from torch_thor.training.tasks import CharLM
from torch_thor.training.tasks.char_lm import CONTEXT


@pytest.fixture(scope="module")
def task():
    recipe = load_recipe("char-lm", ["batch_size=6"])
    return CharLM.open(recipe, torch.device("cpu"), pytest.fail, pytest.fail)


def test_windows_are_of_the_text(task):
    text = "".join(map(chr, torch.cat(characters()).tolist()))
    x, y = next(iter(task.open_data(Shard()).train))
    assert x.shape == y.shape == (6, CONTEXT)
    for row, following in zip(x, y, strict=True):
        window = "".join(map(chr, [*row.tolist(), int(following[-1])]))
        assert window in text
        assert torch.equal(row[1:], following[:-1])


class Bigrams(nn.Module):
    """Scores of the next character that hang on this one alone."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(128, 128)

    def forward(self, x):
        return self.table(x)


def test_figures_by_hand(task):
    torch.manual_seed(0)
    model = Bigrams()
    score = evaluate(task, model, task.open_data(Shard()).evaluation)
    logs = model.table.weight.double().log_softmax(-1)
    _, held_out = characters()
    windows = (len(held_out) - CONTEXT - 2) // CONTEXT + 1
    pairs = [(int(held_out[i]), int(held_out[i + 1])) for i in range(windows * CONTEXT)]
    loss = -sum(logs[pair].item() for pair in pairs) / len(pairs)
    assert score.terms == len(pairs)
    assert score.metrics["loss"] == pytest.approx(loss, rel=1e-6)
    assert score.metrics["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)


def test_the_loss_is_a_mean_over_characters(task):
    batch = next(iter(task.open_data(Shard()).train))
    model = Bigrams()
    found = task.loss(model, batch)
    logs = model.table.weight.log_softmax(-1)
    by_hand = -sum(logs[a, b].item() for a, b in zip(batch[0].flatten(), batch[1].flatten(), strict=True))
    assert task.terms(batch).number == 6 * CONTEXT
    assert found.mean.item() == pytest.approx(by_hand / (6 * CONTEXT), rel=1e-5)
    assert found.output.shape == (6 * CONTEXT, 128)


def test_the_network_sees_no_character_to_come():
    torch.manual_seed(0)
    model = CharTransformer(128, CONTEXT).eval()
    x = torch.randint(128, (2, CONTEXT))
    other = x.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 128
    first, second = model(x), model(other)
    assert torch.allclose(first[:, :20], second[:, :20], atol=1e-6)
    assert not torch.allclose(first[:, 20:], second[:, 20:], atol=1e-2)
    assert model(x[:, :10]).shape == (2, 10, 128)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model=deep-autoencoder", "model=deep-autoencoder is not a network of task=char-lm: use char-transformer"),
        ("data.name=fashion-mnist", "data is set: task=char-lm is trained on the text of this Python's own help"),
        ("label_smoothing=0.1", "label_smoothing=0.1: task=char-lm has no smoothed labels"),
    ],
)
def test_what_is_refused(word, said):
    with pytest.raises(UserError, match=said):
        load_recipe("char-lm", [word])
