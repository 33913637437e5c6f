"""The networks of the small recipes. Each one is built from (channels of the images, number of classes)."""

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.errors import require


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


MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "small-cnn": small_cnn,
    "small-resnet": SmallResNet,
}


def build_model(name: str, in_channels: int, classes: int) -> nn.Module:
    """Build a network with torch's global random numbers (seed them first).

    Args:
        name: A key of `MODELS`.
        in_channels: Channels of the images.
        classes: Number of classes.

    Returns:
        The network, on the CPU, in training mode.
    """
    require(name in MODELS, f"model={name} is no network: use one of {', '.join(MODELS)}")
    return MODELS[name](in_channels, classes)
