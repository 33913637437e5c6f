"""Batches are the same for any number of workers and processes and from any start; what goes wrong
is one line.
"""

import errno
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
from torch_thor.training.data.batches import (
    batches_per_epoch,
    epoch_order,
    held_out_keys,
    loaded,
    smallest_part,
    training_keys,
)
from torch_thor.training.errors import UnreadableError
from torch_thor.training.parallel import Ranks

CPU = torch.device("cpu")


def first(keys, count):
    return list(itertools.islice(keys, count))


def test_processes_share_each_batch_in_the_order_of_the_epoch_from_any_start():
    for count, world, share in itertools.product((12, 13, 24, 50), (1, 2, 3), (1, 2, 4)):
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
    before = torch.get_rng_state()
    orders = {
        tuple(epoch_order(100, seed, epoch).tolist())
        for seed in (0, 1)
        for epoch in (0, 1)
        for _ in "ab"
    }
    assert torch.equal(before, torch.get_rng_state())
    assert len(orders) == 4
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_an_evaluation_counts_each_sample_once_in_the_batches_of_one_process():
    for count, size, world in itertools.product((1, 2, 7, 24, 25), (1, 2, 5, 100), (1, 2, 3, 4)):
        alone = [indices for indices, counts in held_out_keys(count, size, Ranks()) if counts]
        assert list(itertools.chain.from_iterable(alone)) == list(range(count))
        assert max(map(len, alone)) <= size
        assert max(map(len, alone)) - min(map(len, alone)) <= 1
        ranks = [list(held_out_keys(count, size, Ranks(rank, world))) for rank in range(world)]
        # a forward pass that communicates would wait forever
        assert len({len(batches) for batches in ranks}) == 1
        assert (
            sorted(indices for batches in ranks for indices, counts in batches if counts) == alone
        )
        assert all(
            indices in alone for batches in ranks for indices, counts in batches if not counts
        )


def test_batches_that_cannot_be():
    with pytest.raises(
        UserError, match=r"batch_size=4 cannot be shared evenly by 3 processes: .* a multiple of 3"
    ):
        training_keys(11, 4, 0, Ranks(0, 3), 0)
    with pytest.raises(
        UserError, match=r"batch_size=12 is larger than the training set \(11 samples\)"
    ):
        training_keys(11, 12, 0, Ranks(0, 3), 0)
    # the reference's epoch on ImageNet leaves the rest out
    assert batches_per_epoch(1_281_167, 256) * 256 == 1_281_024


class Noise(Dataset):
    """Random numbers by key; odd keys of the second ten are broken, and something `happens` at
    index 5.
    """

    def __init__(self, happens=None):
        self.happens = happens

    def __len__(self):
        return 20

    def __getitem__(self, key):
        epoch, index = key
        if index == 5 and self.happens is not None:
            return self.happens()
        torch.default_generator.manual_seed(1000 * epoch + index)
        return (
            f"noise/{index} cannot be read (odd)"
            if index > 9 and index % 2
            else (torch.rand(3), index)
        )


def read(*given, **options):
    return (batch for batch, _ in flagged(*given, **options))


def flagged(
    happens=None,
    workers=0,
    batches=None,
    say=lambda _: None,
    max_broken=0.5,
    dataset=None,
    **options,
):
    batches = batches or [[(0, index), (1, index + 1)] for index in range(0, 10, 2)]
    return loaded(
        dataset or Noise(happens),
        batches,
        workers=workers,
        prefetch=2,
        device=CPU,
        max_broken=max_broken,
        say=say,
        **options,
    )


def test_workers_change_no_batch_and_no_random_number_of_the_training():
    keys = [
        [(epoch, index) for index in range(first, first + 5)]
        for epoch in range(3)
        for first in (0, 5, 10, 15)
    ]
    said = []
    before = torch.get_rng_state()
    alone, *others = [
        list(read(workers=workers, batches=keys, say=said.append)) for workers in (0, 1, 3)
    ]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(alone) == 12
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


def test_too_much_damage_is_one_line():
    keys = [[(epoch, index) for index in range(20)] for epoch in range(2)]
    # five of twenty, and the same five again
    assert len(list(read(batches=keys, max_broken=0.25))) == 2
    with pytest.raises(
        UserError,
        match=r"5 of 20 samples cannot be read, more than data.max_broken=0.24 allows; .*/19",
    ):
        list(read(batches=keys, max_broken=0.24))
    # where a process must take as many batches as the others, the last of them comes before
    said = []
    late = flagged(batches=keys, max_broken=0.1, patient=True, say=said.append)
    assert [own for _, own in itertools.islice(late, 2)] == [True, True]
    with pytest.raises(UnreadableError, match=r"3 of 20 samples cannot be read, more than"):
        next(late)
    assert len(said) == 3
    with pytest.raises(UserError, match=r"too few samples for a batch can be read; .*lost/"):
        list(read(batches=[[(0, 0)]], dataset=Lost(), max_broken=1))


