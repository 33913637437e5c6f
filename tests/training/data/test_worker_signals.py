"""Whom a reading process obeys: the training process, and nobody else."""

import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch

from torch_thor.training.data import MemorySource, Workers, raw_loader


class Whole:
    size = 4

    def __call__(self, image, epoch, index):
        return image


def loader(count=1):
    source = MemorySource(torch.zeros(40, 3, 4, 4, dtype=torch.uint8), torch.arange(40), ("a",), "zeros")
    return raw_loader(source, Whole(), [[(0, index)] for index in range(40)], Workers(count=count, prefetch=1))


def with_workers(**options):
    """The batches of a loader that has begun, and its workers: other tests may have children of this process too."""
    others = multiprocessing.active_children()
    batches = iter(loader(**options))
    read(batches, 1)
    return batches, [child for child in multiprocessing.active_children() if child not in others]


def read(batches, count):
    return [int(next(batches).labels) for _ in range(count)]


@pytest.mark.skipif(not hasattr(signal, "sigwaitinfo"), reason="this system does not tell who sent a signal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stranger_cannot_stop_a_worker(number):
    batches, [worker] = with_workers()
    script = f"import os; os.kill({worker.pid}, {int(number)})"
    subprocess.run([sys.executable, "-S", "-c", script], check=True, timeout=600)
    assert read(batches, 39) == list(range(1, 40))
    assert worker.is_alive()
    worker.terminate()  # as a DataLoader does with one that does not listen
    worker.join(timeout=600)
    assert worker.exitcode == 0


def test_workers_end_with_their_loader():
    batches, workers = with_workers(count=2)
    assert len(workers) == 2
    assert os.getpid() not in {worker.pid for worker in workers}
    del batches
    for worker in workers:
        worker.join(timeout=600)
        assert worker.exitcode == 0


def test_reading_draws_none_of_the_global_random_numbers():
    before = torch.get_rng_state()
    batches = loader()
    for _ in range(2):
        assert read(iter(batches), 40) == list(range(40))
    assert torch.equal(torch.get_rng_state(), before)
