"""Folders of images and CIFAR: files, labels, pixels and crops; a mistake is one line."""

import itertools
import os
import pickle
import shutil
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.datasets import CIFAR10, CIFAR100, ImageFolder
from torchvision.io import decode_image
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import resize

from image_tree import CLASSES, write_tree
from torch_thor.errors import UserError
from torch_thor.training.data.batches import digest
from torch_thor.training.data.images import collate, normalised, open_images, read_image
from torch_thor.training.recipe_model import Data, Transform

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


@pytest.fixture
def tree(tmp_path):
    return write_tree(tmp_path / "data")


def opened(root, **options):
    return open_images(Data(name="image-folder", root=str(root)), 5, **options)


def paths_of(images):
    return [os.fsdecode(path) for path in images.source.paths]


@pytest.mark.parametrize("names", [("train", "val"), ("ilsvrc", "ilsvrc_eval")])
def test_files_labels_and_classes_are_as_torchvision_lists_them(tmp_path, names):
    write_tree(tmp_path, *names)
    training, held_out = (tmp_path / name for name in names)
    # folders may be links; their classes are sorted by name, and files inside a class
    (training / "china").rename(tmp_path / "elsewhere")
    (training / "china").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    for folder in (training, held_out):
        shutil.copytree(folder / "digit", folder / "digit more")
    for found, folder in zip(opened(tmp_path), (training, held_out), strict=True):
        truth = ImageFolder(str(folder))
        assert found.classes == truth.classes == [*CLASSES[:2], "digit more", CLASSES[2]]
        assert list(zip(paths_of(found), found.labels.tolist(), strict=True)) == truth.samples


def test_hidden_files_are_skipped_and_files_of_other_kinds_counted(tree):
    before, image = [paths_of(images) for images in opened(tree)], tree / "train/china/china_0.JPEG"
    (tree / "train/.ipynb_checkpoints").mkdir()
    shutil.copy(image, tree / "train/.ipynb_checkpoints")
    shutil.copy(image, tree / "train/flower/._flower_0.JPEG")
    for name in ("a.txt", "b.txt", "README"):
        (tree / "val/digit" / name).write_text("no image")
    said = []
    assert [paths_of(images) for images in opened(tree, say=said.append)] == before
    assert said == [f"{tree}/val: 3 files are no images and are left out (.txt 2, no suffix 1)"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("rm -r val", "data.root=.* must contain train and val or train and test or ilsvrc and "),
        ("mkdir train/a train/b", "no valid file for the classes a, b.* add images .*, or remove"),
        ("cp -r val/digit val/x", "val: the training has no class x: name the folders as in"),
    ],
)
def test_folders_that_are_no_data_set_are_refused(tree, spoil, said):
    subprocess.run(spoil, shell=True, cwd=tree, check=True)
    with pytest.raises(UserError, match=f"(?i){said}") as caught:
        opened(tree)
    assert "\n" not in str(caught.value)


def test_a_training_is_known_by_the_names_of_its_files(tree, tmp_path):
    before = opened(tree)[0].data
    assert (before["samples"], before["classes"]) == (18, [*CLASSES])
    shutil.copytree(tree, tmp_path / "far")
    assert opened(tmp_path / "far")[0].data == before
    (tree / "train/china/china_0.JPEG").rename(tree / "train/china/another.jpg")
    after = opened(tree)[0].data
    assert after.pop("files") != before.pop("files")
    assert after == before


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("jpeg", mode) for mode in ("RGB", "L", "CMYK")),
        *(("png", mode) for mode in ("RGB", "L", "P", "RGBA")),
        ("webp", "RGB"),
        ("gif", "P"),
        ("bmp", "RGB"),
        ("tiff", "RGB"),
    ],
)
def test_files_have_the_pixels_of_torchvisions_decoder(tmp_path, kind, mode):
    path = tmp_path / "image.jpg"  # the content tells the format
    picture = Image.fromarray(load_sample_images().images[0]).crop((100, 100, 196, 164))
    picture.convert(mode).save(path, kind)
    if kind in ("bmp", "tiff"):  # unknown to torchvision
        truth = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)
    else:
        truth = decode_image(str(path), "RGB")
    assert torch.equal(read_image(path), truth)


