"""``optimizers.thor.fisher=sampled``: what a recipe trains is what the loop of the documentation trains."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from torch_thor import THOR
from torch_thor.training import Run, RunConfig, UserError, load_recipe, train
from torch_thor.training import image_run as new_run
from torch_thor.training.data import DataBundle, DataSpec, load_data
from torch_thor.training.tasks import ImageClassification


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()


@pytest.mark.parametrize("parts", [1, 2])
def test_the_loop_of_the_documentation(parts):
    """The same bits as a loop written out; all steps refresh, on one batch that is the whole data set."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(8, 1, 6, 6, generator=generator, dtype=torch.float64)
    labels = torch.zeros(8, dtype=torch.long)  # of one class: the order of the images decides little
    options = {"lr": 0.05, "damping": 0.1, "update_interval": 1, "trace_thresholds": (0.0, 0.0), "fisher": "sampled"}
    model = network()
    optimizer = THOR(model, **options)
    config = RunConfig(epochs=3, batch_size=8, seed=5, device="cpu", accumulation=parts)
    data = DataBundle(images, labels, images[:4], labels[:4], 3)
    run = Run(model, optimizer, ImageClassification(data, config), config)
    seen = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()) if torch.is_grad_enabled() else None)
    train(run)
    twin = network()
    its = THOR(twin, **options)
    assert len(seen) == 3 * parts
    for step in range(3):
        for some in seen[step * parts : (step + 1) * parts]:
            scores = twin(some)
            its.sample_fisher(scores, seed=5)
            (functional.cross_entropy(scores, labels[: len(some)]) / parts).backward()
        its.step()
        its.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_recipe_can_ask_for_it():
    data = load_data(DataSpec("digits"))
    words = ["optimizer=thor", "epochs=1", "batch_size=256", "device=cpu", "update_interval=2"]
    losses = {}
    for fisher in ("empirical", "sampled"):
        run = new_run(load_recipe("digits", [*words, f"optimizers.thor.fisher={fisher}"]), "thor", data)
        assert run.optimizer.fisher == fisher
        losses[fisher] = [point.loss for point in train(run).steps]
    assert losses["empirical"][0] == losses["sampled"][0]
    assert losses["empirical"][-1] != losses["sampled"][-1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_mixed_precision_with_a_loss_scale(precision):
    """The scale of the loss is not that of the sampled pass: the factors are those of float32, but for rounding."""
    data = load_data(DataSpec("digits"))
    words = ["optimizer=thor", "epochs=1", "batch_size=1024", "device=cpu", "fisher=sampled", "split_dim=null"]
    found = []
    for more in (["precision=fp32"], [f"precision={precision}"]):
        run = new_run(load_recipe("digits", [*words, *more]), "thor", data)
        train(run)
        found.append({name: layer.factors()[1] for name, layer in run.optimizer.curvature.items()})
    for name, G in found[0].items():
        assert (found[1][name] - G).norm() < 0.05 * G.norm(), name


def test_a_wrong_word():
    with pytest.raises(UserError, match=r"fisher=exact must be empirical or sampled"):
        load_recipe("digits", ["optimizers.thor.fisher=exact"])
