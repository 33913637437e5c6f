"""ZeroRedundancyOptimizer: refused at construction on all ranks where curvature needs all layers,
and right with the others.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from torch_thor import AGCSGD, LAMB, THOR, ThorMuon


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def refusals(rank, world):
    """The errors of this rank, which meets the others in no collective meanwhile."""
    found, model = [], build()
    for make in (THOR, ThorMuon):
        for options in ({}, {"model": model}):
            with pytest.raises(ValueError, match="ZeroRedundancyOptimizer") as caught:
                ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, lr=0.1, **options)
            found.append(str(caught.value))
    return found


def trained(rank, world, make, wraps):
    model = build()
    replicated = DistributedDataParallel(model)
    options = {"lr": 0.05, "model": model}
    if wraps:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=make, **options)
    else:
        optimizer = make(model.parameters(), **options)
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        replicated(x).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def test_curvature_is_refused_on_all_ranks_at_once(run):
    for of_rank in run(2, refusals):
        for message in of_rank:
            for part in ("parameters of its own part", "divide_curvature=True", "fully_shard"):
                assert part in message


@pytest.mark.parametrize("make", [LAMB, AGCSGD])
def test_lamb_and_agc_sgd_take_the_steps_that_they_take_alone(run, make):
    own, wrapped = run(2, trained, make, False), run(2, trained, make, True)
    for of_rank in (*wrapped, own[1]):
        for value, expected in zip(of_rank, own[0], strict=True):
            assert torch.equal(value, expected)
