"""The folder of a run: who may write to it. A refusal changes nothing."""

import io
import json
import math

import noisy
import pytest
from rich.console import Console

from command_line import call, contents
from torch_thor.errors import UserError, is_first_rank
from torch_thor.training import run as running
from torch_thor.training.checkpoint import find_checkpoints, newest
from torch_thor.training.folder import RunFolder
from torch_thor.training.recipes import load_recipe
from torch_thor.training.run import evaluate_saved, run_recipe

SILENT = Console(file=io.StringIO())
GIVEN = {
    "name": "noisy",
    "optimizer": ("sgd",),
    "optimizers": {"sgd": noisy.OPTIMIZERS["sgd"]},
    "epochs": 2,
}
RECIPE = noisy.recipe(**GIVEN, steps=None, batch_size=12)


@pytest.fixture(autouse=True)
def task(monkeypatch):
    monkeypatch.setattr(running, "open_task", lambda *_, **options: noisy.Noisy())


@pytest.fixture
def run(tmp_path):
    """The folder of a finished run, of ten steps."""
    folder = RunFolder(tmp_path / "run")
    run_recipe(RECIPE, folder, SILENT)
    return folder


def changed(**given):
    return RECIPE.model_copy(update=given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["seed=4"], r"other settings \(seed: 3 -> 4\): resume without changing them"),
        (["sgd.lr=0.5"], r"sgd"),
        (["epochs=1"], r"epochs: 2 -> 1\): resume without changing them \(epochs may grow if no"),
    ],
)
def test_words_that_change_a_run_are_refused(run, words, said):
    with pytest.raises(UserError, match=said) as caught:
        run.continued(words)
    assert "\n" not in str(caught.value)


def test_a_recipe_that_was_edited_in_the_run_folder_is_refused(run):
    text = run.recipe.read_text()
    run.recipe.write_text(text.replace("seed: 3\n", "seed: 2\n"))
    with pytest.raises(UserError, match=r"other settings \(seed: 3 -> 2\)"):
        run.continued([])


def test_a_run_is_not_written_over(run):
    before = contents(run.path)
    with pytest.raises(UserError, match="contains a run already: continue it with --resume, cho"):
        run_recipe(RECIPE, run, SILENT)
    assert contents(run.path) == before


def test_what_a_user_keeps_in_the_folder_stays(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError):
        run_recipe(RECIPE, RunFolder(tmp_path / "thesis.txt"), SILENT)
    run_recipe(RECIPE, RunFolder(tmp_path), SILENT)
    run_recipe(RECIPE, RunFolder(tmp_path), SILENT, overwrite=True)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"
    with pytest.raises(UserError, match=r"there is no run in .* to resume: leave --resume out"):
        RunFolder(tmp_path / "new").continued([])


def test_resume_lengthens_and_overwrite_begins_anew(run, tmp_path):
    longer = run.continued(["epochs=3", "keep_best=false"])
    run_recipe(longer, run, SILENT, resume=True)
    assert newest(run.checkpoints("sgd"), pytest.fail).step == 15
    whole = RunFolder(tmp_path / "whole")
    run_recipe(longer, whole, SILENT)
    one, other = (
        newest(folder.checkpoints("sgd"), pytest.fail).path / "model.safetensors"
        for folder in (run, whole)
    )
    assert one.read_bytes() == other.read_bytes()
    cosine = load_recipe("digits", ["schedule.kind=cosine", "epochs=2", "optimizer=sgd"]).schedule
    run_recipe(changed(schedule=cosine), run, SILENT, overwrite=True)
    assert newest(run.checkpoints("sgd"), pytest.fail).step == 10
    with pytest.raises(UserError, match=r"epochs: 2 -> 3\): .* if no schedule ends with"):
        run.continued(["epochs=3"])


def test_two_writers(run):
    with run.begin(RECIPE, resume=True, overwrite=False):
        for resume, overwrite in ((True, False), (False, True)):
            with pytest.raises(UserError, match=rf"{run.path} is in use by another process: wait"):
                run_recipe(RECIPE, RunFolder(run.path), SILENT, resume=resume, overwrite=overwrite)
    run_recipe(RECIPE, RunFolder(run.path), SILENT, resume=True)


def test_evaluations_find_the_checkpoints_of_a_path(run, tmp_path):
    def found(path):
        return [saved.path for saved in find_checkpoints(path, pytest.fail)]

    last = run.checkpoints("sgd") / "step-00000010"
    for path in (run.path, run.path / "sgd", run.checkpoints("sgd"), last):
        assert found(path) == [last]
    best = run.checkpoints("sgd") / "best"
    assert found(best) == [best]
    (own, averaged), _ = evaluate_saved(run.path, ["device=cpu"], pytest.fail)
    lines = [
        line for line in run.metrics("sgd").read_text().splitlines() if '"eval", "step": 10' in line
    ]
    assert f'"top1": {own["top1"]}, "averaged_loss": {averaged["loss"]}' in lines[0]
    assert (own["averaged"], averaged["averaged"], own["path"]) == (False, True, str(last))
    for path, words, said in (
        (run.path, ["seed=4"], "seed cannot be changed for an evaluation, only data, device"),
        (tmp_path, [], "contains no checkpoint: give a run folder, a checkpoint or"),
        (tmp_path / "nowhere", [], "nowhere contains no checkpoint: give"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate_saved(path, words, pytest.fail)


def test_an_evaluation_that_is_not_finite_is_null_in_json(run, monkeypatch, capsys):
    found = {"loss": math.inf, "top1": math.nan, "top5": 0.5}
    monkeypatch.setattr(running, "evaluate", lambda *_: (found, 60))
    code, out, _ = call(monkeypatch, capsys, "eval", run.path, "device=cpu", "--json")
    told = json.loads(out, parse_constant=pytest.fail)
    assert code == 0
    assert [(one["loss"], one["top1"], one["top5"]) for one in told] == [(None, None, 0.5)] * 2
    assert "not finite" in call(monkeypatch, capsys, "eval", run.path, "device=cpu")[1]


@pytest.mark.parametrize("rank", ["1", ""])
def test_a_rank_that_torchrun_did_not_give_hides_nothing(run, monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", rank)
    code, out, err = call(monkeypatch, capsys, "eval", run.path, "device=cpu", "--json")
    assert (code, len(json.loads(out)), err) == (0, 2, "")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    assert not is_first_rank()


def test_a_recipe_that_cannot_start_leaves_no_folder(tmp_path):
    schedule = RECIPE.schedule.model_copy(update={"warmup_epochs": 5.0})
    with pytest.raises(UserError, match=r"schedule.warmup_epochs=5.0 is longer than the training"):
        run_recipe(changed(schedule=schedule), RunFolder(tmp_path / "run"), SILENT)
    assert list(tmp_path.iterdir()) == []
