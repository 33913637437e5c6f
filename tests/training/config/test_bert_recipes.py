"""The recipes of BERT: their numbers, by hand, and that each of them trains at a tiny size."""

import math
from dataclasses import replace

import pytest
import torch

from torch_thor import LAMB, THOR, ThorMuon
from torch_thor.training import load_recipe, new_run, recipe_names, train
from torch_thor.training.config.schedules import factor
from torch_thor.training.models import masked_lm as models
from torch_thor.training.tasks import MaskedLM

NAMES = [name for name in recipe_names() if name.startswith("bert-")]


def values(recipe, key, steps):
    """The learning rate or the damping in steps counted from 0, of a recipe with schedules of the whole training."""
    total = recipe.steps or sum(phase.steps for phase in recipe.phases)
    start = getattr(recipe.optimizers[recipe.optimizer[0]], key)
    schedule = {"lr": recipe.schedule, "damping": recipe.damping_schedule}[key]
    final = None if schedule.end is None else schedule.end / start
    return [start * factor(schedule, step, total, total, final) for step in steps]


def phase_values(recipe, number, steps):
    """The learning rate of a phase with a schedule of its own, in its steps counted from 0."""
    phase, lr = recipe.phases[number], recipe.optimizers[recipe.optimizer[0]].lr
    return [lr * phase.lr_factor * factor(phase.schedule, step, phase.steps, phase.steps) for step in steps]


def test_bert_large_with_thor():
    recipe = load_recipe("bert-large-thor")
    # from lr to 1e-6 with the square of what is left of 30,000 steps, from damping to 1e-6 with its fourth power
    steps = [0, 3000, 15000, 29999]
    assert values(recipe, "lr", steps) == pytest.approx(
        [0.006464, 1e-6 + 0.006463 * 0.81, 1e-6 + 0.006463 / 4, 1e-6 + 0.006463 / 9e8], rel=1e-12
    )
    assert values(recipe, "damping", steps) == pytest.approx(
        [0.007035, 1e-6 + 0.007034 * 0.6561, 1e-6 + 0.007034 / 16, 1e-6], rel=1e-12
    )
    thor = recipe.optimizers["thor"]
    assert (thor.momentum, thor.weight_decay, thor.update_interval) == (0.9, 1e-5, 100)
    assert thor.kl_clip is None
    assert thor.trace_thresholds == "thor_nt"
    assert (recipe.batch_size, recipe.steps, recipe.data.text.length, recipe.phases) == (96, 30_000, 512, [])
    # as published: 3,000 steps of the same schedules
    published = load_recipe("bert-large-thor", ["steps=3000"])
    assert values(published, "lr", [2999]) == values(recipe, "lr", [2999])


def test_bert_large_with_the_schedules_that_were_published_first():
    recipe = load_recipe("bert-large-thor-linear")
    steps = [0, 3000, 15000]
    assert values(recipe, "lr", steps) == pytest.approx([0.0031, 1e-6 + 0.003099 * 0.9, 1e-6 + 0.003099 / 2], rel=1e-12)
    assert values(recipe, "damping", steps) == pytest.approx([0.05, 1e-6 + 0.049999 * 0.9, 1e-6 + 0.049999 / 2])
    thor = recipe.optimizers["thor"]
    assert (thor.momentum, thor.weight_decay, thor.update_interval, thor.kl_clip) == (0.9, 5e-4, 10, None)


def test_bert_large_with_lamb():
    recipe = load_recipe("bert-large-lamb")
    assert [(phase.steps, phase.length, phase.batch_size or recipe.batch_size) for phase in recipe.phases] == [
        (7038, 128, 65_536), (1563, 512, 32_768),
    ]  # fmt: skip
    first, second = 2001, 200  # 0.2843 of 7038 steps, 0.128 of 1563
    for number, (lr, warmup, length) in enumerate([(0.006, first, 7038), (0.004, second, 1563)]):
        found = phase_values(recipe, number, [0, warmup - 1, warmup, length - 1])
        assert found == pytest.approx([lr / warmup, lr, lr, lr * math.sqrt(1 / (length - warmup))], rel=1e-9)
    lamb = recipe.optimizers["lamb"]
    assert (lamb.weight_decay, lamb.beta1, lamb.beta2, lamb.eps) == (0.01, 0.9, 0.999, 1e-6)
    assert (recipe.clip_norm, recipe.activation_checkpointing) == (1.0, True)
    examples = [phase.steps * (phase.batch_size or recipe.batch_size) for phase in recipe.phases]
    assert examples[0] / sum(examples) == pytest.approx(0.9, abs=0.001)


