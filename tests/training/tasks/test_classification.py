"""Image classification: losses and metrics by hand, folders of images as batches."""

import itertools
import shutil

import pytest
import torch
from torch.nn import functional

from image_tree import write_tree
from tiny import assert_same
from torch_thor.errors import UserError
from torch_thor.training.evaluation import evaluate
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.images import ImageClassification

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def opened(say=pytest.fail, train=True, trained=None, **options):
    recipe = Recipe.model_validate(options)
    return ImageClassification(recipe, torch.device("cpu"), say, train=train, data=trained)


def test_smoothing_is_cross_entropy_with_the_stated_distribution():
    for form, outputs, smoothing in itertools.product(
        ("torch", "reference"), (10, 1001), (0.0, 0.1, 0.3)
    ):
        task = opened(classes=outputs, label_smoothing=smoothing, smoothing_form=form)
        scores = torch.randn(6, outputs, dtype=torch.float64, requires_grad=True)
        labels = torch.randint(outputs, (6,))
        everywhere = smoothing / (outputs if form == "torch" else outputs - 1)
        targets = torch.full((6, outputs), everywhere, dtype=torch.float64)
        targets[range(6), labels] = 1 - smoothing + (everywhere if form == "torch" else 0)
        expected = -(targets * functional.log_softmax(scores, dim=1)).sum(dim=1).mean()
        loss = task.loss(lambda _, scores=scores: scores, (None, labels)).mean
        assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
        gradients = [torch.autograd.grad(mean, scores)[0] for mean in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-18)


def test_metrics_by_hand_for_any_number_of_processes():
    task = opened()
    model, (pixels, labels) = task.model(), task.test
    scores = model.eval()(pixels).double()
    ranks = scores.argsort(dim=1, descending=True) == labels[:, None]
    found, number = evaluate(task, model, Ranks())
    assert number == len(labels)
    assert found["top1"] == ranks[:, 0].double().mean()
    assert found["top5"] == pytest.approx(ranks[:, :5].any(dim=1).double().mean().item(), rel=1e-14)
    assert found["loss"] == pytest.approx(functional.cross_entropy(scores, labels).item(), rel=1e-5)
    dealt = [batch for rank in range(3) for batch in task.held_out(Ranks(rank, 3))]
    assert torch.equal(torch.cat([batch[1] for batch, counts in dealt if counts]), labels)
    task.outputs = 3  # fewer than five
    found = task.measure(lambda _: torch.eye(3), (None, torch.tensor([0, 2, 2])))
    assert (found["top1"], found["top5"]) == (2, 3)


@pytest.fixture
def folder(tmp_path):
    """Settings of the small ImageNet, two of whose 18 training images are broken."""
    write_tree(tmp_path)

    def settings(workers=0, max_broken=0.5):
        data = {"name": "image-folder", "root": str(tmp_path), "max_broken": max_broken}
        data |= {"transform": {"size": 24, "resize": 28}, "workers": {"count": workers}}
        return {"data": data, "model": "small-resnet", "batch_size": 6}

    return settings


def test_a_folder_gives_the_same_batches_for_any_number_of_workers_and_processes(folder):
    said = []
    task = opened(said.append, **folder())
    assert (task.data["samples"], task.steps_per_epoch) == (18, 3)
    whole = list(itertools.islice(task.batches(Ranks(), 0), 9))
    assert sum(len(labels) for _, labels in whole) == 3 * 16
    for start, workers in ((0, 2), (4, 0), (5, 1)):
        other = opened(said.append, **folder(workers)).batches(Ranks(), start)
        assert_same([(*batch,) for batch in itertools.islice(other, 9 - start)], whole[start:])
    tasks = [opened(said.append, **folder()) for _ in "ab"]
    shared = [task.batches(Ranks(rank, 2), 2) for rank, task in enumerate(tasks)]
    for batch, *parts in zip(whole[2:], *shared, strict=False):
        assert_same(tuple(map(torch.cat, zip(*parts, strict=True))), (*batch,))
    evaluated = opened(**folder(), train=False).held_out(Ranks())
    assert_same(list(evaluated), list(task.held_out(Ranks())))
    names = {line.partition(" ")[0].rpartition("/")[2] for line in said}
    assert names == {"china_2.JPEG", "flower_2.JPEG"}  # of the broken images


def test_broken_images_do_not_count_and_too_many_are_an_error(folder, tmp_path):
    (tmp_path / "val/digit/digit_7.JPEG").write_bytes(b"no image")
    task = opened(print, **{**folder(), "batch_size": 3})
    assert [len(labels) for (_, labels), _ in task.held_out(Ranks())] == [3, 2, 3]
    found, number = evaluate(task, task.model(), Ranks())
    assert (found["top5"], number) == (1, 8)  # of three classes
    with pytest.raises(UserError, match="1 of 9 samples cannot be read"):
        evaluate(opened(print, **folder(max_broken=0.1)), task.model(), Ranks())


def test_an_evaluation_has_the_outputs_and_the_labels_of_the_training(folder, tmp_path):
    trained = opened(print, **folder()).data
    for name in ("train", "val/china"):  # an evaluation needs neither
        shutil.rmtree(tmp_path / name)
    task = opened(train=False, trained=trained, **folder())
    assert task.outputs == 3
    labels = torch.cat([labels for (_, labels), _ in task.held_out(Ranks())])
    assert labels.tolist() == [1] * 3 + [2] * 3
    with pytest.raises(UserError, match=r"data.name=digits has other classes than the data of the"):
        opened(train=False, trained=trained)
