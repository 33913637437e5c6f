"""A loss that looks like a sum over the batch is warned of once, and nothing else; what is a mean is left alone."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from models import zoo
from summed import regression, stream, summed
from tiny import assert_same, weights
from torch_thor import THOR, ThorMuon


def told(function, *args, **options):
    """The warnings of summed losses that a call gives; all others are errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("error")
        warnings.filterwarnings("always", message=".*looks like a sum")
        function(*args, **options)
    return [str(warning.message) for warning in caught]


def fit(model, optimizer, batches, *, mean=False, micro=1, scaler=None):
    """The ordinary loop."""
    for x, y in batches:
        for part, target in zip(x.chunk(micro), y.chunk(micro), strict=True):
            loss = summed(model(part), target, len(x) if mean else 1)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()


def test_a_sum_is_told_of_once():
    """With its number of terms and what to do; in micro-batches too, and under a scaler, whose scale is no sign of it.

    Who says that it is a sum, or does not mind (ThorMuon), is told nothing, and neither is who has a mean.
    """
    for size, options in ((64, {}), (48, {}), (64, {"micro": 4}), (64, {"scaler": torch.amp.GradScaler("cpu")})):
        model = regression()
        optimizer = THOR(model, update_interval=1)
        (message,) = told(fit, model, optimizer, stream(4, size), **options)
        for part in (f"looks like a sum over the {size} loss terms", 'loss_reduction="sum"', "average the loss"):
            assert part in message
        model = regression()
        assert not told(fit, model, THOR(model, update_interval=1), stream(4, size), mean=True, **options)
    for make in (lambda model: THOR(model, loss_reduction="sum"), ThorMuon):
        model = regression()
        assert not told(fit, model, make(model), stream(2))


def test_a_warning_changes_nothing():
    """A resumed run is that of one that was not stopped, and is told no more; and so is one with other batches."""
    model = regression()
    optimizer = THOR(model, update_interval=3)
    assert told(fit, model, optimizer, stream(2, [64, 32]))
    twin = copy.deepcopy(model)
    resumed = THOR(twin, update_interval=3)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, its_optimizer in ((model, optimizer), (twin, resumed)):
        assert not told(fit, one, its_optimizer, stream(6, [64, 128, 32] * 2))
    assert_same(weights(twin), weights(model))


def test_the_vae_of_the_examples():
    """BCE over pixels and the KL term, summed over the batch: told of; with what the message says, that of the mean."""

    def steps(model, optimizer, x, terms):
        for _ in range(4):
            output, mean, log_variance = model(x)
            divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            reconstruction = F.binary_cross_entropy(output, x.view(-1, 784), reduction="sum")
            ((reconstruction + divergence) / terms).backward()
            optimizer.step()
            optimizer.zero_grad()

    for size in (32, 128, 512):
        x, _ = zoo.digits(size, 28, 1, 0.0, 1.0)[0]
        model = zoo.VAE()
        assert f"sum over the {size} loss terms" in told(steps, model, THOR(model), x, 1)[0]
        results = []
        for terms, options in ((1, {"lr": 0.05 / size, "loss_reduction": "sum"}), (size, {})):
            torch.manual_seed(0)
            model = zoo.VAE()
            assert not told(steps, model, THOR(model, **options), x, terms)
            results.append(weights(model))
        for key, value in results[1].items():
            torch.testing.assert_close(results[0][key], value, rtol=1e-4, atol=1e-6, msg=key)


# ---- what is left alone ------------------------------------------------------------------------------------------


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def pixels():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 4, 1)
    )


def targets_of(size, outputs=1, count=64):
    return mlp(13, outputs), torch.randn(count, 13), lambda y: F.mse_loss(y, size * (1 + 0.4 * torch.randn(y.shape)))


def classes(count, *, smoothing=0.0, size=128):
    return (
        mlp(32, count),
        torch.randn(size, 32),
        lambda y: F.cross_entropy(y, torch.randint(count, (size,)), label_smoothing=smoothing),
    )


def contrastive(temperature):
    def loss(y):
        a, b = F.normalize(y[:128]), F.normalize(y[128:])
        return F.cross_entropy(a @ b.T / temperature, torch.arange(128))

    return mlp(32, 16), torch.randn(128, 32).repeat(2, 1) + 0.1 * torch.randn(256, 32), loss


