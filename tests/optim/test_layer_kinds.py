"""Steps of small models with every kind of layer, weight by weight, against the reference."""

import pytest
import torch
from timm.layers import ScaledStdConv2d, StdConv2d
from torch import nn
from transformers.pytorch_utils import Conv1D

from comparing import compare
from reference import attention_by_hand, attention_layers
from tiny import cross_entropy


class SelfAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Mean(nn.Module):
    """Over everything between the batch and the features."""

    def forward(self, x):
        return x.flatten(1, -2).mean(1)


def by_parts(model, x):
    """`by_stages`, with attention spelt out."""
    seen = []
    for name, stage in model.named_children():
        if isinstance(stage, SelfAttention):
            y, _, more = attention_by_hand(stage.attention, f"{name}.attention", x, x, x)
            seen += more
        else:
            y = stage(x)
            seen.append((name, x, y))
        x = y
    return x, seen


def attentions(model):
    """The reference's layers of every attention in the model."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            layers |= attention_layers(model, name)
    return layers


def headed(layer, width):
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(width, 3))


TOKENS = "tokens"
# name: (model, shape of its input without the batch, or TOKENS)
MODELS = {
    "conv1d": (lambda: headed(nn.Conv1d(2, 4, 3, stride=2, padding=1, groups=2), 12), (2, 5)),
    "conv3d": (lambda: headed(nn.Conv3d(2, 3, (1, 2, 2)), 12), (2, 2, 3, 2)),
    "transposed_1d": (
        lambda: headed(nn.ConvTranspose1d(4, 4, 3, stride=2, output_padding=1, groups=2), 32),
        (4, 3),
    ),
    "transposed_2d": (
        lambda: headed(nn.ConvTranspose2d(2, 3, (3, 2), padding=(1, 0)), 18), (2, 2, 2)
    ),
    "standardised": (
        lambda: headed(StdConv2d(2, 4, 2, padding=0, groups=2, bias=True), 24), (2, 3, 4)
    ),
    "standardised_scaled": (lambda: headed(ScaledStdConv2d(2, 3, 3, gamma=1.7), 27), (2, 3, 3)),
    "embedding_padding": (
        lambda: nn.Sequential(nn.Embedding(7, 4, padding_idx=2), Mean(), nn.Linear(4, 3)), TOKENS
    ),
    "hugging_face": (lambda: nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(3, 6)), (3, 4)),
    "attention_separate": (
        lambda: nn.Sequential(
            SelfAttention(kdim=4, vdim=4, add_bias_kv=True), Mean(), nn.Linear(4, 3)
        ),
        (3, 4),
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 3, 2, bias=False), nn.InstanceNorm1d(3, affine=True), nn.Conv1d(3, 4, 2),
            nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 6), nn.LayerNorm(6),
            nn.Tanh(), nn.Linear(6, 3),
        ),
        (2, 4),
    ),
    "batch_norms": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 2, bias=False), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(),
            nn.Linear(12, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 3),
        ),
        (2, 3, 3),
    ),
    "transformer": (
        lambda: nn.Sequential(
            nn.Embedding(7, 4), SelfAttention(), nn.LayerNorm(4), nn.Linear(4, 5), nn.Tanh(),
            nn.Linear(5, 4), nn.RMSNorm(4), Mean(), nn.Linear(4, 3),
        ),
        TOKENS,
    ),
}  # fmt: skip

SETTINGS = {
    "plain": {"momentum": 0.0},
    "everything": {
        "momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3,
        "update_interval": 3, "split_dim": 3,
    },
    "in_place": {
        "weight_decay": 0.05, "update_interval": 2, "factor_decay": 0.4,
        "trace_thresholds": (0.0, 0.0),
    },
    "trace_rule": {
        "update_interval": 1, "trace_thresholds": (0.2, 0.05), "split_dim": None, "lr": 0.02
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_steps_with_every_kind_of_layer(name, settings):
    make, shape = MODELS[name]
    model, stream = make().double(), []
    for _ in range(8):
        x = torch.randint(7, (5, 3)) if shape is TOKENS else torch.randn(5, *shape).double()
        stream.append((x, cross_entropy(torch.randint(3, model(x).shape[:-1]))))
    oracle = {"forward": by_parts, "reference_options": {"layers": attentions}}
    optimizer, reference = compare(model, stream, rtol=1e-7, **oracle, **SETTINGS[settings])
    assert set(optimizer.curvature) == set(reference.curvature)
    for layer, curvature in reference.curvature.items():
        assert optimizer.curvature[layer].refreshes == curvature.refreshes
        assert optimizer.curvature[layer].stopped == curvature.stopped
