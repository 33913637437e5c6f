"""Workers that the system kills, memory that is missing, training that is killed: one line, no hang, nobody left."""

import errno
import gc
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from command_line import IMAGES, PATIENCE, alive, assert_refused, command, descendants, end, finish, start, wait_for
from image_tree import write_tree
from torch_thor.training import UserError
from torch_thor.training.data import EvaluationTransform, ImageTransform, Workers, raw_loader

CROP = EvaluationTransform(ImageTransform(size=8, resize=8))
WORDS = ("train", "digits", *IMAGES, "data.root=data", "model=small-resnet", "optimizer=sgd", "batch_size=4", "lr=0.01")
SHARED = "enlarge /dev/shm (docker run --shm-size=8g), or use a smaller data.workers.count, data.workers.prefetch"
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to find the workers")


@pytest.fixture(autouse=True)
def tidy():
    """An exception holds its loader, and so its workers, in a circle of references."""
    yield
    gc.collect()


class Deadly:
    """Sound images, but what `happens` at the sixth."""

    labels = torch.zeros(12, dtype=torch.int64)
    classes = ("a", "b")

    def __init__(self, happens):
        self.happens = happens

    def load(self, index):
        if index == 5:
            self.happens()
        return torch.zeros(3, 8, 8, dtype=torch.uint8)

    def where(self, index):
        return f"images/{index}.png"


def refused(happens, workers, match):
    loader = raw_loader(Deadly(happens), CROP, [[(0, index)] for index in range(12)], Workers(count=workers))
    with pytest.raises(UserError, match=match) as caught:
        list(loader)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("number", "said", "workers"),
    [
        (signal.SIGKILL, r"has died \(SIGKILL\): memory was most likely full: use a smaller data.workers.count", 2),
        (signal.SIGBUS, r"has died \(SIGBUS\): shared memory was most likely full: enlarge /dev/shm", 1),
        (signal.SIGSEGV, r"has died \(SIGSEGV\): with data.workers.count=0 the training process shows", 1),
    ],
)
def test_a_worker_that_is_killed_is_one_line(number, said, workers):
    refused(lambda: os.kill(os.getpid(), number), workers, said)


def test_a_worker_that_leaves_is_one_line():
    refused(lambda: os._exit(7), 1, "has died .exit code 7.: with data.workers.count=0 the training")


def test_a_death_is_told_where_batches_are_waited_for_and_nowhere_else():
    # the signal comes at once; torch's own handler would raise wherever the training process happens to be
    handler = signal.getsignal(signal.SIGCHLD)
    loader = raw_loader(Deadly(None), CROP, [[(0, index)] for index in range(4)], Workers(count=1))
    batches = iter(loader)
    next(batches)
    assert signal.getsignal(signal.SIGCHLD) == handler
    [worker] = loader.watch.workers
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(UserError, match=r"has died \(SIGKILL\)"):
        next(batches)
    assert signal.getsignal(signal.SIGCHLD) == handler


def test_the_end_of_other_processes_is_none_of_its_business():
    loader = raw_loader(Deadly(other_process), CROP, [[(0, index)] for index in range(12)], Workers(count=1))
    count = 0
    for _ in loader:
        other_process()
        count += 1
    assert count == 12


def other_process():
    subprocess.run([sys.executable, "-S", "-c", ""], check=True, timeout=600)


@pytest.mark.parametrize("workers", [0, 1])
def test_no_memory_for_an_image_is_one_line(workers):
    def fail():
        raise MemoryError

    refused(
        fail, workers, r"no memory to read images/5.png: use a smaller data.workers.count, then continue with --resume"
    )


def test_workers_that_cannot_be_started_are_one_line(monkeypatch):
    def fail():
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fail)
    refused(
        None, 3, r"data.workers.count=3: .* cannot be started \(Resource temporarily unavailable\): use fewer, or 0"
    )


# From here on the command itself, in processes of its own.

