"""Batches are the same for any number of workers and processes and from any start."""

import itertools
import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import Dataset

from torch_thor.errors import UserError
from torch_thor.training.data import batches as data
from torch_thor.training.data.batches import epoch_order, held_out_keys, training_keys
from torch_thor.training.parallel import Ranks


def first(keys, count):
    return list(itertools.islice(keys, count))


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


def test_the_order_is_a_permutation_and_a_function_of_seed_and_epoch_only():
    before, places = torch.get_rng_state(), [(0, 0), (0, 1), (1, 0), (1, 1)]
    orders = {tuple(epoch_order(100, *place).tolist()) for place in 2 * places}
    assert torch.equal(before, torch.get_rng_state())
    assert len(orders) == 4
    assert all(sorted(order) == list(range(100)) for order in orders)


def test_an_evaluation_counts_each_sample_once_in_the_batches_of_one_process():
    for count, size, world in itertools.product((1, 7, 24, 25), (1, 5, 100), (1, 2, 3, 4)):
        whole = [indices for indices, counts in held_out_keys(count, size, Ranks()) if counts]
        assert list(itertools.chain.from_iterable(whole)) == list(range(count))
        assert max(map(len, whole)) <= size
        ranks = [list(held_out_keys(count, size, Ranks(rank, world))) for rank in range(world)]
        # a forward pass that communicates would wait forever
        assert len({len(batches) for batches in ranks}) == 1
        dealt = [batch for batches in ranks for batch in batches]
        assert sorted(indices for indices, counts in dealt if counts) == whole
        assert all(indices in whole for indices, counts in dealt if not counts)


def test_batches_that_cannot_be_shared_evenly_are_refused():
    with pytest.raises(UserError, match=r"batch_size=4 cannot be shared evenly by 3 processes"):
        data.batches_per_epoch(11, 4, 3)


class Keys(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, key):
        return torch.tensor(key)


def test_a_worker_obeys_its_loader_only():
    others = multiprocessing.active_children()
    options = {"workers": 1, "prefetch": 2, "device": torch.device("cpu")}
    batches = data.loaded(Keys(), [[(0, index)] for index in range(5)], **options)
    next(batches)
    [worker] = [child for child in multiprocessing.active_children() if child not in others]
    # torchrun, schedulers and Ctrl-C signal every process
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(worker.pid, number)
    assert len(list(batches)) == 4
    worker.join(timeout=600)
    assert worker.exitcode == 0
