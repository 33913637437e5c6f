"""The reference's schedules: their published values, and damping driven as torch drives lr."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torch_thor import THOR, ThorMuon
from torch_thor.schedules import LambdaDamping, polynomial, resnet50_damping, resnet50_lr

EPOCH = 5004  # steps, of 256 images


def test_formulas_are_the_published_ones():
    for step in (0, 833, EPOCH - 1, 38 * EPOCH, 39 * EPOCH - 1, 40 * EPOCH - 1, 45 * EPOCH):
        e = (step + 1) / EPOCH
        halved = 0.25 if e >= 40 else 0.5 if e >= 39 else 1.0
        assert resnet50_lr(step, EPOCH) == pytest.approx(
            0.05803 * (1 - e / 53) ** 4.0839 * halved, rel=1e-12
        )
        assert resnet50_damping(step, EPOCH) == pytest.approx(0.03 * 0.50036 ** (e / 10), rel=1e-12)
    assert resnet50_lr(53 * EPOCH, EPOCH) == 0.0  # and no complex number
    whole = resnet50_lr(39 * EPOCH, EPOCH, decay_epochs=None)
    assert whole == 2 * resnet50_lr(39 * EPOCH, EPOCH)
    bounds = {"start": 7.035e-3, "end": 1e-6, "power": 4}
    values = [polynomial(step, 30_000, **bounds) for step in (0, 15_000, 30_000, 40_000)]
    assert values == pytest.approx([7.035e-3, 1e-6 + 7.034e-3 / 16, 1e-6, 1e-6], rel=1e-12)


def halved(step):
    return 0.5**step


def build(kind=THOR):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": model[0].parameters(), "damping": 0.5}, {"params": model[1].parameters()}]
    return model, kind(groups, model=model, damping=0.2, lr=0.2)


@pytest.mark.parametrize("kind", [THOR, ThorMuon])
def test_damping_follows_its_function_as_lr_does_and_resumes(kind):
    model, optimizer = build(kind)
    lr, damping = LambdaLR(optimizer, halved), LambdaDamping(optimizer, halved)
    for step in range(4):
        assert damping.get_last_damping() == pytest.approx([0.5 * 0.5**step, 0.2 * 0.5**step])
        assert damping.get_last_damping()[1] == pytest.approx(lr.get_last_lr()[1])
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lr.step()
        damping.step()
    assert damping.state_dict() == {"last_epoch": 4, "base_dampings": [0.5, 0.2]}
    _, other = build(kind)
    resumed = LambdaDamping(other, halved)
    resumed.load_state_dict(damping.state_dict())
    other.load_state_dict(optimizer.state_dict())
    for schedule in (damping, resumed):
        schedule.step()
    assert resumed.get_last_damping() == damping.get_last_damping()


def test_what_is_refused():
    model, optimizer = build()
    with pytest.raises(ValueError, match=r"LambdaDamping\(SGD\).*must have a damping; give THOR"):
        LambdaDamping(torch.optim.SGD(model.parameters(), lr=0.1), halved)
    with pytest.raises(ValueError, match="must be a function, or a list of 2, with one for each"):
        LambdaDamping(optimizer, [halved])
    with pytest.raises(ValueError, match=r"not the state dict of a LambdaDamping.*'base_lrs'"):
        LambdaDamping(optimizer, halved).load_state_dict(LambdaLR(optimizer, halved).state_dict())
