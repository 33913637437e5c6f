"""The autoencoder: its network, its pixels and its figures, against arithmetic written out."""

import math

import pytest
import torch
from torch import nn

from torch_thor.training import UserError, evaluate, load_recipe
from torch_thor.training.data import DataSpec, Shard, load_data
from torch_thor.training.models import deep_autoencoder
from torch_thor.training.tasks import Autoencoder


@pytest.fixture(scope="module")
def task():
    return Autoencoder.open(load_recipe("autoencoder"), torch.device("cpu"), pytest.fail, pytest.fail)


def test_the_network():
    model = deep_autoencoder(784)
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert [layer.in_features for layer in linear] == [784, 128, 64, 32, 12, 32, 64, 128]
    assert linear[-1].out_features == 784
    # the code (12 wide) and the logits are linear
    assert "".join("L" if isinstance(layer, nn.Linear) else "t" for layer in model) == "LtLtLtLLtLtLtL"
    for layer in linear:
        bound = math.sqrt(6 / (layer.in_features + layer.out_features))
        assert layer.weight.abs().max() <= bound
        assert layer.weight.abs().max() > 0.8 * bound
        assert not layer.bias.any()


def test_pixels_lie_between_0_and_1(task):
    data = load_data(DataSpec("digits"))
    assert task.train.shape == (len(data.train_labels), 64)
    assert (task.train.min(), task.train.max()) == (0, 1)
    assert task.held_out.shape == (len(data.test_labels), 64)  # fewer than 2000
    one = data.train_images[3, 0, 2, 5]
    low, high = data.train_images.min(), data.train_images.max()
    assert task.train[3, 2 * 8 + 5] == (one - low) / (high - low)


def test_loss_and_figures_by_hand(task):
    torch.manual_seed(0)
    model = task.build_model()
    some = task.train[:7]
    found = task.loss(model, some)
    pixels = torch.sigmoid(model(some).double())
    target = some.double()
    cross = -(target * pixels.log() + (1 - target) * (1 - pixels).log())
    assert found.mean.item() == pytest.approx(cross.sum().item() / 7, rel=1e-5)
    assert (found.distribution, task.terms(some).number) == ("bernoulli", 7)
    score = evaluate(task, model, task.open_data(Shard()).evaluation)
    held_out = task.held_out.double()
    by_hand = (torch.sigmoid(model(task.held_out).double()) - held_out).square().sum() / len(held_out)
    assert score.terms == len(held_out)
    assert score.metrics["squared_error"] == pytest.approx(by_hand.item(), rel=1e-5)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model=small-cnn", "model=small-cnn is not a network of task=autoencoder: use deep-autoencoder"),
        ("data.name=cifar10", "data.name=cifar10: task=autoencoder takes one of digits, fashion-mnist"),
        ("label_smoothing=0.1", "label_smoothing=0.1: task=autoencoder has no smoothed labels"),
        ("classes=10", "classes=10: task=autoencoder has no classes"),
        ("task=autoencode", "task=autoencode is not a task: use one of image-classification, autoencoder, char-lm"),
        ("targets=[0]", r"targets=\[0\.0\] must be above 0"),
    ],
)
def test_what_is_refused(word, said):
    with pytest.raises(UserError, match=said):
        load_recipe("autoencoder", [word])
