"""Optimizers that a trainer has wrapped, and modules that override the lists of parameters."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import torch_thor
from tiny import assert_same, batches, mlp, train
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon, param_groups


def test_coverage_of_what_a_trainer_has_wrapped():
    optimizer = ThorMuon(mlp())
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(_optimizer=optimizer))
    assert torch_thor.coverage(wrapped) == torch_thor.coverage(optimizer) == optimizer.coverage()
    itself = SimpleNamespace()
    itself.optimizer = itself
    for other in (torch.optim.SGD(mlp().parameters()), SimpleNamespace(optimizer=None), itself):
        with pytest.raises(TypeError, match=rf"coverage\({type(other).__name__}\): must be THOR"):
            torch_thor.coverage(other)


class Open(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.target_net = mlp(), mlp()

    def forward(self, x):
        return self.net(x)


class Loss(Open):
    """What torchrl's loss modules are: they hide parameters, with methods of fewer arguments."""

    def named_parameters(self, prefix="", recurse=True):
        for name, parameter in super().named_parameters(prefix=prefix, recurse=recurse):
            if not name.startswith("target_"):
                yield name, parameter

    def parameters(self, recurse=True):
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter


@pytest.mark.parametrize("make", [THOR, ThorMuon, AGCSGD, LAMB])
def test_modules_that_override_the_lists_of_their_parameters(make):
    model, plain = Loss(), Open()
    plain.target_net.requires_grad_(False)
    for one in (model, plain):
        optimizer = make(param_groups(one, no_decay="*.0", weight_decay=0.1), lr=0.1, model=one)
        train(one, optimizer, batches(4))
        optimizer.state_dict()
    assert_same(model.state_dict(), plain.state_dict())
