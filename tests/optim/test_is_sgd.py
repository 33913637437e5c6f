"""With the idea switched off THOR is `torch.optim.SGD`: huge damping or no layer, and nothing that bounds the step."""

import pytest
import torch
from torch import nn

from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import THOR

SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
]


def images_model(kind):
    """A model without biases, with one of the named convolutions."""
    options = {"stride": {"stride": 2, "padding": 1}, "groups": {"groups": 2}}[kind]
    return nn.Sequential(
        nn.Conv2d(2, 4, 1, bias=False),
        nn.Tanh(),
        nn.Conv2d(4, 6, 3, bias=False, **options),
        nn.Flatten(),
        nn.Linear(6 * 9, 3, bias=False),
    ).double()


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["linear", "stride", "groups"])
def test_huge_damping_is_a_multiple_of_the_gradient(kind, settings):
    """A_d and G_d are √(λ/T) I, so the natural gradient is ∇W / λ whatever T is."""
    damping = 1e16
    if kind == "linear":
        model, other, stream = mlp(bias=False), mlp(bias=False), batches(6)
    else:
        model, other = images_model(kind), images_model(kind)
        stream = [(torch.randn(4, 2, 5, 5).double(), torch.randint(3, (4,))) for _ in range(6)]
    other.load_state_dict(model.state_dict())
    scaled = {"momentum": 0.0, **settings, "weight_decay": settings.get("weight_decay", 0.0) / damping}
    train(model, THOR(model, lr=0.1 * damping, damping=damping, kl_clip=None, **scaled), stream)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, **settings), stream)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_huge_damping_of_biases():
    """A bias is solved with G_d alone: ∇b / √λ at T = 1."""
    damping = 1e16
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    optimizer = THOR(
        [
            {"params": [p for p in model.parameters() if p.ndim == 2], "lr": 0.1 * damping},
            {"params": [p for p in model.parameters() if p.ndim == 1], "lr": 0.1 * damping**0.5},
        ],
        model=model,
        damping=damping,
        kl_clip=None,
    )
    train(model, optimizer, batches(6))
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), batches(6))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_plain_parameters_are_bit_equal_to_sgd(settings, dtype):
    """A parameter of its own, a layer THOR has no factors for, and what was left out: same gradients, same bits."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 4)
            self.norm = nn.LayerNorm(4)
            self.bilinear = nn.Bilinear(4, 4, 4)
            self.linear = nn.Linear(4, 3)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            h = self.norm(self.embedding(x))
            return self.linear(self.bilinear(h, h)) * self.scale

    model = Model().to(dtype)
    plain = {name: p for name, p in model.named_parameters() if not name.startswith("linear")}
    twins = {name: p.detach().clone().requires_grad_() for name, p in plain.items()}
    thor = THOR(model, lr=0.1, update_interval=2, layers=["-embedding"], kl_clip=None, **{"momentum": 0.0, **settings})
    sgd = torch.optim.SGD(twins.values(), lr=0.1, **settings)
    for _ in range(6):
        cross_entropy(torch.randint(3, (8,)))(model(torch.randint(11, (8,)))).backward()
        for name, twin in twins.items():
            twin.grad = plain[name].grad.clone()
        thor.step()
        thor.zero_grad()
        sgd.step()
        assert_same({n: p.detach() for n, p in plain.items()}, {n: t.detach() for n, t in twins.items()})
    if settings.get("momentum"):
        for name, twin in twins.items():
            assert torch.equal(thor.state[plain[name]]["momentum_buffer"], sgd.state[twin]["momentum_buffer"])


def test_zero_learning_rate_changes_nothing():
    model = mlp()
    before = weights(model)
    train(model, THOR(model, lr=0.0, weight_decay=0.5), batches(3))
    assert_same(weights(model), before)
