"""kill -9, again and again, while images are read, steps taken and checkpoints written: nothing is lost."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from command_line import (
    IMAGES,
    PATIENCE,
    alive,
    assert_same_runs,
    checkpoints,
    descendants,
    finish,
    lines,
    start,
    succeed,
    wait_for,
)
from image_tree import write_tree

OPTIMIZERS = ("thor", "adamw")
WORDS = (
    "train",
    "digits",
    *IMAGES,
    "data.root=data",
    "model=small-resnet",
    f"optimizer={','.join(OPTIMIZERS)}",
    "batch_size=4",
    "epochs=15",
    "eval_epochs=8",
    "ema_decay=0.9",
    "checkpoint_interval=3",  # mid-epoch: an epoch has 4 steps
    "optimizers.thor.lr=0.002",
    "optimizers.thor.update_interval=5",
    "optimizers.thor.trace_thresholds=[0.05,0.001]",
    "damping_schedule.kind=exponential",
    "damping_schedule.rate=0.5",
)


def kill(process, run, kind, chance):
    """kill -9 the training process at a random moment; gives the ids of its workers."""

    def seen():
        return {path for name in OPTIMIZERS for path in (run / name / "checkpoints").glob("step-*")}

    def writing():
        # os.walk passes over folders that go while it looks: old checkpoints are removed at any moment
        folders = (found for name in OPTIMIZERS for found in os.walk(run / name / "checkpoints"))
        return [Path(top) / name for top, names, _ in folders for name in names if name.startswith(".writing-")]

    if kind == "starting":
        time.sleep(chance.uniform(0, 1))
    else:
        for _ in range(chance.randint(1, 3)):
            before = seen()
            wait_for(process, lambda old=before: seen() - old, "new checkpoint")
        if kind == "writing":
            left = writing()  # of a run that was killed before
            wait_for(process, lambda: set(writing()) - set(left), "checkpoint that is being written", pause=0)
            time.sleep(chance.choice((0, 0.002, 0.01)))
        else:
            time.sleep(chance.uniform(0, 0.2))
    workers = descendants(process.pid)
    assert process.poll() is None, process.communicate()
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    return workers


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the workers")
def test_killed_at_five_random_moments_equals_never_stopped(tmp_path):
    write_tree(tmp_path / "data")
    succeed(tmp_path, *WORDS, "--out", "whole")
    chance = random.Random(4)
    kinds = ["starting"] + ["writing"] * 2 + ["between"] * 2
    chance.shuffle(kinds)
    run, workers, half_written = tmp_path / "killed", [], 0
    for kind in kinds:
        resume = ["--resume"] if (run / "recipe.yaml").exists() else []
        process = start(tmp_path, *WORDS, "--out", "killed", *resume)
        workers += kill(process, run, kind, chance)
        half_written += any(run.rglob(".writing-*"))
    assert workers, "no worker was ever seen"
    assert half_written, "no kill came while a checkpoint was written"
    code, out, err = finish(start(tmp_path, *WORDS, "--out", "killed", "--resume"))
    assert code == 0, f"{out}\n{err}"
    assert "damaged" not in out
    assert_same_runs(tmp_path / "whole", run, *OPTIMIZERS)
    for name in OPTIMIZERS:
        assert checkpoints(run, name) == [57, 60]
        assert [line["step"] for line in lines(run, name, "step")] == list(range(1, 61))
        assert [line["terms"] for line in lines(run, name, "step")].count(4) < 60  # some hold a broken image
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in workers if alive(pid)]:
        assert time.monotonic() < deadline, f"workers {left} outlived their training process"
        time.sleep(0.1)
