"""Masked language models: loss and metrics as transformers computes them, and phases."""

import json
from functools import partial
from itertools import islice
from math import exp
from statistics import fmean

import pytest
import torch
from torch.nn import functional

from tiny import assert_same
from torch_thor.errors import UserError
from torch_thor.training.data.batches import epoch_order
from torch_thor.training.evaluation import evaluate
from torch_thor.training.loop import Record, split, train
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipes import load_recipe
from torch_thor.training.run import build
from torch_thor.training.tasks.opening import open_task
from word_corpus import PIECES, write_corpus, write_texts

CPU = torch.device("cpu")
LONG, SHORT = 48, 24
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "dim": 32}
SIZES |= {"intermediate_size": 64, "hidden_dim": 64, "n_layers": 1, "n_heads": 2}
PHASES = (
    f"phases=[{{steps: 4, length: {SHORT}, batch_size: 6, accumulation: 2}}, "
    "{steps: 4, lr_factor: 0.5}]"
)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Words for a recipe with a small corpus in a cache of its own."""
    return [
        f"data.root={tmp_path_factory.mktemp('cache')}", "data.text.vocab_size=300",
        f"data.text.length={LONG}", "data.workers.count=0", "batch_size=4", "device=cpu",
        "eval_interval=100", "optimizer=thor", "schedule.kind=constant",
    ]  # fmt: skip


def opened(words, *more, say=lambda _: None, **options):
    return open_task(load_recipe("bert-tiny", [*words, *more]), CPU, say, **options)


@pytest.fixture(scope="module")
def task(words):
    return opened(words)


@pytest.fixture(scope="module")
def model(task):
    torch.manual_seed(0)
    return task.model()


class Watch(Record):
    """Also notes the tokens that the network is given, and the terms that THOR is told."""

    def __init__(self, run):
        super().__init__()
        self.terms, self.parts = [], []
        run.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model, args, kwargs):
        if model.training:
            self.parts.append(kwargs["input_ids"])

    def step(self, run, point):
        super().step(run, point)
        self.terms.append(getattr(run.optimizer, "loss_terms", None))


def trained(words, *more, still=False):
    recipe = load_recipe("bert-tiny", [*words, *more])
    run = build(recipe, recipe.optimizer[0], opened(words, *more), Ranks())
    for module in run.model.modules() if still else ():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    watch = Watch(run)
    train(run, [watch])
    return run, watch


def batches(task, number, rank=0, world=1, start=0):
    return list(islice(task.batches(Ranks(rank, world), start), number))


def test_the_loss_is_as_in_transformers_and_its_terms_add_up_over_micro_batches(task, model):
    (batch,) = batches(task, 1)
    model.eval()
    ours, terms = task.loss(model, batch), task.terms(batch)
    theirs = model(**{key: value for key, value in batch.items() if key != "masked"})
    assert ours.mean.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    assert terms.number == (batch["labels"] >= 0).sum() == len(ours.output)
    assert terms.row_mask.equal(batch["attention_mask"] == 1)
    for part in split(batch, 3):
        assert task.terms(part).number == (part["labels"] >= 0).sum()


@torch.no_grad()
def test_metrics_by_hand(task, model):
    found, _ = evaluate(task, model, Ranks())
    right, losses, following, inputs = [], [], [], ("input_ids", "token_type_ids", "attention_mask")
    model.eval()
    for batch, _ in task.held_out(Ranks()):
        output = model(**{key: batch[key] for key in inputs})
        kinds = output.seq_relationship_logits.argmax(1)
        following += (kinds == batch["next_sentence_label"]).tolist()
        for scores, labels in zip(output.prediction_logits, batch["labels"], strict=True):
            chosen = labels != -100
            scores, labels = scores[chosen].double(), labels[chosen]
            losses += functional.cross_entropy(scores, labels, reduction="none").tolist()
            right += (scores.argmax(1) == labels).tolist()
    assert found["loss"] == pytest.approx(fmean(losses), rel=1e-5)
    assert found["perplexity"] == pytest.approx(exp(fmean(losses)), rel=1e-4)
    assert found["mlm_accuracy"] == pytest.approx(fmean(right), rel=1e-12)
    assert found["nsp_accuracy"] == pytest.approx(fmean(following), rel=1e-12)


def test_all_evaluations_have_the_same_masks(words, task):
    first = list(task.held_out(Ranks()))
    again = list(opened(words, "seed=5", "data.workers.count=1", train=False).held_out(Ranks()))
    ranks = (task.held_out(Ranks(rank, 2)) for rank in range(2))
    shared = [batch for pair in zip(*ranks, strict=True) for batch in pair if batch[1]]
    for other in (again, shared):
        for (a, _), (b, _) in zip(first, other, strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("phases", [[], [PHASES]], ids=["plain", "phases"])
def test_batches_are_the_same_for_any_workers_and_ranks_and_from_any_step(words, phases):
    task = opened(words, *phases)
    whole = batches(task, 8)
    for start in (2, 4, 5):
        assert_same(batches(task, 8 - start, start=start), whole[start:])
    assert_same(batches(opened(words, "data.workers.count=2", *phases), 8), whole)
    parts = zip(*(batches(task, 8, rank, 2) for rank in range(2)), strict=True)
    joined = [{key: torch.cat([own[key] for own in pair]) for key in pair[0]} for pair in parts]
    assert_same(joined, whole)


def test_each_step_has_the_examples_of_its_phase(words):
    run, watch = trained(words, PHASES)
    assert (run.total_steps, run.task.steps_per_epoch, run.step) == (8, 8, 8)
    assert [tuple(part.shape) for part in watch.parts] == [(3, SHORT)] * 8 + [(4, LONG)] * 4
    # the second phase begins where the epochs of the first phase end, so that no masks come twice
    for part, length, epoch, count in ((watch.parts[0], SHORT, 0, 3), (watch.parts[8], LONG, 1, 4)):
        maker = run.task._train[length]
        numbers = epoch_order(len(maker.corpus), 0, epoch)[:count].tolist()
        assert part.tolist() == [maker[epoch, n]["input_ids"].tolist() for n in numbers]
    assert watch.terms == [point.terms for point in watch.points]
    lrs = [point.lr / watch.points[0].lr for point in watch.points]
    assert lrs == pytest.approx([1.0] * 4 + [0.5] * 4)
    batch, _ = next(iter(run.task.held_out(Ranks())))
    assert batch["input_ids"].shape[1] == LONG


@pytest.mark.parametrize("kind", ["roberta", "distilbert"])
def test_other_networks_by_their_config_file(words, tmp_path, kind):
    config = {"model_type": kind, "max_position_embeddings": 64, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(config))
    task = opened(words, f"model={tmp_path}/config.json", "activation_checkpointing=true")
    assert [metric.name for metric in task.metrics] == ["loss", "mlm_accuracy", "perplexity"]
    network = task.model()
    (batch,) = batches(task, 1)
    assert not batch["token_type_ids"].any()
    task.loss(network, batch).mean.backward()
    assert 0 <= evaluate(task, network, Ranks())[0]["mlm_accuracy"] <= 1


def test_what_does_not_fit_the_corpus_is_refused(words, task, tmp_path):
    write_corpus(tmp_path / "corpus", write_texts(tmp_path / "texts"), pieces=PIECES)
    config = {"model_type": "distilbert", "max_position_embeddings": 15, **SIZES}
    (short := tmp_path / "short.json").write_text(json.dumps(config))
    own = ["data.name=corpus", f"data.root={tmp_path / 'corpus'}", "data.text.length=16"]
    assert opened(words, *own, "batch_size=2").data["examples"] > 0
    for more, options, message in (
        ([f"data.root={tmp_path}"], {}, r"is no prepared corpus .* torch-thor prepare"),
        (["data.text.whole_words=true"], {}, r"whole_words=true: .* has no pieces that begin"),
        ([], {"train": False, "data": task.data}, "was trained with another tokenizer"),
        ([f"model={short}"], {}, "max_position_embeddings to 16 or more"),
    ):
        with pytest.raises(UserError, match=message):
            opened(words, *own, *more, **options).model()


def test_activation_checkpointing_changes_no_bit_and_computes_twice(words):
    given = words, "steps=3", "update_interval=3"
    run, _ = trained(*given, "activation_checkpointing=true")
    whole, _ = trained(*given)
    assert_same(run.model.state_dict(), whole.model.state_dict())
    calls = []
    dense = run.model.train().bert.encoder.layer[0].intermediate.dense
    dense.register_forward_hook(lambda *_: calls.append(1))
    run.task.loss(run.net, batches(run.task, 1)[0]).mean.backward()
    assert len(calls) == 2


@pytest.mark.slow
def test_compiled_equals_eager_in_both_phases(words, monkeypatch):
    """With torch's compiler except its generation of code, which takes minutes."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    compiled, eager = (
        [point.loss for point in trained(words, PHASES, f"compile={word}", still=True)[1].points]
        for word in ("true", "false")
    )
    assert compiled == pytest.approx(eager, rel=1e-4)
