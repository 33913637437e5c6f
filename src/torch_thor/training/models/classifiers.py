"""The networks that a recipe can name: the small ones here, torchvision's and timm's.

Each one is built from (channels of the images, number of classes).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.models.library import LibraryModel, find_model


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut (He et al., 2016), with a projection where the shape changes.

    Args:
        in_channels: Channels coming in.
        channels: Channels going out.
        stride: Of the first convolution and of the projection.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut.append(nn.Conv2d(in_channels, channels, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(channels))

    def forward(self, images: Tensor) -> Tensor:
        """Apply the block.

        Args:
            images: (N, in_channels, H, W).

        Returns:
            (N, channels, H / stride, W / stride).
        """
        inner = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(images))


class SmallResNet(nn.Module):
    """Three stages of one basic block each, 16, 32 and 64 wide: 0.08 million weights, for 28 x 28 images.

    Args:
        in_channels: Channels of the images.
        classes: Number of classes.
        widths: Channels of the three stages.
    """

    def __init__(self, in_channels: int, classes: int, widths: tuple[int, ...] = (16, 32, 64)) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(widths[0])
        stages: list[nn.Module] = []
        for index, width in enumerate(widths):
            stages.append(BasicBlock(widths[max(0, index - 1)], width, stride=1 if index == 0 else 2))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images.

        Args:
            images: (N, in_channels, H, W).

        Returns:
            Scores, (N, classes).
        """
        features = self.stages(functional.relu(self.norm1(self.conv1(images))))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores


def small_cnn(in_channels: int, classes: int) -> nn.Module:
    """Two convolutions, a pooling between them, one hidden layer: for the 8 x 8 digits.

    Args:
        in_channels: Channels of the images.
        classes: Number of classes.

    Returns:
        The network, for images of 8 x 8.
    """
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(in_channels, 16, 3, padding=1),
            relu1=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            conv2=nn.Conv2d(16, 32, 3, padding=1),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            hidden=nn.Linear(32 * 4 * 4, 64),
            relu3=nn.ReLU(),
            head=nn.Linear(64, classes),
        )
    )


def cifar_resnet18(in_channels: int, classes: int) -> nn.Module:
    """Build torchvision's ResNet-18 with the stem of He et al. 2016, section 4.2, for images of 32 x 32.

    A 3 x 3 convolution of stride 1 and no pooling in the place of 7 x 7, stride 2, and pooling, which would leave an
    image of 8 x 8 to the first stage.

    Args:
        in_channels: Channels of the images.
        classes: Number of classes.

    Returns:
        The network.
    """
    from torchvision.models import resnet18  # slow to import, needed for this network alone

    model: nn.Module = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "small-cnn": small_cnn,
    "small-resnet": SmallResNet,
    "cifar-resnet18": cifar_resnet18,
}


def check_name(name: str) -> None:
    """Refuse what is not a network to train.

    Args:
        name: As `build_model` takes it.

    Raises:
        UserError: If it is neither ours nor a classifier of torchvision's or timm's.
    """
    if name in MODELS:
        return
    try:
        found = _in_library(name)
    except UserError as error:
        raise UserError(f"model={name} is not a network: {error}") from error
    found.check_classifier()


def _in_library(name: str) -> LibraryModel:
    return find_model(name, list(MODELS), f"ours are {', '.join(MODELS)}")


def build_model(name: str, in_channels: int, classes: int) -> nn.Module:
    """Build a network with torch's global random numbers (seed them first).

    Args:
        name: A key of `MODELS`, or a name of torchvision's or timm's.
        in_channels: Channels of the images.
        classes: Number of classes.

    Returns:
        The network, on the CPU, in training mode.
    """
    check_name(name)
    if name in MODELS:
        return MODELS[name](in_channels, classes)
    return _in_library(name).build_classifier(in_channels, classes)


@torch.no_grad()
def check_fits(name: str, model: nn.Module, image_shape: Sequence[int], classes: int) -> None:
    """Refuse a network that cannot take the images; its weights, running averages and mode stay.

    Args:
        name: What the recipe calls it.
        model: The network, on its device.
        image_shape: (C, H, W).
        classes: Number of classes.

    Raises:
        UserError: If it fails on such images, or returns anything but scores (N, classes).
    """
    size = " x ".join(str(length) for length in image_shape)
    parameter = next(model.parameters())
    images = torch.zeros(2, *image_shape, dtype=parameter.dtype, device=parameter.device)
    training = model.training
    try:
        scores = model.eval()(images)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(
            f"model={name} does not take the data's images ({size}): {first_line(error)}; use another model, or other "
            "data"
        ) from error
    finally:
        model.train(training)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    require(
        shape == (2, classes),
        f"model={name} gives {shape} for 2 images ({size}) and not scores (2, {classes}): use a classifier",
    )


def check_head(outputs: int, classes: int) -> None:
    """Check that every label has an output.

    Args:
        outputs: Outputs of the network's last layer.
        classes: Classes of the data.

    Raises:
        UserError: If a label lies outside the head.
    """
    if outputs < classes:
        raise UserError(
            f"the data has {classes} classes, the network {outputs} outputs: labels {outputs} to {classes - 1} lie "
            f"outside its head; leave classes=null, or set classes={classes} or more"
        )
