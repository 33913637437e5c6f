"""Image classification: losses and metrics by hand, label smoothing in both forms, folders of
images as batches.
"""

import itertools
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from image_tree import write_tree
from tiny import assert_same
from torch_thor.errors import UserError
from torch_thor.training.errors import UnreadableError
from torch_thor.training.evaluation import evaluate
from torch_thor.training.loop import split
from torch_thor.training.models.small import CLASSIFIERS
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe_model import Recipe
from torch_thor.training.tasks.images import ImageClassification
from torch_thor.training.tasks.opening import check_task, open_task

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def opened(say=pytest.fail, train=True, **options):
    return open_task(Recipe.model_validate(options), torch.device("cpu"), say, train=train)


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
        gradients = [torch.autograd.grad(one, scores)[0] for one in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-18)


def test_metrics_by_hand_for_any_number_of_processes():
    task = opened()
    model = task.model()
    images, labels = task.test
    scores = model.eval()(images).double()
    ranks = scores.argsort(dim=1, descending=True) == labels[:, None]
    found = evaluate(task, model, Ranks())
    assert found["top1"] == ranks[:, 0].double().mean()
    assert found["top5"] == pytest.approx(ranks[:, :5].any(dim=1).double().mean().item(), rel=1e-14)
    assert found["loss"] == pytest.approx(functional.cross_entropy(scores, labels).item(), rel=1e-5)
    counted = [
        batch[1] for rank in range(3) for batch, counts in task.held_out(Ranks(rank, 3)) if counts
    ]
    assert torch.equal(torch.cat(counted), labels)


def test_fewer_than_five_outputs():
    task = opened()
    task.outputs = 3
    found = task.measure(lambda _: torch.eye(3), (None, torch.tensor([0, 2, 2])))
    assert (found["top1"], found["top5"]) == (2, 3)


@pytest.fixture
def folder(tmp_path):
    """Settings of the small ImageNet, two of whose 18 training images are broken."""
    write_tree(tmp_path)
    common = {
        "name": "image-folder",
        "root": str(tmp_path),
        "max_broken": 0.5,
        "transform": {"size": 24, "resize": 28},
    }

    def settings(workers=0):
        return {
            "data": common | {"workers": {"count": workers}},
            "model": "small-resnet",
            "batch_size": 6,
        }

    return settings


def test_a_folder_gives_the_same_batches_for_any_number_of_workers_and_processes(folder):
    said = []
    task = opened(said.append, **folder())
    assert (task.samples, task.steps_per_epoch) == (18, 3)
    alone = list(itertools.islice(task.batches(Ranks(), 0), 9))
    assert sum(len(labels) for _, labels in alone) == 3 * 16
    evaluated = list(task.held_out(Ranks()))
    for start, workers in ((0, 2), (4, 0), (5, 1)):
        other = opened(said.append, **folder(workers)).batches(Ranks(), start)
        assert_same([(*batch,) for batch in itertools.islice(other, 9 - start)], alone[start:])
    shared = [
        itertools.islice(opened(said.append, **folder()).batches(Ranks(rank, 2), 2), 7)
        for rank in range(2)
    ]
    for (images, labels), *parts in zip(alone[2:], *shared, strict=True):
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)
    assert_same(list(opened(**folder(), train=False).held_out(Ranks())), evaluated)
    names = {line.partition(" ")[0].rpartition("/")[2] for line in said}
    assert names == {"china_2.JPEG", "flower_2.JPEG"}


def test_a_broken_image_is_named_once_and_on_its_own_process(folder, capsys):
    said = []
    task = opened(said.append, **folder())
    for _ in range(2):
        list(itertools.islice(task.batches(Ranks(), 0), 6))
    assert len(said) == 2
    assert all(line.endswith("is left out") for line in said)
    for rank in range(2):
        list(itertools.islice(task.batches(Ranks(rank, 2), 0), 9))
    assert len(said) == 2
    assert capsys.readouterr().err.count("is left out") == 2


class Pixel(nn.Module):
    """A classifier whose BatchNorm sees one pixel of an image."""

    def __init__(self, channels, classes):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(channels, classes, 24), nn.BatchNorm2d(classes)

    def forward(self, images):
        return self.norm(self.conv(images)).flatten(1)


@pytest.fixture
def pixel(monkeypatch):
    monkeypatch.setitem(CLASSIFIERS, "pixel", Pixel)
    return {"model": "pixel"}


