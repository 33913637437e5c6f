"""`weights=`: what a training starts from, what does not fit, and a resume that does not need the file."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file, save_model
from torch import nn

from command_line import newest, state
from sums import sha256
from tiny import assert_same
from torch_thor.training import UserError, evaluate_saved, load_recipe, override, run_recipe
from torch_thor.training import image_run as new_run
from torch_thor.training.checkpoints import RunFolder, newest_whole
from torch_thor.training.checkpoints.weights import with_weights_checksum
from torch_thor.training.data import DataSpec, load_data
from torch_thor.training.models import MODELS, build_model

SILENT = Console(file=io.StringIO())
WORDS = ["optimizer=sgd", "model=small-resnet", "epochs=1", "batch_size=256", "device=cpu", "schedule.kind=constant"]


@pytest.fixture(scope="module")
def data():
    return load_data(DataSpec("digits"))


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Weights of the small ResNet with another seed than the recipe's."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(7)
    model = build_model("small-resnet", 1, 10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
    save_model(model, str(tmp_path / "mine.safetensors"))
    return tmp_path / "mine.safetensors"


def started(words, data):
    return new_run(load_recipe("digits", [*WORDS, *words]), "sgd", data).model.state_dict()


def test_a_training_starts_from_its_weights(file, data):
    weights = load_file(file)
    found = started([f"weights={file}"], data)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert not torch.equal(started([], data)["conv1.weight"], weights["conv1.weight"])
    run = new_run(load_recipe("digits", [*WORDS, f"weights={file}", "ema_decay=0.5"]), "sgd", data)
    assert torch.equal(run.average.module.conv1.weight, weights["conv1.weight"])


def test_what_is_left_out_starts_as_the_seed_made_it(file, data):
    random, weights = started([], data), load_file(file)
    found = started([f"weights={file}", "weights_except=[head, 'stages.2.*']"], data)
    for name, tensor in found.items():
        left_out = name.startswith(("head.", "stages.2."))
        assert torch.equal(tensor, (random if left_out else weights)[name]), name


def test_a_head_of_another_size_and_a_file_without_counters(file, data):
    weights = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("num_batches_tracked")}
    weights["head.weight"], weights["head.bias"] = torch.zeros(1000, 64), torch.zeros(1000)
    save_file({**weights, "extra": torch.zeros(1)}, file)
    found = started([f"weights={file}", "weights_except=[head, extra]"], data)
    assert found["head.weight"].shape == (10, 64)
    assert torch.equal(found["conv1.weight"], weights["conv1.weight"])


class Tied(nn.Module):
    def __init__(self, in_channels, classes):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, classes)

    def forward(self, images):
        return self.head(self.second(self.first(images.flatten(1))))


def test_shared_weights_stand_in_a_file_once(file, data, monkeypatch):
    monkeypatch.setitem(MODELS, "tied", Tied)
    torch.manual_seed(9)
    model = Tied(1, 10)
    save_model(model, str(file))
    assert len(load_file(file)) == len(model.state_dict()) - 1
    found = started([f"weights={file}", "model=tied"], data)
    assert torch.equal(found["first.weight"], model.first.weight)
    assert torch.equal(found["second.weight"], model.first.weight)


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        (
            lambda w: {n: t for n, t in w.items() if not n.startswith("head")},
            [],
            r"missing: head.weight, head.bias\)",
        ),
        (lambda w: {**w, "a.b": torch.zeros(1)}, [], r"unexpected: a.b\).*weights_except="),
        (
            lambda w: {**w, "head.bias": torch.zeros(3)},
            [],
            r"of another shape: head.bias \(3,\) for \(10,\)",
        ),
        (
            lambda w: {f"module.{n}": t for n, t in w.items()},
            [],
            r"missing: conv1.weight, .* and \d+ more; unexpected: module.conv1.weight",
        ),
        (lambda w: w, ["weights_except=[haed]"], "weights_except=haed matches no weight"),
        (lambda w: w, ["weights_sha256=0123"], "is not the file that the recipe names"),
        (lambda w: w, ["weights=nowhere.safetensors"], "is neither a safetensors file nor a checkpoint"),
        (lambda w: w, ["weights=null", "weights_except=[head]"], "weights is not set"),
    ],
)
def test_what_does_not_fit_is_one_line_and_no_run_is_begun(file, change, words, said):
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError, match=said) as caught:
        run_recipe(load_recipe("digits", [*WORDS, f"weights={file}", *words]), RunFolder(Path("run")), SILENT)
    assert "\n" not in str(caught.value)
    assert not Path("run").exists()


def test_a_file_that_holds_code_is_not_read(file, data):
    torch.save(load_file(file), file.with_suffix(".pt"))
    with pytest.raises(UserError, match=r"mine.pt is not a safetensors file .* safetensors.torch.save_file"):
        started([f"weights={file.with_suffix('.pt')}"], data)


def test_a_run_knows_its_weights_and_resumes_without_them(file):
    recipe = load_recipe("digits", [*WORDS, f"weights={file}", "weights_except=[head]"])
    run_recipe(override(recipe, ["epochs=2"]), RunFolder(Path("whole")), SILENT)
    run_recipe(recipe, RunFolder(Path("cut")), SILENT)
    stored = RunFolder(Path("cut")).stored_recipe()
    assert len(stored.weights_sha256) == 64
    assert stored.weights_sha256 in (newest(Path("cut"), "sgd") / "recipe.yaml").read_text()
    file.rename("elsewhere.safetensors")
    run_recipe(override(stored, ["epochs=2"]), RunFolder(Path("cut")), SILENT, resume=True)
    both = [newest(Path(run), "sgd") for run in ("whole", "cut")]
    assert (both[0] / "model.safetensors").read_bytes() == (both[1] / "model.safetensors").read_bytes()
    assert_same(*(state(path) for path in both))
    # other weights are another run
    with pytest.raises(UserError, match=r"other settings \(weights_except"):
        run_recipe(override(stored, ["epochs=2", "weights_except=[]"]), RunFolder(Path("cut")), SILENT, resume=True)


def test_from_a_checkpoint_of_a_run(file, data):
    run_recipe(load_recipe("digits", [*WORDS, "seed=3"]), RunFolder(Path("before")), SILENT)
    saved = newest(Path("before"), "sgd")
    found = started([f"weights={saved}"], data)
    assert all(torch.equal(found[name], tensor) for name, tensor in load_file(saved / "model.safetensors").items())
    (saved / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"is damaged: model\.safetensors"):
        started([f"weights={saved}"], data)


def test_the_paths_of_eval_are_those_of_weights(file, data):
    """A run folder, the best checkpoints in it, and a checkpoint itself."""
    run_recipe(load_recipe("digits", [*WORDS, "seed=3"]), RunFolder(Path("before")), SILENT)
    saved = newest(Path("before"), "sgd")
    for path in (saved, saved.parent / "best", Path("before")):
        found = started([f"weights={path}"], data)
        (score,) = evaluate_saved(path, ["device=cpu"], pytest.fail)
        taken = load_file(score.path / "model.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in taken.items()), path


def test_a_run_of_several_optimizers_needs_one_to_be_named(file, data):
    words = [*WORDS, "optimizer=sgd,adamw"]
    run_recipe(load_recipe("digits", words), RunFolder(Path("before")), SILENT)
    with pytest.raises(UserError, match=r"of sgd, adamw: choose one, such as weights=before/sgd$"):
        started(["weights=before"], data)
    started(["weights=before/sgd"], data)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_taken(file):
    run_recipe(load_recipe("digits", [*WORDS, "checkpoint_interval=3"]), RunFolder(Path("before")), SILENT)
    folder = newest(Path("before"), "sgd").parent
    for path in folder.rglob(f"{newest(Path('before'), 'sgd').name}/model.safetensors"):
        path.write_bytes(b"damaged")
    said = []
    found = with_weights_checksum(load_recipe("digits", [*WORDS, f"weights={folder}"]), said.append)
    assert any("falling back to the previous one" in line for line in said)
    weights = newest_whole(folder, lambda _: None).path / "model.safetensors"
    assert found.weights_sha256 == sha256(weights)


def test_weights_that_changed_before_an_optimizer_started_are_noticed(file):
    recipe = load_recipe("digits", [*WORDS, f"weights={file}"])
    run_recipe(recipe, RunFolder(Path("run")), SILENT)
    stored = RunFolder(Path("run")).stored_recipe()
    for saved in (newest(Path("run"), "sgd"), *Path("run/sgd/checkpoints/best").iterdir()):
        for path in saved.iterdir():
            path.unlink()
        saved.rmdir()
    save_file({**load_file(file), "more": torch.zeros(1)}, file)
    with pytest.raises(UserError, match="is not the file that the recipe names"):
        run_recipe(stored, RunFolder(Path("run")), SILENT, resume=True)