def test_bert_base():
    recipe = load_recipe("bert-base")
    assert [(phase.steps, phase.length or recipe.data.text.length) for phase in recipe.phases] == [
        (900_000, 128), (100_000, 512),
    ]  # fmt: skip
    steps = [0, 4999, 9999, 10_000, 505_000, 999_999]
    assert values(recipe, "lr", steps) == pytest.approx([1e-8, 5e-5, 1e-4, 1e-4, 5e-5, 1e-4 / 990_000])
    adamw = recipe.optimizers["adamw"]
    assert (adamw.weight_decay, adamw.beta1, adamw.beta2, adamw.eps) == (0.01, 0.9, 0.999, 1e-6)
    assert (recipe.batch_size, recipe.clip_norm) == (256, 1.0)


def test_bert_babylm():
    recipe = load_recipe("bert-babylm")
    assert values(recipe, "lr", [299, 599, 600, 5300, 9999]) == pytest.approx([2.5e-4, 5e-4, 5e-4, 2.5e-4, 5e-4 / 9400])
    assert (recipe.steps, recipe.batch_size, recipe.data.text.length) == (10_000, 64, 128)
    model = models.build(recipe.model, 30_522, 128, 0, next_sentence=recipe.data.text.next_sentence)
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e6, 1) == 11.2
    assert (model.config.num_attention_heads, model.config.intermediate_size) == (4, 1024)


SHORT = {128: 16, 512: 32}


def tiny(recipe, cache):
    """The recipe with short examples, a few steps, small batches, and all else as it is."""
    text = replace(recipe.data.text, length=SHORT[recipe.data.text.length], vocab_size=300)
    data = replace(
        recipe.data, name="python-text", root=str(cache), text=text, workers=replace(recipe.data.workers, count=0)
    )
    phases = [
        replace(phase, steps=2, length=phase.length and SHORT[phase.length], batch_size=4, accumulation=2)
        for phase in recipe.phases
    ]
    warmup = None if recipe.schedule.warmup_steps is None else 1
    return replace(
        recipe, data=data, phases=phases, epochs=1, steps=None if phases else 3, batch_size=4, device="cpu",
        accumulation=2, schedule=replace(recipe.schedule, warmup_steps=warmup), eval_interval=100,
    )  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.filterwarnings("ignore:THOR preconditions")  # of a tiny network the embeddings are the most
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_trains(name, cache, monkeypatch):
    """With a tiny network in the place of its own: phases, precision, parts, clipping, schedules."""
    for size in models.BERTS:
        monkeypatch.setitem(models.BERTS, size, (1, 32, 2, 64))
    recipe = tiny(load_recipe(name), cache)
    task = MaskedLM.open(recipe, torch.device("cpu"), lambda _: None, pytest.fail)
    for optimizer in recipe.optimizer:
        run = new_run(recipe, optimizer, task)
        record = train(run)
        kinds = {"thor": THOR, "thor-muon": ThorMuon, "lamb": LAMB, "adamw": torch.optim.AdamW}
        assert type(run.optimizer) is kinds[optimizer]
        assert len(record.steps) == (2 * len(recipe.phases) or 3)
        assert all(0 < point.loss < 8 and not point.skipped for point in record.steps)
        assert math.isfinite(record.evaluations[-1].metrics["loss"])
        assert ("nsp_accuracy" in record.evaluations[-1].metrics) == (name != "bert-babylm")
