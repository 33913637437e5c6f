"""LAMB equals a loop in numpy. More: test_contract.py, test_excluding.py."""

import numpy as np
import pytest
import torch
from torch import nn

from tiny import batches, cross_entropy, mlp, train
from torch_thor import LAMB


class ByTheBook:
    """Algorithm 2 of the paper for a parameter; `adapted=False` has neither decay nor ratio."""

    def __init__(self, x, *, adapted):
        self.x, self.adapted = np.array(x, dtype=float), adapted
        self.m, self.v, self.t = np.zeros_like(self.x), np.zeros_like(self.x), 0

    def step(self, g, lr, betas, eps, weight_decay):
        b1, b2 = betas
        self.t += 1
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        r = (self.m / (1 - b1**self.t)) / (np.sqrt(self.v / (1 - b2**self.t)) + eps)
        u = r + weight_decay * self.x if self.adapted else r
        norm, length = np.sqrt((self.x**2).sum()), np.sqrt((u**2).sum())
        ratio = norm / length if self.adapted and norm > 0 and length > 0 else 1.0
        self.x = self.x - lr * ratio * u


EXCLUDED = {
    "default": (None, {"0.bias", "1.weight", "1.bias", "3.bias"}),
    "patterns": (["0", "*.bias"], {"0.weight", "0.bias", "1.bias", "3.bias"}),
    "callable": (lambda name, p: p.dim() > 1, {"0.weight", "3.weight"}),
}


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", EXCLUDED)
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_equals_the_loop(weight_decay, name, foreach):
    """Some gradients are missing in some steps: every parameter counts its own steps."""
    model = nn.Sequential(
        nn.Conv1d(1, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 3)
    ).double()
    options = {"lr": 0.03, "betas": (0.7, 0.9), "eps": 1e-3, "weight_decay": weight_decay}
    exclude, excluded = EXCLUDED[name]
    optimizer = LAMB(model, exclude=exclude, foreach=foreach, **options)
    assert set(optimizer.excluded) == excluded
    books = {
        name: ByTheBook(p.detach().numpy(), adapted=name not in excluded)
        for name, p in model.named_parameters()
    }
    for step, (x, labels) in enumerate(batches(7)):
        cross_entropy(labels)(model(x[:, None])).backward()
        if step in (0, 3):
            model[0].weight.grad = model[3].bias.grad = None
            model[3].weight.grad.zero_()  # in the first step ‖u‖ is 0
        for name, p in model.named_parameters():
            if p.grad is not None:
                books[name].step(p.grad.numpy().copy(), **options)
        optimizer.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            np.testing.assert_allclose(
                p.detach().numpy(), books[name].x, rtol=1e-10, atol=1e-13, err_msg=name
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_float32_moments_and_norms(dtype):
    """Steps are steps of float32 parameters that are rounded after each."""
    model, wide = mlp(dtype=dtype), mlp(dtype=torch.float32)
    wide.load_state_dict(model.state_dict())
    optimizer, other = LAMB(model, lr=0.05), LAMB(wide, lr=0.05)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        for p, q in zip(model.parameters(), wide.parameters(), strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.float()
        optimizer.step()
        other.step()
        with torch.no_grad():
            for q in wide.parameters():
                q.copy_(q.to(dtype))
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        assert torch.equal(p.float(), q)
        for key in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][key].dtype == torch.float32
            assert torch.equal(optimizer.state[p][key], other.state[q][key])


def test_a_checkpoint_of_adamw_goes_on():
    """Moments, steps and betas come from AdamW, the other options from LAMB."""
    model = mlp(dtype=torch.bfloat16)
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9), weight_decay=0.3)
    train(model, adamw, batches(3, dtype=torch.bfloat16))
    optimizer = LAMB(model, lr=0.02, eps=1e-5, weight_decay=0.1)
    optimizer.load_state_dict(adamw.state_dict())
    group = optimizer.param_groups[0]
    expected = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.1}
    assert {name: group[name] for name in expected} == expected
    for p in model.parameters():
        assert torch.equal(optimizer.state[p]["exp_avg"], adamw.state[p]["exp_avg"].float())
        assert optimizer.state[p]["exp_avg_sq"].dtype == torch.float32
    train(model, optimizer, batches(1, dtype=torch.bfloat16))
    assert optimizer.state[model[0].weight]["step"] == 4
