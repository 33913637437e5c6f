"""Processes that `torchrun` starts again continue the run of their own job, and no other."""

import pytest
from torch import distributed as dist
from torch.distributed import run as torchrun

import killed_script
from command_line import checkpoints, finish, lines, start, succeed
from torch_thor.training.engine.job import Job

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
DIGITS = ("train", "digits", "optimizer=sgd", "batch_size=64", "device=cpu", "threads=1", "targets=[]", "steps=4")
DIGITS += ("eval_interval=4", "checkpoint_interval=2")


def joined(store, path):
    job = Job(path, {})
    job.join(store, 0, 1)
    return job


def test_a_later_start_knows_that_the_run_was_begun(tmp_path):
    store = dist.HashStore()
    first = joined(store, tmp_path)
    assert not first.has_begun
    assert not joined(store, tmp_path).has_begun  # the first start was refused, or killed before it began
    first.begin()
    assert joined(store, tmp_path).has_begun
    assert not joined(store, tmp_path / "another").has_begun
    assert not joined(dist.HashStore(), tmp_path).has_begun  # of another torchrun


def test_one_process_without_torchrun_has_no_earlier_start(tmp_path):
    job = Job(tmp_path, {})
    job.begin()
    assert not job.has_begun


def restarted(folder, *words):
    """One process that `torchrun` starts twice."""
    command = ("--standalone", "--nproc-per-node=1", "--max-restarts=1", killed_script.__file__, *words)
    return finish(start(folder, *command, script=torchrun.__file__, cold=True))


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_a_start_that_was_refused_does_not_continue_the_run_of_another_job(tmp_path):
    succeed(tmp_path, *DIGITS, "steps=2", "eval_interval=2", "--out", tmp_path / "run")
    code, out, err = restarted(tmp_path, "none", *DIGITS, "steps=2", "eval_interval=2", "--out", tmp_path / "run")
    assert code != 0, out
    assert err.count("contains a run already") == 2  # each start refuses it
    assert "continues" not in out


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_a_start_that_was_killed_before_it_overwrote_a_run_is_repeated(tmp_path):
    succeed(tmp_path, *DIGITS, "lr=1e-9", "--out", tmp_path / "run")
    before = lines(tmp_path / "run", "sgd")
    kills = "0:claim:0"
    code, out, err = restarted(tmp_path, kills, *DIGITS, "lr=1e-9", "--overwrite", "--out", tmp_path / "run")
    assert code == 0, err
    assert "continues" not in out
    assert checkpoints(tmp_path / "run", "sgd") == [2, 4]
    assert [line["step"] for line in lines(tmp_path / "run", "sgd")] == [line["step"] for line in before]
