"""`fisher=sampled` in a recipe: what trains is what the loop of the documentation trains."""

import itertools

import torch
from torch import nn
from torch.nn import functional

from torch_thor import THOR
from torch_thor.training.loop import train
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipe import Recipe
from torch_thor.training.recipes import load_recipe
from torch_thor.training.run import build
from torch_thor.training.tasks import open_task
from torch_thor.training.tasks.task import Loss, Metric, Terms

OPTIONS = {"lr": 0.05, "damping": 0.1, "update_interval": 1, "trace_thresholds": (0.0, 0.0), "fisher": "sampled"}


class OneBatch:
    """Each step has the same eight images of one class."""

    unit, steps_per_epoch, samples = "images", 3, 8
    metrics = (Metric("loss", "loss", "loss", higher_is_better=False, primary=True),)

    def __init__(self):
        self.images = torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
        self.labels = torch.zeros(8, dtype=torch.long)

    def model(self):
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 3)).double()

    def batches(self, ranks, start):
        return itertools.repeat((self.images, self.labels))

    def held_out(self, ranks):
        return [((self.images, self.labels), True)]

    def terms(self, batch):
        return Terms(len(batch[1]))

    def loss(self, net, batch):
        output = net(batch[0])
        return Loss(functional.cross_entropy(output, batch[1]), output)

    def measure(self, net, batch):
        return {"loss": self.loss(net, batch).mean * len(batch[1])}


def trained(parts, fisher):
    recipe = Recipe(
        batch_size=8, seed=5, device="cpu", accumulation=parts, optimizers={"thor": {**OPTIONS, "fisher": fisher}}
    )
    run = build(recipe, "thor", OneBatch(), Ranks())
    train(run)
    return run.model


def test_the_loop_of_the_documentation():
    """The same bits as a loop written out; all steps refresh."""
    for parts in (1, 2):
        task = OneBatch()
        twin = task.model()
        its = THOR(twin, **OPTIONS)
        for _ in range(3):
            for images, labels in zip(task.images.chunk(parts), task.labels.chunk(parts), strict=True):
                scores = twin(images)
                its.sample_fisher(scores, seed=5)
                (functional.cross_entropy(scores, labels) / parts).backward()
            its.step()
            its.zero_grad()
        found, plain = trained(parts, "sampled"), trained(parts, "empirical")
        both = list(zip(found.parameters(), twin.parameters(), plain.parameters(), strict=True))
        assert all(torch.equal(one, other) for one, other, _ in both)
        assert not any(torch.equal(one, other) for one, _, other in both)


def test_in_mixed_precision_with_a_loss_scale():
    """The scale of the loss is not that of the sampled pass: the factors are those of float32, but for rounding."""
    words = ["optimizer=thor", "epochs=1", "batch_size=1024", "device=cpu", "fisher=sampled", "split_dim=null"]
    found = {}
    for precision in ("fp32", "bf16", "fp16"):
        recipe = load_recipe("digits", [*words, f"precision={precision}"])
        run = build(recipe, "thor", open_task(recipe, torch.device("cpu"), print), Ranks())
        train(run)
        found[precision] = {name: layer.factors()[1] for name, layer in run.optimizer.curvature.items()}
    for name, G in found["fp32"].items():
        for precision in ("bf16", "fp16"):
            assert 0 < (found[precision][name] - G).norm() < 0.05 * G.norm(), (precision, name)