class Lost(Noise):
    """A disk that is gone."""

    def __getitem__(self, key):
        return f"lost/{key[1]}"


def test_the_smallest_part_is_that_of_chunk():
    for count, parts in itertools.product(range(1, 20), range(1, 9)):
        sizes = [len(part) for part in torch.arange(count).chunk(parts)]
        assert smallest_part(count, parts) == min(sizes)


def test_a_batch_of_too_few_is_filled_the_same_way_everywhere():
    """The keys alone say with what: neither the workers nor what was read before."""
    keys = [[(epoch, first), (epoch, first + 2), (epoch, first + 3)] for epoch in (0, 1)
    for first in (9, 11, 13, 15)]  # fmt: skip
    for parts, least, sizes in ((1, 1, {1, 2}), (1, 3, {3}), (2, 2, {4}), (2, 1, {1, 2})):
        found = list(flagged(batches=keys, parts=parts, least=least))
        assert {len(batch[1]) for batch, _ in found} == sizes
        for start, workers in ((3, 0), (0, 2), (5, 1)):
            rest = read(batches=keys[start:], workers=workers, parts=parts, least=least)
            assert_same(list(rest), [batch for batch, _ in found[start:]])
    # nothing but broken samples
    (first, own), (again, _), (other, _) = flagged(
        batches=[[(0, 11), (0, 13)], [(0, 11), (0, 17)], [(1, 11), (1, 13)]]
    )
    assert not own
    assert_same(first, again)
    assert not torch.equal(first[0], other[0])
    assert torch.equal(first[0][0], Noise()[0, int(first[1])][0])


def refused(match, **options):
    with pytest.raises(UserError, match=match) as caught:
        list(read(**options))
    assert "\n" not in str(caught.value)


def raising(error):
    def fail(*_, **__):
        raise error

    return fail


def assert_only(others):
    """No other child process goes on."""
    for worker in multiprocessing.active_children():
        if worker not in others:
            worker.join(timeout=60)
            assert worker.exitcode is not None


@pytest.mark.slow
def test_a_machine_without_resources_is_one_line(monkeypatch):
    remedy = r"enlarge /dev/shm .* lower data.workers.count"
    for workers in (0, 1):
        refused(
            rf"no memory for a batch \(MemoryError\): {remedy}",
            happens=raising(MemoryError()),
            workers=workers,
        )
        refused(
            r"^too many open files$",
            happens=raising(UserError("too many open files")),
            workers=workers,
        )
    others = multiprocessing.active_children()
    for end in (lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: os._exit(7)):
        refused(rf"a worker process of the data has died, .*: {remedy}", happens=end, workers=2)
        assert_only(others)
    full = RuntimeError(
        "unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device "
        "(28)"
    )
    with monkeypatch.context() as patch:
        for name in ("_share_fd_cpu_", "_share_filename_cpu_"):
            patch.setattr(torch.UntypedStorage, name, raising(full))
        refused(rf"no memory for a batch \(.*No space left on device \(28\)\): {remedy}", workers=1)
    monkeypatch.setattr(
        os, "fork", raising(BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
    )
    refused(
        r"data.workers.count=3: .* cannot be started \(Resource temporarily unavailable\): use "
        r"fewer",
        workers=3,
    )


def test_an_error_of_the_program_is_no_death_of_a_worker_and_ends_them():
    others = multiprocessing.active_children()
    for workers in (0, 1, 2):
        with pytest.raises(RuntimeError, match="a fault of the program"):
            list(read(happens=raising(RuntimeError("a fault of the program")), workers=workers))
    assert_only(others)


def test_workers_obey_nobody_but_their_loader():
    others = multiprocessing.active_children()
    handlers = [
        signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    ]
    batches = read(workers=1)
    next(batches)
    [worker] = [child for child in multiprocessing.active_children() if child not in others]
    # torchrun, schedulers and Ctrl-C signal every process
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.pid, number)
    assert handlers == [
        signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
    ]
    assert len(list(batches)) == 4
    worker.join(timeout=600)
    assert worker.exitcode == 0


ENDING = """
import itertools, test_batches as here
left = here.read(workers=2, batches=itertools.repeat([(0, 0)]))
next(left)
raise SystemExit(3)
"""


def test_a_program_ends_quietly_with_its_workers_alive():
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", ENDING], env=os.environ | {"PYTHONPATH": path}, capture_output=True,
        text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")
