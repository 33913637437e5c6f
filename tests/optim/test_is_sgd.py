"""With the idea switched off THOR is `torch.optim.SGD`: huge damping or no layer, and nothing that bounds the step."""

import pytest
import torch
from torch import nn

from tiny import assert_same, cross_entropy
from torch_thor import THOR

SETTINGS = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "weight_decay": 0.1},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True},
]


class Model(nn.Module):
    """Parameters of its own, a layer THOR has no factors for, one that is left out, and one that is preconditioned."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.norms = nn.Sequential(nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.BatchNorm1d(4))
        self.bilinear = nn.Bilinear(4, 4, 4)
        self.linear = nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        h = self.norms(self.embedding(x))
        return self.linear(self.bilinear(h, h)) * self.scale


@pytest.mark.filterwarnings("ignore:THOR preconditions")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_plain_parameters_are_bit_equal_to_sgd(settings, dtype):
    model = Model().to(dtype)
    plain = {name: p for name, p in model.named_parameters() if not name.startswith("linear")}
    twins = {name: p.detach().clone().requires_grad_() for name, p in plain.items()}
    options = {"momentum": 0.0, **settings, "lr": 0.1, "max_update_ratio": None}
    thor = THOR(model, update_interval=2, layers=["-embedding"], **options)
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
    assert all("normalisation layer" in e.reason for e in thor.coverage() if e.name.startswith("norms"))
