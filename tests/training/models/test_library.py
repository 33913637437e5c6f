"""torchvision's and timm's networks by name: which one a name means, and that nothing is fetched."""

import sys

import pytest
import torch
from torch import nn

from torch_thor.training import UserError
from torch_thor.training.models import find_model


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    def refuse(*_, **__):
        raise OSError("pretrained weights were asked for")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)


def find(word):
    return find_model(word, ["mine"], "or write your own")


def sizes(model):
    return [p.shape for p in model.parameters()]


@pytest.mark.parametrize("word", ["resnet50", "torchvision:resnet50"])
def test_resnet50_is_version_1_5_with_the_datas_classes(word):
    model = find(word).build_classifier(3, 1001)
    assert type(model).__module__ == "torchvision.models.resnet"
    block = model.layer2[0]
    assert (block.conv1.stride, block.conv2.stride) == ((1, 1), (2, 2))  # 1.0 has the stride in the first convolution
    assert model.fc.weight.shape == (1001, 2048)
    assert sum(p.numel() for p in model.parameters()) == 25_557_032 + 2049  # with 1000 classes, and one more


def test_a_prefix_chooses_the_library():
    pytest.importorskip("timm")
    assert type(find("timm:resnet18").build()).__module__ == "timm.models.resnet"
    assert type(find("resnet18").build()).__module__ == "torchvision.models.resnet"
    assert type(find("resnet10t").build()).__module__ == "timm.models.resnet"  # timm alone knows it


def test_timm_takes_any_number_of_channels():
    pytest.importorskip("timm")
    model = find("timm:resnet10t").build_classifier(1, 7).eval()
    assert model(torch.randn(2, 1, 32, 32)).shape == (2, 7)


def test_torchvision_takes_three():
    with pytest.raises(
        UserError, match=r"model=resnet18 takes images of 3 channels, and those of the data have 1: .*timm:resnet18"
    ):
        find("resnet18").build_classifier(1, 10)


@pytest.mark.parametrize("word", ["torchvision:googlenet", "torchvision:inception_v3"])
def test_auxiliary_heads_are_left_out(word):
    model = find(word).build_classifier(3, 5).train()
    assert model(torch.randn(2, 3, 96, 96)).shape == (2, 5)


def test_segmentation_is_no_classifier_but_can_be_built_without_a_pretrained_backbone():
    found = find("lraspp_mobilenet_v3_large")
    assert isinstance(found.build(), nn.Module)
    with pytest.raises(UserError, match="model=lraspp_mobilenet_v3_large does not classify images"):
        found.build_classifier(3, 10)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "resnet5",
            r"^resnet5 is neither a torchvision nor a timm model \(did you mean resnet50\?\); or write your own",
        ),
        ("mien", r"did you mean mine\?"),
        (
            "torchvision:resnet5",
            r"^torchvision:resnet5 is not a torchvision model \(did you mean resnet50\?\); or",
        ),
        ("torchvision:resnet10t", r"is not a torchvision model"),
        ("timm:resnet5", r"^timm:resnet5 is not a timm model \(did you mean resnet50\?\); or write"),
        ("hf-hub:timm/resnet50", r"is neither"),
    ],
)
def test_unknown_names(word, said):
    pytest.importorskip("timm")
    with pytest.raises(UserError, match=said) as caught:
        find(word)
    assert "\n" not in str(caught.value)


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as where it is not installed
    assert find("resnet18").library == "torchvision:"
    for word in ("timm:resnet18", "resnet10t"):
        with pytest.raises(UserError, match=r"pip install 'torch-thor\[timm\]'"):
            find(word)
    with pytest.raises(UserError, match=r"torchvision:resnet10t is not a torchvision model"):
        find("torchvision:resnet10t")


def test_a_network_that_cannot_be_built_is_one_line(monkeypatch):
    def broken(*_, **__):
        raise ValueError("no such thing\nand more")

    monkeypatch.setattr("torchvision.models.get_model", broken)
    with pytest.raises(UserError, match=r"^resnet18 could not be built: no such thing$"):
        find("resnet18").build()


def test_a_module_that_timm_lacks_is_not_taken_for_timm(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("import nobody_has_this\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ModuleNotFoundError, match="nobody_has_this"):
        find("timm:resnet10t")
