"""CIFAR in torchvision's own file format, with few images, through the same streams."""

import hashlib
import pickle

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, CIFAR100

from torch_thor.training import UserError
from torch_thor.training.data import (
    CIFAR,
    DataSpec,
    EvaluationTransform,
    ImageSet,
    ImageTransform,
    Normalize,
    Shard,
    Workers,
)
from torch_thor.training.data.cifar import open_cifar

KINDS = {"cifar10": (CIFAR10, 10, "labels"), "cifar100": (CIFAR100, 100, "fine_labels")}


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """Write both sets with three images a file; the checksums that torchvision asks for become those of our files."""
    pixels = {}
    for kind, classes, key in KINDS.values():
        folder = tmp_path / kind.base_folder
        folder.mkdir()
        parts = {"train_list": kind.train_list, "test_list": kind.test_list}
        for attribute, files in parts.items():
            listed = []
            for number, (name, _) in enumerate(files):
                random = np.random.default_rng(number)
                data = random.integers(0, 256, (3, 3072), dtype=np.uint8)
                labels = [0, classes - 1, (number + 3) % classes]
                listed.append([name, dump(folder / name, {"data": data, key: labels, "coarse_labels": [0, 0, 0]})])
                pixels[kind, name] = (data, labels)
            monkeypatch.setattr(kind, attribute, listed)
        names = [f"class {number}" for number in range(classes)]
        meta = dict(kind.meta)
        meta["md5"] = dump(folder / meta["filename"], {meta["key"]: names})
        monkeypatch.setattr(kind, "meta", meta)
    return tmp_path, pixels


def dump(path, content):
    path.write_bytes(pickle.dumps(content))
    return hashlib.md5(path.read_bytes()).hexdigest()


def small(root, name, workers=0, transform=None):
    spec = DataSpec(name=name, root=str(root), download=False, transform=transform, workers=Workers(count=workers))
    return ImageSet(spec, torch.device("cpu"), print).open(batch_size=2, seed=0, shard=Shard())


@pytest.mark.parametrize("name", KINDS)
def test_pixels_and_labels_are_those_of_the_files(archive, name):
    root, pixels = archive
    kind, classes, _ = KINDS[name]
    for source, files in zip(open_cifar(name, root, download=False), (kind.train_list, kind.test_list), strict=True):
        data = np.concatenate([pixels[kind, file][0] for file, _ in files]).reshape(-1, 3, 32, 32)
        assert torch.equal(source.images, torch.from_numpy(data))
        assert source.labels.tolist() == [label for file, _ in files for label in pixels[kind, file][1]]
        assert source.classes == tuple(f"class {number}" for number in range(classes))
        assert source.where(1).startswith(name)


@pytest.mark.parametrize("name", KINDS)
def test_evaluation_images_are_whole(archive, name):
    root, _ = archive
    _, evaluation = open_cifar(name, root, download=False)
    batches = list(small(root, name).evaluation)
    images = torch.cat([images for images, _ in batches])
    assert torch.equal(images, Normalize(CIFAR.mean, CIFAR.std)(evaluation.images))
    assert torch.equal(EvaluationTransform(CIFAR)(evaluation.images[0], 0, 0), evaluation.images[0])


def test_training_is_the_same_for_any_number_of_workers(archive):
    root, _ = archive
    one, other = (small(root, "cifar10", workers=workers).train for workers in (0, 2))
    for _ in range(2):
        for (images, labels), (other_images, other_labels) in zip(one, other, strict=True):
            assert images.shape == (2, 3, 32, 32)
            assert torch.equal(images, other_images)
            assert torch.equal(labels, other_labels)
    assert one.epoch == 2
    assert len(one) == 7  # 15 images, 2 a batch


def test_padded_crops_reach_the_batches(archive):
    root, _ = archive
    transform = ImageTransform(size=32, resize=32, padding=4, flip=0.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    images = torch.cat([images for images, _ in small(root, "cifar10", transform=transform).train])
    borders = (images[:, :, 0] == 0).all(dim=(1, 2)) | (images[:, :, -1] == 0).all(dim=(1, 2))
    assert borders.any()


@pytest.mark.parametrize("name", KINDS)
def test_missing_and_damaged_files(archive, name, tmp_path):
    root, _ = archive
    kind = KINDS[name][0]
    with pytest.raises(UserError, match=f"{name} is not whole in .*{kind.base_folder}.* data.download=true") as caught:
        open_cifar(name, tmp_path / "nowhere", download=False)
    assert "\n" not in str(caught.value)
    path = root / kind.base_folder / kind.train_list[0][0]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=f"{name} is not whole"):
        open_cifar(name, root, download=False)


def test_a_download_that_fails(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fail)
    with pytest.raises(UserError, match=r"no route to host.*check the network"):
        open_cifar("cifar10", tmp_path, download=True)