def policy(size):
    """Cross-entropy weighted by advantages that nobody has normalised, and a bonus for entropy."""

    def loss(y):
        chosen = F.cross_entropy(y, torch.randint(4, (size,)), reduction="none")
        entropy = -(y.softmax(-1) * y.log_softmax(-1)).sum(-1)
        return (chosen * 100 * torch.randn(size) - 0.01 * entropy).mean()

    return mlp(8, 4), torch.randn(size, 8), loss


def tasks():
    """Five losses added up, one weighted by 10."""

    def loss(y):
        labels = torch.randint(10, (64,))
        return sum(F.cross_entropy(part, labels) for part in y[:, :40].split(10, 1)) + 10 * y[:, 40:].abs().mean()

    return mlp(13, 50), torch.randn(64, 13), loss


def segmentation(per_image):
    """A mean over pixels; or their sum in each image, averaged over images."""

    def loss(y):
        found = F.cross_entropy(y, torch.randint(4, (32, 16, 16)), reduction="sum")
        return found / (32 if per_image else 32 * 256)

    return pixels(), torch.randn(32, 3, 16, 16), loss


def boxes():
    """Smooth L1 of four coordinates, five times, and focal weights, summed over 100 anchors, a mean over images."""

    def loss(y):
        y = y.unflatten(1, (100, 5))
        coordinates = F.smooth_l1_loss(y[..., :4], torch.randn(32, 100, 4), reduction="sum")
        objects = F.binary_cross_entropy_with_logits(y[..., 4], (torch.rand(32, 100) < 0.1).float(), reduction="sum")
        return (5 * coordinates + objects) / 32

    return mlp(13, 500), torch.randn(32, 13), loss


def tokens(count):
    """A mean over all tokens of a large vocabulary."""
    model = nn.Sequential(nn.Embedding(count, 16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, count))
    x = torch.randint(count, (16, 24))
    return model, x, lambda y: F.cross_entropy(y.flatten(0, 1), x.flatten())


MEANS = {
    "two_classes": lambda: classes(2),
    "ten_classes": lambda: classes(10),
    "thousand_classes": lambda: classes(1000),
    "label_smoothing": lambda: classes(10, smoothing=0.1),
    "a_batch_of_two": lambda: classes(10, size=2),
    "a_batch_of_one": lambda: classes(10, size=1),
    "standardised": lambda: (mlp(13, 100), torch.randn(64, 13), lambda y: F.mse_loss(y, torch.randn(64, 100))),
    "outputs_summed": lambda: (
        mlp(13, 784), torch.randn(64, 13), lambda y: F.mse_loss(y, torch.randn(64, 784), reduction="sum") / 64
    ),
    "targets_of_10": lambda: targets_of(10),
    "targets_of_30": lambda: targets_of(30, count=256),
    "targets_of_100": lambda: targets_of(100),
    "targets_of_1000": lambda: targets_of(1000),
    "targets_of_300_in_a_large_batch": lambda: targets_of(300, count=2048),
    "targets_of_100000": lambda: targets_of(1e5),
    "targets_of_100000_one_term": lambda: targets_of(1e5, count=1),
    "contrastive": lambda: contrastive(0.07),
    "contrastive_sharp": lambda: contrastive(0.01),
    "advantages": lambda: policy(64),
    "advantages_in_a_large_batch": lambda: policy(2048),
    "returns_of_500": lambda: (mlp(8, 1), torch.randn(64, 8), lambda y: F.mse_loss(y, 500 * torch.rand(64, 1))),
    "five_tasks": tasks,
    "segmentation": lambda: segmentation(False),
    "segmentation_by_image": lambda: segmentation(True),
    "boxes": boxes,
    "tokens": lambda: tokens(5000),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_means_are_left_alone(name):
    for seed in range(3):
        torch.manual_seed(seed)
        model, x, loss = MEANS[name]()
        optimizer = THOR(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*looks like a sum")
            loss(model(x)).backward()
            optimizer.step()


def test_large_gradients_of_sampled_labels_are_no_sum():
    """A Gaussian of deviation 0.01 has gradients of 100, and they are not the loss's."""
    model = regression()
    optimizer = THOR(model, fisher="sampled")
    ((x, y),) = stream(1)
    output = model(x)
    optimizer.sample_fisher(output, lambda mean: Independent(Normal(mean, 0.01), 1))
    F.mse_loss(output, y).backward()
    assert not told(optimizer.step)
