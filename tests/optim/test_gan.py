"""Two models that train each other, each with a THOR of its own, which hears of the passes of both."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from comparing import assert_same_weights
from reference import ReferenceTHOR
from torch_thor import THOR

STEPS, SIZE = 7, 6
ONE = {"lr": 0.02, "damping": 0.1, "max_update_ratio": None, "trace_thresholds": (0.0, 0.0)}
# the two refresh together in step 0 alone: what one gathers in a pass of the other must go
INTERVALS = {"generator": 2, "critic": 3}


def models():
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    return generator, critic


def stream():
    random = torch.Generator().manual_seed(5)
    return [
        tuple(torch.randn(SIZE, size, generator=random, dtype=torch.float64) for size in (4, 3)) for _ in range(STEPS)
    ]


def labelled(real, fake):
    labels = torch.cat([real.new_ones(len(real), 1), real.new_zeros(len(fake), 1)])
    return torch.cat([real, fake]), lambda y: F.binary_cross_entropy_with_logits(y, labels)


def believed(y):
    return F.binary_cross_entropy_with_logits(y, torch.ones_like(y))


@pytest.mark.parametrize("dropped", ["by the optimizer", "by the model"])
@pytest.mark.parametrize("fresh", [True, False], ids=["generated twice", "generated once"])
def test_each_has_the_statistics_of_its_own_loss(dropped, fresh):
    """The critic's gradients of the generator's pass are dropped, and so are their rows: oracle by oracle."""
    generator, critic = models()
    both = {"generator": generator, "critic": critic}
    references = {name: ReferenceTHOR(m, update_interval=INTERVALS[name], **ONE) for name, m in both.items()}
    optimizers = {name: THOR(m, update_interval=INTERVALS[name], **ONE) for name, m in both.items()}

    def drop(name, model):
        (optimizers[name] if dropped == "by the optimizer" else model).zero_grad()

    for step, (real, noise) in enumerate(stream()):
        drop("critic", critic)
        fake = generator(noise)
        x, loss = labelled(real, fake.detach())
        loss(critic(x)).backward()
        optimizers["critic"].step()
        references["critic"].step((x, loss))
        assert_same_weights(critic, references["critic"], step)

        drop("generator", generator)
        believed(critic(generator(noise) if fresh else fake)).backward()
        optimizers["generator"].step()
        judge = copy.deepcopy(critic).requires_grad_(False)
        references["generator"].step((noise, lambda y, judge=judge: believed(judge(y))))
        assert_same_weights(generator, references["generator"], step)
    for name, optimizer in optimizers.items():
        refreshes = len(range(0, STEPS, INTERVALS[name]))
        assert {layer.refreshes for layer in optimizer.curvature.values()} == {refreshes}
