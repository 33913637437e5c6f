"""A loss that is summed over the batch is noticed, and trained as its mean; what is a mean is left alone."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.nn import functional as F

from models import zoo
from summed import regression, stream, summed
from tiny import assert_same, weights
from torch_thor import THOR

TOLD = "looks like a sum over the 64 loss terms"


def fit(model, optimizer, batches, *, mean=False, micro=1, scaler=None):
    """The ordinary loop; what each refresh decided."""
    events = []
    for x, y in batches:
        for part, target in zip(x.chunk(micro), y.chunk(micro), strict=True):
            loss = summed(model(part), target, len(x) if mean else 1)
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        events.append([(e.layer, e.decision, e.trace_change, e.trace) for e in optimizer.last_refresh])
        optimizer.zero_grad()
    return events


def both(batches, *, micro=1, scaler=None, **options):
    """Train on the sum and on the mean, from the same weights: (model, optimizer, events) of each."""
    results = []
    for mean in (False, True):
        model = regression()
        optimizer = THOR(model, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if mean else "ignore")
            events = fit(model, optimizer, batches, mean=mean, micro=micro, scaler=None if mean else scaler)
        results.append((model, optimizer, events))
    return results


SETTINGS = {
    "default": {},
    "no_momentum": {"momentum": 0.0},
    "nesterov": {"nesterov": True, "weight_decay": 0.1},
    "both_bounds": {"kl_clip": 1e-4, "max_update_ratio": 0.05},
    "trace_rule": {"update_interval": 1, "trace_thresholds": (0.02, 0.002), "factor_decay": 0.3},
    "split": {"split_dim": 4, "update_interval": 2},
    "hardly_bounded": {"max_update_ratio": 1e3, "lr": 1e-3},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sum_is_trained_as_its_mean_bit_for_bit(name):
    """64 terms: a power of two, which rounds nothing."""
    batches = list(stream(6))
    (model, optimizer, events), (twin, its_optimizer, its_events) = both(batches, **SETTINGS[name])
    assert optimizer.param_groups[0]["loss_scale"] == 64
    assert its_optimizer.param_groups[0]["loss_scale"] == 1
    assert events == its_events
    assert_same(weights(model), weights(twin))


@pytest.mark.parametrize("size", [48, 100])
def test_any_number_of_terms(size):
    (model, optimizer, _), (twin, _, _) = both(list(stream(6, size)), update_interval=2)
    assert optimizer.param_groups[0]["loss_scale"] == size
    for key, value in weights(twin).items():
        torch.testing.assert_close(model.get_parameter(key).detach(), value, rtol=1e-9, atol=1e-12, msg=key)


def test_micro_batches_are_one_sum():
    (model, optimizer, _), (twin, _, _) = both(list(stream(5)), micro=4, update_interval=2)
    assert optimizer.param_groups[0]["loss_scale"] == 64
    assert_same(weights(model), weights(twin))


def test_a_scaled_sum():
    """GradScaler's scale is no sign of a sum, and does not hide one."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    (model, optimizer, _), (twin, _, _) = both(list(stream(4)), scaler=scaler, update_interval=2)
    assert optimizer.param_groups[0]["loss_scale"] == 64
    assert_same(weights(model), weights(twin))


def test_refreshes_follow_the_batch_size():
    sizes = [64, 32, 128, 32]
    (model, optimizer, _), (twin, _, _) = both(list(stream(4, sizes)), update_interval=1)
    assert optimizer.param_groups[0]["loss_scale"] == 32
    assert_same(weights(model), weights(twin))
    model = regression()
    optimizer = THOR(model)  # between refreshes N is that of the latest
    with pytest.warns(RuntimeWarning, match=TOLD):
        fit(model, optimizer, stream(2, [64, 32]))
    assert optimizer.param_groups[0]["loss_scale"] == 64


def test_chosen_split(tmp_path, monkeypatch):
    """The choice is of the same statistics, whatever their scale."""
    monkeypatch.setenv("TORCH_THOR_CACHE", str(tmp_path))
    (model, optimizer, _), (twin, its_optimizer, _) = both(list(stream(3)), split_dim="auto")
    assert optimizer.param_groups[0]["split_dim"] == its_optimizer.param_groups[0]["split_dim"]
    for key, value in weights(twin).items():
        torch.testing.assert_close(model.get_parameter(key).detach(), value, rtol=1e-8, atol=1e-12, msg=key)


def test_it_is_said_once():
    model = regression()
    optimizer = THOR(model, update_interval=1)
    with pytest.warns(RuntimeWarning, match=TOLD) as caught:
        fit(model, optimizer, stream(4))
    assert len(caught) == 1
    for word in ("64", "Average the loss", "preset('paper')"):
        assert word in str(caught[0].message)