FULL = """
import sys, torch
from torch_thor.cli import main
def fail(*_, **__):
    raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)")
torch.UntypedStorage._share_fd_cpu_ = torch.UntypedStorage._share_filename_cpu_ = fail
main()
"""
STUCK = """
import os, time
from pathlib import Path
from torch_thor.cli import main
from torch_thor.training.data import FolderSource
def load(self, index):
    Path(f"reading-{os.getpid()}").touch()
    time.sleep(10**6)
FolderSource.load = load
main()
"""


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def workers_of(process):
    own = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    return [pid for pid in descendants(process.pid) if Path(f"/proc/{pid}/cmdline").read_bytes() == own]


def assert_all_end(pids):
    deadline = time.monotonic() + PATIENCE
    try:
        while left := [pid for pid in pids if alive(pid)]:
            assert time.monotonic() < deadline, f"workers {left} outlived their training process"
            time.sleep(0.05)
    finally:
        for pid in left:
            end(pid)


@pytest.mark.slow
def test_shared_memory_that_is_full_is_one_line_and_no_hang(tmp_path):
    # simulated at the call that asks the system for it; the next test has a /dev/shm that is really small
    write_tree(tmp_path / "data")
    process = start(tmp_path, *WORDS, "--out", "run", script=script(tmp_path, FULL))
    said = f"no shared memory for a batch of 0.0 MB (No space left on device (28)): {SHARED}"
    assert_refused(finish(process), said)


def own_mounts():
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
    try:
        return subprocess.run(probe, capture_output=True, check=False, timeout=600).returncode == 0
    except OSError:
        return False


SMALL_SHM = """
import ctypes, subprocess, sys
from torch_thor.cli import main

options, *sys.argv[1:] = sys.argv[1:]
CLONE_NEWNS = 0x00020000
assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/dev/shm"], check=True)
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not own_mounts(), reason="needs the right to mount a small /dev/shm of its own")
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=128k", SHARED),
        ("size=128k,nr_inodes=3", "worker processes cannot be started (No space left on device): use fewer, or 0"),
    ],
)
def test_a_small_dev_shm_is_one_line_and_no_hang(tmp_path, options, said):
    write_tree(tmp_path / "data")
    words = [*WORDS, "batch_size=16", "data.transform.size=64", "data.transform.resize=64", "--out", "run"]
    (tmp_path / "main.py").write_text(SMALL_SHM)
    code, out, err = command(tmp_path, options, *words, script=tmp_path / "main.py")
    # torch 2.9 does not reserve the memory, so the worker dies as it writes (SIGBUS), of which torch prints a line, too
    assert_refused((code, out, re.sub(r"\AERROR: Unexpected bus error .*\n\0?", "", err)), said)


@pytest.mark.slow
@needs_proc
def test_a_worker_that_the_system_kills_ends_training_with_one_line(tmp_path):
    write_tree(tmp_path / "data")
    process = start(tmp_path, *WORDS, "epochs=9999", "data.workers.count=2", "--out", "run")
    metrics = tmp_path / "run/sgd/checkpoints"
    wait_for(process, lambda: any(metrics.glob("step-*")), "checkpoint")
    workers = workers_of(process)
    assert len(workers) >= 2
    os.kill(workers[-1], signal.SIGKILL)
    assert_refused(finish(process), "has died (SIGKILL): memory was most likely full: use a smaller data.workers.count")
    assert_all_end(workers)


@pytest.mark.slow
@needs_proc
def test_workers_that_wait_for_a_disk_end_with_training_that_was_killed(tmp_path):
    write_tree(tmp_path / "data")
    process = start(tmp_path, *WORDS, "data.workers.count=2", script=script(tmp_path, STUCK))
    wait_for(process, lambda: len(list(tmp_path.glob("reading-*"))) == 2, "workers that read")
    workers = workers_of(process)
    assert {f"reading-{pid}" for pid in workers} == {path.name for path in tmp_path.glob("reading-*")}
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    assert_all_end(workers)
