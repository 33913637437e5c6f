"""A network is only used with the tokenizer that it was trained with; corpora of other tokenizers are refused."""

import shutil
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import nn

from sums import sha256
from torch_thor.training import UserError, evaluate_saved, export, load_recipe, run_recipe
from torch_thor.training.checkpoints import RunFolder, load_weights, open_checkpoint
from torch_thor.training.tasks import MaskedLM
from torch_thor.training.text import Manifest
from word_corpus import PIECES, write_corpus, write_texts


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the corpus `own`, and beside it corpora with the same and with other numbers of the word pieces."""
    folder = tmp_path_factory.mktemp("trained")
    texts = write_texts(folder / "texts")
    write_corpus(folder / "own", texts, pieces=PIECES)
    write_corpus(folder / "same", texts, tokenizer=folder / "own" / "tokenizer.json")
    write_corpus(folder / "other", texts, pieces=PIECES[::-1])
    words = ["data.name=corpus", f"data.root={folder / 'own'}", "data.text.length=16", "batch_size=2", "device=cpu"]
    words += ["steps=2", "eval_interval=2", "optimizer=sgd", "targets=[]"]
    recipe = load_recipe("bert-tiny", words)
    run_recipe(recipe, RunFolder(folder / "run"), Console(file=StringIO()))
    return folder, recipe


@pytest.fixture
def prepared_again(trained):
    """The corpus of the run, prepared again with other numbers of the word pieces."""
    folder, _ = trained
    (folder / "own").rename(folder / "kept")
    shutil.copytree(folder / "other", folder / "own")
    yield folder
    shutil.rmtree(folder / "own")
    (folder / "kept").rename(folder / "own")


def newest(folder):
    return folder / "run" / "sgd" / "checkpoints" / "step-00000002"


def test_a_checkpoint_names_its_tokenizer(trained):
    folder, _ = trained
    assert open_checkpoint(newest(folder)).tokenizer == sha256(folder / "own" / "tokenizer.json")
    assert Manifest.read(folder / "own").vocab_size == Manifest.read(folder / "other").vocab_size


REFUSED = r"own/tokenizer\.json is not the tokenizer that .*step-00000002 was trained with"


def test_an_export_with_another_tokenizer_is_refused(trained, prepared_again, tmp_path):
    with pytest.raises(UserError, match=REFUSED):
        export(newest(prepared_again), tmp_path / "out", "transformers", pytest.fail)
    assert not (tmp_path / "out").exists()


def test_resuming_with_another_tokenizer_is_refused(trained, prepared_again):
    with pytest.raises(UserError, match=REFUSED):
        run_recipe(trained[1], RunFolder(prepared_again / "run"), Console(file=StringIO()), resume=True)


def test_an_evaluation_takes_other_corpora_of_the_same_tokenizer_only(trained):
    folder, _ = trained
    own, same = (evaluate_saved(folder / "run", words, pytest.fail) for words in ([], [f"data.root={folder / 'same'}"]))
    assert own[0].score == same[0].score
    with pytest.raises(UserError, match=r"other/tokenizer\.json is not the tokenizer that .* prepare one with --tok"):
        evaluate_saved(folder / "run", [f"data.root={folder / 'other'}"], pytest.fail)


def test_a_training_does_not_start_from_the_weights_of_another_tokenizer(trained, tmp_path):
    folder, recipe = trained

    def run(name, file="", **changes):
        data = replace(recipe.data, root=str(folder / name))
        started = replace(recipe, data=data, weights=str(newest(folder) / file), **changes)
        run_recipe(started, RunFolder(tmp_path / name), Console(file=StringIO()))

    with pytest.raises(UserError, match=REFUSED.replace("own", "other")):
        run("other")
    with pytest.raises(UserError, match=REFUSED.replace("own", "other")):
        run("other", "model.safetensors")
    run("same", "model.safetensors")
    run("other", weights_except=["*word_embeddings", "cls.predictions.*bias", "cls.predictions.decoder"])


def test_weights_of_another_tokenizer_do_not_fit_networks_that_do_not_name_their_embedding(trained):
    folder, recipe = trained
    other = replace(recipe, data=replace(recipe.data, root=str(folder / "other")), weights=str(newest(folder)))
    task = MaskedLM.open(other, torch.device("cpu"), pytest.fail, pytest.fail)
    plain = nn.Module()
    for name, child in task.build_model().named_children():
        plain.add_module(name, child)
    with pytest.raises(UserError, match=REFUSED.replace("own", "other")):
        load_weights(plain, other, task)
    load_weights(plain, other)  # without a task nothing is known about the data
