"""The autoencoder: its pixels and metrics, against arithmetic written out."""

import pytest
import torch

from torch_thor.training.data.small import load_images
from torch_thor.training.evaluation import evaluate
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe import Data, Recipe
from torch_thor.training.tasks import open_task


@pytest.fixture(scope="module")
def task():
    return open_task(Recipe(task="autoencoder", model="deep-autoencoder"), torch.device("cpu"), pytest.fail)


def test_pixels_lie_between_0_and_1(task):
    (images, _), (test, _) = load_images(Data())
    low, high = images.min(), images.max()
    assert torch.equal(task.train, (images.flatten(1) - low) / (high - low))
    assert (task.train.min(), task.train.max()) == (0, 1)
    assert task.test.shape == (len(test), 64)  # fewer than 2000


def test_loss_and_metrics_by_hand(task):
    model = task.model()
    some = next(task.batches(Ranks(), 0))[:7]
    found = task.loss(model, some)
    pixels, target = torch.sigmoid(model(some).double()), some.double()
    cross = -(target * pixels.log() + (1 - target) * (1 - pixels).log())
    assert found.mean.item() == pytest.approx(cross.sum().item() / 7, rel=1e-5)
    assert (found.distribution, task.terms(some).number) == ("bernoulli", 7)
    by_hand = (torch.sigmoid(model(task.test).double()) - task.test.double()).square().sum() / len(task.test)
    assert evaluate(task, model, Ranks())["squared_error"] == pytest.approx(by_hand.item(), rel=1e-5)