@pytest.mark.parametrize("size", [32, 128, 512])
def test_the_vae_of_the_examples(size):
    """BCE over pixels and the KL term, summed over the batch: at every size it is the training of the mean."""
    x, _ = zoo.digits(size, 28, 1, 0.0, 1.0)[0]
    results = []
    for terms in (1, size):
        torch.manual_seed(0)
        model = zoo.VAE()
        optimizer = THOR(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                output, mean, log_variance = model(x)
                divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
                reconstruction = F.binary_cross_entropy(output, x.view(-1, 784), reduction="sum")
                ((reconstruction + divergence) / terms).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len([w for w in caught if f"sum over the {size} loss terms" in str(w.message)]) == (terms == 1)
        results.append((optimizer.param_groups[0]["loss_scale"], weights(model)))
    assert [scale for scale, _ in results] == [size, 1]
    for key, value in results[1][1].items():
        torch.testing.assert_close(results[0][1][key], value, rtol=1e-4, atol=1e-6, msg=key)


# ---- what is left alone ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"loss_reduction": "sum"},
        THOR.preset("paper"),
        {"kl_clip": 1e-3},
        {"max_update_ratio": None},
        {"scaling": "spectral"},
    ],
    ids=str,
)
def test_whoever_says_otherwise_is_believed(options):
    model = regression()
    optimizer = THOR(model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, optimizer, stream(2))
    assert optimizer.param_groups[0]["loss_scale"] == 1


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
        assert optimizer.param_groups[0]["loss_scale"] == 1, seed


def test_large_gradients_of_sampled_labels_are_no_sum():
    """A Gaussian of deviation 0.01 has gradients of 100, and they are not the loss's."""
    model = regression()
    optimizer = THOR(model, fisher="sampled")
    ((x, y),) = stream(1)
    output = model(x)
    optimizer.sample_fisher(output, lambda mean: Independent(Normal(mean, 0.01), 1))
    F.mse_loss(output, y).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert optimizer.param_groups[0]["loss_scale"] == 1


# ---- what it is kept in ------------------------------------------------------------------------------------------


def test_resumed_bit_for_bit():
    batches = list(stream(8))
    model = regression()
    optimizer = THOR(model, update_interval=3)
    with pytest.warns(RuntimeWarning, match=TOLD):
        fit(model, optimizer, batches[:2])
    twin = copy.deepcopy(model)
    its_optimizer = THOR(twin, update_interval=3)
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert its_optimizer.param_groups[0]["loss_scale"] == 64
    with warnings.catch_warnings():  # and it is not said again
        warnings.simplefilter("error")
        fit(model, optimizer, batches[2:])
        fit(twin, its_optimizer, batches[2:])
    assert_same(weights(twin), weights(model))


def test_state_of_a_version_that_did_not_know_it():
    model = regression()
    optimizer = THOR(model, update_interval=1, **THOR.preset("paper"), lr=1e-3)
    fit(model, optimizer, stream(1))
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["loss_scale"], group["max_update_ratio"]
    later = THOR(model, update_interval=1, lr=1e-3)
    later.load_state_dict(state)
    with warnings.catch_warnings():  # its factors are those of the sum, so the sum it stays
        warnings.simplefilter("error")
        fit(model, later, stream(2))
    assert later.param_groups[0]["loss_scale"] == 1


@pytest.mark.parametrize("value", [0.0, -64.0, math.nan, math.inf, "64"])
def test_a_damaged_scale_reaches_no_weight(value):
    optimizer = THOR(regression())
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["loss_scale"] = value
    with pytest.raises(ValueError, match="loss_scale"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["loss_scale"] == 1


def test_parameters_that_are_added_later_are_trained_with_the_same_loss():
    model = regression()
    rest = [p for name, p in model.named_parameters() if not name.startswith("norm")]
    optimizer = THOR(rest, model=model, momentum=0.0, lr=1.0)
    with pytest.warns(RuntimeWarning, match=TOLD):
        fit(model, optimizer, stream(1))
    optimizer.add_param_group({"params": model.norm.parameters(), "max_update_ratio": 1e3})
    before = model.norm.weight.detach().clone()
    ((x, y),) = stream(1)
    summed(model(x), y).backward()
    wanted = before - model.norm.weight.grad / 64
    optimizer.step()
    assert torch.equal(model.norm.weight, wanted)


def test_a_refresh_without_terms_keeps_what_held():
    """Nothing is reached, so nothing is to be told: an empty last batch, whose sum is 0."""
    model = regression()
    optimizer = THOR(model, update_interval=1)
    with pytest.warns(RuntimeWarning, match=TOLD):
        fit(model, optimizer, stream(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no rows
        fit(model, optimizer, stream(1, [0]))
    assert optimizer.param_groups[0]["loss_scale"] == 64
    fit(model, optimizer, stream(2))
    assert all(p.isfinite().all() for p in model.parameters())
