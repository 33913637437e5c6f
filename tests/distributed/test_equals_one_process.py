"""DDP on 2 and 4 ranks takes the steps of one process on the joined batch, in float64, over several refreshes."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradient
from torch.nn import functional as F
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
    part,
    routed,
    share,
    stream,
    train,
)
from torch_thor import THOR, Distributed

STEPS = 14


def both_ways(rank, world, options=None, ddp=None, micro=1, count=STEPS):
    options = options or {}
    batches = list(stream(count))
    model, optimizer = parallel(rank, world, ddp=ddp, **options)
    decisions = train(model, optimizer, [share(b, rank, world) for b in batches], micro=micro)
    twin, its_optimizer = alone(**options)
    wanted = train(twin, its_optimizer, batches)
    # of a softmax's gradient one direction is rounding alone, which polar factors raise to some 1e-9
    rounding = {"rtol": 1e-6, "atol": 1e-8} if "scaling" in options else {}
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, wanted), **rounding)
    kinds = {event.decision.name for step in decisions for event in step.values()}
    return digest(model, optimizer), kinds


CASES = {
    "plain": {},
    "static-graph": {"ddp": {"static_graph": True, "gradient_as_bucket_view": True}},
    "accumulation": {"micro": 3},
    "unused-allowed": {"ddp": {"find_unused_parameters": True}, "options": {"nesterov": True, "weight_decay": 0.1}},
    "whole-factors-clipped": {"options": {"split_dim": None, "kl_clip": 1e-3, "factor_decay": 0.6}},
    "spectral": {"options": {"scaling": "spectral", "damping": 0.1}, "count": 8},
    "every-step": {"options": {"update_interval": 1, "trace_thresholds": (0.0, 0.0)}, "count": 6},
}


@pytest.mark.parametrize(("name", "world"), [*((name, 2) for name in CASES), ("plain", 4), ("accumulation", 4)])
def test_equals_one_process_on_the_joined_batch(run, world, name):
    digests, kinds = zip(*run(world, both_ways, *_arguments(**CASES[name])), strict=True)
    assert len(set(digests)) == 1, "the ranks differ in some bit"
    if name == "plain":
        assert kinds[0] == {"UPDATE", "KEEP", "STOP"}


def _arguments(options=None, ddp=None, micro=1, count=STEPS):
    return options, ddp, micro, count


def one_rank(rank, world):
    """A group of one rank: the bits of no group at all."""
    batches = list(stream(6))
    model, optimizer = parallel(rank, world)
    train(model, optimizer, batches)
    twin, its_optimizer = alone()
    train(twin, its_optimizer, batches)
    return digest(model, optimizer) == digest(twin, its_optimizer)


def test_one_rank_has_the_bits_of_no_group(run):
    assert run(1, one_rank) == [True]


def experts(rank, world):
    """Each expert's rows of all ranks are one expert's, also where some rank has none."""
    options = {"update_interval": 2, "trace_thresholds": (0.0, 0.0)}
    batches = list(stream(6))
    for (_, words), _ in batches:
        words[0, 0] = 4  # expert 4 has rows of the first example alone
        words[1:] -= (words[1:] % 5 == 4).long()
    model, optimizer = parallel(rank, world, make=routed, **options)
    decisions = train(model, optimizer, [share(b, rank, world) for b in batches])
    twin, its_optimizer = alone(make=routed, **options)
    wanted = train(twin, its_optimizer, batches)
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, wanted))
    return digest(model, optimizer)


@pytest.mark.parametrize("world", [2, 4])
def test_experts(run, world):
    assert len(set(run(world, experts))) == 1


def summed(rank, world):
    """DDP divides the gradient of a sum by the ranks: every direction is 1/P of one process's."""

    def sum_loss(output, labels):
        return F.cross_entropy(output, labels, reduction="sum") / 8

    batches = list(stream(STEPS))
    options = {"loss_reduction": "sum", "damping": 0.05}
    model, optimizer = parallel(rank, world, **{**options, "lr": 0.01 * world, "weight_decay": 0.1 / world})
    decisions = train(model, optimizer, [share(b, rank, world) for b in batches], loss=sum_loss)
    twin, its_optimizer = alone(**options, lr=0.01, weight_decay=0.1)
    wanted = train(twin, its_optimizer, batches, loss=sum_loss)
    for q in twin.parameters():
        its_optimizer.state[q]["momentum_buffer"] /= world
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, wanted))