@pytest.mark.parametrize(("size", "parts"), [(1, 1), (6, 6), (7, 3), (3, 2)])
def test_a_part_of_one_image_is_refused_before_the_first_step(folder, pixel, size, parts):
    given = {**folder(), **pixel, "batch_size": size, "accumulation": parts}
    with pytest.raises(
        UserError,
        match=rf"batch_size={size} in accumulation={parts} parts on 1 processes leaves a part of 1 "
        r"image, of which BatchNorm in model=pixel .* \(3 x 24 x 24 .*: raise batch_size or lower "
        r"accumulation, so that each part has 2 or more, or use larger images",
    ):
        opened(print, **given).model()
    # an evaluation takes it, and a network that has no such layer
    opened(print, train=False, **given).model()
    opened(print, **{**given, "model": "small-resnet"}).model()


def test_the_share_of_a_process_may_be_too_small(folder, pixel, monkeypatch):
    monkeypatch.setattr("torch_thor.training.tasks.images.world_size", lambda: 6)
    with pytest.raises(UserError, match=r"batch_size=6 .* on 6 processes leaves a part of 1 image"):
        opened(print, **{**folder(), **pixel}).model()
    monkeypatch.setattr("torch_thor.training.tasks.images.world_size", lambda: 4)
    with pytest.raises(UserError, match="batch_size=6 cannot be shared evenly by 4 processes"):
        opened(print, **folder())


def test_a_part_that_broken_images_leave_too_small_is_filled_the_same_way_after_a_resume(
    folder, pixel
):
    given = {**folder(), **pixel, "batch_size": 6, "accumulation": 3}
    task = opened(print, **given)
    net = task.model()
    found = list(itertools.islice(task.batches(Ranks(), 0), 9))
    plain = opened(print, **given)  # whose network takes a single image
    assert {len(labels) for _, labels in itertools.islice(plain.batches(Ranks(), 0), 9)} >= {5}
    assert {len(labels) for _, labels in found} == {6}
    for batch in found:
        for part in split(batch, 3):
            net(part[0])
    for start, workers in ((1, 0), (4, 2)):
        again = opened(print, **{**given, **folder(workers), **pixel, "batch_size": 6})
        again.model()
        rest = list(itertools.islice(again.batches(Ranks(), start), 9 - start))
        assert_same([(*batch,) for batch in rest], found[start:])


def test_a_batch_without_a_readable_image_ends_nothing_and_does_not_count(folder):
    given = {**folder(), "batch_size": 1}
    task = opened(print, **given)
    assert [len(labels) for _, labels in itertools.islice(task.batches(Ranks(), 0), 18)] == [1] * 18
    root = Path(given["data"]["root"])
    (root / "val/digit/digit_7.JPEG").write_bytes(b"no image")
    task = opened(print, **given)
    counted = [counts for _, counts in task.held_out(Ranks())]
    assert sorted(counted) == [False] + [True] * 8
    found = evaluate(task, task.model(), Ranks())
    assert found["top5"] == 1  # of three classes, the mean of eight images
    # the others of a batch count
    whole = list(opened(print, **{**given, "batch_size": 3}).held_out(Ranks()))
    assert [(len(labels), counts) for (_, labels), counts in whole] == [
        (3, True),
        (2, True),
        (3, True),
    ]


def test_an_evaluation_of_too_many_broken_images_is_an_error_at_its_end(folder):
    given = folder()
    given["data"] |= {"max_broken": 0.1}
    (Path(given["data"]["root"]) / "val/digit/digit_7.JPEG").write_bytes(b"no image")
    task = opened(print, **given)
    batches = task.held_out(Ranks())
    assert sum(len(labels) for (_, labels), _ in itertools.islice(batches, 2)) == 8
    with pytest.raises(UnreadableError, match="1 of 9 samples cannot be read"):
        next(batches)
    with pytest.raises(UnreadableError, match="1 of 9 samples cannot be read"):
        evaluate(task, task.model(), Ranks())


