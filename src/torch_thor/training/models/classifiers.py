"""The image classifiers that a recipe can name: the small ones in this module, and those of torchvision and timm.

Each is built from the channels of the images and the number of classes.
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
        in_channels: Number of input channels.
        channels: Number of output channels.
        stride: Stride of the first convolution and of the projection.
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
    """A residual network of three basic blocks with 16, 32 and 64 channels: 0.08 million weights, for 28 x 28 images.

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
            Logits, (N, classes).
        """
        features = self.stages(functional.relu(self.norm1(self.conv1(images))))
        scores: Tensor = self.head(features.mean(dim=(2, 3)))
        return scores


def small_cnn(in_channels: int, classes: int) -> nn.Module:
    """Build a network of two convolutions with a pooling layer between them, and one hidden linear layer.

    Args:
        in_channels: Channels of the images.
        classes: Number of classes.

    Returns:
        The network, for images of 8 x 8 pixels.
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
    """Build torchvision's ResNet-18 with the stem of He et al. 2016, section 4.2, for images of 32 x 32 pixels.

    The stem is a 3 x 3 convolution with stride 1 and no pooling. The usual stem (7 x 7, stride 2, pooling) would reduce
    such an image to 8 x 8 before the first stage.

    Args:
        in_channels: Channels of the images.
        classes: Number of classes.

    Returns:
        The network.
    """
    from torchvision.models import resnet18  # slow to import, and needed for this network only

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
    """Refuse a name that is not an image classifier.

    Args:
        name: A key of `MODELS`, or a name of torchvision or timm.

    Raises:
        UserError: If there is no such network, or it does not classify images.
    """
    if name in MODELS:
        return
    try:
        found = _in_library(name)
    except UserError as error:
        raise UserError(f"model={name} is not a network: {error}") from error
    found.check_classifier()


def _in_library(name: str) -> LibraryModel:
    return find_model(name, list(MODELS), f"torch-thor itself has {', '.join(MODELS)}")


def build_model(name: str, in_channels: int, classes: int) -> nn.Module:
    """Build a network with torch's global random numbers (seed them first).

    Args:
        name: A key of `MODELS`, or a name of torchvision or timm.
        in_channels: Channels of the images.
        classes: Number of classes.

    Returns:
        The network, on the CPU, in training mode.

    Raises:
        UserError: If there is no such network, or it cannot be built.
    """
    check_name(name)
    if name in MODELS:
        return MODELS[name](in_channels, classes)
    return _in_library(name).build_classifier(in_channels, classes)


@torch.no_grad()
def check_fits(name: str, model: nn.Module, image_shape: Sequence[int], classes: int) -> None:
    """Refuse a network that cannot process the images. Its weights, running statistics and mode do not change.

    Args:
        name: The name of the network in the recipe.
        model: The network, on its device.
        image_shape: (C, H, W).
        classes: Number of classes.

    Raises:
        UserError: If it fails on such images, or does not return logits (N, classes).
    """
    size = " x ".join(str(length) for length in image_shape)
    parameter = next(model.parameters())
    images = torch.zeros(2, *image_shape, dtype=parameter.dtype, device=parameter.device)
    training = model.training
    try:
        scores = model.eval()(images)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(
            f"model={name} cannot process the data's images ({size}): {first_line(error)}; use another model, or other "
            "data"
        ) from error
    finally:
        model.train(training)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    require(
        shape == (2, classes),
        f"model={name} returns {shape} for 2 images ({size}) instead of logits (2, {classes}): use a classifier",
    )


def check_head(outputs: int, classes: int) -> None:
    """Check that the network has an output for every class.

    Args:
        outputs: Number of outputs of the network.
        classes: Number of classes in the data.

    Raises:
        UserError: If there are fewer outputs than classes.
    """
    if outputs < classes:
        raise UserError(
            f"the data has {classes} classes, and the network only {outputs} outputs: leave classes=null, or set "
            f"classes={classes} or more"
        )
