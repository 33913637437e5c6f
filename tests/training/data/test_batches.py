"""Batches are the same for any number of workers and processes and from any start."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from tiny import assert_same
from torch_thor.errors import UserError
from torch_thor.training.data import batches as data
from torch_thor.training.data.batches import epoch_order, held_out_keys, training_keys
from torch_thor.training.parallel import Ranks


def first(keys, count):
    return list(itertools.islice(keys, count))


def test_cores_are_those_of_the_process_not_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert data.allowed_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert data.allowed_cores() == 64


def test_processes_share_each_batch_in_the_order_of_the_epoch_from_any_start():
    for count, world, share in itertools.product((12, 13, 50), (1, 2, 3), (1, 4)):
        size, per_epoch = world * share, count // (world * share)
        ranks = [
            first(training_keys(count, size, 5, Ranks(rank, world), 0), 3 * per_epoch)
            for rank in range(world)
        ]
        for number, parts in enumerate(zip(*ranks, strict=True)):
            epoch, batch = divmod(number, per_epoch)
            expected = epoch_order(count, 5, epoch).tolist()[batch * size :][:size]
            assert [key for part in parts for key in part] == [(epoch, index) for index in expected]
        for start in (1, per_epoch, 2 * per_epoch - 1):
            rest = first(training_keys(count, size, 5, Ranks(0, world), start), per_epoch)
            assert rest == ranks[0][start : start + per_epoch]


def test_the_order_is_a_permutation_and_a_function_of_seed_and_epoch_alone():
    before, places = torch.get_rng_state(), [(0, 0), (0, 1), (1, 0), (1, 1)]
    orders = {tuple(epoch_order(100, *place).tolist()) for place in 2 * places}
    assert torch.equal(before, torch.get_rng_state())
    assert len(orders) == 4
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_an_evaluation_counts_each_sample_once_in_the_batches_of_one_process():
    for count, size, world in itertools.product((1, 7, 24, 25), (1, 5, 100), (1, 2, 3, 4)):
        alone = [indices for indices, counts in held_out_keys(count, size, Ranks()) if counts]
        assert list(itertools.chain.from_iterable(alone)) == list(range(count))
        assert max(map(len, alone)) <= size
        assert max(map(len, alone)) - min(map(len, alone)) <= 1
        ranks = [list(held_out_keys(count, size, Ranks(rank, world))) for rank in range(world)]
        # a forward pass that communicates would wait forever
        assert len({len(batches) for batches in ranks}) == 1
        dealt = [batch for batches in ranks for batch in batches]
        assert sorted(indices for indices, counts in dealt if counts) == alone
        assert all(indices in alone for indices, counts in dealt if not counts)


def test_batches_that_cannot_be():
    with pytest.raises(UserError, match=r"batch_size=4 cannot be shared evenly by 3 processes"):
        data.batches_per_epoch(11, 4, 3)
    with pytest.raises(UserError, match=r"batch_size=12 is larger than .* \(11 samples\)"):
        data.batches_per_epoch(11, 12, 3)
    # the reference's epoch on ImageNet leaves the rest out
    assert data.batches_per_epoch(1_281_167, 256) * 256 == 1_281_024


class Noise(Dataset):
    """Random numbers by key; of the second ten, odd keys are broken, or all of a `lost` disk."""

    def __init__(self, lost=False):
        self.lost = lost

    def __len__(self):
        return 20

    def __getitem__(self, key):
        epoch, index = key
        torch.default_generator.manual_seed(1000 * epoch + index)
        if self.lost or (index > 9 and index % 2):
            return f"noise/{index} cannot be read (odd)"
        return torch.rand(3), index


def read(keys, workers=0, *, lost=False, max_broken=0.5, say=lambda _: None):
    options = {"workers": workers, "prefetch": 2, "device": torch.device("cpu")}
    return data.loaded(Noise(lost), keys, max_broken=max_broken, say=say, **options)


def test_workers_change_no_batch_and_no_random_number_of_the_training():
    starts = [(epoch, first) for epoch in range(3) for first in (0, 5, 10, 15)]
    keys = [[(epoch, first + index) for index in range(5)] for epoch, first in starts]
    said, before = [], torch.get_rng_state()
    alone, *others = [list(read(keys, workers, say=said.append)) for workers in (0, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    for batches in others:
        assert_same(batches, alone)
    numbers = [
        torch.rand(3, generator=torch.Generator().manual_seed(2000 + index))
        for index in (10, 12, 14)
    ]
    assert_same(alone[10], [torch.stack(numbers), torch.tensor([10, 12, 14])])
    assert said == 3 * [
        f"noise/{index} cannot be read (odd) and is left out" for index in (11, 13, 15, 17, 19)
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_unreadable_samples_are_one_line(workers):
    keys = [[(epoch, index) for index in range(20)] for epoch in range(2)]
    # five of twenty, and the same five again
    assert len(list(read(keys, workers, max_broken=0.25))) == 2
    said = r"5 of 20 samples cannot be read, more than data.max_broken=0.24 allows; .*/19"
    with pytest.raises(UserError, match=said):
        list(read(keys, workers, max_broken=0.24))
    with pytest.raises(UserError, match=r"5 of 20 samples cannot be read, .*noise/4"):
        list(read(keys, workers, max_broken=0.24, lost=True))
    said = r"no sample of a batch can be read \(noise/11 .*noise/13 .* raise batch_size"
    with pytest.raises(UserError, match=said):
        list(read([[(0, 11), (0, 13)]], workers))


def test_workers_obey_nobody_but_their_loader():
    others = multiprocessing.active_children()
    batches = read([[(0, index)] for index in range(5)], workers=1)
    next(batches)
    [worker] = [child for child in multiprocessing.active_children() if child not in others]
    # torchrun, schedulers and Ctrl-C signal every process
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.pid, number)
    assert len(list(batches)) == 4
    worker.join(timeout=600)
    assert worker.exitcode == 0


ENDING = """
import itertools, multiprocessing, os, signal, sys
import test_batches as here
left = here.read(itertools.repeat([(0, 0)]), workers=2)
next(left), next(left)  # one of each worker
print(*(child.pid for child in multiprocessing.active_children()), flush=True)
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("raise SystemExit(3)", 3),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", -9, marks=pytest.mark.slow),
    ],
)
def test_workers_end_quietly_with_the_training(end, code):
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    # it returns when the workers have closed their ends of stdout too
    done = subprocess.run(
        [sys.executable, "-c", ENDING.format(end=end)], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (code, "")
    assert len(done.stdout.split()) == 2
