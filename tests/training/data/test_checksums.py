"""Which data a run began with: the same anywhere, others if a file is missing, added or renamed."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from command_line import assert_refused, call, contents
from image_tree import write_tree
from torch_thor.training.checkpoint import newest
from torch_thor.training.data.checksums import values_checksum
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipes import load_recipe, to_yaml
from torch_thor.training.run import run_recipe
from torch_thor.training.tasks.opening import open_task

FILES = (
    "data.name=image-folder", "data.transform={size: 28, resize: 28}", "data.workers.count=0",
    "model=small-resnet", "optimizer=sgd", "batch_size=8", "threads=1",
    "data.max_broken=0.5", "schedule.kind=constant",
)  # fmt: skip


def checksums(*words, name="digits"):
    recipe = load_recipe(name, words)
    return open_task(recipe, torch.device("cpu"), lambda _: None).data_checksums


@pytest.mark.slow
def test_images_are_known_by_their_names_in_any_folder(tmp_path):
    write_tree(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "far/two")
    (tmp_path / "far/two/train").rename(tmp_path / "far/two/ilsvrc")
    (tmp_path / "far/two/val").rename(tmp_path / "far/two/ilsvrc_eval")
    before, moved = (
        checksums(*FILES, f"data.root={tmp_path / name}") for name in ("one", "far/two")
    )
    assert before == moved
    assert before["training data"] != before["evaluation data"]
    file = next((tmp_path / "one/val/china").iterdir())
    file.rename(file.with_name("another.jpg"))
    after = checksums(*FILES, f"data.root={tmp_path / 'one'}")
    assert after["training data"] == before["training data"]
    assert after["evaluation data"] != before["evaluation data"]


def test_sets_in_memory_are_known_by_their_values():
    assert values_checksum(torch.tensor([1, 2])) != values_checksum(torch.tensor([2, 1]))
    digits = checksums()
    assert digits == checksums("task=autoencoder", "model=deep-autoencoder")
    assert len({*digits.values(), *checksums(name="characters").values()}) == 4


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """The folder of a run that has begun with `data.root=data`, in another working folder now."""
    write_tree(tmp_path / "here/data")
    monkeypatch.chdir(tmp_path / "here")
    recipe = load_recipe("digits", [*FILES, "epochs=1", "data.root=data"])
    run_recipe(recipe, RunFolder(tmp_path / "run"), Console(file=io.StringIO()))
    write_tree(tmp_path / "elsewhere/data")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "run"


def test_data_are_found_from_another_working_folder_or_refused(
    trained, tmp_path, monkeypatch, capsys
):
    (tmp_path / "elsewhere/data/train/china/china_0.JPEG").unlink()
    assert RunFolder(trained).stored().data.root == str(tmp_path / "here/data")
    resume = ("train", "--resume", "--out", trained)
    code, _, err = call(monkeypatch, capsys, *resume, "epochs=2")
    assert code == 0, err
    assert RunFolder(trained).stored().data.root == str(tmp_path / "here/data")
    (tmp_path / "here/data").rename(tmp_path / "moved")
    code, _, err = call(monkeypatch, capsys, *resume, "epochs=3", "data.root=../moved")
    assert code == 0, err
    assert newest(trained / "sgd/checkpoints", pytest.fail).recipe.epochs == 3

    before = contents(trained)
    result = call(monkeypatch, capsys, *resume, "epochs=4", "data.root=data")
    assert_refused(
        result, "the training data are not those that the run", "give their folder as data.root="
    )
    assert contents(trained) == before


def test_an_evaluation_tells_of_other_files(trained, tmp_path, monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, "eval", trained, "--json")
    assert (code, err) == (0, "")
    (tmp_path / "here/data/val/china/china_6.JPEG").unlink()
    code, fewer, err = call(monkeypatch, capsys, "eval", trained, "--json")
    assert code == 0
    assert "the evaluation data are not those of the training" in err
    assert json.loads(fewer)[0]["loss"] != json.loads(out)[0]["loss"]


def test_an_evaluation_does_not_guess_what_a_relative_place_of_a_file_means(
    tmp_path, monkeypatch, capsys
):
    write_tree(tmp_path / "here/data")
    shutil.copytree(tmp_path / "here/data", tmp_path / "pictures")
    monkeypatch.chdir(tmp_path / "here")
    words = [*FILES, "epochs=1"]
    Path("mine.yaml").write_text(to_yaml(load_recipe("digits", [*words, "data.root=./data"])))
    train = ("train", "mine.yaml", "--out")
    assert call(monkeypatch, capsys, *train, tmp_path / "run")[0] == 0
    assert (
        call(monkeypatch, capsys, *train, tmp_path / "named", f"data.root={tmp_path}/pictures")[0]
        == 0
    )
    code, out, _ = call(monkeypatch, capsys, "eval", tmp_path / "run", "--json")
    assert code == 0

    Path("deep").mkdir()
    monkeypatch.chdir("deep")
    place, said = tmp_path / "here/data", f"data.root={tmp_path / 'here/data'}"
    for path in (tmp_path / "run", tmp_path / "run/sgd/checkpoints/best"):
        result = call(monkeypatch, capsys, "eval", path)
        assert_refused(
            result, f"is {Path.cwd() / 'data'} in this folder, and was {place}", f"add {said}"
        )
    whole = f"data={{name: image-folder, root: {place}, transform: {{size: 28, resize: 28}}}}"
    for word in (said, whole):
        assert call(monkeypatch, capsys, "eval", tmp_path / "run", word, "--json")[:2] == (0, out)
    for other in ("run", "named"):
        resume = ("train", "--resume", "--out", tmp_path / other, "epochs=2")
        assert call(monkeypatch, capsys, *resume)[0] == 0
    code, _, err = call(monkeypatch, capsys, "eval", tmp_path / "named")
    assert code == 0, err
