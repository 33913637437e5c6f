"""What is special to convolutions: sizes that a call gives, and weights that are standardised."""

import copy

import torch
from timm.layers import ScaledStdConv2d
from torch import nn

from comparing import assert_matches_reference
from torch_thor import THOR


def test_output_size_given_to_the_call():
    """One stride makes several sizes possible; which one it was stands in the output alone."""

    class WithSize(nn.Module):
        def __init__(self, sizes, by_name):
            super().__init__()
            self.conv = nn.ConvTranspose2d(2, 3, (3, 1), stride=3, padding=(1, 0)).double()
            self.sizes, self.by_name = list(sizes), by_name

        def forward(self, x):
            return (
                self.conv(input=x, output_size=self.sizes)
                if self.by_name
                else self.conv(x, self.sizes)
            )

    def forward(model, x):
        y = model(x)
        return y, [("conv", x, y)]

    loss = lambda output: (output**3).sum() / 2  # noqa: E731
    for sizes in ((10, 7), (11, 8), (12, 7), (10, 9)):
        for by_name in (True, False):
            x = torch.randn(2, 2, 4, 3).double()
            model = WithSize(sizes, by_name)
            assert_matches_reference(model, x, loss, terms=2, split_dim=4, forward=forward)


def test_half_precision_statistics_are_those_of_float32():
    """c of a bfloat16 weight is found in float32, where the factors are."""
    model, x = (
        nn.Sequential(ScaledStdConv2d(4, 4, 3, gamma=1.7, groups=2)).bfloat16(),
        torch.randn(3, 4, 7, 6),
    )
    twin = copy.deepcopy(model).float()
    found = []
    for one, inputs in ((model, x.bfloat16()), (twin, x.bfloat16().float())):
        optimizer = THOR(one, lr=0.0, trace_thresholds=(0.0, 0.0))
        # the gradient is a constant: no rounding of forward in it
        (one(inputs).float() * 3).sum().div(3).backward()
        optimizer.step()
        found.append(optimizer.curvature["0"].factors()[1])
    torch.testing.assert_close(list(found[0]), list(found[1]), rtol=1e-5, atol=1e-7)
