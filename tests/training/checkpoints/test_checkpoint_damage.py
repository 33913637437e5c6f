"""Every file that a resumed run reads, damaged in every way: named, and the run goes on as if nothing had happened."""

import json
import os
import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file
from torch import nn

from command_line import assert_refused, contents, succeed
from sums import add_checksum
from torch_thor.training import DamagedCheckpointError, UserError, image_run
from torch_thor.training.callbacks import read_metrics
from torch_thor.training.checkpoints import RunFolder, checkpoint, open_checkpoint, restore
from torch_thor.training.data import load_data

WORDS = ["optimizer=thor", "epochs=3", "batch_size=479", "eval_interval=3", "keep_best=false", "ema_decay=0.5"]
WORDS += ["checkpoint_interval=3", "keep_checkpoints=2", "device=cpu"]
NEWEST = "thor/checkpoints/step-00000009"
IN_CHECKPOINT = [
    checkpoint.WEIGHTS,
    checkpoint.AVERAGED,
    checkpoint.STATE,
    checkpoint.METRICS,
    checkpoint.RECIPE,
    checkpoint.MANIFEST,
]
FILES = ["recipe.yaml", "thor/metrics.jsonl", *(f"{NEWEST}/{name}" for name in IN_CHECKPOINT)]


def flip(place):
    def damage(content):
        index = place(len(content))
        return content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]

    return damage


