"""A folder of images from the command line: results, what goes wrong before and while it trains, and evaluation."""

import functools
import json
import os
import shutil

import pytest
import torch

from command_line import IMAGES, assert_refused, assert_same_runs, call, checkpoints, lines
from image_tree import write_tree

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
WORDS = ("train", "digits", *IMAGES, "data.workers.count=0", "data.root=data", "model=small-resnet", "optimizer=sgd")
WORDS += ("batch_size=4", "epochs=2", "lr=0.05", "ema_decay=0.5")


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Call the command line in a folder that holds the small ImageNet; gives (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "data")
    return functools.partial(call, monkeypatch, capsys)


def test_trains_and_counts_what_it_read(run, tmp_path):
    code, out, err = run(*WORDS, "epochs=4", "--out", "run")
    assert (code, err) == (0, "")
    assert out.count("china_2.JPEG cannot be read") == 1
    assert out.count("flower_2.JPEG cannot be read") == 1
    steps = lines(tmp_path / "run", "sgd", "step")
    assert len(steps) == 16
    broken = sum(4 - line["terms"] for line in steps)
    assert 4 <= broken <= 8  # two an epoch, unless they are among the two images that each epoch leaves out
    assert all(line["loss"] > 0 for line in steps)


def test_the_number_of_workers_changes_nothing(run, tmp_path):
    assert run(*WORDS, "--out", "none")[0] == 0
    assert run(*WORDS, "data.workers.count=2", "data.workers.prefetch=1", "--out", "two")[0] == 0
    assert_same_runs(tmp_path / "none", tmp_path / "two", "sgd")


@pytest.mark.parametrize("more", [[], ["data.cache=cache"], ["classes=7"]])
def test_eval_prints_what_training_measured(run, tmp_path, more):
    code, _, err = run(*WORDS, *more, "--out", "run")
    assert (code, err) == (0, "")
    final = lines(tmp_path / "run", "sgd", "eval")[-1]
    for path in ("run", "run/sgd/checkpoints/step-00000008"):
        code, out, err = run("eval", path)
        assert (code, err) == (0, "")
        own, averaged = (row for row in out.splitlines() if "sgd" in row)
        assert f"{final['top1']:.2%}" in own
        assert f"{final['averaged_top1']:.2%}" in averaged
        assert "averaged weights" in averaged
        assert f"{final['averaged_top5']:.2%}" in averaged


def spoil_one_class(data):
    for part in ("train", "val"):
        for name in ("digit", "flower"):
            shutil.rmtree(data / part / name)


def spoil_empty_class(data):
    for path in (data / "train/digit").iterdir():
        path.unlink()


def spoil_class_lists(data):
    (data / "val/digit").rename(data / "val/digits")


def spoil_evaluation(data):
    for path in (data / "val").rglob("*.JPEG"):
        path.unlink()


def spoil_root(data):
    shutil.rmtree(data)


def spoil_root_kind(data):
    shutil.rmtree(data)
    data.write_text("no folder")


def nothing(data):
    pass


