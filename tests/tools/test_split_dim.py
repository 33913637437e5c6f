"""`torch-thor split-dim` beside what the command line tests: whose numbers are reported, and from
which samples.
"""

import json

import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

from fake_times import fake_times
from torch_thor import choose_split_dim
from torch_thor import split as choice_module
from torch_thor.errors import UserError
from torch_thor.tools import split_dim as module
from torch_thor.tools.split_dim import load_subject, sample_images, split_dim
from torch_thor.training.recipe_model import Transform

MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(20))

def net():
    pool = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(nn.Conv2d(3, 8, 3), pool, nn.Flatten(), nn.Linear(32, 20))

def own():
    return nn.Linear(5, 3), (torch.randn(6, 5), torch.zeros(6, 3)), nn.functional.mse_loss

def empty():
    return ()

def word():
    return "net"
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    return lambda function: f"{tmp_path / 'mine.py'}:{function}"


def run(word, folder, **options):
    console = Console(width=200, record=True)
    with fake_times(lambda sizes, split_dims, **_: tuple(map(float, split_dims))):
        choice = split_dim(word, folder, console, device="cpu", **options)
    return choice, json.loads((folder / "split_dim.json").read_text()), console.export_text()


@pytest.mark.parametrize("given", [{}, {"optimizer": "thor"}], ids=str)
def test_the_report_is_that_of_the_choice(mine, tmp_path, monkeypatch, given):
    monkeypatch.setattr(
        choice_module, "orthogonal_seconds", lambda _, split_dims, **__: [0.0] * len(split_dims)
    )
    choice, found, printed = run(mine("net"), tmp_path / "out", batch=3, pixels=12, seed=5, **given)
    with fake_times(lambda sizes, split_dims, **_: tuple(map(float, split_dims))):
        expected = choose_split_dim(
            load_subject(mine("net"), 5).model,
            sample_images(3, 12, None, 5)[0],
            **({"optimizer": "thor-muon"} | given),
        )
    assert found["optimizer"] == given.get("optimizer", "thor-muon")
    assert choice == expected
    assert found | json.loads(json.dumps(expected.as_dict())) == found
    assert (found["batch"], found["pixels"], found["seed"]) == (3, 12, 5)
    assert (tmp_path / "out" / "split_dim.png").read_bytes().startswith(b"\x89PNG")
    for said in ("photographs in scikit-learn", "<- chosen", module.verdict(choice)):
        assert said in printed
    _, found, _ = run(mine("own"), tmp_path / "out", overwrite=True)
    assert (found["batch"], list(found["losses"])) == (None, [""])


def test_samples_are_normalised_crops_of_the_images_of_a_folder(tmp_path):
    """Images of one colour stay so, whatever the crop; which ones are chosen depends on the seed
    alone.
    """
    for number in range(6):
        (tmp_path / f"{number}").mkdir()
        Image.new("RGB", (9, 7), (40 * number, 7, 255)).save(tmp_path / f"{number}" / "one.png")
        (tmp_path / f"{number}" / "._one.png").write_bytes(b"no image")
    said = []
    images, source = sample_images(4, 5, tmp_path, 1, said.append)
    assert said == [
        f"{tmp_path}: left out of its files and folders: 6 hidden or made by programs (._* 6)"
    ]
    assert images.shape == (4, 3, 5, 5)
    assert source == f"crops of 4 images of {tmp_path}"
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (Transform().mean, Transform().std)
    )
    colours = ((images * std + mean) * 255).round()
    assert (colours == colours[..., :1, :1]).all()
    assert (colours[:, 1:, 0, 0] == torch.tensor([7.0, 255.0])).all()
    assert len({*colours[:, 0, 0, 0].tolist()} & {*range(0, 240, 40)}) == 4
    assert torch.equal(images, sample_images(4, 5, tmp_path, 1)[0])
    assert not torch.equal(images, sample_images(4, 5, tmp_path, 2)[0])
    two = sample_images(4, 5, None, 0)[0]
    assert two.std() > 0.1


def test_models_by_name():
    assert isinstance(load_subject("small-cnn", 0).model, nn.Module)
    first, again, other = (
        next(load_subject("squeezenet1_1", seed).model.parameters()) for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("word", "options", "said"),
    [
        ("net", {"batch": 0}, "--batch 0: give 1 or more"),
        ("net", {"pixels": 0}, "--pixels 0: give 1 or more"),
        ("net", {"seed": -1}, "--seed -1: must be between 0"),
        ("net", {"data": "no", "batch": 2}, "contains 0 images, fewer than --batch 2"),
        ("net", {"data": "few", "batch": 2}, "contains 1 images, fewer than --batch 2"),
        ("net", {"data": "few", "batch": 1}, "cannot be read as an image"),
        ("build", {"pixels": 2}, "could not be measured"),
        ("missing", {}, "failed: KeyError"),
        ("empty", {}, "returned an object of type tuple: return a model"),
        ("word", {}, "returned an object of type str: return a model"),
        ("resnet5", {}, "did you mean resnet50.*; for your own model give FILE.py:FUNCTION"),
        ("nowhere.py:net", {}, "nowhere.py does not exist: give FILE.py:FUNCTION"),
    ],
)
def test_mistakes_leave_nothing_behind(mine, tmp_path, word, options, said):
    (tmp_path / "few").mkdir()
    (tmp_path / "few" / "one.JPG").write_text("no image")
    if "data" in options:
        options = {**options, "data": tmp_path / options["data"]}
    with pytest.raises(UserError, match=said):
        run(word if "." in word or word == "resnet5" else mine(word), tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_results_are_not_replaced_by_mistake(mine, tmp_path):
    (tmp_path / "split_dim.png").write_text("mine")
    with pytest.raises(
        UserError, match=r"split_dim\.png exists already: give another --out, or --overwrite"
    ):
        run(mine("own"), tmp_path)
    assert (tmp_path / "split_dim.png").read_text() == "mine"
