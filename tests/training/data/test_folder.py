"""Listing equals torchvision's ImageFolder; every way a folder can be wrong is one clear line."""

import shutil

import pytest
import torch
from torchvision.datasets import ImageFolder

from image_tree import CLASSES, write_tree
from torch_thor.training import UserError
from torch_thor.training.data import BrokenImageError, list_images, open_folders
from torch_thor.training.data.folder import find_splits

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def refused(root, match):
    with pytest.raises(UserError, match=match) as caught:
        open_folders(root, say=pytest.fail)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["train", "val"])
def test_listing_is_that_of_torchvision(imagenet, part):
    source, truth = list_images(imagenet / part), ImageFolder(str(imagenet / part))
    assert source.classes == tuple(truth.classes) == CLASSES
    assert [(source.where(i), int(source.labels[i])) for i in range(len(source.labels))] == truth.samples
    assert len(truth.samples) == (18 if part == "train" else 9)


def test_names_beyond_ascii_and_sub_folders(imagenet, tmp_path):
    place = tmp_path / "Blüten/日本"
    place.mkdir(parents=True)
    shutil.copy(imagenet / "val/flower/flower_6.JPEG", place / "ö.jpg")
    source = list_images(tmp_path)
    assert source.where(0) == str(place / "ö.jpg")
    assert source.load(0).shape[0] == 3


@pytest.mark.parametrize("names", [("train", "val"), ("ilsvrc", "ilsvrc_eval")])
def test_both_layouts_are_found(tmp_path, names):
    write_tree(tmp_path, *names)
    assert find_splits(tmp_path) == (tmp_path / names[0], tmp_path / names[1])
    train, evaluation = open_folders(tmp_path, say=pytest.fail)
    assert (len(train.labels), len(evaluation.labels)) == (18, 9)


def test_a_file_that_went_away_is_broken(tree):
    source = list_images(tree / "train")
    (tree / "train/china/china_0.JPEG").unlink()
    with pytest.raises(BrokenImageError, match="No such file"):
        source.load(0)


def test_missing_splits(tree):
    (tree / "val").rename(tree / "validation")
    refused(tree, "must hold train/ and val/ or ilsvrc/ and ilsvrc_eval/.* it holds train, validation")
    refused(tree / "nowhere", "nowhere is not a folder")
    (tree / "empty").mkdir()
    refused(tree / "empty", "no folders")


def test_images_without_class_folders(tree):
    for path in sorted((tree / "val").rglob("*.JPEG")):
        path.rename(tree / "val" / path.name)
    for name in CLASSES:
        (tree / "val" / name).rmdir()
    refused(tree, "val holds its images directly: .* sort the images")


def test_one_class(tree):
    for part in ("train", "val"):
        for name in ("digit", "flower"):
            shutil.rmtree(tree / part / name)
    refused(tree, "one class folder, china: .* two or more")


def test_an_empty_training_class(tree):
    for path in (tree / "train/digit").iterdir():
        path.unlink()
    (tree / "train/digit/notes.txt").write_text("no image")
    refused(tree, "train: no image in digit: add images")


def test_an_empty_evaluation_class_is_a_warning(tree):
    for path in (tree / "val/digit").iterdir():
        path.unlink()
    said = []
    _, evaluation = open_folders(tree, said.append)
    assert evaluation.classes == CLASSES
    assert evaluation.labels.tolist() == [0, 0, 0, 2, 2, 2]
    assert len(said) == 1
    assert "no image in digit" in said[0]


def test_no_evaluation_image_at_all(tree):
    for path in (tree / "val").rglob("*.JPEG"):
        path.unlink()
    refused(tree, "nothing to evaluate")


def test_different_class_lists(tree):
    (tree / "val/digit").rename(tree / "val/digits")
    refused(tree, r"differ \(digit only in train/; digits only in val/\)")
    shutil.rmtree(tree / "val/digits")
    refused(tree, r"differ \(digit only in train/\)")
    for number in range(5):
        (tree / f"val/x{number}").mkdir()
    refused(tree, r"x0, x1, x2 and 2 more only in val/")


def test_labels_are_class_numbers(imagenet):
    labels = list_images(imagenet / "train").labels
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [6, 6, 6]
