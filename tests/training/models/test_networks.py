"""The small networks: their sizes counted by hand, and what they compute."""

import pytest
import torch
from torch import nn

from torch_thor.training.models.library import build_model
from torch_thor.training.models.small import CharTransformer, deep_autoencoder

RESIDUAL = 9 * (2 * 256 + 512 + 1024 + 2048 + 4096) + 512 + 2048


@pytest.mark.parametrize(
    ("name", "channels", "pixels", "weights"),
    [
        # 1·16·9 + 16, 16·32·9 + 32, 512·64 + 64, 64·10 + 10
        ("small-cnn", 1, 8, 160 + 4640 + 32832 + 650),
        # the stem, three blocks of two convolutions and two projections, norms (2 a channel), head
        ("small-resnet", 1, 28, 144 + RESIDUAL + 2 * (16 * 3 + 96 + 192) + 650),
        # torchvision's, with a stem of 3·64·9 for 3·64·49, and 10 outputs for 1000
        ("cifar-resnet18", 3, 32, 11_689_512 - 3 * 64 * 40 - 990 * 513),
    ],
)
def test_sizes_by_hand(name, channels, pixels, weights):
    model = build_model(name, channels, 10)
    assert model.training
    assert sum(parameter.numel() for parameter in model.parameters()) == weights
    assert model(torch.randn(2, channels, pixels, pixels)).shape == (2, 10)


def test_the_layers_of_the_autoencoder():
    model = deep_autoencoder(784)
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert [layer.in_features for layer in linear] == [784, 128, 64, 32, 12, 32, 64, 128]
    assert linear[-1].out_features == 784
    # the code (12 wide) and the logits are linear
    kinds = ["L" if isinstance(layer, nn.Linear) else "t" for layer in model]
    assert "".join(kinds) == "LtLtLtLLtLtLtL"


def test_the_character_model_sees_no_character_to_come():
    model = CharTransformer(128, 64).eval()
    x = torch.randint(128, (2, 64))
    other = x.clone()
    other[:, 20:] = (other[:, 20:] + 1) % 128
    before, after = model(x), model(other)
    assert torch.allclose(before[:, :20], after[:, :20], atol=1e-6)
    assert not torch.allclose(before[:, 20:], after[:, 20:], atol=1e-2)
    assert model(x[:, :10]).shape == (2, 10, 128)
