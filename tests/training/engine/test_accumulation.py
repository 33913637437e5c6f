"""A batch in parts, or compiled, gives the step of the whole batch."""

import pytest
import torch
from torch import nn

from torch_thor import THOR, ThorMuon
from torch_thor.training import Run, RunConfig, train
from torch_thor.training.data import DataBundle
from torch_thor.training.tasks import ImageClassification


def data(images, dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    shape = (images, 2, 5, 5)
    pictures = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(3, (images,), generator=generator)
    return DataBundle(pictures, labels, pictures[:4], labels[:4], 3)


def network(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 3)).to(dtype)


MAKERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "thor": lambda model: THOR(model, lr=0.01, damping=0.1, update_interval=2, split_dim=8),
    "thor-average": lambda model: THOR(model, lr=0.01, damping=0.1, update_interval=2, factor_decay=0.5),
    "thor-scale-free": lambda model: ThorMuon(model, lr=0.01, damping=0.1, update_interval=2, factor_decay=0.9),
}


def trained(maker, dtype=torch.float64, *, images=30, batch_size=10, **options):
    torch.manual_seed(0)
    model = network(dtype)
    optimizer = MAKERS[maker](model)
    config = RunConfig(epochs=2, batch_size=batch_size, device="cpu", label_smoothing=0.1, **options)
    run = Run(model, optimizer, ImageClassification(data(images, dtype), config), config)
    return run, train(run)


def assert_same_training(run, record, whole, whole_record, rtol, atol):
    assert len(record.steps) == len(whole_record.steps)
    for own, wanted in zip(record.steps, whole_record.steps, strict=True):
        assert own.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert own.terms == wanted.terms
    for own, wanted in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("maker", list(MAKERS))
@pytest.mark.parametrize(("batch_size", "parts"), [(10, 3), (10, 10), (5, 4), (7, 2)])
def test_parts_equal_the_whole_in_float64(maker, batch_size, parts):
    whole, whole_record = trained(maker, batch_size=batch_size)
    run, record = trained(maker, batch_size=batch_size, accumulation=parts)
    # of a softmax's gradient one direction is rounding alone, which polar factors raise to some 1e-9
    rtol, atol = (1e-6, 1e-8) if maker == "thor-scale-free" else (1e-9, 1e-11)
    assert_same_training(run, record, whole, whole_record, rtol=rtol, atol=atol)
    for layer, curvature in getattr(run.optimizer, "curvature", {}).items():
        for own, wanted in zip(curvature.factors(), whole.optimizer.curvature[layer].factors(), strict=True):
            assert own is wanted is None or torch.allclose(own, wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("maker", list(MAKERS))
def test_parts_equal_the_whole_in_float32(maker):
    whole, whole_record = trained(maker, torch.float32)
    run, record = trained(maker, torch.float32, accumulation=3)
    assert_same_training(run, record, whole, whole_record, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("maker", ["sgd", "thor"])
def test_parts_under_a_loss_scale(maker):
    whole, whole_record = trained(maker, torch.float32, precision="fp16", loss_scale=128.0)
    run, record = trained(maker, torch.float32, precision="fp16", loss_scale=128.0, accumulation=3)
    for own, wanted in zip(record.steps, whole_record.steps, strict=True):
        assert own.loss == pytest.approx(wanted.loss, rel=5e-3)
    for own, wanted in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, rtol=2e-2, atol=2e-3)


def test_the_loss_weighs_parts_by_their_images():
    _, record = trained("sgd", images=5, batch_size=5, accumulation=4)  # 2 + 2 + 1
    model = network()
    batch = data(5)
    first = nn.functional.cross_entropy(model(batch.train_images), batch.train_labels, label_smoothing=0.1)
    assert record.steps[0].loss == pytest.approx(first.item(), rel=1e-6)
    assert [point.terms for point in record.steps] == [5, 5]


@pytest.mark.slow
def test_compiled_equals_eager():
    whole, whole_record = trained("thor", torch.float32)
    run, record = trained("thor", torch.float32, compile=True, accumulation=2)
    assert_same_training(run, record, whole, whole_record, rtol=2e-4, atol=2e-5)
    assert run.model.state_dict().keys() == network().state_dict().keys()
    assert not any("_orig_mod" in name for name in run.model.state_dict())
    assert set(run.optimizer.curvature) == set(whole.optimizer.curvature)
    assert all(layer.refreshes > 0 for layer in run.optimizer.curvature.values())
