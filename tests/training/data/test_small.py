"""The small data sets: their splits, and the contents of their files."""

import gzip
import struct

import pytest
import torch
from sklearn.datasets import load_digits
from torchvision.datasets import FashionMNIST

from torch_thor.errors import UserError
from torch_thor.training.data import small
from torch_thor.training.data.small import CLASSES, load_characters, load_images
from torch_thor.training.recipe_model import Data


def test_digits_are_split_and_keep_their_labels():
    train, test = load_images(Data())
    assert [images.shape for images, _ in (train, test)] == [(1438, 1, 8, 8), (359, 1, 8, 8)]
    assert abs(float(train[0].mean())) < 1e-5
    assert abs(float(train[0].std()) - 1) < 1e-5
    images, labels = (torch.cat(pair) for pair in zip(train, test, strict=True))
    # two pixels whose raw values are known undo the normalisation: 0 is the least, 16 the greatest
    low, high = images.min(), images.max()
    raw = ((images - low) / (high - low) * 16).round().flatten(1).int().tolist()
    digits = load_digits()
    found = [(*image, label) for image, label in zip(raw, labels.tolist(), strict=True)]
    wanted = zip(digits.data.astype(int).tolist(), digits.target.tolist(), strict=True)
    assert sorted(found) == sorted((*image, label) for image, label in wanted)


def test_fashion_mnist_is_read(tmp_path):
    for part, count in (("train", 20), ("t10k", 10)):
        pixels = torch.arange(count * 784).remainder(251).to(torch.uint8).view(count, 28, 28)
        labels = torch.arange(count).remainder(10).to(torch.uint8)
        for kind, values in (("images-idx3", pixels), ("labels-idx1", labels)):
            content = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            packed = gzip.compress(content + values.numpy().tobytes())
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(packed)
    train, test = load_images(Data(name="fashion-mnist", root=str(tmp_path), download=False))
    pixels = torch.arange(20 * 784).remainder(251).double() / 255
    expected = (pixels - pixels.mean()) / pixels.std()
    torch.testing.assert_close(train[0].double().flatten(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(test[0], train[0][:10])
    assert train[1].tolist() == [*range(10), *range(10)]
    assert train[1].dtype == torch.int64
    assert CLASSES["fashion-mnist"] == FashionMNIST.classes


def test_fashion_mnist_that_is_missing_is_one_line(tmp_path):
    said = r"fashion-mnist is missing or .* \(Dataset not found.*: set data.root to its folder"
    with pytest.raises(UserError, match=said) as caught:
        load_images(Data(name="fashion-mnist", root=str(tmp_path), download=False))
    assert "\n" not in str(caught.value)


def test_the_text_is_held_out_at_its_end():
    (train, held_out), text = load_characters(), small.python_text()
    assert len(train) == len(text) * 19 // 20
    assert "".join(map(chr, torch.cat([train, held_out]).tolist())) == text
    assert len(text) > 300_000
    assert text.isascii()
