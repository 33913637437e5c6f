"""The folder of a run: who may write to it, and what if its recipe is damaged. A refusal changes
nothing.
"""

import io
import json
import math
import os
import shutil
import threading

import noisy
import pytest
from rich.console import Console

from command_line import call, contents
from torch_thor.errors import UserError
from torch_thor.printing import is_first_rank
from torch_thor.training import run as running
from torch_thor.training.checkpoint import newest
from torch_thor.training.folder import RunFolder
from torch_thor.training.initial_weights import find_checkpoints
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


REFUSED = [
    (
        RECIPE,
        {},
        "contains a run already: continue it with --resume, choose another folder with --out, or "
        "delete it",
    ),
    (RECIPE, {"resume": True, "overwrite": True}, "--resume and --overwrite exclude each other"),
    (
        changed(name="other"),
        {"overwrite": True},
        "belongs to recipe noisy, not other: choose another folder",
    ),
    (
        changed(seed=4, batch_size=7),
        {"resume": True},
        r"other settings \((seed: 3 -> 4|batch_size: 12 -> 7); ",
    ),
    (
        changed(optimizers={"sgd": {"lr": 0.5}}),
        {"resume": True},
        r"\(optimizers.sgd.momentum: 0.0 -> None",
    ),
    (
        changed(epochs=1),
        {"resume": True},
        "epochs=1 is less than the run's 2: --resume only lengthens a run",
    ),
]


@pytest.mark.parametrize(("recipe", "options", "said"), REFUSED)
def test_refused_in_one_line_and_nothing_changes(run, recipe, options, said):
    before = contents(run.path)
    with pytest.raises(UserError, match=said) as caught:
        run_recipe(recipe, run, SILENT, **options)
    assert "\n" not in str(caught.value)
    assert contents(run.path) == before


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for folder, options, said in (
        ("", {"overwrite": True}, "is not a run folder and not empty"),
        ("thesis.txt", {}, "is not a run folder and not empty"),
        (
            "thesis.txt/run",
            {},
            r"thesis.txt is a file \(which .* would be in\): choose another folder",
        ),
        ("new", {"resume": True}, "there is no run in .* to resume: leave --resume out"),
    ):
        with pytest.raises(UserError, match=said):
            run_recipe(RECIPE, RunFolder(tmp_path / folder), SILENT, **options)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_link_to_nothing_is_named_before_any_work(tmp_path):
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    for folder, where in (("gone", ""), ("gone/run", r" \(which .*gone/run would be in\)")):
        with pytest.raises(
            UserError, match=f"gone is a link to nothing{where}: choose another folder with --out"
        ):
            run_recipe(RECIPE, RunFolder(tmp_path / folder), SILENT)
    assert [path.name for path in tmp_path.iterdir()] == ["gone"]


def test_resume_lengthens_and_overwrite_begins_anew(run, tmp_path):
    longer = changed(epochs=3, keep_best=False)
    run_recipe(longer, run, SILENT, resume=True)
    assert newest(run.checkpoints("sgd"), pytest.fail).step == 15
    assert RunFolder(run.path).stored() == longer
    whole = RunFolder(tmp_path / "whole")
    run_recipe(longer, whole, SILENT)
    one, other = (
        newest(folder.checkpoints("sgd"), pytest.fail).path / "model.safetensors"
        for folder in (run, whole)
    )
    assert one.read_bytes() == other.read_bytes()
    run_recipe(changed(seed=4), run, SILENT, overwrite=True)
    assert newest(run.checkpoints("sgd"), pytest.fail).step == 10
    cosine = load_recipe("digits", ["schedule.kind=cosine", "epochs=2", "optimizer=sgd"]).schedule
    run_recipe(changed(schedule=cosine), run, SILENT, overwrite=True)
    with pytest.raises(
        UserError, match=r"schedule.kind=cosine ends with the training, so the steps so far used"
    ):
        run_recipe(changed(schedule=cosine, epochs=3), run, SILENT, resume=True)


