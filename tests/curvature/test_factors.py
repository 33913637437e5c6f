"""Factors against curvlinops, and steps against the exact Fisher where it is a product."""

import pytest
import torch
from timm.layers import ScaledStdConv2d, StdConv2d
from torch import nn

from comparing import curvlinops_factors, refreshed
from tiny import batches, conv_model, cross_entropy, mlp
from torch_thor import THOR


@pytest.mark.filterwarnings("ignore:.*:FutureWarning", "ignore:.*:DeprecationWarning")
def test_curvlinops_agrees():
    for kind in ("linear", "plain", "stride", "uneven", "dilation", "same"):
        if kind == "linear":
            model, [(x, labels)] = mlp(), batches(1)
        else:
            (model, x), labels = conv_model(kind), torch.tensor([0, 2, 1])
        inputs, grads = curvlinops_factors(model, x, labels, "empirical")
        optimizer = refreshed(model, x, cross_entropy(labels), split_dim=None)
        assert set(inputs) == set(optimizer.curvature)
        for name, curvature in optimizer.curvature.items():
            A, G = curvature.factors()
            torch.testing.assert_close(A, inputs[name], rtol=1e-9, atol=1e-12)
            G = curvature.rows_per_term * G
            torch.testing.assert_close(G, grads[name], rtol=1e-9, atol=1e-12)


# ---- where the Kronecker product is the Fisher itself: gradients of single examples, by autograd -


def exact(layer):
    """(the full Fisher of a weight, the mean gradient, T · G ⊗ A, and what THOR steps along).

    Constant images are shown, and the gradient is at a single position: T = 6 for a 1 x 1 kernel.
    All pairs of an input and a gradient come, so that E[ggᵀ ⊗ aaᵀ] = E[ggᵀ] ⊗ E[aaᵀ] exactly, and
    both have full rank.
    """
    inputs, grads = torch.randn(6, 4).double(), torch.randn(5, 3).double()
    x = inputs.repeat_interleave(5, 0)[:, :, None, None].expand(-1, -1, 2, 3).contiguous()
    loss = lambda output, i: (output[0, :, i % 2, i % 3] * grads[i % 5]).sum()  # noqa: E731
    model = nn.Sequential(layer)
    rows = torch.stack([
        torch.autograd.grad(loss(model(x[i : i + 1]), i),
        layer.weight)[0].flatten() for i in range(len(x))
    ])  # fmt: skip
    before = layer.weight.detach().clone()
    options = {"damping": 1e-22, "momentum": 0.0, "split_dim": None, "max_update_ratio": None}
    optimizer = THOR(model, lr=1.0, **options)
    output = model(x)
    sum(loss(output[i : i + 1], i) for i in range(len(x))).div(len(x)).backward()
    optimizer.step()
    A, G = optimizer.curvature["0"].factors()
    step = (before - layer.weight.detach()).flatten()
    return rows.T @ rows / len(rows), rows.mean(0), 6 * torch.kron(G, A), step


def test_independent_inputs_and_gradients():
    fisher, grad, product, step = exact(nn.Conv2d(4, 3, 1, bias=False).double())
    torch.testing.assert_close(product, fisher, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(step, torch.linalg.solve(fisher, grad), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("kind", [StdConv2d, ScaledStdConv2d])
def test_standardised_weights_are_exact_but_for_the_lengths_of_the_rows(kind):
    layer = kind(4, 3, 1, bias=False, eps=1e-20).double()
    if kind is ScaledStdConv2d:
        nn.init.normal_(layer.gain)
    centred = layer.weight.detach().flatten(1)
    units = nn.functional.normalize(centred - centred.mean(1, keepdim=True))
    away = torch.block_diag(*(torch.eye(4).double() - torch.outer(u, u) for u in units))
    fisher, _, product, _ = exact(layer)
    torch.testing.assert_close(away @ product @ away, fisher, rtol=1e-10, atol=1e-12)
