"""Clipping the gradient's norm, beside a loop written out by hand."""

import pytest
import torch
from small_network import network, small_data
from torch.nn import functional

from torch_thor import THOR
from torch_thor.training import Run, RunConfig, UserError, train
from torch_thor.training.data import epoch_order
from torch_thor.training.tasks import ImageClassification

NORM, LR, BATCH = 0.5, 0.5, 5


@pytest.fixture
def data():
    return small_data()


def trained(data, make, **options):
    model = network()
    config = RunConfig(epochs=2, batch_size=BATCH, device="cpu", **options)
    run = Run(model, make(model), ImageClassification(data, config), config)
    train(run)
    return run


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=LR)


def by_hand(data):
    model = network()
    norms = []
    for step in range(8):
        chosen = epoch_order(20, 0, step // 4)[BATCH * (step % 4) :][:BATCH]
        loss = functional.cross_entropy(model(data.train_images[chosen]), data.train_labels[chosen])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm().item())
        scale = min(1.0, NORM / norms[-1])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LR * scale * gradient
    return model, norms


@pytest.mark.parametrize(
    ("options", "rtol"),
    [({}, 1e-5), ({"accumulation": 3}, 1e-4), ({"precision": "fp16", "loss_scale": 128.0}, 5e-2)],
    ids=["whole", "in parts", "under a loss scale"],
)
def test_the_norm_is_bounded(data, options, rtol):
    wanted, norms = by_hand(data)
    assert min(norms) < NORM < max(norms)  # some steps are clipped, and some are not
    run = trained(data, sgd, clip_norm=NORM, **options)
    for own, right in zip(run.model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(own, right, rtol=rtol, atol=rtol / 10)


def test_a_norm_that_is_never_reached_changes_nothing(data):
    make = lambda model: THOR(model, lr=0.01, damping=0.1, update_interval=2)  # noqa: E731
    plain, bounded = trained(data, make), trained(data, make, clip_norm=1e6)
    for own, right in zip(bounded.model.parameters(), plain.model.parameters(), strict=True):
        assert own.equal(right)


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_norms_that_cannot_be_are_refused(norm):
    with pytest.raises(UserError, match=r"clip_norm=.* must be above 0, 1 is usual; null clips nothing"):
        RunConfig(clip_norm=norm)