@pytest.mark.parametrize(
    ("spoil", "words", "said"),
    [
        (spoil_one_class, [], "one class folder, china"),
        (spoil_empty_class, [], "no image in digit"),
        (spoil_class_lists, [], "digit only in train/; digits only in val/"),
        (spoil_evaluation, [], "val contains no image: add the evaluation images"),
        (spoil_root, [], "data.root=data is not a folder"),
        (spoil_root_kind, [], "data.root=data is not a folder"),
        (nothing, ["data.root=null"], "data.root is not set"),
        (nothing, ["classes=2"], "the network only 2 outputs"),
        (nothing, ["model=small-cnn"], "model=small-cnn cannot process the data's images"),
        (nothing, ["batch_size=19"], "batch_size=19 is larger than the training set (18 images)"),
        (nothing, ["accumulation=5"], "accumulation=5 must lie in [1, batch_size=4]"),
        (nothing, ["schedule.horizon_epochs=1"], "schedule.horizon_epochs=1.0 is shorter than the training (2 epochs)"),
        (nothing, ["schedule.horizon_steps=7"], "schedule.horizon_steps=7 is shorter than the training (8 steps)"),
        (nothing, ["schedule.warmup_epochs=3"], "schedule.warmup_epochs=3.0 is longer than the training"),
        (nothing, ["loss_scale=128"], "loss_scale=128.0 must be a number above 0, and needs precision=fp16"),
        (nothing, ["precision=fp8"], "precision=fp8 must be one of fp32, bf16, fp16"),
        (nothing, ["stop_at=76"], "stop_at=76.0 must lie in (0, 1]"),
        (nothing, ["ema_decay=1"], "ema_decay=1.0 must lie in [0, 1)"),
        (nothing, ["eval_epochs=0"], "eval_epochs=0 must be 1 or more"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(run, tmp_path, spoil, words, said):
    spoil(tmp_path / "data")
    assert_refused(run(*WORDS, *words, "--out", "run"), said)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the cores of this process are unknown here")
@pytest.mark.filterwarnings("error:This DataLoader will create")  # torch's own, on top of ours
def test_more_workers_than_cores_is_one_warning(run, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    code, out, err = run(*WORDS, "data.workers.count=2", "epochs=1")
    assert (code, err) == (0, "")
    assert out.count("data.workers.count=2: 2 worker processes share 1 cores; data.workers.count=1 would be") == 1


def test_an_unreadable_file_is_a_broken_image(run, tmp_path):
    picture = tmp_path / "data/train/digit/digit_3.JPEG"
    picture.unlink()
    picture.symlink_to("nowhere")  # even root cannot read it
    code, out, _ = run(*WORDS, "epochs=3", "--out", "run")
    assert code == 0
    assert out.count("digit_3.JPEG cannot be read (No such file or directory) and is left out") == 1


def test_too_many_broken_images_end_training_with_its_checkpoints(run, tmp_path):
    assert_refused(run(*WORDS, "data.max_broken=0.07", "checkpoint_interval=1", "--out", "run"), "data.max_broken=0.07")
    kept = checkpoints(tmp_path / "run", "sgd")
    for name in ("china", "flower"):
        folder = tmp_path / "data/train" / name
        shutil.copy(folder / f"{name}_0.JPEG", folder / f"{name}_2.JPEG")
    code, out, err = run("train", "digits", "--resume", "--out", "run")
    assert code == 0, err
    if kept:
        assert f"sgd: continues from step {kept[-1]} of 8" in out


def test_another_network_is_refused_and_nothing_is_lost(run, tmp_path):
    assert run(*WORDS, "--out", "run")[0] == 0
    assert run(*WORDS, "model=timm:test_resnet", "--out", "other")[0] == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    refused = run(*WORDS, "model=timm:test_resnet", "--out", "run", "--resume")
    assert_refused(refused, "has other settings (model: small-resnet -> timm:test_resnet)")
    assert {path: path.read_bytes() for path in before} == before
    # its weights in this run's folder, with checksums that are right
    there = tmp_path / "run/sgd/checkpoints"
    shutil.rmtree(there)
    shutil.copytree(tmp_path / "other/sgd/checkpoints", there)
    foreign = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}
    assert_refused(run("train", "digits", "--out", "run", "--resume"), "does not contain the weights of this network")
    assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == foreign


def test_a_checkpoint_of_another_optimizer_is_refused(run, tmp_path):
    assert run(*WORDS, "--out", "run")[0] == 0
    assert run(*WORDS, "optimizer=adamw", "--out", "other")[0] == 0
    there = tmp_path / "run/sgd/checkpoints"
    shutil.rmtree(there)
    shutil.copytree(tmp_path / "other/adamw/checkpoints", there)
    assert_refused(run("train", "digits", "--out", "run", "--resume"), "belongs to optimizer adamw, not sgd")


def test_eval_of_images_that_have_changed(run, tmp_path):
    assert run(*WORDS, "--out", "run")[0] == 0
    for part in ("train", "val"):
        shutil.copytree(tmp_path / f"data/{part}/digit", tmp_path / f"data/{part}/zebra")
    assert_refused(run("eval", "run"), "does not contain the weights of this network")
    assert_refused(run("train", "digits", "--resume", "--out", "run"), "does not contain the weights of this network")


def test_eval_of_labels_outside_the_head(run, tmp_path):
    assert run(*WORDS, "classes=3", "--out", "run")[0] == 0
    for part in ("train", "val"):
        shutil.copytree(tmp_path / f"data/{part}/digit", tmp_path / f"data/{part}/zebra")
    assert_refused(run("eval", "run"), "the network only 3 outputs")


def test_resuming_an_ended_run_does_nothing(run, tmp_path):
    assert run(*WORDS, "stop_at=0.1", "epochs=9", "--out", "run")[0] == 0
    assert checkpoints(tmp_path / "run", "sgd")[-1] < 36
    before = {
        path: path.read_bytes()
        for path in (tmp_path / "run/sgd").rglob("*")
        if "tensorboard" not in str(path) and path.is_file()
    }
    code, out, _ = run("train", "digits", "--resume", "--out", "run")
    assert code == 0
    assert "final accuracy" in out
    assert {path: path.read_bytes() for path in before} == before


def test_in_half_precision_and_parts(run, tmp_path):
    more = ["precision=fp16", "loss_scale=128", "accumulation=3", "optimizer=thor", "lr=0.001", "checkpoint_interval=3"]
    code, _, err = run(*WORDS, *more, "--out", "run")
    assert (code, err) == (0, "")
    state = torch.load(tmp_path / "run/thor/checkpoints/step-00000008/state.pt", weights_only=True)
    assert state["precision"]["scale"] == 128
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary[0]["steps"] == 8
