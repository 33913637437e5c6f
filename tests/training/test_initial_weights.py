"""`weights=`: what a training starts from, what does not fit, and a resume that does not need the
file.
"""

import io

import noisy
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from sums import sha256
from torch_thor.errors import UserError
from torch_thor.training import initial_weights as weights
from torch_thor.training import run as running
from torch_thor.training.checkpoint import newest
from torch_thor.training.errors import DamagedCheckpointError
from torch_thor.training.folder import RunFolder
from torch_thor.training.parallel import Ranks
from torch_thor.training.run import build, run_recipe

SILENT = Console(file=io.StringIO())


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Weights of another seed."""
    monkeypatch.setattr(running, "open_task", lambda *_, **options: noisy.Noisy())
    torch.manual_seed(7)
    path = tmp_path / "mine.safetensors"
    save_file(noisy.Net().double().state_dict(), path)
    return path


def recipe(path, **given):
    return noisy.recipe(weights=str(path), optimizer=("sgd",), **{"name": "noisy", **given})


def started(path, task=None, **given):
    return build(recipe(path, **given), "sgd", task or noisy.Noisy(), Ranks())


def test_a_training_and_its_average_start_from_the_weights(file, monkeypatch):
    wanted = load_file(file)
    monkeypatch.setenv("HERE", str(file.parent))
    for path in (file, "$HERE/mine.safetensors"):
        run = started(path)
        for found in (run.model.state_dict(), run.average.module.state_dict()):
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    plain = build(noisy.recipe(), "sgd", noisy.Noisy(), Ranks()).model.state_dict()
    given = {
        name: tensor for name, tensor in wanted.items() if not name.endswith("num_batches_tracked")
    }
    save_file({**given, "head.weight": torch.zeros(9, 8), "extra": torch.zeros(1)}, file)
    found = started(file, weights_except=("head", "extra", "lists.1*")).model.state_dict()
    for name, tensor in found.items():
        assert torch.equal(
            tensor, (plain if name.startswith(("head", "lists.1")) else {**plain, **given})[name]
        ), name


def test_a_shared_weight_stands_in_a_file_under_one_of_its_names(file):
    stored = {name: torch.randn(p.shape).double() for name, p in noisy.Tied().named_parameters()}
    stored["again.weight"] = stored.pop("layers.0.weight")
    save_file(stored, file)
    found = started(file, noisy.Noisy(noisy.Tied)).model
    assert torch.equal(found.layers[0].weight, stored["again.weight"])


FAULTS = [
    (
        lambda w: {n: t for n, t in w.items() if n != "head.bias"},
        {},
        r"\(head.bias: missing, the network has \(3,\)\)",
    ),
    (
        lambda w: {**w, "a.b": torch.zeros(1)},
        {},
        r"\(a.b: \(1,\), the network has none\).*weights_except=\[NAME\]",
    ),
    (
        lambda w: {**w, "head.bias": torch.zeros(9)},
        {},
        r"\(head.bias: \(9,\), the network has \(3,\)\)",
    ),
    (lambda w: {f"module.{n}": t for n, t in w.items()}, {}, r"missing, .*; \d+ more"),
    (lambda w: w, {"weights_except": ("haed",)}, "weights_except=haed matches no weight"),
    (
        lambda w: w,
        {"weights_sha256": "0123"},
        "is not the file that the recipe names: its SHA-256 is",
    ),
    (
        lambda w: w,
        {"weights": "nowhere"},
        "weights=nowhere does not exist: give a safetensors file, a run folder",
    ),
]


@pytest.mark.parametrize(("change", "given", "said"), FAULTS)
def test_what_does_not_fit_is_one_line_and_no_run_is_begun(file, tmp_path, change, given, said):
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError, match=said) as caught:
        run_recipe(recipe(file).model_copy(update=given), RunFolder(tmp_path / "run"), SILENT)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_file_that_holds_code_is_not_read(file):
    torch.save(load_file(file), file)
    with pytest.raises(
        UserError,
        match=r"mine.safetensors is not a safetensors file .* safetensors.torch.save_file",
    ):
        started(file)


def test_a_run_knows_its_weights_and_resumes_without_the_file(file, tmp_path):
    given, longer = recipe(file, steps=None, epochs=1), {"epochs": 2}
    folder, whole = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "whole")
    run_recipe(given.model_copy(update=longer), whole, SILENT)
    run_recipe(given, folder, SILENT)
    stored = folder.stored()
    assert stored.weights_sha256 == sha256(file)
    file.rename(tmp_path / "elsewhere.safetensors")
    run_recipe(stored.model_copy(update=longer), folder, SILENT, resume=True)
    one, other = (
        newest(place.checkpoints("sgd"), pytest.fail).path / "model.safetensors"
        for place in (folder, whole)
    )
    assert one.read_bytes() == other.read_bytes()


def test_the_checkpoints_of_a_run(file, tmp_path):
    folder, several = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "several")
    run_recipe(recipe(file), folder, SILENT)
    last = folder.checkpoints("sgd") / "step-00000012"
    for path in (
        folder.path,
        folder.path / "sgd",
        folder.checkpoints("sgd"),
        last,
        last / "model.safetensors",
    ):
        found = started(path).model.state_dict()
        assert all(
            torch.equal(found[key], value)
            for key, value in load_file(last / "model.safetensors").items()
        )
        assert weights.checksum(recipe(path), pytest.fail).weights_sha256 == sha256(
            last / "model.safetensors"
        )
    averages = load_file(last / "averaged.safetensors")
    assert torch.equal(
        started(last / "averaged.safetensors").model.head.weight, averages["head.weight"]
    )
    (last / "state.pt").write_bytes(b"damaged")  # a part that is not needed counts too
    said = []
    weights.checksum(recipe(folder.path), said.append)
    assert "step-00000012 is damaged: state.pt" in said[0]
    assert "falling back" in said[0]
    with pytest.raises(DamagedCheckpointError, match=r"step-00000012 is damaged: state.pt"):
        started(last / "model.safetensors")
    run_recipe(noisy.recipe(optimizer=("sgd", "thor"), steps=3), several, SILENT)
    said = rf"weights=.* holds the networks of sgd, thor: give one, such as {several.path / 'sgd'}$"
    with pytest.raises(UserError, match=said):
        started(several.path)


def test_another_tokenizer_is_refused_unless_the_embedding_is_left_out(file, tmp_path):
    class Words(noisy.Noisy):
        tokenizer_file = "tokenizer.json"

        def __init__(self, checksum):
            super().__init__(Embedded)
            self.tokenizer_checksum = checksum

    class Embedded(noisy.Net):
        def get_input_embeddings(self):
            return self.body[0]

    noisy.go(tmp_path / "old", noisy.recipe(steps=1), "sgd", task=Words("a" * 64))
    path = tmp_path / "old/step-00000001"
    started(path, Words("a" * 64))
    started(path, Words("b" * 64), weights_except=("body.0",))
    with pytest.raises(
        UserError, match=r"tokenizer.json is not the tokenizer that .* was trained with"
    ):
        started(path, Words("b" * 64))
