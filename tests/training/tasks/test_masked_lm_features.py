"""What large networks are trained with: activation checkpointing, clipping, parts, bfloat16, compilation."""

import json
from functools import partial
from io import StringIO
from pydoc_data.topics import topics

import pytest
import torch
from rich.console import Console

from torch_thor.training import UserError, load_recipe, new_run, train
from torch_thor.training.data import Shard
from torch_thor.training.tasks import MaskedLM
from torch_thor.training.text import Preparation, Settings, prepare

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    paragraphs = "\n\n".join(topics.values()).split("\n\n")[:300]
    for number, paragraph in enumerate(paragraphs):  # short documents: examples with padding
        (folder / f"{number:03}.txt").write_text(paragraph[:80], encoding="utf-8")
    wanted = Preparation((str(folder),), folder / "corpus", Settings(300, lengths=(64,), held_out=0.1))
    prepare(wanted, Console(file=StringIO()))
    return [
        "data.name=corpus", f"data.root={folder / 'corpus'}", "data.text.length=64", "steps=3", "batch_size=4",
        "device=cpu", "optimizer=thor", "optimizers.thor.update_interval=2", "eval_interval=100",
        "optimizers.thor-muon.update_interval=2", "schedule.kind=constant",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def opened(words):
    return MaskedLM.open(load_recipe("bert-tiny", words), CPU, lambda _: None, pytest.fail)


def trained(words, opened, *more):
    recipe = load_recipe("bert-tiny", [*words, *more])
    run = new_run(recipe, recipe.optimizer[0], MaskedLM(opened.train, opened.held_out, recipe, CPU))
    train(run)
    return run


def factors(run):
    return {
        (name, number): factor
        for name, layer in run.optimizer.curvature.items()
        for number, factor in enumerate(layer.factors())
        if factor is not None
    }


def assert_close(run, whole, **tolerance):
    for own, wanted in zip(run.record.steps, whole.record.steps, strict=True):
        assert own.loss == pytest.approx(wanted.loss, rel=1e-5)
        assert own.terms == wanted.terms
    for own, wanted in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(own, wanted, **tolerance)


@pytest.fixture(scope="module")
def whole(words, opened):
    return trained(words, opened)


def test_activation_checkpointing_changes_no_bit(words, opened, whole):
    run = trained(words, opened, "activation_checkpointing=true")
    layers = [module for module in run.model.modules() if getattr(module, "gradient_checkpointing", False)]
    assert len(layers) >= 2
    batches = list(opened.open_data(Shard()).train)[:3]
    assert not all(batch["attention_mask"].all() for batch in batches)  # the row mask leaves padding out
    assert [point.loss for point in run.record.steps] == [point.loss for point in whole.record.steps]
    own, wanted = factors(run), factors(whole)
    assert own.keys() == wanted.keys()
    assert len(own) > 20
    assert all(own[key].equal(wanted[key]) for key in own)
    for mine, theirs in zip(run.model.parameters(), whole.model.parameters(), strict=True):
        assert mine.equal(theirs)


def test_activations_are_computed_again(words, opened):
    calls = {}
    for kept in ("false", "true"):
        recipe = load_recipe("bert-tiny", [*words, f"activation_checkpointing={kept}"])
        run = new_run(recipe, "thor", MaskedLM(opened.train, opened.held_out, recipe, CPU))
        seen = []
        run.model.bert.encoder.layer[0].intermediate.dense.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        run.stepper.take(next(iter(run.streams.train)), 1)
        calls[kept] = len(seen)
    assert calls == {"false": 1, "true": 2}


def test_a_network_that_cannot_checkpoint_is_refused(words, opened, tmp_path, monkeypatch):
    import transformers

    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "distilbert", "dim": 32, "n_layers": 1, "n_heads": 2})
    )
    recipe = load_recipe("bert-tiny", [*words, f"model={tmp_path}/config.json", "activation_checkpointing=true"])
    task = MaskedLM(opened.train, opened.held_out, recipe, CPU)
    assert any(getattr(module, "gradient_checkpointing", False) for module in task.build_model().modules())
    monkeypatch.setattr(transformers.DistilBertForMaskedLM, "supports_gradient_checkpointing", False)
    with pytest.raises(UserError, match=r"activation_checkpointing=true: DistilBertForMaskedLM .* does not support it"):
        task.build_model()


def test_parts_give_the_step_of_the_whole(words, opened):
    still = ["optimizer=sgd", "lr=0.01", "activation_checkpointing=true"]
    model = [load_recipe("bert-tiny", [*words, *still, parts]) for parts in ("accumulation=1", "accumulation=3")]
    runs = []
    for recipe in model:
        run = new_run(recipe, "sgd", MaskedLM(opened.train, opened.held_out, recipe, CPU))
        for module in run.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        train(run)
        runs.append(run)
    # next-sentence predictions are a mean over examples, and parts count by masked tokens: nearly the same
    for own, wanted in zip(runs[1].record.steps, runs[0].record.steps, strict=True):
        assert own.loss == pytest.approx(wanted.loss, rel=2e-2)
        assert own.terms == wanted.terms


@pytest.mark.parametrize("name", ["thor", "thor-muon", "lamb", "adamw"])
def test_bfloat16_trains(words, opened, name):
    run = trained(words, opened, f"optimizer={name}", "precision=bf16", "activation_checkpointing=true", "clip_norm=1")
    assert all(parameter.dtype == torch.float32 for parameter in run.model.parameters())
    assert all(torch.isfinite(parameter).all() for parameter in run.model.parameters())
    assert 0 < run.record.evaluations[-1].metrics["loss"] < 8


@pytest.mark.slow
def test_compiled_equals_eager_in_both_phases(words, monkeypatch, tmp_path):
    """With torch's compiler but for the code that it writes in the end, which takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, values: values)  # compiled, it draws other numbers
    text = ["data.name=python-text", f"data.root={tmp_path}", "data.text.vocab_size=300"]
    change = [*words, *text, "steps=null", "epochs=1", "phases=[{steps: 2}, {steps: 2, length: 16}]"]
    task = MaskedLM.open(load_recipe("bert-tiny", change), CPU, lambda _: None, pytest.fail)
    runs = [trained(change, task, f"compile={word}") for word in ("true", "false")]
    assert_close(*runs, rtol=2e-4, atol=2e-5)