def test_an_unreadable_file_is_a_reason_in_one_line(tree):
    path = tree / "train/china/china_0.JPEG"
    whole = path.read_bytes()
    Image.new("I;16", (32, 32)).save(path, "png")
    deep = path.read_bytes()
    for content, said in (
        (b"no image" * 20, "cannot identify image file"),
        (whole[:1000], "truncated"),
        (deep, "mode I;16: convert it to 8 bits a channel"),
    ):
        path.write_bytes(content)
        reason = opened(tree)[0][0, 0]
        assert reason.startswith(f"{path} cannot be read (")
        assert said in reason
        assert "\n" not in reason


def photograph():
    return torch.tensor(load_sample_images().images[1]).permute(2, 0, 1)  # 427 x 640


@pytest.fixture
def cropped(tree, monkeypatch):
    """Training and evaluation images, all of the same photograph."""
    monkeypatch.setattr("torch_thor.training.data.images.read_image", lambda _: photograph())

    def images(options, seed=5):
        return open_images(Data(name="image-folder", root=str(tree), transform=options), seed)

    return images


@pytest.mark.parametrize(
    ("options", "crop"),
    [
        (Transform(), v2.RandomResizedCrop(224, antialias=True)),
        (Transform(size=32, resize=32, padding=4), v2.RandomCrop(32, padding=4)),
    ],
)
def test_training_crops_are_torchvisions_under_the_seed_of_the_sample(cropped, options, crop):
    pipeline, found = v2.Compose([crop, v2.RandomHorizontalFlip(0.5)]), []
    for seed, epoch, index in itertools.product((5, 6), (0, 2), (0, 1)):
        torch.manual_seed(digest(seed, epoch, index))
        found.append(pipeline(photograph()))
        torch.rand(7)
        assert torch.equal(cropped(options, seed)[0][epoch, index][0], found[-1])
    assert not any(torch.equal(*pair) for pair in itertools.combinations(found, 2))


def test_evaluation_crops_by_hand(cropped):
    _, images = cropped(Transform())
    # 427 x 640: the shorter side becomes 256, the longer one int(640 * 256 / 427) = 383
    resized = resize(photograph(), [256, 383], antialias=True)
    assert torch.equal(images[0, 0][0], resized[:, 16:240, 80:304])


def test_batches_are_normalised_and_channels_last():
    images = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8)
    batch, labels = collate([(images[0], torch.tensor(4)), (images[1], torch.tensor(2))])
    assert labels.tolist() == [4, 2]
    result, options = normalised(batch, Transform()), Transform()
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)
    mean, std = (torch.tensor(v).double().view(3, 1, 1) for v in (options.mean, options.std))
    expected = (images.double() / 255 - mean) / std
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("kind", "classes", "key"), [(CIFAR10, 10, "labels"), (CIFAR100, 100, "fine_labels")]
)
def test_cifar_is_what_its_files_hold(tmp_path, monkeypatch, kind, classes, key):
    def dump(name, content):
        (tmp_path / kind.base_folder / name).write_bytes(pickle.dumps(content))

    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    (tmp_path / kind.base_folder).mkdir()
    names, parts = [f"class {number}" for number in range(classes)], []
    dump(kind.meta["filename"], {kind.meta["key"]: names})
    for files in (kind.train_list, kind.test_list):
        pixels = torch.randint(256, (len(files), 3, 3, 32, 32), dtype=torch.uint8)
        labels = torch.randint(classes, (len(files), 3))
        for (name, _), own, numbers in zip(files, pixels, labels.tolist(), strict=True):
            dump(name, {"data": own.view(3, 3072).numpy(), key: numbers})
        parts.append((pixels.flatten(0, 1), labels.flatten().tolist()))
    data = Data(name=f"cifar{classes}", root=str(tmp_path), download=False)
    for found, (pixels, labels) in zip(open_images(data, 0), parts, strict=True):
        assert torch.equal(found.source, pixels)
        assert (found.labels.tolist(), found.classes) == (labels, names)
    # evaluated as they are
    assert all(torch.equal(found[0, index][0], image) for index, image in enumerate(parts[-1][0]))
