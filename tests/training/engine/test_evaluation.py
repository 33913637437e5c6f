"""Top-1 and top-5 against a count by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torch_thor.training import RunConfig, UserError
from torch_thor.training.data import DataBundle
from torch_thor.training.engine import evaluation
from torch_thor.training.tasks import ImageClassification


def evaluate(model, batches, classes):
    """Metrics by name as attributes."""
    images, labels = batches[0]
    task = ImageClassification(DataBundle(images, labels, images, labels, classes), RunConfig())
    return SimpleNamespace(**evaluation.evaluate(task, model, batches).metrics)


def in_batches(images, labels, size):
    return list(zip(images.split(size), labels.split(size), strict=True))


def count(scores, labels, k):
    """How many labels are among the k best-scored classes, with lists and loops."""
    hits = 0
    for row, label in zip(scores.tolist(), labels.tolist(), strict=True):
        better = sum(score > row[label] for score in row)
        hits += better < k
    return hits


@pytest.mark.parametrize("images", [1, 50, 999])
def test_equals_a_count_by_hand(images):
    torch.manual_seed(2)
    scores, labels = torch.randn(images, 12), torch.randint(12, (images,))
    empty = [(scores[:0], labels[:0])]  # what a rank may be given
    score = evaluate(nn.Identity(), empty + in_batches(scores, labels, 50) + empty, 12)
    assert score.top1 == count(scores, labels, 1) / images
    assert score.top5 == count(scores, labels, 5) / images
    by_hand = [-row.log_softmax(0)[label].item() for row, label in zip(scores.double(), labels, strict=True)]
    assert score.loss == pytest.approx(sum(by_hand) / images, rel=1e-5)


def test_three_images_worked_out():
    scores = torch.tensor([[6.0, 5, 4, 3, 2, 1], [6, 5, 4, 3, 2, 1], [1, 2, 3, 4, 5, 6]])
    score = evaluate(nn.Identity(), [(scores, torch.tensor([0, 4, 0]))], 6)
    assert (score.top1, score.top5) == (1 / 3, 2 / 3)


def test_with_few_classes_top5_is_certain():
    assert evaluate(nn.Identity(), [(torch.randn(20, 3), torch.randint(3, (20,)))], 3).top5 == 1.0


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("where", ["data", "model"])
def test_the_mode_is_restored_after_an_error(training, where):
    def batches():
        yield torch.randn(4, 10), torch.randint(10, (4,))
        if where == "data":
            raise UserError("a file is gone")
        yield torch.randn(4, 9), torch.randint(10, (4,))

    model = nn.Sequential(nn.Linear(10, 10), nn.Dropout(0.5)).train(training)
    task = ImageClassification(DataBundle(*next(batches()), *next(batches()), 10), RunConfig())
    with pytest.raises((UserError, RuntimeError)):
        evaluation.evaluate(task, model, batches())
    assert [module.training for module in model.modules()] == [training] * 3


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_running_statistics_are_left_as_they_were(training):
    model = nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(0.5)).train(training)
    images, labels = torch.randn(20, 10), torch.randint(10, (20,))
    before, random = model[0].running_mean.clone(), torch.get_rng_state()
    evaluate(model, [(images, labels)], 10)
    assert model.training is training
    assert torch.equal(model[0].running_mean, before)
    assert torch.equal(torch.get_rng_state(), random)
