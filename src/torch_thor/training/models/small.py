"""The application's small networks: image classifiers, an autoencoder and a character model."""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a shortcut, projected if the shape changes (He et al., 2016)."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut.extend(
                [
                    nn.Conv2d(in_channels, channels, 1, stride, bias=False),
                    nn.BatchNorm2d(channels),
                ]
            )

    def forward(self, images: Tensor) -> Tensor:
        """Apply the block to (N, in_channels, H, W)."""
        inner = functional.relu(self.norm1(self.conv1(images)))
        return functional.relu(self.norm2(self.conv2(inner)) + self.shortcut(images))


class SmallResNet(nn.Module):
    """A residual network, one basic block per width: 0.08 million weights, for 28 x 28 images."""

    def __init__(
        self, in_channels: int, classes: int, widths: tuple[int, ...] = (16, 32, 64)
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, widths[0], 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(widths[0])
        self.stages = nn.Sequential(BasicBlock(widths[0], widths[0], stride=1))
        self.stages.extend(BasicBlock(*pair, stride=2) for pair in itertools.pairwise(widths))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, (N, classes)."""
        features = self.stages(functional.relu(self.norm1(self.conv1(images))))
        return cast(Tensor, self.head(features.mean(dim=(2, 3))))


def small_cnn(in_channels: int, classes: int) -> nn.Module:
    """Build two convolutions with pooling between, and a hidden linear layer, for 8 x 8 images."""
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
    """Return torchvision's ResNet-18 with the 32 x 32 pixel stem of He et al. 2016, section 4.2."""
    from torchvision.models import resnet18  # slow to import, and needed for this network only

    model: nn.Module = resnet18(num_classes=classes)
    model.conv1 = nn.Conv2d(in_channels, 64, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


# the image classifiers, built from the channels of the images and the number of classes
CLASSIFIERS: dict[str, Callable[[int, int], nn.Module]] = {
    "small-cnn": small_cnn,
    "small-resnet": SmallResNet,
    "cifar-resnet18": cifar_resnet18,
}


def deep_autoencoder(
    pixels: int, hidden: Sequence[int] = (128, 64, 32, 12, 32, 64, 128)
) -> nn.Module:
    """Build a smaller autoencoder after Hinton and Salakhutdinov (2006), Martens and Grosse (2015).

    It has linear layers with tanh between them. The narrowest hidden layer, the code, is linear.
    Weights are initialised by Glorot's uniform rule, biases with 0.

    Args:
        pixels: the size of the input.
        hidden: the widths of the hidden layers.

    Returns:
        A network from (N, pixels) to the logits of the pixels.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise((pixels, *hidden, pixels)):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    del layers[-1], layers[2 * hidden.index(min(hidden)) + 1]
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


WIDTH, HEADS, DEPTH = 64, 4, 2  # of the character model


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block to (N, L, WIDTH)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return cast(Tensor, x + self.down(functional.gelu(self.up(self.norm2(x)))))


class CharTransformer(nn.Module):
    """A transformer that gives next-character logits for windows of up to `context` characters."""

    def __init__(self, symbols: int, context: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(symbols, WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, symbols)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, (N, L, symbols), of each next character of (N, L), L <= `context`."""
        places = self.places(torch.arange(x.shape[1], device=x.device))
        return cast(Tensor, self.head(self.norm(self.blocks(self.tokens(x) + places))))
