"""`torch-thor split-dim`: whose numbers are reported, and from which samples."""

import json

import pytest
import torch
from PIL import Image
from rich.console import Console

from fake_times import fake_times
from torch_thor import choose_split_dim
from torch_thor import split as choice_module
from torch_thor.errors import UserError
from torch_thor.tools.split_dim import load_subject, sample_images, split_dim
from torch_thor.training.recipe_model import Transform

MODEL = """
import torch
from torch import nn

def net():
    pool = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(nn.Conv2d(3, 8, 3), pool, nn.Flatten(), nn.Linear(32, 20))

def own():
    return nn.Linear(5, 3), (torch.randn(6, 5), torch.zeros(6, 3)), nn.functional.mse_loss
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    return lambda function: f"{tmp_path / 'mine.py'}:{function}"


def run(word, folder, **options):
    console = Console(width=200, record=True)
    with fake_times(lambda sizes, split_dims, **_: tuple(map(float, split_dims))):
        split_dim(word, folder, console, device="cpu", **options)
    return json.loads((folder / "split_dim.json").read_text()), console.export_text()


@pytest.mark.parametrize("optimizer", ["thor", "thor-muon"])
def test_the_report_shows_the_choice(mine, tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr(
        choice_module, "orthogonal_seconds", lambda _, split_dims, **__: [0.0] * len(split_dims)
    )
    out, given = tmp_path / "out", {"batch": 3, "pixels": 12, "seed": 5, "optimizer": optimizer}
    found, printed = run(mine("net"), out, **given)
    with fake_times(lambda sizes, split_dims, **_: tuple(map(float, split_dims))):
        model, images = load_subject(mine("net"), 5).model, sample_images(3, 12, None, 5)
        expected = choose_split_dim(model, images, optimizer=optimizer)
    assert found | given | json.loads(json.dumps(expected.as_dict())) == found
    assert (out / "split_dim.png").read_bytes().startswith(b"\x89PNG")
    assert "<- chosen" in printed
    with pytest.raises(UserError, match=r"split_dim\.json exists already: give another --out"):
        run(mine("own"), out)
    found, _ = run(mine("own"), out, overwrite=True)
    assert list(found["losses"]) == [""]  # the own batch and loss function


def test_samples_are_normalised_crops_of_the_images_of_a_folder(tmp_path):
    with pytest.raises(UserError, match="contains no images"):
        sample_images(4, 5, tmp_path, 1)
    for number in range(6):
        Image.new("RGB", (9, 7), (40 * number, 7, 255)).save(tmp_path / f"{number}.PNG")
    images = sample_images(4, 5, tmp_path, 1)
    assert images.shape == (4, 3, 5, 5)
    mean, std = (torch.tensor(v)[:, None, None] for v in (Transform().mean, Transform().std))
    colours = ((images * std + mean) * 255).round()
    assert (colours == colours[..., :1, :1]).all()  # an image of a single colour stays so
    assert (colours[:, 1:, 0, 0] == torch.tensor([7.0, 255.0])).all()
    assert torch.equal(images, sample_images(4, 5, tmp_path, 1))
    assert not torch.equal(images, sample_images(4, 5, tmp_path, 2))


def test_a_model_by_name_is_drawn_from_the_seed():
    first, again, other = (
        next(load_subject("small-cnn", seed).model.parameters()) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
