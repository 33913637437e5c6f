"""docs/how-to/coming-from.md against the formulas of MindSpore's THOR in float64.

The formulas are in mindspore/python/mindspore/nn/optim/thor.py and nn/layer/thor_layer.py: with δ
the gradient of the mean loss with respect to an output, B the batch size of a device and R the
rows, A = (1/R) Σ a aᵀ, G = (B²/R) Σ δ δᵀ, and the damping λ · B / R for a convolution, λ for a
linear layer.
"""

import copy
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from torch_thor import THOR
from torch_thor.training.models.small import SmallResNet

LR, DAMPING, DECAY = 0.05, 0.03, 0.01


def inverse(factor, damping, block=128):
    """Invert the damped diagonal blocks of a factor."""
    index = torch.arange(len(factor)) // block
    factor = factor.where(index == index[:, None], 0.0)
    return (factor + damping * torch.eye(len(factor), dtype=factor.dtype)).inverse()


def mean_square(rows):
    return rows.T @ rows / len(rows)


def observed(model, x, y):
    """Differentiate the mean loss; return each layer with its input and the gradient δ."""
    seen = []

    def keep(layer, inputs, output):
        output.retain_grad()
        seen.append((layer, inputs[0].detach(), output))

    layers = [module for module in model.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
    hooks = [layer.register_forward_hook(keep) for layer in layers]
    F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
    for hook in hooks:
        hook.remove()
    return [(layer, inputs, output.grad) for layer, inputs, output in seen]


class MindSpore:
    """MindSpore's THOR for linear layers on one Ascend; biases take the steps of SGD."""

    def __init__(self, model, block):
        self.model, self.block = model, block
        self.v = {weight: torch.zeros_like(weight) for weight in model.parameters()}

    def step(self, x, y):
        self.model.zero_grad()
        for layer, inputs, delta in observed(self.model, x, y):
            a, g = mean_square(inputs.flatten(0, -2)), mean_square(delta.flatten(0, -2))
            left = inverse(len(x) ** 2 * g, DAMPING**0.5, self.block)
            right = inverse(a, DAMPING**0.5, self.block)
            self.move(layer.weight, left @ layer.weight.grad @ right)
            self.move(layer.bias, layer.bias.grad)

    @torch.no_grad()
    def move(self, weight, direction):
        self.v[weight] = 0.9 * self.v[weight] + direction + DECAY * weight
        weight -= LR * self.v[weight]


@pytest.mark.parametrize("length", [1, 7], ids=["no_sequences", "sequences"])
@pytest.mark.parametrize("block", [128, 4])
def test_the_steps_of_linear_layers_are_equal_with_the_values_of_the_page(length, block):
    """In sequences of L tokens with L times the rate and damping; biases by SGD."""
    theirs = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5)).double()
    ours = copy.deepcopy(theirs)
    reference = MindSpore(theirs, block)
    matrices, biases = (ours[0].weight, ours[2].weight), (ours[0].bias, ours[2].bias)
    optimizer = THOR(
        matrices, model=ours, lr=LR * length, damping=DAMPING * length,
        weight_decay=DECAY / length, momentum=0.9, update_interval=1, split_dim=block,
        max_update_ratio=None, trace_thresholds=(0.0, 0.0),
    )  # fmt: skip
    rest = torch.optim.SGD(biases, lr=LR, momentum=0.9, weight_decay=DECAY)
    for _ in range(3):
        x, y = torch.randn(8, length, 6, dtype=torch.float64), torch.randint(5, (8, length))
        reference.step(x, y)
        optimizer.loss_terms = len(x)
        F.cross_entropy(ours(x).flatten(0, 1), y.flatten()).backward()
        for each in (optimizer, rest):
            each.step()
            each.zero_grad()
    for own, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, their, rtol=1e-9, atol=1e-12)


def lengths_of_steps(images, parts=1):
    """Return how long MindSpore's first steps are, as multiples of ours, by convolution."""
    digits = load_digits()
    x = torch.from_numpy(digits.images[:images, None] / 16)
    x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    y = torch.from_numpy(digits.target[:images])
    found = {"g_max": [], "GPU": [], "devices": []}
    for layer, inputs, delta in observed(SmallResNet(1, 10).double(), x, y)[:-1]:
        sizes = layer.kernel_size, layer.dilation, layer.padding, layer.stride
        a = F.unfold(inputs, *sizes).mT
        g = images * delta.flatten(2).mT
        damping = (DAMPING / a.shape[1]) ** 0.5
        weight = layer.weight.grad.flatten(1)
        right, left = (inverse(mean_square(rows.flatten(0, 1)), damping) for rows in (a, g))
        ours = (left @ weight @ right).norm()
        found["g_max"].append(float(left.abs().max() / right.abs().max()))
        # patches and gradients are averaged over the images of a batch before they are multiplied
        right, left = (inverse(mean_square(rows.mean(0)), damping) for rows in (a, g))
        found["GPU"].append(float((left @ weight @ right).norm() / ours))
        right, left = (
            sum(inverse(mean_square(part.flatten(0, 1)), damping) for part in rows.chunk(parts))
            for rows in (a, g)
        )
        found["devices"].append(float((left @ weight @ right).norm() / ours) / parts**2)
    return found


def test_the_page_has_the_lengths_of_steps():
    single, eight = lengths_of_steps(32), lengths_of_steps(256, parts=8)
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md").read_text()
    for lengths, form in (
        (single["GPU"], ".1f"), (single["g_max"], ".1f"), (eight["devices"], ".2f")
    ):  # fmt: skip
        assert f"{min(lengths):{form}} to {max(lengths):{form}} times" in page
