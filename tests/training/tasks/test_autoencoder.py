"""The autoencoder: its data and metrics, against arithmetic written out."""

import pytest
import torch

from torch_thor.training.data.small import load_images
from torch_thor.training.evaluation import evaluate
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Data, Recipe
from torch_thor.training.tasks.autoencoder import Autoencoder


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
