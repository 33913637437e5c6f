"""What the ranks tell each other, and when: on refresh steps, in a few collectives, whatever the layers."""

import copy

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel as DDP

from joined import (
    OPTIONS,
    SIZE,
    alone,
    assert_same_training,
    digest,
    mean_loss,
    network,
    parallel,
    share,
    stream,
    train,
)
from torch_thor import THOR, Distributed

COLLECTIVES = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather", "scatter"))]
COLLECTIVES += ["barrier", "send", "recv", "isend", "irecv", "batch_isend_irecv", "monitored_barrier"]


class Counter:
    """Counts the collectives that Python code starts (DDP's own start in C++)."""

    def __init__(self):
        self.calls = []
        for name in COLLECTIVES:
            really = getattr(dist, name)
            if callable(really) and not isinstance(really, type):
                setattr(dist, name, self.counting(name, really))

    def counting(self, name, really):
        def counted(*args, **kwargs):
            self.calls.append(name)
            return really(*args, **kwargs)

        counted.really = really
        return counted

    def stop(self):
        for name in COLLECTIVES:
            setattr(dist, name, getattr(getattr(dist, name), "really", getattr(dist, name)))


def deep(layers):
    torch.manual_seed(3)
    stack = [m for _ in range(layers) for m in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(50, 6), *stack, nn.Linear(6, 5))


def count_collectives(rank, world, layers):
    """Collectives of each step of a training with an interval of 3."""
    model, optimizer = parallel(rank, world, lambda: deep(layers), trace_thresholds=(0.0, 0.0))
    optimizer.process_group = dist.group.WORLD
    mean_loss(model(torch.zeros(1, 50)), torch.zeros(1, dtype=torch.long)).backward()  # DDP sets itself up
    optimizer.zero_grad()
    counter, found = Counter(), []
    try:
        for (pixels, _), labels in stream(7):
            mean_loss(model(pixels.float().flatten(1)[rank::world]), labels[rank::world]).backward()
            counter.calls.clear()
            optimizer.step()
            optimizer.zero_grad()
            found.append(list(counter.calls))
    finally:
        counter.stop()
    return found


def test_collectives_on_refresh_steps_only_and_as_many_for_any_number_of_layers(run):
    few, many = run(2, count_collectives, 1), run(2, count_collectives, 9)
    assert few == many
    gather = "all_gather_into_tensor"
    # what is due and whether all are ready; rows; traces; blocks to their owners; failures; blocks from their owners
    refresh = [gather, gather, gather, "reduce_scatter_tensor", gather, gather]
    for calls in many:
        # the first one also looks whether the loss is a sum
        assert calls == [[gather, *refresh], [], [], refresh, [], [], refresh]


