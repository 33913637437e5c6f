"""Where the Kronecker product is the Fisher itself, THOR must solve with the full empirical Fisher.

No reference implementation here: per-example gradients come from autograd one at a time, the Fisher is
their second moment, and the expected step is one dense solve.
"""

import torch
from torch import nn

from torch_thor import THOR


def full_fisher(model, x, loss_of_one):
    """(1/N) Σ ∇ℓ ∇ℓᵀ over the flattened weight, and the mean gradient."""
    rows = []
    for index in range(len(x)):
        (grad,) = torch.autograd.grad(loss_of_one(model(x[index : index + 1]), index), [model[0].weight])
        rows.append(grad.flatten())
    rows = torch.stack(rows)
    return rows.T @ rows / len(rows), rows.mean(0)


def thor_direction(model, x, loss_of_one, damping):
    """What THOR steps along for the mean of the losses, and its factors."""
    before = model[0].weight.detach().clone()
    optimizer = THOR(model, lr=1.0, damping=damping, momentum=0.0, split_dim=None, max_update_ratio=None)
    output = model(x)
    sum(loss_of_one(output[i : i + 1], i) for i in range(len(x))).div(len(x)).backward()
    optimizer.step()
    return (before - model[0].weight.detach()).flatten(), *optimizer.curvature["0"].factors()


def test_independent_inputs_and_gradients():
    """Data are all pairs (aᵢ, gⱼ), so E[ggᵀ ⊗ aaᵀ] = E[ggᵀ] ⊗ E[aaᵀ] exactly, and both have full rank."""
    inputs, grads = torch.randn(6, 4).double(), torch.randn(5, 3).double()
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    x = inputs.repeat_interleave(5, 0)
    loss = lambda output, i: (output * grads[i % 5]).sum()  # noqa: E731
    fisher, grad = full_fisher(model, x, loss)
    direction, *_ = thor_direction(model, x, loss, damping=1e-22)
    torch.testing.assert_close(direction, torch.linalg.solve(fisher, grad), rtol=1e-6, atol=1e-8)


def test_independent_convolution_with_many_rows_a_term():
    """Constant images, gradient at a single position: Fisher = T · (G ⊗ A) exactly, with T = 6."""
    inputs, grads = torch.randn(6, 4).double(), torch.randn(5, 3).double()
    model = nn.Sequential(nn.Conv2d(4, 3, 1, bias=False)).double()
    x = inputs.repeat_interleave(5, 0)[:, :, None, None].expand(-1, -1, 2, 3).contiguous()
    loss = lambda output, i: (output[0, :, i % 2, i % 3] * grads[i % 5]).sum()  # noqa: E731
    fisher, grad = full_fisher(model, x, loss)
    direction, A, G = thor_direction(model, x, loss, damping=1e-22)
    torch.testing.assert_close(6 * torch.kron(G, A), fisher, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(direction, torch.linalg.solve(fisher, grad), rtol=1e-6, atol=1e-8)


def test_one_datum():
    """One datum: the Fisher is ∇∇ᵀ = gg ᵀ ⊗ aaᵀ, and Sherman-Morrison gives the damped step by hand.

    G_d⁻¹ g = g / (‖g‖² + √λ) and A_d⁻¹ a = a / (‖a‖² + √λ).
    """
    model = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    a, g = torch.randn(1, 4).double(), torch.randn(3).double()
    loss = lambda output, _: (output * g).sum()  # noqa: E731
    fisher, grad = full_fisher(model, a, loss)
    direction, A, G = thor_direction(model, a, loss, damping=0.09)
    torch.testing.assert_close(torch.kron(G, A), fisher, rtol=1e-12, atol=1e-14)
    expected = grad / (g.square().sum() + 0.3) / (a.square().sum() + 0.3)
    torch.testing.assert_close(direction, expected, rtol=1e-10, atol=1e-14)
