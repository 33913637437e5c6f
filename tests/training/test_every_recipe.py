"""Each recipe of the package trains with its settings, at a tiny size: data, precision, parts,
phases, schedules.
"""

import math

import pytest
import torch

from image_tree import write_tree
from torch_thor import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.training.loop import Record, train
from torch_thor.training.models import bert
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipes import load_recipe, override, recipe_names
from torch_thor.training.run import build
from torch_thor.training.tasks.opening import open_task

KINDS = {
    "thor": THOR, "thor-muon": ThorMuon, "lamb": LAMB, "agc-sgd": AGCSGD,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}  # fmt: skip
SHORT = {128: 16, 512: 32}  # tokens
MODELS = {
    "torchvision:resnet50": "small-resnet",
    "cifar-resnet18": "small-resnet",
    "timm:nf_resnet50": "timm:test_nfnet",
}


def trains(recipe, steps):
    said = []
    task = open_task(recipe, torch.device("cpu"), said.append)
    for name in recipe.optimizer:
        run, record = build(recipe, name, task, Ranks()), Record()
        train(run, [record])
        assert type(run.optimizer) is KINDS[name]
        assert len(record.points) == steps
        assert all(0 < point.loss < 10 and not point.skipped for point in record.points)
        assert all(
            math.isfinite(value) for score in record.scores for value in score.metrics.values()
        )
    return run.score.metrics, said


# of a tiny network the embeddings are the most
@pytest.mark.filterwarnings("ignore:.* preconditions")
def test_every_recipe_of_bert_trains(tmp_path, monkeypatch):
    for size in bert.BERTS:
        monkeypatch.setitem(bert.BERTS, size, (1, 32, 2, 64))
    names = [name for name in recipe_names() if name.startswith("bert-")]
    for name in names:
        recipe = load_recipe(name)
        phases = [
            {**phase.model_dump(), "steps": 2, "length": phase.length and SHORT[phase.length],
            "batch_size": 4,
             "accumulation": 2}
            for phase in recipe.phases
        ]  # fmt: skip
        words = [
            "data.name=python-text", f"data.root={tmp_path}",
            f"data.text.length={SHORT[recipe.data.text.length]}",
            "data.text.vocab_size=300", "data.workers.count=0", "batch_size=4",
            "device=cpu",
            "accumulation=2", "eval_interval=100", f"steps={'null' if phases else 3}",
        ]  # fmt: skip
        if recipe.schedule.warmup_steps is not None:
            words.append("schedule.warmup_steps=1")
        tiny = override(recipe, words if not phases else [*words, "phases=[]"])
        tiny = type(tiny).model_validate({**tiny.model_dump(), "phases": phases})
        metrics, _ = trains(tiny, 2 * len(phases) or 3)
        assert ("nsp_accuracy" in metrics) == (name != "bert-babylm")


@pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
def test_every_recipe_of_images_trains(tmp_path):
    photographs = write_tree(tmp_path / "images")
    for name in recipe_names():
        recipe = load_recipe(name)
        if recipe.task != "image-classification" or name in ("digits", "fashion-mnist"):
            continue
        words = [
            "data.name=image-folder", f"data.root={photographs}", "data.transform.size=32",
            "data.transform.resize=36",
            "data.workers.count=0", "data.max_broken=0.2", "batch_size=9", "epochs=2", "device=cpu",
            f"model={MODELS[recipe.model]}", "schedule.horizon_epochs=null",
            "schedule.warmup_epochs=0.5",
            "schedule.milestones=[1]",
            *(["update_interval=2"] if "thor" in recipe.optimizer else []),
        ]  # fmt: skip
        metrics, said = trains(override(recipe, words), 4)
        assert math.isfinite(metrics["loss"])
        assert said  # the broken images, by name