def test_sums_of_losses(run):
    run(2, summed)
    run(4, summed)


def scaled(rank, world):
    """A GradScaler on every rank; on one of them inf, which all skip, as one process does."""
    trained = []
    for (model, optimizer), first, processes in ((parallel(rank, world), rank, world), (alone(), 0, 1)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        decisions = []
        for step, batch in enumerate(stream(8)):
            inputs, labels = share(batch, first, processes)
            blow_up = step == 3 and first == 0  # a refresh step
            scaler.scale(mean_loss(model(inputs), labels) * (torch.inf if blow_up else 1.0)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            decisions.append({event.layer: event for event in optimizer.last_refresh})
            optimizer.zero_grad()
        assert not decisions[3]
        assert optimizer.param_groups[0]["step"] == 7
        assert scaler.get_scale() != 2.0**10
        trained.append((model, optimizer, decisions))
    assert_same_training(*trained)


def test_gradient_scaler(run):
    run(2, scaled)


def uneven(rank, world):
    """3 and 9 examples: the factors are those of the joined batch, and so is a gradient that is weighted as it."""
    sizes = [3, 9]
    cut = slice(0, 3) if rank == 0 else slice(3, SIZE)
    batches = list(stream(STEPS))
    # (a) plain means: DDP averages the ranks' means; the statistics know how many terms each had
    model, optimizer = parallel(rank, world, lr=0.0)
    train(model, optimizer, [part(batches[0], cut)])
    twin, its_optimizer = alone(lr=0.0)
    train(twin, its_optimizer, batches[:1])
    for name, layer in optimizer.curvature.items():
        wanted = its_optimizer.curvature[name]
        assert layer.rows_per_term == wanted.rows_per_term
        for got, want in zip(layer.factors(), wanted.factors(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-13)
    assert optimizer.param_groups[0]["last_loss_terms"] == SIZE
    # (b) sums divided by the joined batch's share of a rank, which is then what the loss of a rank averages over
    share_of_terms = sum(sizes) // world

    def weighted(output, labels):
        return F.cross_entropy(output, labels, reduction="sum") / share_of_terms

    model, optimizer = parallel(rank, world, loss_terms=lambda: share_of_terms)
    decisions = train(model, optimizer, [part(b, cut) for b in batches], loss=weighted)
    twin, its_optimizer = alone()
    wanted = train(twin, its_optimizer, batches)
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, wanted))


def test_uneven_batches(run):
    run(2, uneven)


def sentences(count):
    """Words and which of them count, an even number; in the fourth (a refresh step) the odd sentences are padding."""
    generator = torch.Generator().manual_seed(9)
    for step in range(count):
        words = torch.randint(11, (SIZE, 4), generator=generator)
        keep = torch.rand(SIZE, 4, generator=generator) < 0.6
        if step == 3:
            keep[1::2] = False
        keep[0, 0] ^= bool(keep.sum() % 2)
        yield words, keep


def padded(rank, world):
    """Rows of padding and loss terms of one's own, other ones on each rank, once none on the second of two."""

    def make():
        torch.manual_seed(3)
        return nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 5)).double()

    trained = []
    for (model, optimizer), first, processes in ((parallel(rank, world, make), rank, world), (alone(make), 0, 1)):
        decisions = []
        for words, keep in sentences(STEPS):
            # a rank's sum is divided by its share of all terms, so that the average of the ranks is the mean over all
            share_of_terms = int(keep.sum()) // processes
            words, keep = words[first::processes], keep[first::processes]
            optimizer.row_mask, optimizer.loss_terms = keep, share_of_terms
            losses = F.cross_entropy(model(words).flatten(0, 1), words.flatten() % 5, reduction="none")
            ((losses * keep.flatten()).sum() / share_of_terms).backward()
            optimizer.step()
            decisions.append({event.layer: event for event in optimizer.last_refresh})
            optimizer.zero_grad()
        trained.append((model, optimizer, decisions))
    assert_same_training(*trained)


def test_padding(run):
    run(2, padded)