class Heads(nn.Module):
    """A head that some batches go through and some do not."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(50, 6)
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(6, 5)

    def forward(self, x, second):
        x = torch.tanh(self.body(x))
        heads = [self.first(x)]
        if second is not None and second.any():
            chosen = torch.zeros(len(x), 5, dtype=x.dtype)
            heads.append(chosen.index_put((second.nonzero()[:, 0],), self.second(x[second])))
        return sum(heads)


def heads(rank, world, reached):
    """The second head is reached by the examples that `reached` says, of the joined batch, from step 4 on."""

    def make():
        torch.manual_seed(3)
        return Heads().double()

    trained, counter = [], Counter()
    found = []
    try:
        for (model, optimizer), first, processes in (
            (parallel(rank, world, make, {"find_unused_parameters": True}, update_interval=6), rank, world),
            (alone(make, update_interval=6), 0, 1),
        ):
            decisions = []
            for step, ((pixels, _), labels) in enumerate(stream(14)):
                second = torch.zeros(SIZE, dtype=torch.bool)
                if step >= 4 and reached is not None:
                    second[reached] = True
                x = pixels.flatten(1)[first::processes]
                mean_loss(model(x, second[first::processes]), labels[first::processes]).backward()
                counter.calls.clear()
                optimizer.step()
                found.append(len(counter.calls))
                decisions.append({event.layer: event for event in optimizer.last_refresh})
                optimizer.zero_grad()
            trained.append((model, optimizer, decisions))
    finally:
        counter.stop()
    assert_same_training(*trained)
    optimizer = trained[0][1]
    return found[:14], optimizer.curvature["second"].refreshes, digest(*trained[0][:2])


@pytest.mark.parametrize("reached", [[1, 3], list(range(SIZE)), None], ids=["by-one-rank", "by-all-ranks", "by-none"])
def test_a_layer_that_only_some_ranks_reach(run, reached):
    (calls, refreshes, bits), *others = run(2, heads, reached)
    assert others == [(calls, refreshes, bits)]
    steps = {step for step, number in enumerate(calls) if number}
    # the late layer refreshes on its own, in between: in the step after the one that gave all ranks a gradient for it
    assert steps == ({0, 6, 12} if reached is None else {0, 5, 6, 12})
    assert bool(refreshes) == (reached is not None)


def empty_batch(rank, world):
    """The second rank has no examples in two of three refreshes; a loss that is a sum has no NaN then."""

    def loss(output, labels):
        return nn.functional.cross_entropy(output, labels, reduction="sum") / (SIZE // world)

    batches = list(stream(10))
    empty = {0, 6}
    ours = []
    for step, batch in enumerate(batches):
        whole = slice(None) if rank == 0 else slice(0, 0)
        (pixels, words), labels = batch
        ours.append(((pixels[whole], words[whole]), labels[whole]) if step in empty else share(batch, rank, world))
    model, optimizer = parallel(rank, world, loss_terms=SIZE // world)
    decisions = train(model, optimizer, ours, loss=loss)
    twin, its_optimizer = alone(loss_terms=SIZE)
    wanted = train(twin, its_optimizer, batches)
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, wanted))


def test_a_rank_without_examples(run):
    run(2, empty_batch)


def resume(rank, world, tmp):
    """Five steps, saved and loaded on every rank, equal ten without a stop; one process goes on from it too."""
    batches = [share(b, rank, world) for b in stream(10)]
    model, optimizer = parallel(rank, world)
    train(model, optimizer, batches[:5])
    saved = copy.deepcopy((model.module.state_dict(), optimizer.state_dict()))
    train(model, optimizer, batches[5:])
    again, its_optimizer = parallel(rank, world)
    again.module.load_state_dict(saved[0])
    its_optimizer.load_state_dict(saved[1])
    train(again, its_optimizer, batches[5:])
    single, single_optimizer = alone()
    single.load_state_dict(saved[0])
    single_optimizer.load_state_dict(saved[1])
    wanted = train(single, single_optimizer, list(stream(10))[5:])
    assert_same_training((model, optimizer, wanted), (single, single_optimizer, wanted))
    return digest(model, optimizer), digest(again, its_optimizer)


def test_state_is_the_same_everywhere_and_resumes(run, tmp_path):
    digests = run(2, resume, str(tmp_path))
    assert len({bits for pair in digests for bits in pair}) == 1


def state_on_one_rank(rank, world):
    """torch.distributed.checkpoint takes a step to make the state; one rank alone may ask."""
    model, optimizer = parallel(rank, world)
    if rank == 0:
        get_optimizer_state_dict(model.module, optimizer)
        assert optimizer.param_groups[0]["step"] == 0
    batches = list(stream(4))
    decisions = train(model, optimizer, [share(b, rank, world) for b in batches])
    twin, its_optimizer = alone()
    wanted = train(twin, its_optimizer, batches)
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, wanted))


def test_the_state_may_be_asked_for_on_one_rank(run):
    run(2, state_on_one_rank)


def copied(rank, world):
    """A deep copy keeps the group; what is unpickled has lost it and says so."""
    import pickle

    batches = [share(b, rank, world) for b in stream(8)]
    group = dist.new_group([0, 1])
    model = network()
    optimizer = THOR(model, **OPTIONS, distributed=Distributed(process_group=group))
    train(DDP(model, process_group=group), optimizer, batches[:4])
    twin = copy.deepcopy(optimizer)
    assert twin.process_group is group
    train(DDP(twin.model, process_group=group), twin, batches[4:])
    read = pickle.loads(pickle.dumps(optimizer))
    train(DDP(model, process_group=group), optimizer, batches[4:])
    with pytest.raises(RuntimeError, match=r"had a process group when it was pickled.*optimizer.process_group"):
        train(DDP(read.model), read, batches[4:])
    read.zero_grad()
    read.process_group = None
    train(DDP(read.model), read, batches[4:])
    default = pickle.loads(pickle.dumps(THOR(network(), distributed=Distributed(process_group=False))))
    assert default.process_group is False
    return len({digest(one.model, one) for one in (optimizer, twin, read)})


def test_copies_and_pickles(run):
    assert run(2, copied) == [1, 1]


def on_its_own(rank, world):
    """process_group=False: other data, other weights, no collective."""
    model, optimizer = alone()
    counter = Counter()
    try:
        train(model, optimizer, [share(b, rank, world) for b in stream(4)])
        assert not counter.calls
    finally:
        counter.stop()
    return digest(model, optimizer)


def test_models_of_their_own(run):
    left, right = run(2, on_its_own)
    assert left != right
