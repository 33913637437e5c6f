"""Masked-language-model pretraining: loss and figures as transformers computes them, and a run that is resumed."""

import json

import pytest
import torch
import transformers
from torch.nn import functional

from torch_thor import THOR
from torch_thor.training import UserError, evaluate, load_recipe
from torch_thor.training.data import Shard
from torch_thor.training.tasks import MaskedLM
from word_corpus import PIECES, write_corpus, write_texts


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A recipe's words: a corpus in a cache of its own, and a small one."""
    cache = tmp_path_factory.mktemp("cache")
    return [f"data.root={cache}", "data.text.vocab_size=300", "data.text.length=32", "batch_size=4", "device=cpu"]


def opened(words, *more):
    said = []
    return MaskedLM.open(load_recipe("bert-tiny", [*words, *more]), torch.device("cpu"), said.append, pytest.fail), said


@pytest.fixture(scope="module")
def task(words):
    return opened(words)[0]


@pytest.fixture(scope="module")
def model(task):
    torch.manual_seed(0)
    return task.build_model()


def small(batch, size):
    return {key: value[:size] for key, value in batch.items()}


def test_the_python_corpus_is_prepared_once(words, task):
    again, said = opened(words)
    assert said == []
    assert len(again.train[32].corpus) == len(task.train[32].corpus) > 1000


def test_a_bit_that_flipped_in_the_corpus_is_refused_by_training_and_evaluation(tmp_path):
    corpus = tmp_path / "corpus"
    write_corpus(corpus, write_texts(tmp_path / "texts"), pieces=PIECES)
    recipe = load_recipe("bert-tiny", ["data.name=corpus", f"data.root={corpus}", "data.text.length=16"])

    def flip(name):
        content = bytearray((corpus / name).read_bytes())
        content[len(content) // 2] ^= 1
        (corpus / name).write_bytes(content)

    flip("train-000000.arrow")
    MaskedLM.open_saved(recipe, torch.device("cpu"), pytest.fail, set())  # it reads only the held-out part
    with pytest.raises(UserError, match=r"train-000000\.arrow .*changed.* SHA-256 .*: delete .* prepare"):
        MaskedLM.open(recipe, torch.device("cpu"), pytest.fail, pytest.fail)
    flip("held-out-000000.arrow")
    with pytest.raises(UserError, match=r"held-out-000000\.arrow .*changed.* SHA-256 .*: delete .* prepare"):
        MaskedLM.open_saved(recipe, torch.device("cpu"), pytest.fail, set())


def test_the_network_is_that_of_transformers(model):
    assert type(model) is transformers.BertForPreTraining
    assert (model.config.vocab_size, model.config.hidden_size, model.config.num_hidden_layers) == (300, 128, 2)


def test_the_loss_is_that_of_transformers(task, model):
    batch = next(iter(task.open_data(Shard()).train))
    model.eval()
    ours = task.loss(model, batch)
    theirs = model(**batch)
    assert ours.mean.item() == pytest.approx(theirs.loss.item(), rel=1e-6)
    terms = task.terms(batch)
    assert terms.number == (batch["labels"] >= 0).sum() == len(ours.output)
    assert terms.row_mask.equal(batch["attention_mask"] == 1)


def test_figures_by_hand(task, model):
    score = evaluate(task, model, task.open_evaluation(Shard()))
    right = loss = terms = following = examples = 0
    model.eval()
    with torch.no_grad():
        for batch in task.open_evaluation(Shard()):
            output = model(**{key: batch[key] for key in ("input_ids", "token_type_ids", "attention_mask")})
            for n in range(len(batch["labels"])):
                chosen = batch["labels"][n] != -100
                scores, labels = output.prediction_logits[n][chosen], batch["labels"][n][chosen]
                loss += functional.cross_entropy(scores.double(), labels, reduction="sum").item()
                right += (scores.argmax(1) == labels).sum().item()
                terms += len(labels)
            following += (output.seq_relationship_logits.argmax(1) == batch["next_sentence_label"]).sum().item()
            examples += len(batch["labels"])
    assert score.terms == terms
    assert score.metrics["loss"] == pytest.approx(loss / terms, rel=1e-5)
    assert score.metrics["mlm_accuracy"] == right / terms
    assert score.metrics["nsp_accuracy"] == following / examples
    assert examples == len(task.held_out.corpus)
    assert score.metrics["perplexity"] == pytest.approx(torch.tensor(loss / terms).exp().item(), rel=1e-4)


def test_the_evaluation_has_the_same_masks_each_time(task):
    first, second = (list(task.open_evaluation(Shard())) for _ in range(2))
    assert all(a[key].equal(b[key]) for a, b in zip(first, second, strict=True) for key in a)


def test_thor_covers_bert(model):
    covered = {entry.name: entry for entry in THOR(model).coverage()}
    plain = [name for name, entry in covered.items() if not entry.preconditioned]
    assert all("LayerNorm" in name or name.endswith("predictions.bias") for name in plain), plain


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "roberta", "max_position_embeddings": 64},
        {"model_type": "distilbert", "dim": 32, "hidden_dim": 64, "n_layers": 1, "n_heads": 2},
    ],
    ids=["roberta", "distilbert"],
)
def test_other_networks_by_their_config_file(words, tmp_path, config):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**({} if config["model_type"] == "distilbert" else sizes), **config}))
    task, _ = opened(words, f"model={file}")
    assert [metric.name for metric in task.metrics()] == ["loss", "mlm_accuracy", "perplexity"]
    network = task.build_model()
    batch = next(iter(task.open_data(Shard()).train))
    assert not batch["token_type_ids"].any()
    task.loss(network, batch).mean.backward()
    score = evaluate(task, network, [small(next(iter(task.open_evaluation(Shard()))), 4)])
    assert 0 <= score.metrics["mlm_accuracy"] <= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["model=resnet18"], "model=resnet18 is no network of task=masked-lm"),
        (["data.name=digits"], "data.name=digits: task=masked-lm takes python-text or corpus"),
        (["data.text.masked=1.5"], r"data\.text\.masked=1\.5 must be a share"),
        (["classes=3"], "classes=3: task=masked-lm has no classes"),
        (["task=image-classification", "model=small-cnn"], "is text, and task=image-classification needs images"),
    ],
)
def test_recipes_that_cannot_be_right_are_refused(words, change, message):
    with pytest.raises(UserError, match=message):
        load_recipe("bert-tiny", [*words, *change])


def test_a_length_that_the_corpus_lacks_and_a_file_that_is_none_are_refused(words, task, tmp_path):
    folder = task.train[32].corpus.folder
    with pytest.raises(UserError, match=r"data\.root is not set: give the folder that torch-thor prepare has written"):
        opened(words, "data.name=corpus", "data.root=null")
    with pytest.raises(UserError, match="prepared for examples of 32 tokens, not 64"):
        opened(words, "data.name=corpus", f"data.root={folder}", "data.text.length=64")
    with pytest.raises(UserError, match="there is no such file"):
        opened(words, f"model={tmp_path}/config.json")[0].build_model()
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    with pytest.raises(UserError, match="describes no masked language model"):
        opened(words, f"model={tmp_path}/config.json")[0].build_model()
