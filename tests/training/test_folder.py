"""The folder of a run: refusals, resumed runs, and the checkpoints that an evaluation finds."""

import io

import noisy
import pytest
from rich.console import Console

from command_line import lines
from tiny import assert_same
from torch_thor.errors import UserError
from torch_thor.training import run as running
from torch_thor.training.checkpoint import find_checkpoints, newest
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipe_model import Schedule
from torch_thor.training.run import evaluate_saved, run_recipe

SILENT = Console(file=io.StringIO())
OWN = {"optimizer": ("sgd",), "optimizers": {"sgd": noisy.OPTIMIZERS["sgd"]}}
RECIPE = noisy.recipe(**OWN, name="noisy", epochs=2, steps=None, batch_size=12)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    monkeypatch.setattr(running, "open_task", lambda *_, **options: noisy.Noisy())


@pytest.fixture
def run(tmp_path):
    """The folder of a finished run, of ten steps."""
    folder = RunFolder(tmp_path / "run")
    run_recipe(RECIPE, folder, SILENT)
    return folder


def test_changes_of_a_run_are_refused(run):
    with pytest.raises(UserError, match=r"other settings \(epochs: 2 -> 1; seed: 3 -> 4\): resume"):
        run.continued(["seed=4", "epochs=1"])


def test_a_users_own_files_in_the_folder_stay(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        run_recipe(RECIPE, RunFolder(tmp_path), SILENT, overwrite=overwrite)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_resume_lengthens_and_overwrite_begins_anew(run, tmp_path):
    longer, whole = run.continued(["epochs=3", "keep_best=false"]), RunFolder(tmp_path / "whole")
    run_recipe(longer, run, SILENT, resume=True)
    run_recipe(longer, whole, SILENT)
    found, expected = (newest(each.checkpoints("sgd"), pytest.fail) for each in (run, whole))
    assert found.step == 15
    assert_same(found.weights(), expected.weights())
    cosine = RECIPE.model_copy(update={"schedule": Schedule(kind="cosine")})
    run_recipe(cosine, run, SILENT, overwrite=True)
    assert newest(run.checkpoints("sgd"), pytest.fail).step == 10
    with pytest.raises(UserError, match=r"epochs: 2 -> 3\): .* if no schedule ends with"):
        run.continued(["epochs=3"])


def test_a_second_writer_is_refused(run):
    with run.begin(RECIPE, resume=True, overwrite=False):
        for resume, overwrite in ((True, False), (False, True)):
            with pytest.raises(UserError, match=rf"{run.path} is in use by another process: wait"):
                run_recipe(RECIPE, RunFolder(run.path), SILENT, resume=resume, overwrite=overwrite)
    run_recipe(RECIPE, RunFolder(run.path), SILENT, resume=True)


def test_evaluations_find_the_checkpoints_of_a_path(run, tmp_path):
    last, best = (run.checkpoints("sgd") / name for name in ("step-00000010", "best"))
    for path, expected in (
        *((path, last) for path in (run.path, run.path / "sgd", run.checkpoints("sgd"), last)),
        (best, best),
    ):
        assert [saved.path for saved in find_checkpoints(path, pytest.fail)] == [expected]
    (own, averaged), _ = evaluate_saved(run.path, ["device=cpu"], pytest.fail)
    line = lines(run.path, "sgd", "eval")[-1]
    assert (own["top1"], averaged["loss"]) == (line["top1"], line["averaged_loss"])
    assert (own["averaged"], averaged["averaged"], own["path"]) == (False, True, str(last))
    for path, words, said in (
        (run.path, ["seed=4"], "seed cannot be changed for an evaluation, only data, device"),
        (tmp_path, [], "contains no checkpoint: give a run folder, a checkpoint or"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate_saved(path, words, pytest.fail)
