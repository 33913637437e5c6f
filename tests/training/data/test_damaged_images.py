"""Damaged images, and what is no image at all, from the command line: named, counted, left out; resumed bit for bit."""

import os
import random
import shutil

import pytest

import damage
from command_line import IMAGES, assert_same_runs, checkpoints, command, lines
from image_tree import write_tree

WORDS = ("train", "digits", *IMAGES, "data.root=data", "model=small-resnet", "optimizer=thor", "batch_size=8")
WORDS += ("epochs=4", "lr=0.01", "checkpoint_interval=2", "keep_checkpoints=9", "data.cache=null")
BROKEN = {"china_2.JPEG": "no image format", "flower_2.JPEG": "truncated"}  # of the small ImageNet itself


def spoil(data):
    """Damaged PNG, in training and in evaluation, and files that must not be opened; gives what is said of each."""
    chance, said = random.Random(0), dict(BROKEN)
    for number in range(12):
        name = f"damaged_{number}.png"
        spoiled = damage.flipped(damage.png(2, 8, width=80, height=60), chance)
        (data / ("train" if number < 8 else "val") / "digit" / name).write_bytes(spoiled)
        said[name] = ""
    train = data / "train/digit"
    (train / "bomb.jpg").write_bytes(damage.png(2, 8, stated=(30_000, 30_000)))
    (train / "zero.png").write_bytes(b"")
    os.mkfifo(train / "pipe.png")
    (train / "device.png").symlink_to("/dev/zero")
    (train / "circle.png").symlink_to("circle.png")
    return said | {
        "bomb.jpg": "exceeds limit of 178956970 pixels",
        "zero.png": "the file is empty",
        "pipe.png": "a named pipe, not a file",
        "device.png": "a device, not a file",
        "circle.png": "Too many levels of symbolic links",
    }


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_each_is_named_once_and_left_out_whatever_reads_it(tmp_path):
    write_tree(tmp_path / "data")
    said = spoil(tmp_path / "data")
    outputs = {}
    for count in (0, 2):
        more = ("data.max_broken=0.6", f"data.workers.count={count}", "--out", f"workers-{count}")
        code, out, err = command(tmp_path, *WORDS, *more)
        assert code == 0, f"{out}\n{err}"
        assert "Traceback" not in err
        outputs[count] = out
    for name, reason in said.items():
        for out in outputs.values():
            [line] = [line for line in out.splitlines() if f"{name} cannot be read" in line]
            assert reason in line
    assert_same_runs(tmp_path / "workers-0", tmp_path / "workers-2", "thor")
    # 31 training images, 15 of them broken, 24 asked for in an epoch: the batches hold what is sound
    steps = lines(tmp_path / "workers-2", "thor", "step")
    assert len(steps) == 12
    assert 4 * 9 <= sum(line["terms"] for line in steps) <= 4 * 16

    # from a checkpoint inside the first epoch: the same to the last bit, and no image is named again
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "workers-2", resumed)
    for step in checkpoints(resumed, "thor")[1:]:
        shutil.rmtree(resumed / f"thor/checkpoints/step-{step:08d}")
    code, out, err = command(tmp_path, "train", "digits", "--resume", "--out", "resumed", "data.workers.count=1")
    assert code == 0, f"{out}\n{err}"
    assert_same_runs(tmp_path / "workers-2", resumed, "thor")
    assert sum("cannot be read" in line for line in out.splitlines()) < len(said)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_are_one_line(tmp_path, workers):
    write_tree(tmp_path / "data")
    spoil(tmp_path / "data")
    code, _, err = command(tmp_path, *WORDS, f"data.workers.count={workers}", "data.max_broken=0.1", "--out", "run")
    assert code == 2
    assert err.count("\n") == 1
    assert "more than data.max_broken=0.1 allows" in err
    assert "repair or remove them, or raise data.max_broken" in err


def test_a_link_in_a_circle_is_one_line(tmp_path):
    write_tree(tmp_path / "data")
    (tmp_path / "data/train/digit/all").symlink_to("../..", target_is_directory=True)
    code, out, err = command(tmp_path, *WORDS, "--out", "run")
    assert (code, out) == (2, "")
    assert err.startswith("torch-thor: data/train/digit/all is a link to ")
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