def test_more_workers_than_cores_are_one_line(folder, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")  # as others than torchrun may leave it
    opened(**folder(workers=1), train=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    said = []
    task = opened(said.append, **folder(workers=2), train=False)
    list(task.held_out(Ranks()))
    assert said == [
        "data.workers.count=2: 4 worker processes share 1 cores; data.workers.count=0 would be "
        "enough"
    ]


def test_workers_that_could_not_be_talked_to_are_refused_before_they_start(folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", "/" + 75 * "t")
    message = r"TMPDIR=/t+ has 76 bytes, .* or data.workers.count=0 to read in the training process"
    with pytest.raises(UserError, match=message):
        opened(print, **folder(workers=1), train=False)
    opened(print, **folder(workers=0), train=False)


def test_what_the_data_refuse():
    for options, said in [
        (
            {"classes": 9},
            r"classes=9: the data has 10 classes; leave classes=null, or set 10 or more",
        ),
        ({"batch_size": 2000}, r"batch_size=2000 is larger than the training set \(1438 samples\)"),
        ({"model": "resnet5"}, r"model=resnet5 is not a network \(did you mean resnet50\?\)"),
        (
            {"model": "resnet18"},
            r"model=resnet18 takes images of 3 channels, and those of the data have 1",
        ),
        (
            {"label_smoothing": 0.95, "smoothing_form": "reference"},
            r"label_smoothing=0.95 with smoothing_form=reference must be below 0.9 for 10 outputs",
        ),
    ]:
        with pytest.raises(UserError, match=said):
            opened(**options).model()


def test_other_images_are_evaluated_with_the_crops_of_the_training():
    def recipe(name, **transform):
        return Recipe.model_validate({"data": {"name": name, "transform": transform or None}})

    trained = recipe("image-folder", size=32, resize=40, mean=(0.1, 0.2, 0.3))
    assert (
        ImageClassification.recipe_of_evaluation(recipe("cifar10"), trained).data.crops
        == trained.data.crops
    )
    assert ImageClassification.recipe_of_evaluation(recipe("digits"), recipe("digits")) == recipe(
        "digits"
    )
    for others, own in (
        ("cifar10", "digits"),
        ("digits", "image-folder"),
        ("fashion-mnist", "digits"),
    ):
        with pytest.raises(
            UserError,
            match=rf"data.name={others} has images of .* trained on .*: choose data of that",
        ):
            ImageClassification.recipe_of_evaluation(recipe(others), recipe(own))


def test_settings_that_the_tasks_cannot_use():
    for options, *said in [
        ({},),
        (
            {"data": {"name": "corpus", "root": "x"}},
            "data.name=corpus cannot be used for task=image-cla",
        ),
        (
            {"phases": [{"steps": 3}], "activation_checkpointing": True},
            "phases is set",
            "activation_checkpointing=true",
        ),
        (
            {"stop_at": 76, "targets": [0.5, 76]},
            "stop_at=76.0 must lie in (0, 1]",
            "targets=[0.5, 76.0] must lie in",
        ),
        ({"task": "autoencoder", "model": "deep-autoencoder", "targets": [7]},),
        (
            {
                "task": "autoencoder",
                "data": {"name": "cifar10"},
                "classes": 10,
                "label_smoothing": 0.1,
            },
            "model=small-cnn is not a network of task=autoencoder: use deep-autoencoder",
            "data.name=cifar10 cannot be used for task=autoencoder: use digits, fashion-mnist",
            "classes=10: task=autoencoder has no classes",
            "label_smoothing=0.1: task=autoencoder has no labels",
        ),
        (
            {"task": "char-lm", "model": "deep-autoencoder", "data": {"name": "fashion-mnist"}},
            "model=deep-autoencoder is not a network of task=char-lm: use char-transformer",
            "data is set, but task=char-lm always uses the language reference of Python: leave "
            "data out",
        ),
        (
            {"task": "masked-lm", "model": "resnet18", "data": {"name": "digits"}, "classes": 3},
            "model=resnet18 is not a network of task=masked-lm",
            "data.name=digits cannot be used for task=masked-lm: use python-text, corpus",
            "classes=3: task=masked-lm has no classes",
        ),
    ]:
        faults = check_task(Recipe.model_validate(options))
        assert len(faults) == len(said), faults
        assert all(fault.startswith(start) for fault, start in zip(faults, said, strict=True)), (
            faults
        )


def test_the_network_is_that_of_the_seed_and_leaves_no_trace():
    task = opened()
    models = []
    for _ in "ab":
        torch.manual_seed(3)
        models.append(task.model())
    assert_same(models[0].state_dict(), models[1].state_dict())
    assert all(module.training for module in models[0].modules())
