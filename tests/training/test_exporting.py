"""Exporting a trained network: transformers reads it and computes the same; what cannot be exported is one line."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from torch_thor.training import UserError, export, load_recipe, run_recipe
from torch_thor.training.checkpoints import RunFolder
from torch_thor.training.tasks import MaskedLM


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps with two optimizers, one of which keeps averages."""
    folder = tmp_path_factory.mktemp("run")
    words = [
        "data.text.vocab_size=300",
        "data.text.length=32",
        "batch_size=4",
        "device=cpu",
        "steps=2",
        "eval_interval=2",
    ]
    words += [f"data.root={folder / 'cache'}", "ema_decay=0.5", "optimizer=thor,sgd", "targets=[]"]
    recipe = load_recipe("bert-tiny", words)
    run_recipe(recipe, RunFolder(folder / "run"), Console(file=StringIO()))
    return folder / "run", recipe


@pytest.mark.parametrize("averaged", [False, True])
def test_transformers_reads_what_was_trained(run, tmp_path, averaged):
    from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

    folder, recipe = run
    said = []
    export(folder / "thor", tmp_path / "out" / "bert", "transformers", said.append, averaged=averaged)
    assert said == [f"thor, step 2: written to {tmp_path / 'out' / 'bert'}"]
    task = MaskedLM.open_saved(recipe, torch.device("cpu"), pytest.fail, set())
    from torch_thor.training.checkpoints import find_checkpoints

    model = task.build_model().eval()
    find_checkpoints(folder / "thor", pytest.fail)[0].load_weights(model, averaged=averaged)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "bert")
    batch = tokenizer(["The sequence of statements."], ["An object is returned."], return_tensors="pt", padding=True)
    with torch.no_grad():
        wanted = model(**batch)
        assert AutoModelForMaskedLM.from_pretrained(tmp_path / "out" / "bert")(**batch).logits.equal(
            wanted.prediction_logits
        )
        hidden = AutoModel.from_pretrained(tmp_path / "out" / "bert")(**batch).last_hidden_state
        assert hidden.equal(model.bert(**batch).last_hidden_state)
    assert tokenizer.decode(batch["input_ids"][0]).startswith("[CLS] the sequence of statements. [SEP] an object")
    assert tokenizer.mask_token_id == task.held_out.mask


def test_what_cannot_be_exported_is_one_line(run, tmp_path):
    folder, _ = run
    out = tmp_path / "out"
    for path, form, more, message in (
        (folder, "transformers", {}, "holds the networks of thor, sgd: give one"),
        (folder / "thor", "onnx", {}, "--format onnx must be one of transformers"),
        (tmp_path / "none", "transformers", {}, "does not exist"),
        (folder.parent / "cache", "transformers", {}, "neither a run folder nor a checkpoint"),
    ):
        with pytest.raises(UserError, match=message):
            export(path, out, form, pytest.fail, **more)
    out.mkdir()
    with pytest.raises(UserError, match="exists: give another folder"):
        export(folder / "thor", out, "transformers", pytest.fail)
    assert list(out.iterdir()) == []
