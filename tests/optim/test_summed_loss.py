"""A loss that looks like a sum over the batch is warned of once, and nothing else; what is a mean
is left alone.
"""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from tiny import assert_same, told, weights
from torch_thor import THOR, ThorMuon


def regression(**options):
    """On standardised targets: (model, its THOR)."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.LayerNorm(16),
        nn.Tanh(),
        nn.Linear(16, 12),
        nn.Tanh(),
        nn.Linear(12, 40),
    )
    return model, THOR(model, **options)


def fit(model, optimizer, sizes, *, mean=False, micro=1, scaled=False):
    """The ordinary loop, with the squared error summed over outputs and batch, over batches of
    these sizes.
    """
    generator, scaler = (
        torch.Generator().manual_seed(11),
        torch.amp.GradScaler("cpu", enabled=scaled),
    )
    for size in sizes:
        x, y = (torch.randn(size, width, generator=generator) for width in (6, 40))
        for part, target in zip(x.chunk(micro), y.chunk(micro), strict=True):
            loss = F.mse_loss(model(part), target, reduction="sum") / (size if mean else 1)
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_a_sum_is_told_of_once():
    """With its number of terms and what to do; in micro-batches too, and under a scaler, whose
    scale is no sign of it.

    Who says that it is a sum, or does not mind (ThorMuon), is told nothing, and neither is who has
    a mean.
    """
    for size, options in ((64, {}), (48, {}), (64, {"micro": 4}), (64, {"scaled": True})):
        (message,) = told(partial(fit, **options), *regression(update_interval=1), [size] * 4)
        for part in (
            f"looks like a sum over the {size} loss terms",
            'loss_reduction="sum"',
            "average the loss",
        ):
            assert part in message
        assert not told(
            partial(fit, mean=True, **options), *regression(update_interval=1), [size] * 4
        )
    assert not told(fit, *regression(loss_reduction="sum"), [64, 64])
    model, _ = regression()
    assert not told(fit, model, ThorMuon(model), [64, 64])


def test_a_warning_changes_nothing():
    """A resumed run is that of one that was not stopped, and is told no more; and so is one with
    other batches.
    """
    model, optimizer = regression(update_interval=3)
    assert told(fit, model, optimizer, [64, 32])
    twin, resumed = regression(update_interval=3)
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its_optimizer in ((model, optimizer), (twin, resumed)):
        assert not told(fit, one, its_optimizer, [64, 128, 32] * 2)
    assert_same(weights(twin), weights(model))


# ---- what is left alone: at scales and in batches where gradients are large ----------------------


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs)
    )


def targets_of(size, outputs=1, count=64):
    return (
        mlp(13, outputs),
        torch.randn(count, 13),
        lambda y: F.mse_loss(y, size * (1 + 0.4 * torch.randn(y.shape))),
    )


def classes(count, *, smoothing=0.0, size=128):
    labels = torch.randint(count, (size,))
    return (
        mlp(32, count),
        torch.randn(size, 32),
        lambda y: F.cross_entropy(y, labels, label_smoothing=smoothing),
    )


def contrastive():
    def loss(y):
        a, b = F.normalize(y[:128]), F.normalize(y[128:])
        return F.cross_entropy(a @ b.T / 0.01, torch.arange(128))

    return mlp(32, 16), torch.randn(128, 32).repeat(2, 1) + 0.1 * torch.randn(256, 32), loss


MEANS = {
    "ten_classes": lambda: classes(10, smoothing=0.1),
    "thousand_classes": lambda: classes(1000),
    "a_batch_of_one": lambda: classes(10, size=1),
    "outputs_summed": lambda: (
        mlp(13, 784), torch.randn(64, 13),
        lambda y: F.mse_loss(y, torch.randn(64, 784), reduction="sum") / 64
    ),
    **{f"targets_of_{size}": lambda size=size: targets_of(size) for size in (10, 100, 1000,
    100_000)},
    "targets_of_300_in_a_large_batch": lambda: targets_of(300, count=2048),
    "targets_of_100000_one_term": lambda: targets_of(1e5, count=1),
    "contrastive": contrastive,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*positive definite")
@pytest.mark.parametrize("name", MEANS)
def test_means_are_left_alone(name):
    for seed in range(2):
        torch.manual_seed(seed)
        model, x, loss = MEANS[name]()
        optimizer = THOR(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*looks like a sum")
            loss(model(x)).backward()
            optimizer.step()


def test_large_gradients_of_sampled_labels_are_no_sum():
    """A Gaussian of deviation 0.01 has gradients of 100, and they are not the loss's."""
    model, optimizer = regression(fisher="sampled")
    output = model(torch.randn(64, 6))
    optimizer.sample_fisher(output, lambda mean: Independent(Normal(mean, 0.01), 1))
    output.square().mean().backward()
    assert not told(optimizer.step)
