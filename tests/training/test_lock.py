"""One process at a time writes to a run folder; what a dead one has left behind is no obstacle."""

import multiprocessing
import os
import signal

import pytest

from command_line import PATIENCE, checkpoints, command, contents, finish, start, succeed, wait_for
from torch_thor.training import UserError
from torch_thor.training.lock import Lock

WORDS = ("train", "digits", "optimizer=sgd", "batch_size=64", "checkpoint_interval=10", "device=cpu", "--out", "run")


def complaints(err):
    return [line for line in err.splitlines() if line.startswith("torch-thor")]


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs a process that can be halted")
def test_a_second_process_gets_one_line_and_a_killed_one_holds_nothing(tmp_path):
    first = start(tmp_path, *WORDS, "epochs=1000")
    wait_for(first, lambda: checkpoints(tmp_path / "run", "sgd"), "checkpoint")
    os.kill(first.pid, signal.SIGSTOP)  # so that nothing changes but by the others
    before = contents(tmp_path / "run")
    others = [start(tmp_path, *WORDS, "epochs=1000", *more) for more in ([], ["--resume"], ["--overwrite"])]
    for code, out, err in map(finish, others):
        assert code == 2, f"{out}\n{err}"
        [said] = complaints(err)
        assert said.startswith(f"torch-thor: the run in run is in use by process {first.pid} on ")
        assert said.endswith(": wait for it, end it, or choose another folder with --out")
        assert "Traceback" not in err
    assert contents(tmp_path / "run") == before
    os.kill(first.pid, signal.SIGKILL)
    finish(first)
    assert f"process {first.pid}" in (tmp_path / "run" / ".lock").read_text()
    succeed(tmp_path, *WORDS, "epochs=1", "--overwrite")
    assert (tmp_path / "run" / ".lock").read_text() == ""


def test_the_faster_of_two_that_find_nothing_there_gets_the_folder(tmp_path):
    both = [start(tmp_path, *WORDS, "epochs=1") for _ in range(2)]
    codes = {process.pid: finish(process) for process in both}
    assert sorted(code for code, _, _ in codes.values()) == [0, 2]
    [(_, _, err)] = [result for result in codes.values() if result[0] == 2]
    [said] = complaints(err)
    assert "in use by" in said or "contains a run already" in said  # it came when the other was done
    assert checkpoints(tmp_path / "run", "sgd")[-1] == 22


@pytest.mark.slow
def test_under_torchrun_all_ranks_end_with_the_first_ones_line(tmp_path):
    succeed(tmp_path, *WORDS, "epochs=1")
    with Lock(tmp_path / "run" / ".lock", "the run", "wait") as lock:
        lock.take()
        before = contents(tmp_path / "run")
        code, _, err = command(tmp_path, *WORDS, "epochs=1", "--resume", ranks=2)
        assert code != 0
        assert complaints(err) == [line for line in complaints(err) if f"in use by process {os.getpid()} on" in line]
        assert len(complaints(err)) == 1
        assert contents(tmp_path / "run") == before


def hold(path, ready, done):
    with Lock(path, "it", "wait") as lock:
        lock.take()
        worker = multiprocessing.get_context("fork").Process(target=done.wait)  # as a reader of images
        worker.start()
        ready.set()
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
def test_a_worker_that_outlives_its_parent_holds_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    parent = context.Process(target=hold, args=(tmp_path / ".lock", ready, done))
    parent.start()
    try:
        assert ready.wait(PATIENCE)
        os.waitpid(parent.pid, 0)  # `join` would wait for the worker, too
        with Lock(tmp_path / ".lock", "it", "wait") as lock:
            lock.take()
    finally:
        done.set()


def test_a_lock_is_taken_once_and_let_go(tmp_path):
    path = tmp_path / ".lock"
    with Lock(path, "it", "wait") as lock:
        lock.take()
        lock.take()
        with (
            Lock(path, "the figure", "come back later") as other,
            pytest.raises(UserError, match=rf"^the figure is in use by process {os.getpid()} on .*: come back later$"),
        ):
            other.take()
        assert path.read_text()  # one that was refused has not touched it
    with Lock(path, "it", "wait") as lock:
        lock.take()


def test_no_place_for_a_lock_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with Lock(tmp_path / "file" / ".lock", "it", "wait") as lock, pytest.raises(UserError, match="cannot be written"):
        lock.take()
