"""kill -9, again and again, where images are read, steps taken and checkpoints written: nothing is lost."""

import signal

import pytest

import killed_script
from command_line import IMAGES, assert_same_runs, checkpoints, command, lines, succeed
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
    "epochs=8",
    "eval_epochs=4",
    "ema_decay=0.9",
    "checkpoint_interval=3",  # mid-epoch: an epoch has 4 steps
    "optimizers.thor.lr=0.002",
    "optimizers.thor.update_interval=5",
    "optimizers.thor.trace_thresholds=[0.05,0.001]",
    "damping_schedule.kind=exponential",
    "damping_schedule.rate=0.5",
)
# before the run is begun, in a refresh, in a checkpoint that is half written, in an evaluation, and before a checkpoint
# of the second optimizer; every kill is later than what a run that goes on repeats
KILLS = ("0:claim:0", "0:step:6", "0:writing:15", "0:evaluation:16", "0:checkpoint:9")


@pytest.mark.slow
def test_killed_at_five_moments_equals_never_stopped(tmp_path):
    write_tree(tmp_path / "data")
    succeed(tmp_path, *WORDS, "--out", "whole")
    run = tmp_path / "killed"
    for kill in KILLS:
        resume = ["--resume"] if (run / "recipe.yaml").exists() else []
        # its output ends when its workers have ended: none outlives it
        code, out, err = command(tmp_path, kill, *WORDS, "--out", run, *resume, script=killed_script.__file__)
        assert code == -signal.SIGKILL, f"{kill}: {out}\n{err}"
        assert any(run.rglob(".writing-step-*")) == ("writing" in kill)
    assert "damaged" not in succeed(tmp_path, *WORDS, "--out", run, "--resume")
    assert_same_runs(tmp_path / "whole", run, *OPTIMIZERS)
    for name in OPTIMIZERS:
        assert checkpoints(run, name) == [30, 32]
        assert [line["step"] for line in lines(run, name, "step")] == list(range(1, 33))
        assert [line["terms"] for line in lines(run, name, "step")].count(4) < 32  # some hold a broken image
