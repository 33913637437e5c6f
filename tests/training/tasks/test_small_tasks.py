"""The character model and the autoencoder: data and metrics, against arithmetic written out."""

import itertools
import math

import pytest
import torch
from torch import nn

from tiny import assert_same
from torch_thor.training.data.small import load_characters, load_images
from torch_thor.training.evaluation import evaluate
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Data, Recipe
from torch_thor.training.tasks.autoencoder import Autoencoder
from torch_thor.training.tasks.char_lm import CONTEXT
from torch_thor.training.tasks.opening import open_task


def opened(**options):
    recipe = Recipe(task="char-lm", model="char-transformer", **({"batch_size": 6} | options))
    return open_task(recipe, torch.device("cpu"), pytest.fail)


@pytest.fixture(scope="module")
def task():
    return opened()


def first(batches, count):
    return [(x.clone(), y.clone()) for x, y in itertools.islice(batches, count)]


def test_windows_are_of_the_text_anywhere_and_new_in_each_batch(task):
    text = "".join(map(chr, load_characters()[0].tolist()))
    windows = [
        "".join(map(chr, [*x.tolist(), int(y[-1])]))
        for batch in first(task.batches(Ranks(), 0), 50)
        for x, y in zip(*batch, strict=True)
    ]
    assert all(len(window) == CONTEXT + 1 and window in text for window in windows)
    assert len(set(windows)) > 290  # of 300
    x, y = next(task.batches(Ranks(), 0))
    assert torch.equal(x[:, 1:], y[:, :-1])


def test_batches_are_functions_of_seed_and_number_and_shared(task):
    whole = first(task.batches(Ranks(), 0), 9)
    assert_same(first(task.batches(Ranks(), 4), 5), whole[4:])
    shares = [first(opened().batches(Ranks(rank, 3), 2), 7) for rank in range(3)]
    parts = (zip(*step, strict=True) for step in zip(*shares, strict=True))
    assert_same([tuple(map(torch.cat, pair)) for pair in parts], whole[2:])
    assert not torch.equal(first(opened(seed=1).batches(Ranks(), 0), 1)[0][0], whole[0][0])
    assert task.steps_per_epoch == len(load_characters()[0]) // CONTEXT // 6


def test_loss_and_metrics_by_hand(task):
    model = nn.Sequential(nn.Embedding(128, 128))  # scores depend on the last character only
    logs = model[0].weight.double().log_softmax(-1)
    _, held_out = load_characters()
    number = CONTEXT * ((len(held_out) - CONTEXT - 2) // CONTEXT + 1)
    loss = -logs[held_out[:number], held_out[1 : number + 1]].mean().item()
    found, _ = evaluate(task, model, Ranks())
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    x, y = next(task.batches(Ranks(), 0))
    assert task.terms((x, y)).number == 6 * CONTEXT
    wanted = -logs[x, y].mean().item()
    assert task.loss(model, (x, y)).mean.item() == pytest.approx(wanted, rel=1e-5)


@pytest.fixture(scope="module")
def autoencoder():
    recipe = Recipe(task="autoencoder", model="deep-autoencoder")
    return Autoencoder(recipe, torch.device("cpu"), pytest.fail)


def test_pixels_lie_between_0_and_1(autoencoder):
    (images, _), (test, _) = load_images(Data())
    low, high = images.min(), images.max()
    assert torch.equal(autoencoder.train, (images.flatten(1) - low) / (high - low))
    assert (autoencoder.train.min(), autoencoder.train.max()) == (0, 1)
    assert autoencoder.test.shape == (len(test), 64)  # fewer than 2000


def test_loss_and_metrics_of_the_autoencoder_by_hand(autoencoder):
    model = autoencoder.model()
    some = next(autoencoder.batches(Ranks(), 0))[:7]
    found = autoencoder.loss(model, some)
    pixels, target = torch.sigmoid(model(some).double()), some.double()
    cross = -(target * pixels.log() + (1 - target) * (1 - pixels).log())
    assert found.mean.item() == pytest.approx(cross.sum().item() / 7, rel=1e-5)
    assert (found.distribution, autoencoder.terms(some).number) == ("bernoulli", 7)
    test = autoencoder.test.double()
    errors = (torch.sigmoid(model(autoencoder.test).double()) - test).square().sum(1)
    metrics, _ = evaluate(autoencoder, model, Ranks())
    assert metrics["squared_error"] == pytest.approx(errors.mean().item(), rel=1e-5)