def test_two_writers(run, tmp_path):
    with (
        run.locked(),
        pytest.raises(
            UserError, match=rf"{run.path} is in use by process {os.getpid()} on .*: wait"
        ),
    ):
        run_recipe(RECIPE, RunFolder(run.path), SILENT, resume=True)
    run_recipe(RECIPE, RunFolder(run.path), SILENT, resume=True)
    one, other = RunFolder(tmp_path / "new"), RunFolder(tmp_path / "new")
    with one.locked(), other.locked():  # new to both
        one.claim(RECIPE, resume=False, overwrite=False)
        with pytest.raises(UserError, match="is in use by process"):
            other.claim(RECIPE, resume=False, overwrite=True)
    assert one.stored() == RECIPE


def test_starts_at_the_same_moment_get_folders_of_their_own(tmp_path):
    place = tmp_path / "runs/noisy"
    one, two, three, four = (RunFolder.named(place) for _ in range(4))
    assert one.path == two.path == three.path == place
    with one.locked(), two.locked():
        for folder in (one, two):
            assert not folder.admit(RECIPE, False, False)
            folder.claim(RECIPE, resume=False, overwrite=False)
        # one is refused no run, and takes no other's: neither before it is admitted nor after
        with three.locked():
            assert not three.admit(RECIPE, False, False)
            three.claim(RECIPE, resume=False, overwrite=False)
    run_recipe(RECIPE, four, SILENT)  # the others have ended
    names = [folder.path.name for folder in (one, two, three, four)]
    assert names == ["noisy", "noisy-2", "noisy-3", "noisy-4"]
    assert all(folder.stored() == RECIPE for folder in (one, two, three, four))


