"""The data sets: the split is a split, the files are read right, and what is missing or broken is said in one line."""

import gzip
import struct

import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.datasets import FashionMNIST

from torch_thor.training import UserError
from torch_thor.training.data import DataSpec, epoch_order, load_data
from torch_thor.training.data.in_memory import DEBIAN_FASHION_MNIST, read_idx


def rows(images):
    return sorted(tuple(row) for row in images.flatten(1).double().round(decimals=3).tolist())


def test_digits_split_covers_every_image_once_and_does_not_overlap():
    data = load_data(DataSpec("digits"))
    assert data.train_images.shape == (1438, 1, 8, 8)
    assert data.test_images.shape == (359, 1, 8, 8)
    assert (data.image_shape, data.classes) == ((1, 8, 8), 10)
    everything = torch.cat([data.train_images, data.test_images])
    raw = torch.from_numpy(load_digits().images).unsqueeze(1)
    # undo the normalisation with two pixels whose raw values are known: 0 is the least, 16 the greatest
    low, high = everything.min(), everything.max()
    assert rows((everything - low) / (high - low) * 16) == rows(raw)


def test_digits_labels_belong_to_their_images():
    data = load_data(DataSpec("digits"))
    digits = load_digits()
    raw = {
        tuple(image.flatten().tolist()): int(label) for image, label in zip(digits.images, digits.target, strict=True)
    }
    low, high = data.test_images.min(), data.test_images.max()
    restored = ((data.test_images - low) / (high - low) * 16).round().flatten(1).double()
    assert [raw[tuple(image.tolist())] for image in restored] == data.test_labels.tolist()


def test_training_images_are_normalised():
    images = load_data(DataSpec("digits")).train_images
    assert images.dtype == torch.float32
    assert abs(float(images.mean())) < 1e-5
    assert abs(float(images.std()) - 1) < 1e-5


def test_order_is_a_permutation_and_a_function_of_seed_and_epoch_alone():
    order = epoch_order(100, seed=3, epoch=5)
    torch.rand(7)
    assert torch.equal(order, epoch_order(100, seed=3, epoch=5))
    assert order.sort().values.tolist() == list(range(100))
    others = [epoch_order(100, 3, 6), epoch_order(100, 5, 3), epoch_order(100, 4, 5)]
    assert not any(torch.equal(order, other) for other in others)


def test_order_leaves_the_global_random_numbers_alone():
    before = torch.get_rng_state()
    epoch_order(100, seed=3, epoch=5)
    assert torch.equal(before, torch.get_rng_state())


def write_idx(path, values, *, cut=0):
    content = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.numpy().tobytes()
    content = content[: len(content) - cut]
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_set(folder, ending):
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(1)
    for part, count in (("train", 20), ("t10k", 10)):
        images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)
        write_idx(folder / f"{part}-images-idx3-ubyte{ending}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{ending}", (torch.arange(count) % 10).to(torch.uint8))


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_fashion_mnist_files_are_read_as_torchvision_reads_them(tmp_path, ending):
    write_set(tmp_path / "FashionMNIST" / "raw", "")
    expected = FashionMNIST(str(tmp_path), train=True)
    write_set(tmp_path / "ours", ending)
    data = load_data(DataSpec("fashion-mnist", root=str(tmp_path / "ours"), download=False))
    scaled = expected.data.double() / 255
    assert torch.allclose(data.train_images[:, 0].double(), (scaled - scaled.mean()) / scaled.std(), atol=1e-5)
    assert torch.equal(data.train_labels, expected.targets)
    assert data.test_images.shape == (10, 1, 28, 28)


def test_torchvisions_folder_is_found(tmp_path):
    write_set(tmp_path / "FashionMNIST" / "raw", "")
    assert len(load_data(DataSpec("fashion-mnist", root=str(tmp_path), download=False)).train_labels) == 20


def test_missing_files_are_named_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match=r"not in .*data\.root.*dataset-fashion-mnist"):
        load_data(DataSpec("fashion-mnist", root=str(tmp_path), download=False))


def test_failed_download_is_one_line(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nTried http://...")

    monkeypatch.setattr(FashionMNIST, "download", fail)
    with pytest.raises(UserError, match="could not be downloaded") as caught:
        load_data(DataSpec("fashion-mnist", root=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("damage", ["cut inside", "cut outside", "empty", "other type"])
def test_damaged_files_are_refused(tmp_path, ending, damage):
    path = tmp_path / f"a{ending}"
    write_idx(path, torch.zeros(3, 4, dtype=torch.uint8), cut=1 if damage == "cut inside" else 0)
    if damage == "cut outside":
        path.write_bytes(path.read_bytes()[:-9])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "other type":
        content = struct.pack(">HBBI", 0, 0x0D, 1, 4) + bytes(16)
        path.write_bytes(gzip.compress(content) if ending else content)
    with pytest.raises(UserError, match="fetch the data set again"):
        read_idx(tmp_path, "a")


@pytest.mark.skipif(not DEBIAN_FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_debians_fashion_mnist():
    data = load_data(DataSpec("fashion-mnist", download=False))
    assert data.train_images.shape == (60000, 1, 28, 28)
    assert data.train_labels.bincount().tolist() == [6000] * 10
    assert data.test_labels.bincount().tolist() == [1000] * 10
