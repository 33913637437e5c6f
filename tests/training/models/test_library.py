"""Networks by name: their library, and whether they take the images."""

import copy
import sys

import pytest
import torch
from torch import nn

from tiny import assert_same
from torch_thor.errors import UserError
from torch_thor.training.models.library import build_model, check_fits
from torch_thor.training.models.small import CharTransformer


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    def refuse(*_, **__):
        raise OSError("pretrained weights were asked for")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)


def test_a_prefix_chooses_the_library_and_timm_takes_any_number_of_channels():
    pytest.importorskip("timm")
    libraries = {"timm:resnet18": "timm", "resnet18": "torchvision", "resnet10t": "timm"}
    for name, library in libraries.items():
        assert type(build_model(name, 3, 7)).__module__ == f"{library}.models.resnet"
    assert build_model("timm:resnet10t", 1, 7).eval()(torch.randn(2, 1, 32, 32)).shape == (2, 7)
    with pytest.raises(UserError, match=r"takes images of 3 channels, and .* have 1: .*timm:NAME"):
        build_model("resnet18", 1, 10)


def test_auxiliary_heads_are_left_out():
    model = build_model("torchvision:googlenet", 3, 5).train()
    assert model(torch.randn(2, 3, 96, 96)).shape == (2, 5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smal-cnn", r"^model=smal-cnn is not a network \(did you mean small-cnn\?\): give an"),
        ("timm:resnet5", r"^model=timm:resnet5 is not a network \(did you mean resnet50\?\)"),
        ("lraspp_mobilenet_v3_large", r"is not a network.*: give an image classifier"),
    ],
)
def test_unknown_names_are_refused(name, said):
    pytest.importorskip("timm")
    with pytest.raises(UserError, match=said):
        build_model(name, 3, 10)


def test_without_timm_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as where it is not installed
    with pytest.raises(UserError, match=r"pip install 'torch-thor\[timm\]'"):
        build_model("timm:resnet18", 3, 10)


def plain():
    layers = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten(), nn.Linear(108, 5)
    return nn.Sequential(*layers)


def test_checking_leaves_the_network_as_it_was():
    model = plain()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check_fits("mine", model, (1, 8, 8), 5)
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("shape", "classes", "said"),
    [
        ((1, 8, 8), 4, r"mine returns \(2, 5\) for 2 images \(1 x 8 x 8\) instead of"),
        ((1, 9, 9), 5, r"model=mine cannot process the data's images \(1 x 9 x 9\)"),
    ],
)
def test_a_network_that_does_not_fit_is_one_line(shape, classes, said):
    with pytest.raises(UserError, match=said) as caught:
        check_fits("mine", plain(), shape, classes)
    assert "\n" not in str(caught.value)


def test_the_character_model_sees_no_character_to_come():
    model = CharTransformer(128, 64).eval()
    x = torch.randint(128, (2, 64))
    other = x.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 128
    before, after = model(x), model(other)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-2)
    assert model(x[:, :10]).shape == (2, 10, 128)
