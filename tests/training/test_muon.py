"""`MuonAdamW` is torch's Muon on matrices and torch's AdamW on the rest, to the bit."""

import copy

import pytest
import torch
from torch import nn

from torch_thor.training.muon import MuonAdamW


def some_gradients(params, step):
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_the_matrix_of_its_flattened_weight_and_its_bias_is_adamws(memory_format):
    conv, still = nn.Conv2d(4, 6, 3).to(memory_format=memory_format), nn.Parameter(torch.ones(2, 2))
    matrix, bias = (
        nn.Parameter(p.detach().flatten(1).clone()) for p in (conv.weight, conv.bias[None])
    )
    ours = MuonAdamW([*conv.parameters(), still], lr=0.02, adamw_lr=0.003)
    muon = torch.optim.Muon([matrix], lr=0.02, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([bias], lr=0.003, weight_decay=0.0)
    for step in range(5):
        some_gradients(conv.parameters(), step)
        matrix.grad, bias.grad = conv.weight.grad.flatten(1).clone(), conv.bias.grad[None].clone()
        for optimizer in (ours, muon, adamw):
            optimizer.step()
    assert torch.equal(conv.weight.flatten(1), matrix)
    assert torch.equal(conv.bias[None], bias)
    assert torch.equal(still, torch.ones(2, 2))  # it had no gradient


def test_schedulers_reach_both_halves():
    net = nn.Linear(2, 2)
    twin = copy.deepcopy(net)
    halved, half = MuonAdamW(net.parameters(), lr=0.2), MuonAdamW(twin.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(halved, lambda step: 0.5)
    for model, optimizer in ((net, halved), (twin, half)):
        some_gradients(model.parameters(), 0)
        optimizer.step()
    assert torch.equal(net.weight, twin.weight)
    assert torch.equal(net.bias, twin.bias)


def test_embeddings_can_be_left_to_adamw():
    net = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    net[1].weight = net[0].weight  # tied, as in language models
    for given, expected in (
        ({"adamw_embeddings": True}, [("adamw", net[0].weight), ("adamw", net[1].bias)]),
        ({}, [("muon", net[0].weight), ("adamw", net[1].bias)]),
    ):
        groups = MuonAdamW(net, lr=0.02, **given).param_groups
        found = [(group["algorithm"], p) for group in groups for p in group["params"]]
        assert [(kind, id(p)) for kind, p in found] == [(kind, id(p)) for kind, p in expected]
