"""Each recipe of the package trains with its settings, at a tiny size."""

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

KINDS = {"thor": THOR, "thor-muon": ThorMuon, "lamb": LAMB, "agc-sgd": AGCSGD}
KINDS |= {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
SHORT = {128: 16, 512: 32}  # tokens
MODELS = {"timm:nf_resnet50": "timm:test_nfnet"}  # all others: small-resnet


def trains(recipe, steps):
    said = []
    task = open_task(recipe, torch.device("cpu"), said.append)
    for name in recipe.optimizer:
        run, record = build(recipe, name, task, Ranks()), Record()
        train(run, [record])
        assert type(run.optimizer) is KINDS[name]
        assert len(record.points) == steps
        assert all(0 < point.loss < 10 and not point.skipped for point in record.points)
        for score in record.scores:
            assert all(map(math.isfinite, score.metrics.values()))
        for p in run.model.parameters():  # in bf16 and fp16 too
            assert (p.dtype, bool(p.isfinite().all())) == (torch.float32, True)
    return run.score.metrics, said


# the embeddings are most of a tiny network
@pytest.mark.filterwarnings("ignore:.* preconditions")
def test_every_recipe_of_bert_trains(tmp_path, monkeypatch):
    for size in bert.BERTS:
        monkeypatch.setitem(bert.BERTS, size, (1, 32, 2, 64))
    for name in [name for name in recipe_names() if name.startswith("bert-")]:
        recipe = load_recipe(name)
        short = {"steps": 2, "batch_size": 4, "accumulation": 2}
        phases = [
            {**phase.model_dump(), **short, "length": phase.length and SHORT[phase.length]}
            for phase in recipe.phases
        ]
        tiny = override(recipe, [
            "data.name=python-text", f"data.root={tmp_path}", "data.text.vocab_size=300",
            f"data.text.length={SHORT[recipe.data.text.length]}", "data.workers.count=0",
            "batch_size=4", "device=cpu", "accumulation=2", "eval_interval=100",
            *(["steps=null", "phases=[]"] if phases else ["steps=3"]),
            *(["schedule.warmup_steps=1"] if recipe.schedule.warmup_steps is not None else []),
        ])  # fmt: skip
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
        tiny = override(recipe, [
            "data.name=image-folder", f"data.root={photographs}", "data.transform.size=32",
            "data.transform.resize=36", "data.workers.count=0", "data.max_broken=0.2",
            f"model={MODELS.get(recipe.model, 'small-resnet')}", "batch_size=9", "epochs=2",
            "device=cpu", "schedule.horizon_epochs=null", "schedule.warmup_epochs=0.5",
            "schedule.milestones=[1]",
            *(["update_interval=2"] if "thor" in recipe.optimizer else []),
        ])  # fmt: skip
        _, said = trains(tiny, 4)
        assert said  # the broken images, by name
