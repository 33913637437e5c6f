"""Networks by name: which one a name means, whether it takes the images, and that nothing is
fetched.
"""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from torch_thor.errors import UserError
from torch_thor.training.models.library import (
    build_library_model,
    build_model,
    check_fits,
    check_name,
    find_model,
)


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    def refuse(*_, **__):
        raise OSError("pretrained weights were asked for")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)


def test_resnet50_is_version_1_5_with_any_number_of_outputs():
    for name in ("resnet50", "torchvision:resnet50"):
        model = build_model(name, 3, 1001)
        assert type(model).__module__ == "torchvision.models.resnet"
        block = model.layer2[0]
        # in 1.0 the first convolution has it
        assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))
        # with 1000 outputs, and one more
        assert sum(p.numel() for p in model.parameters()) == 25_557_032 + 2049


def test_a_prefix_chooses_the_library_and_timm_takes_any_number_of_channels():
    pytest.importorskip("timm")
    for name, library in {
        "timm:resnet18": "timm",
        "resnet18": "torchvision",
        "resnet10t": "timm",
    }.items():
        assert type(build_library_model(name)).__module__ == f"{library}.models.resnet"
    assert build_model("timm:resnet10t", 1, 7).eval()(torch.randn(2, 1, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("name", ["torchvision:googlenet", "torchvision:inception_v3"])
def test_auxiliary_heads_are_left_out(name):
    assert build_model(name, 3, 5).train()(torch.randn(2, 3, 96, 96)).shape == (2, 5)


def test_segmentation_is_no_classifier_but_can_be_built_without_a_pretrained_backbone():
    name = "lraspp_mobilenet_v3_large"
    assert isinstance(build_library_model(name), nn.Module)
    with pytest.raises(UserError, match=f"model={name} does not classify images"):
        check_name(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "smal-cnn",
            r"^model=smal-cnn is not a network \(did you mean small-cnn\?\): give a name of "
            r"torch-thor",
        ),
        ("resnet5", r"did you mean resnet50\?"),
        (
            "torchvision:resnet5",
            r"^model=torchvision:resnet5 is not a network \(did you mean resnet50\?\)",
        ),
        ("torchvision:resnet10t", r"is not a network"),
        ("timm:resnet5", r"^model=timm:resnet5 is not a network \(did you mean resnet50\?\)"),
        ("hf-hub:timm/resnet50", r"is not a network"),
    ],
)
def test_unknown_names(name, said):
    pytest.importorskip("timm")
    with pytest.raises(UserError, match=said) as caught:
        check_name(name)
    assert "\n" not in str(caught.value)


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as where it is not installed
    assert find_model("resnet18") == ("torchvision:", "resnet18")
    for name in ("timm:resnet18", "resnet10t"):
        with pytest.raises(UserError, match=r"pip install 'torch-thor\[timm\]'"):
            find_model(name)
    with pytest.raises(
        UserError, match=r"model=torchvision:resnet10t is not a network.*: give a name"
    ):
        find_model("torchvision:resnet10t")


def test_a_network_that_cannot_be_built_is_one_line(monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr("torchvision.models.get_model", broken)
    with pytest.raises(UserError, match=r"^model=resnet18 could not be built: no such thing$"):
        build_library_model("resnet18")
    with pytest.raises(
        UserError,
        match=r"takes images of 3 channels, and those of the data have 1: .*timm:resnet18",
    ):
        build_model("resnet18", 1, 10)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        return self.head(images.flatten(1)), images


def test_checking_leaves_the_network_as_it_was():
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten(), nn.Linear(108, 5)
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check_fits("mine", model, (1, 8, 8), 5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    for network, shape, classes, said in [
        (
            model,
            (1, 8, 8),
            4,
            r"model=mine returns \(2, 5\) for 2 images \(1 x 8 x 8\) instead of logits \(2, 4\)",
        ),
        (model, (1, 9, 9), 5, r"model=mine cannot process the data's images \(1 x 9 x 9\)"),
        (Pair(), (1, 2, 2), 3, r"returns tuple for 2 images"),
        (
            build_model("vit_b_16", 3, 10),
            (3, 32, 32),
            10,
            r"Wrong image height! Expected 224 but got 32",
        ),
    ]:
        with pytest.raises(UserError, match=said) as caught:
            check_fits("mine", network, shape, classes)
        assert "\n" not in str(caught.value)
        assert all(module.training for module in network.modules())


@pytest.mark.parametrize(
    ("layers", "least"),
    [
        ([nn.Conv2d(3, 4, 8), nn.BatchNorm2d(4)], 2),
        ([nn.Conv2d(3, 4, 7), nn.BatchNorm2d(4), nn.AvgPool2d(2)], 1),
        ([nn.Conv2d(3, 4, 8), nn.GroupNorm(1, 4)], 1),
        ([nn.Conv2d(3, 4, 8), nn.Flatten(), nn.BatchNorm1d(4)], 2),
    ],
)
def test_a_network_whose_batch_norm_sees_single_pixels_needs_two_images(layers, least):
    model = nn.Sequential(*layers, nn.Flatten())
    assert check_fits("mine", model, (3, 8, 8), 4) == least
    images = torch.randn(1, 3, 8, 8)
    with pytest.raises(ValueError, match="more than 1") if least == 2 else nullcontext():
        model(images)
    # nothing stays in the network
    assert not any(module._forward_pre_hooks for module in model.modules())