class JoinedNorm(nn.Module):
    """What nn.SyncBatchNorm does, which runs on GPUs only: mean and variance of all ranks, gradients through both."""

    def __init__(self, alone):
        super().__init__()
        self.alone = alone

    def forward(self, x):
        sums = torch.stack([x.sum(0), x.square().sum(0), torch.ones_like(x).sum(0)])
        total, squares, count = sums if self.alone else all_reduce_with_gradient(sums)
        mean = total / count
        return (x - mean) * (squares / count - mean.square() + 1e-5).rsqrt()


def normed(rank, world):
    def make(alone):
        torch.manual_seed(3)
        first, second = JoinedNorm(alone), JoinedNorm(alone)
        layers = nn.Flatten(), nn.Linear(50, 6), first, nn.Tanh(), nn.Linear(6, 6), second, nn.Linear(6, 5)
        return nn.Sequential(*layers).double()

    trained = []
    for (model, optimizer), first, processes in (
        (parallel(rank, world, lambda: make(False)), rank, world),
        (alone(lambda: make(True)), 0, 1),
    ):
        for batch in stream(7):
            (pixels, _), labels = share(batch, first, processes)
            mean_loss(model(pixels), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        trained.append((model, optimizer, []))
    assert_same_training(*trained)


def test_layers_before_a_norm_over_all_ranks(run):
    run(2, normed)


def test_synchronised_batch_norm_is_a_norm():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)))
    reasons = {entry.name: entry.reason for entry in THOR(model).coverage() if entry.kind == "SyncBatchNorm"}
    assert reasons == {"1.weight": "a normalisation layer", "1.bias": "a normalisation layer"}


def pairs_of_ranks(rank, world):
    """Two trainings of two ranks each, given their own groups; and four trainings without one."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[rank // 2]
    batches = list(stream(STEPS + rank // 2))[-STEPS:]
    model = network()
    optimizer = THOR(model, **OPTIONS, distributed=Distributed(process_group=mine))
    wrapped = DDP(model, process_group=mine)
    decisions = train(wrapped, optimizer, [share(b, rank % 2, 2) for b in batches])
    twin, its_optimizer = alone()
    wanted = train(twin, its_optimizer, batches)
    assert_same_training((wrapped, optimizer, decisions), (twin, its_optimizer, wanted))
    return digest(model, optimizer)


def test_groups_of_their_own(run):
    digests = run(4, pairs_of_ranks)
    assert digests[0] == digests[1] != digests[2] == digests[3]


def eager_and_compiled(rank, world, order):
    """Compiled before or after DDP, on refresh steps eagerly."""
    batches = list(stream(7))
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    model = network()
    optimizer = THOR(model, **OPTIONS)
    if order == "compile, then DDP":
        wrapped = DDP(torch.compile(model, backend=backend))
    else:
        wrapped = torch.compile(DDP(model), backend=backend)
    decisions = train(wrapped, optimizer, [share(b, rank, world) for b in batches])
    twin, its_optimizer = alone()
    wanted = train(twin, its_optimizer, batches)
    assert calls
    assert_same_training((model, optimizer, decisions), (twin, its_optimizer, wanted))


@pytest.mark.parametrize("order", ["compile, then DDP", "DDP, then compile"])
def test_compiled(run, order):
    run(2, eager_and_compiled, order)


def checkpointed(rank, world, reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Tanh())
            self.head = nn.Linear(6, 5)

        def forward(self, x):
            return self.head(checkpoint(self.inner, x, use_reentrant=reentrant))

    def make():
        torch.manual_seed(3)
        return Checkpointed().double()

    batches = [(b[0][0].flatten(1)[:, :5].requires_grad_(), b[1]) for b in stream(7)]
    model, optimizer = parallel(rank, world, make, ddp={"static_graph": True})
    twin, its_optimizer = alone(make)
    for (model_of, optimizer_of), (first, step) in (
        ((model, optimizer), (rank, world)),
        ((twin, its_optimizer), (0, 1)),
    ):
        for x, labels in batches:
            mean_loss(model_of(x[first::step].detach().requires_grad_()), labels[first::step]).backward()
            optimizer_of.step()
            optimizer_of.zero_grad()
    assert_same_training((model, optimizer, []), (twin, its_optimizer, []))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing_and_a_static_graph(run, reentrant):
    run(2, checkpointed, reentrant)
