"""The small data sets: the split is a split, the files are read right, and what is missing or
broken is one line.
"""

import gzip
import struct

import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.datasets import FashionMNIST

from torch_thor.errors import UserError
from torch_thor.training.data.small import (
    DEBIAN_FASHION_MNIST,
    load_characters,
    load_images,
    python_text,
    read_idx,
)
from torch_thor.training.recipe_model import Data


def test_digits_are_split_and_keep_their_labels():
    train, test = load_images(Data())
    assert [images.shape for images, _ in (train, test)] == [(1438, 1, 8, 8), (359, 1, 8, 8)]
    assert abs(float(train[0].mean())) < 1e-5
    assert abs(float(train[0].std()) - 1) < 1e-5
    images, labels = (torch.cat(pair) for pair in zip(train, test, strict=True))
    # undo the normalisation by two pixels whose raw values are known: 0 is the least, 16 the
    # greatest
    raw = ((images - images.min()) / (images.max() - images.min()) * 16).round().flatten(1).int()
    digits = load_digits()
    expected = [
        (*image.astype(int).flatten(), label)
        for image, label in zip(digits.images, digits.target, strict=True)
    ]
    found = [(*image, label) for image, label in zip(raw.tolist(), labels.tolist(), strict=True)]
    assert sorted(found) == sorted(expected)


def write_idx(path, values, kind=8, cut=0):
    content = (
        struct.pack(f">HBB{values.ndim}I", 0, kind, values.ndim, *values.shape)
        + values.numpy().tobytes()
    )
    path.write_bytes(gzip.compress(content[: len(content) - cut]))


@pytest.mark.parametrize("place", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_found_and_read(tmp_path, place):
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 20), ("t10k", 10)):
        pixels = torch.arange(count * 784).remainder(251).to(torch.uint8).view(count, 28, 28)
        write_idx(tmp_path / place / f"{part}-images-idx3-ubyte.gz", pixels)
        write_idx(
            tmp_path / place / f"{part}-labels-idx1-ubyte.gz",
            torch.arange(count).remainder(10).to(torch.uint8),
        )
    train, test = load_images(Data(name="fashion-mnist", root=str(tmp_path), download=False))
    pixels = torch.arange(20 * 784).remainder(251).double() / 255
    expected = (pixels - pixels.mean()) / pixels.std()
    torch.testing.assert_close(train[0].double().flatten(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(test[0], train[0][:10])
    assert train[1].tolist() == [*range(10), *range(10)]
    assert train[1].dtype == torch.int64


def test_what_is_missing_or_cannot_be_fetched_is_one_line(tmp_path, monkeypatch):
    def fail(self):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz:\nTried http://...")

    monkeypatch.setattr(FashionMNIST, "download", fail)
    for download, reason in (
        (False, "Dataset not found"),
        (True, "Error downloading train-images"),
    ):
        with pytest.raises(
            UserError, match=rf"not in .*FashionMNIST/raw \({reason}.*: set data.root"
        ) as caught:
            load_images(Data(name="fashion-mnist", root=str(tmp_path), download=download))
        assert "\n" not in str(caught.value)


def test_damaged_files_are_refused(tmp_path):
    path, values = tmp_path / "a.gz", torch.zeros(3, 4, dtype=torch.uint8)
    write_idx(path, values, kind=9)
    damaged = [path.read_bytes()]
    write_idx(path, values, cut=1)
    damaged.append(path.read_bytes())
    write_idx(path, values)
    assert torch.equal(read_idx(path), values)
    whole = path.read_bytes()
    for content in (*damaged, whole[:-9], whole[:7], b"", gzip.compress(b"")):
        path.write_bytes(content)
        with pytest.raises(UserError, match="fetch the data set again"):
            read_idx(path)


@pytest.mark.skipif(
    not DEBIAN_FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist is not installed"
)
def test_debians_fashion_mnist():
    train, test = load_images(Data(name="fashion-mnist", download=False))
    assert train[0].shape == (60000, 1, 28, 28)
    assert [labels.bincount().tolist() for _, labels in (train, test)] == [[6000] * 10, [1000] * 10]


def test_the_text_is_held_out_at_its_end():
    (train, held_out), text = load_characters(), python_text()
    assert len(train) == len(text) * 19 // 20
    assert "".join(map(chr, torch.cat([train, held_out]).tolist())) == text
    assert len(text) > 300_000
    assert text.isascii()
