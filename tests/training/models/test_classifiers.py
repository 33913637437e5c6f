"""Networks by name, and whether they take the data's images."""

import pytest
import torch
from torch import nn

from torch_thor.training import UserError, load_recipe, train
from torch_thor.training import image_run as new_run
from torch_thor.training.data import DataBundle
from torch_thor.training.models import build_model
from torch_thor.training.models.classifiers import check_fits, check_head, check_name
from torch_thor.training.tasks import TASKS


def data(channels, pixels, classes):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(8, channels, pixels, pixels, generator=generator)
    labels = torch.arange(8) % classes
    return DataBundle(images, labels, images, labels, classes)


@pytest.mark.parametrize(
    ("name", "pixels", "weights"),
    [
        # 1·16·9 + 16, 16·32·9 + 32, 512·64 + 64, 64·10 + 10
        ("small-cnn", 8, 160 + 4640 + 32832 + 650),
        # 144, three blocks of two 3 x 3 convolutions and two projections, norms (2 a channel), 64·10 + 10
        (
            "small-resnet",
            28,
            144 + 9 * (2 * 256 + 512 + 1024 + 2048 + 4096) + 512 + 2048 + 2 * (16 * 3 + 96 + 192) + 650,
        ),
    ],
)
def test_our_networks(name, pixels, weights):
    model = build_model(name, 1, 10)
    assert model.training
    assert sum(p.numel() for p in model.parameters()) == weights
    assert model(torch.randn(2, 1, pixels, pixels)).shape == (2, 10)


@pytest.mark.parametrize("name", ["torchvision:squeezenet1_1", "shufflenet_v2_x0_5", "timm:resnet10t"])
def test_a_recipe_trains_a_librarys_network_with_the_datas_classes(name):
    if name.startswith("timm:"):
        pytest.importorskip("timm")
    recipe = load_recipe("digits", [f"model={name}", "epochs=1", "batch_size=4", "lr=0.001", "label_smoothing=0.1"])
    assert recipe.model == name
    run = new_run(recipe, "thor", data(3, 64, 7))
    record = train(run)
    assert len(record.steps) == 2
    assert run.model(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    again = new_run(recipe, "thor", data(3, 64, 7)).model.state_dict()
    first = new_run(recipe, "sgd", data(3, 64, 7)).model.state_dict()
    assert all(torch.equal(again[key], first[key]) for key in first)  # weights are the seed's


@pytest.mark.parametrize(
    ("name", "bundle", "said"),
    [
        ("resnet18", data(1, 64, 10), r"model=resnet18 takes images of 3 channels and the data has 1"),
        ("small-cnn", data(1, 28, 10), r"model=small-cnn does not take the data's images \(1 x 28 x 28\)"),
        ("vit_b_16", data(3, 32, 10), r"model=vit_b_16 does not take .*Wrong image height! Expected 224 but got 32"),
    ],
)
def test_images_that_a_network_cannot_take_are_one_line(name, bundle, said):
    recipe = load_recipe("digits", [f"model={name}", "batch_size=4"])
    with pytest.raises(UserError, match=said) as caught:
        new_run(recipe, "sgd", bundle)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smal-cnn", r"^model=smal-cnn is not a network: .*did you mean small-cnn\?.*ours are small-cnn, small-resnet"),
        ("torchvision:resnet5", r"^model=torchvision:resnet5 is not a network: .*did you mean resnet50\?"),
        ("fcn_resnet50", r"^model=fcn_resnet50 does not classify images"),
    ],
)
def test_names_that_are_refused(name, said):
    with pytest.raises(UserError, match=said):
        check_name(name)
    recipe = load_recipe("digits", [f"model={name}"])  # libraries are not asked before one is to be trained
    with pytest.raises(UserError, match=said):
        TASKS[recipe.task].open(recipe, torch.device("cpu"), pytest.fail, pytest.fail)


def test_checking_leaves_the_network_as_it_was():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(), nn.Flatten(), nn.Linear(108, 5))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check_fits("mine", model, (1, 8, 8), 5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training for module in model.modules())
    with pytest.raises(
        UserError, match=r"model=mine gives \(2, 5\) for 2 images \(1 x 8 x 8\) and not scores \(2, 4\)"
    ):
        check_fits("mine", model, (1, 8, 8), 4)
    with pytest.raises(UserError, match=r"does not take"):
        check_fits("mine", model, (1, 9, 9), 5)
    assert all(module.training for module in model.modules())


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, images):
        return self.head(images.flatten(1)), images


def test_a_network_that_returns_more_than_scores():
    with pytest.raises(UserError, match=r"gives tuple for 2 images"):
        check_fits("pair", Pair(), (1, 2, 2), 3)


def test_labels_outside_the_head():
    check_head(outputs=3, classes=3)
    check_head(outputs=1001, classes=1000)
    with pytest.raises(UserError, match="1000 classes, the network 10 outputs: labels 10 to 999 lie outside"):
        check_head(outputs=10, classes=1000)