def test_a_restarted_job_finds_its_run_among_later_ones(tmp_path, monkeypatch):
    folders = []
    for job in ("first", "second"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        folders.append(RunFolder.named(tmp_path / "noisy"))
        with folders[-1].locked():
            folders[-1].claim(RECIPE, resume=False, overwrite=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert RunFolder.named(tmp_path / "noisy").path == folders[0].path


@pytest.mark.parametrize("evaluation", [1, 2])  # the second is the last step's
@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_that_is_deleted_ends_its_run_in_one_line(
    tmp_path, monkeypatch, evaluation, moved
):
    class Deleting(noisy.Noisy):
        held_outs = 0

        def held_out(self, ranks):
            self.held_outs += 1
            if self.held_outs == evaluation:
                (tmp_path / "run").rename(tmp_path / "away")
                if not moved:
                    shutil.rmtree(tmp_path / "away")
            return super().held_out(ranks)

    monkeypatch.setattr(running, "open_task", lambda *_, **options: Deleting())
    said = []  # by threads
    monkeypatch.setattr(threading, "excepthook", said.append)
    with pytest.raises(UserError, match=r"run was deleted or moved .*: start|move .* back and use"):
        run_recipe(RECIPE, RunFolder(tmp_path / "run"), SILENT)
    assert said == []
    assert threading.excepthook == said.append
    assert not any((tmp_path / "run").rglob("step-*"))  # nothing is begun in its place
    if moved:
        (tmp_path / "away").rename(tmp_path / "run")
        monkeypatch.setattr(running, "open_task", lambda *_, **options: noisy.Noisy())
        run_recipe(RECIPE, RunFolder(tmp_path / "run"), SILENT, resume=True)


@pytest.mark.parametrize("damage", ["missing", "cut", "not utf-8"])
def test_a_checkpoint_has_a_copy_of_a_damaged_recipe(run, damage):
    text = run.recipe.read_text()
    if damage == "missing":
        run.recipe.unlink()
    else:
        run.recipe.write_bytes({"cut": b"seed: [", "not utf-8": b"\xff"}[damage])
    with pytest.raises(
        UserError, match=r"recipe.yaml is damaged \(.*\): copy that of a checkpoint over it"
    ):
        run.stored()
    run_recipe(RECIPE, run, SILENT, resume=True)
    assert run.recipe.read_text() == text


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_that_has_lost_its_checkpoints_is_not_begun_anew(run, finished):
    shutil.rmtree(run.checkpoints("sgd"))
    if not finished:
        run.summary.unlink()
    before = contents(run.path)
    message = r"checkpoints has no checkpoint, but .*metrics.jsonl has 10 steps: put the checkpoint"
    with pytest.raises(UserError, match=message):
        run_recipe(changed(checkpoint_interval=20), run, SILENT, resume=True)
    assert contents(run.path) == before


def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on(run):
    """While it wrote that of its fifth step, the metrics of five were on the disk."""
    lines = run.metrics("sgd").read_text().splitlines(keepends=True)
    text = "".join(line for line in lines if json.loads(line)["step"] <= 5)
    shutil.rmtree(run.checkpoints("sgd"))
    run.summary.unlink()
    run.metrics("sgd").write_text(text)
    run_recipe(RECIPE, run, SILENT, resume=True)
    assert newest(run.checkpoints("sgd"), pytest.fail).step == 10
    assert len(run.metrics("sgd").read_text().splitlines()) == len(lines)


def test_a_recipe_whose_bit_flipped_is_not_continued(run):
    for key, old, new in (("seed", 3, 2), ("epochs", 2, 1)):
        run.recipe.write_text(run.recipe.read_text().replace(f"{key}: {old}\n", f"{key}: {new}\n"))
        flipped = run.stored()
        assert flipped != RECIPE
        with pytest.raises(
            UserError,
            match=r"settings \(seed: 3 -> 2\).*copy that of a|epochs=1 is less than the run's 2",
        ):
            run_recipe(flipped, run, SILENT, resume=True)
        run.recipe.write_bytes((run.checkpoints("sgd") / "step-00000010/recipe.yaml").read_bytes())
        assert run.stored() == RECIPE


def test_the_next_free_folder(tmp_path, monkeypatch):
    first = tmp_path / "digits"
    for name in ("digits", "digits-2", "digits-3"):
        folder = RunFolder.named(first)
        assert folder.path == tmp_path / name
        run_recipe(RECIPE, folder, SILENT)
    assert (
        RunFolder.named(first, resume=True).path
        == RunFolder.named(first, overwrite=True).path
        == folder.path
    )
    assert RunFolder.named(tmp_path / "new", resume=True).path == tmp_path / "new"
    # another job than that which has begun it
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert RunFolder.named(first).path == tmp_path / "digits-4"


def test_evaluations_find_the_checkpoints_of_a_path(run, tmp_path):
    def found(path):
        return [saved.path for saved in find_checkpoints(path, pytest.fail)]

    last = run.checkpoints("sgd") / "step-00000010"
    for path in (run.path, run.path / "sgd", run.checkpoints("sgd"), last):
        assert found(path) == [last]
    best = run.checkpoints("sgd") / "best"
    assert found(best) == [best]
    own, averaged = evaluate_saved(run.path, ["device=cpu"], pytest.fail)
    lines = [
        line for line in run.metrics("sgd").read_text().splitlines() if '"eval", "step": 10' in line
    ]
    assert f'"top1": {own.values["top1"]}, "averaged_loss": {averaged.values["loss"]}' in lines[0]
    assert (own.averaged, averaged.averaged, own.path) == (False, True, last)
    for path, words, said in (
        (run.path, ["seed=4"], "seed cannot be changed for an evaluation, only data, device"),
        (tmp_path, [], "is no checkpoint: give a run folder, a checkpoint or"),
        (tmp_path / "nowhere", [], "nowhere does not exist: give"),
    ):
        with pytest.raises(UserError, match=said):
            evaluate_saved(path, words, pytest.fail)


def test_an_evaluation_that_is_not_finite_is_null_in_json(run, monkeypatch, capsys):
    found = {"loss": math.inf, "top1": math.nan, "top5": 0.5}
    monkeypatch.setattr(running, "counted", lambda *_: (found, 60))
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
