"""Crops against torchvision's and against hand-made ones; randomness is a function of seed, epoch and image."""

import math

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from torch_thor.training import UserError
from torch_thor.training.data import CIFAR, IMAGENET, EvaluationTransform, ImageTransform, Normalize, TrainingTransform
from torch_thor.training.data.transforms import sample_seed


def photograph():
    return torch.tensor(load_sample_images().images[1]).permute(2, 0, 1)  # 427 x 640


def test_imagenet_recipe():
    assert (IMAGENET.size, IMAGENET.resize, IMAGENET.flip, IMAGENET.padding) == (224, 256, 0.5, None)
    assert IMAGENET.scale == (0.08, 1.0)
    assert IMAGENET.ratio == pytest.approx((0.75, 1.333), abs=1e-3)
    assert (CIFAR.size, CIFAR.resize) == (32, 32)


def test_training_crop_is_torchvisions_under_the_sample_seed():
    pipeline = v2.Compose([v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(0.5)])
    transform = TrainingTransform(IMAGENET, seed=5)
    for index in range(6):
        torch.manual_seed(sample_seed(5, 2, index))
        assert torch.equal(transform(photograph(), 2, index), pipeline(photograph()))


def test_training_crops_have_the_stated_areas_ratios_and_flips():
    # the image's pixels are its coordinates, so that a crop tells where it was taken
    height, width = 200, 250
    rows = torch.arange(height, dtype=torch.uint8).view(-1, 1).expand(height, width)
    columns = torch.arange(width, dtype=torch.uint8).view(1, -1).expand(height, width)
    image = torch.stack([rows, columns, rows])
    transform = TrainingTransform(IMAGENET, seed=0)
    areas, ratios, flips = [], [], 0
    for index in range(300):
        crop = transform(image, 0, index).double()
        middle = 112
        rise = (crop[0, 200, middle] - crop[0, 24, middle]) / 176 * 224
        run = (crop[1, middle, 200] - crop[1, middle, 24]) / 176 * 224
        flips += int(run < 0)
        areas.append(float(rise * abs(run)) / (height * width))
        ratios.append(float(abs(run) / rise))
    assert 0.07 < min(areas) < 0.15
    assert 0.85 < max(areas) < 1.05
    assert 0.72 < min(ratios) < 0.80
    assert 1.25 < max(ratios) < 1.40
    assert abs(flips / 300 - 0.5) < 4 * math.sqrt(0.25 / 300)


def test_randomness_is_a_function_of_seed_epoch_and_image_and_leaves_the_global_one_alone():
    transform = TrainingTransform(IMAGENET, seed=1)
    first = transform(photograph(), 0, 7)
    torch.rand(3)
    before = torch.get_rng_state()
    again = transform(photograph(), 0, 7)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    others = [transform(photograph(), 1, 7), transform(photograph(), 0, 8)]
    others.append(TrainingTransform(IMAGENET, seed=2)(photograph(), 0, 7))
    assert all(not torch.equal(first, other) for other in others)


def test_evaluation_crop_by_hand():
    image = photograph()
    # 427 x 640: the shorter side becomes 256, the longer one int(640 * 256 / 427) = 383
    resized = functional.resize(image, [256, 383], antialias=True)
    top, left = 16, round((383 - 224) / 2)
    expected = resized[:, top : top + 224, left : left + 224]
    assert torch.equal(EvaluationTransform(IMAGENET)(image, 3, 4), expected)


def test_evaluation_crop_is_near_pillows():
    picture = Image.fromarray(load_sample_images().images[1]).resize((383, 256), Image.Resampling.BILINEAR)
    expected = functional.pil_to_tensor(picture.crop((80, 16, 304, 240)))
    crop = EvaluationTransform(IMAGENET)(photograph(), 0, 0)
    assert (crop.int() - expected.int()).abs().max() <= 2


def test_padded_crops_of_cifar():
    transform = TrainingTransform(ImageTransform(size=32, resize=32, padding=4, flip=0.0), seed=0)
    image = torch.randint(1, 256, (3, 32, 32), dtype=torch.uint8)
    padded = torch.nn.functional.pad(image, (4, 4, 4, 4))
    places = {(y, x): padded[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)}
    found = set()
    for index in range(200):
        crop = transform(image, 0, index)
        (place,) = [key for key, value in places.items() if torch.equal(value, crop)]
        found.add(place)
    assert {y for y, _ in found} == {x for _, x in found} == set(range(9))


def test_normalize_against_the_formula_in_float64():
    images = torch.randint(0, 256, (2, 3, 5, 4), dtype=torch.uint8).to(memory_format=torch.channels_last)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    result = Normalize(mean, std)(images)
    columns = [torch.tensor(v, dtype=torch.float64).view(1, 3, 1, 1) for v in (mean, std)]
    expected = (images.double() / 255 - columns[0]) / columns[1]
    assert result.dtype == torch.float32
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"size": 0, "resize": 10}, "size=0"),
        ({"size": 288}, "resize=256 must be data.transform.size=288 or more"),
        ({"scale": (0.0, 1.0)}, "scale"),
        ({"scale": (0.5, 0.1)}, "scale"),
        ({"ratio": (2.0, 1.0)}, "ratio"),
        ({"flip": 1.5}, "flip=1.5"),
        ({"padding": -1}, "padding=-1"),
        ({"std": (0.2, 0.0, 0.2)}, "std"),
    ],
)
def test_bad_options(options, match):
    with pytest.raises(UserError, match=match):
        ImageTransform(**options)