DAMAGE = {
    "first byte": flip(lambda size: 0),
    "middle byte": flip(lambda size: size // 2),
    "last byte": flip(lambda size: size - 1),
    "cut short": lambda content: content[: len(content) // 2],
    "one byte less": lambda content: content[:-1],
    "empty": lambda content: b"",
    "missing": None,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    succeed(folder.parent, "train", "digits", *WORDS, "--out", folder)
    return folder


@pytest.fixture(scope="module")
def again(finished):
    """A run of the same recipe, before its first step."""
    recipe = RunFolder(finished).stored_recipe(pytest.fail)
    return image_run(recipe, "thor", load_data(recipe.data))


def untimed(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("seconds", "duration", "waited")} for line in lines]


def assert_same_end(run, whole):
    for name in (checkpoint.WEIGHTS, checkpoint.AVERAGED):
        left, right = (load_file(folder / NEWEST / name) for folder in (run, whole))
        assert left.keys() == right.keys()
        assert all(left[key].equal(right[key]) for key in left)
    assert untimed(run / "thor/metrics.jsonl") == untimed(whole / "thor/metrics.jsonl")
    assert (run / "recipe.yaml").read_bytes() == (whole / "recipe.yaml").read_bytes()
    assert open_checkpoint(run / NEWEST).step == 9


END_TO_END = [(file, "middle byte") for file in FILES[:3]] + [(file, "missing") for file in FILES[:2]]


@pytest.mark.parametrize(("file", "damage"), END_TO_END)
def test_damage_is_named_and_the_run_ends_as_it_would_have(run, finished, tmp_path, monkeypatch, file, damage):
    monkeypatch.setenv("COLUMNS", "500")
    shutil.copytree(finished, tmp_path / "run")
    harm(tmp_path / "run" / file, damage)
    code, out, err = run("train", "--resume", "--out", "run")
    assert code == 0, err
    assert_same_end(tmp_path / "run", finished)
    assert [line for line in (out + err).splitlines() if file.rpartition("/")[2] in line], out


def harm(path, damage):
    if DAMAGE[damage] is None:
        path.unlink()
    else:
        path.write_bytes(DAMAGE[damage](path.read_bytes()))


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", IN_CHECKPOINT)
def test_a_damaged_part_of_a_checkpoint_is_named(finished, tmp_path, name, damage):
    path = tmp_path / "step-00000009"
    shutil.copytree(finished / NEWEST, path)
    harm(path / name, damage)
    if (name, damage) == (checkpoint.MANIFEST, "one byte less"):  # the newline at its end
        assert open_checkpoint(path) == replace(open_checkpoint(finished / NEWEST), path=path)
        return
    with pytest.raises(DamagedCheckpointError, match=rf"{path} is damaged: .*{name}"):
        open_checkpoint(path)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_recipe_is_named_and_a_checkpoints_copy_takes_its_place(finished, tmp_path, damage):
    shutil.copytree(finished, tmp_path / "run")
    folder, heard = RunFolder(tmp_path / "run"), []
    before = folder.stored_recipe(pytest.fail)
    harm(folder.path / "recipe.yaml", damage)
    assert folder.stored_recipe(heard.append) == before
    [said] = heard
    assert str(folder.path / "recipe.yaml") in said
    assert f"the copy in {folder.path / NEWEST} is used instead" in said


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_metrics_file_is_named_and_a_checkpoints_copy_takes_its_place(finished, again, tmp_path, damage):
    metrics, heard = tmp_path / "metrics.jsonl", []
    shutil.copy(finished / "thor/metrics.jsonl", metrics)
    saved = open_checkpoint(finished / NEWEST)
    restore(again, saved, metrics, pytest.fail)
    before = again.record
    assert before == read_metrics(metrics)
    harm(metrics, damage)
    restore(again, saved, metrics, heard.append)
    assert again.record == before
    [said] = heard
    assert str(metrics) in said
    assert f"the copy in {finished / NEWEST}" in said


def test_a_recipe_without_a_checksum_is_compared_with_the_checkpoint(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    folder, heard = RunFolder(tmp_path / "run"), []
    before = folder.stored_recipe(pytest.fail)
    lines = (folder.path / "recipe.yaml").read_text().splitlines(keepends=True)[1:]
    (folder.path / "recipe.yaml").write_text("".join(lines).replace("keep_checkpoints: 2", "keep_checkpoints: 5"))
    assert folder.stored_recipe(pytest.fail) == replace(before, keep_checkpoints=5)  # free to change
    (folder.path / "recipe.yaml").write_text("".join(lines).replace("seed: 0", "seed: 2"))
    assert folder.stored_recipe(heard.append) == before
    assert "seed: 0 -> 2" in heard[0]
    (folder.path / "recipe.yaml").write_text("".join(lines).replace("epochs: 3", "epochs: 2"))
    assert folder.stored_recipe(heard.append) == before
    assert "epochs=2 is less than the run's 3" in heard[1]


@pytest.mark.parametrize("file", ["thor/metrics.jsonl", "recipe.yaml"])
def test_nothing_whole_to_go_on_from_is_refused_and_nothing_changes(run, finished, tmp_path, file):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    harm(folder / file, "middle byte")
    for weights in folder.glob("thor/checkpoints/*/model.safetensors"):
        weights.unlink()
    (folder / ".lock").unlink(missing_ok=True)  # which names the process
    before = contents(folder)
    assert_refused(run("train", "--resume", "--out", "run"), "damaged")
    (folder / ".lock").unlink(missing_ok=True)  # which names the process
    assert contents(folder) == before


@pytest.mark.parametrize(
    "content",
    ["null", "[]", "7", '"x"', "{}", "[" * 100_000, '{"format": 3}', '{"format": [], "sha256": {}}', "\x00", "\ud800"],
)
def test_a_manifest_of_wrong_types_is_damage(finished, tmp_path, content):
    path = tmp_path / "step-00000009"
    shutil.copytree(finished / NEWEST, path)
    (path / "manifest.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(UserError, match=r"manifest.json is truncated or altered$|has format"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": "9"}, {"step": None}, {"step": True}, {"step": 10**400}, {"optimizer": 3}, {"sha256": []},
        {"sha256": {"model.safetensors": 1}}, {"sha256": {"../../x": "1", "state.pt": "\x00"}}, {"format": 2.5},
    ],
)  # fmt: skip
def test_wrong_values_in_a_manifest_are_damage(finished, tmp_path, wrong):
    path = tmp_path / "step-00000009"
    shutil.copytree(finished / NEWEST, path)
    manifest = {**json.loads((path / "manifest.json").read_text()), **wrong}
    manifest = add_checksum({key: value for key, value in manifest.items() if key != "checksum"})
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"is damaged|has format"):
        open_checkpoint(path)


def test_a_renamed_checkpoint_is_not_taken_for_a_newer_one(finished, tmp_path):
    shutil.copytree(finished / NEWEST, tmp_path / "step-00000099")
    with pytest.raises(UserError, match="step-00000099 is damaged: it contains step 9"):
        open_checkpoint(tmp_path / "step-00000099")


@pytest.mark.skipif(os.name != "posix", reason="needs file modes")
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_weights_have_the_mode_of_their_neighbours(tmp_path, mask):
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    about = {"step": 1, "optimizer": "sgd", "recipe": "", "keep": 1}
    before = os.umask(mask)
    try:
        path = checkpoint.save(tmp_path, model, {}, **about, average=average, metrics=b"")
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o666 & ~mask}
    assert len(list(path.iterdir())) == 6
