"""Nothing is read twice, nothing is lost, and the steps do not depend on how many processes share them."""

import itertools

import pytest
import torch

from torch_thor.training import UserError
from torch_thor.training.data import EvaluationOrder, Shard, TrainingOrder, epoch_order

WORLDS = [1, 2, 3, 4]
COUNTS = [12, 13, 24, 50, 101]
# with batch sizes that go around
TRAINED = list(zip(COUNTS, itertools.cycle([3, 1, 2]), strict=False))
EVALUATED = list(zip([1, 2, 7, *COUNTS], itertools.cycle([5, 1, 2]), strict=False))


def all_ranks(world, make):
    return [make(Shard(rank, world)) for rank in range(world)]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("count", "batch_size"), TRAINED)
def test_training_ranks_share_the_epochs_order(world, count, batch_size):
    orders = all_ranks(world, lambda shard: TrainingOrder(count, batch_size * world, 5, shard))
    epochs = [list(order.epoch(4)) for order in orders]
    steps = count // (batch_size * world)
    assert [len(epoch) for epoch in epochs] == [steps] * world == [order.batches for order in orders]
    assert all(len(batch) == batch_size for epoch in epochs for batch in epoch)
    together = [index for step in zip(*epochs, strict=True) for batch in step for index in batch]
    # in the very order of the epoch: so no overlap, and less than a global batch is left out
    assert together == epoch_order(count, 5, 4)[: len(together)].tolist()
    assert count - len(together) < batch_size * world
    assert sum(order.images for order in orders) == len(together)


def test_a_step_holds_the_same_images_whatever_the_number_of_processes():
    steps = []
    for world in (1, 2, 4):
        epochs = [list(o.epoch(1)) for o in all_ranks(world, lambda s: TrainingOrder(101, 8, 3, s))]
        steps.append([[index for batch in step for index in batch] for step in zip(*epochs, strict=True)])
    assert steps[0] == steps[1] == steps[2]
    assert len(steps[0]) == 12


def test_what_is_left_out_changes_with_the_epoch():
    order = TrainingOrder(count=13, batch_size=4, seed=0)
    left = [set(range(13)) - {index for batch in order.epoch(epoch) for index in batch} for epoch in range(200)]
    assert all(len(rest) == 1 for rest in left)
    assert set.union(*left) == set(range(13))


def test_the_order_is_a_function_of_seed_and_epoch():
    def first(seed, epoch):
        return [index for batch in TrainingOrder(50, 5, seed).epoch(epoch) for index in batch]

    assert first(0, 1) == first(0, 1)
    assert len({tuple(first(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("count", "batch_size"), EVALUATED)
def test_evaluation_ranks_share_every_image_once(world, count, batch_size):
    orders = all_ranks(world, lambda shard: EvaluationOrder(count, batch_size, shard))
    epochs = [list(order.epoch(0)) for order in orders]
    together = [index for epoch in epochs for batch in epoch for index in batch]
    assert sorted(together) == list(range(count))
    assert len({len(epoch) for epoch in epochs}) == 1  # a forward that communicates would wait for ever
    assert len(epochs[0]) == orders[0].batches == -(-count // (batch_size * world))
    sizes = [len(batch) for epoch in epochs for batch in epoch]
    assert max(sizes) <= batch_size
    assert max(sizes) - min(sizes) <= 1
    assert [order.images for order in orders] == [sum(map(len, epoch)) for epoch in epochs]


@pytest.mark.parametrize("start", [0, 1, 3, 12])
def test_a_later_start_is_the_rest_of_the_epoch(start):
    training, evaluation = TrainingOrder(50, 4, 0, Shard(1, 2)), EvaluationOrder(50, 4, Shard(1, 2))
    for order in (training, evaluation):
        assert list(order.epoch(2, start)) == list(order.epoch(2))[start:]


def test_bad_shards():
    with pytest.raises(UserError, match=r"rank=2 must lie in \[0, world_size=2\)"):
        Shard(2, 2)
    with pytest.raises(UserError, match=r"batch_size=4 cannot be shared evenly by 3 processes: .* choose a multiple"):
        TrainingOrder(11, 4, 0, Shard(0, 3))
    with pytest.raises(UserError, match=r"batch_size=12 is larger than the training set \(11 images\)"):
        TrainingOrder(11, 12, 0, Shard(0, 3))
    for make in (lambda: TrainingOrder(11, 0, 0), lambda: EvaluationOrder(11, 0)):
        with pytest.raises(UserError, match="batch_size=0"):
            make()


def test_numbers_are_plain_integers():
    # tensors would travel to the workers as shared memory, one file each
    assert all(type(index) is int for batch in TrainingOrder(10, 5, 0).epoch(0) for index in batch)
    assert not isinstance(next(EvaluationOrder(10, 5).epoch(0)), torch.Tensor)
