"""A loss that each rank sums over its share: DDP averages the sums, and the step is that of one process on the mean."""

import warnings

import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tiny import weights
from torch_thor import THOR, Distributed


def regression():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 16), torch.nn.LayerNorm(16), torch.nn.Tanh(), torch.nn.Linear(16, 40)]
    return torch.nn.Sequential(*layers).double()


def stream(count):
    generator = torch.Generator().manual_seed(11)
    shape = {"generator": generator, "dtype": torch.float64}
    return [(torch.randn(64, 6, **shape), torch.randn(64, 40, **shape)) for _ in range(count)]


def fit(model, optimizer, batches, terms):
    events = []
    for x, y in batches:
        (F.mse_loss(model(x), y, reduction="sum") / terms).backward()
        optimizer.step()
        events += [(e.layer, e.decision, e.trace_change) for e in optimizer.last_refresh]
        optimizer.zero_grad()
    return events


def sums_of_ranks(rank, world):
    model = regression()
    optimizer = THOR(model, update_interval=2)
    share = [(x.chunk(world)[rank], y.chunk(world)[rank]) for x, y in stream(5)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        events = fit(DDP(model), optimizer, share, 1)
    told = [str(w.message) for w in caught if "looks like a sum over the 64 loss terms" in str(w.message)]
    return weights(model), optimizer.param_groups[0]["loss_scale"], len(told), events


def test_two_ranks_that_sum_are_one_process_that_averages(run):
    model = regression()
    optimizer = THOR(model, update_interval=2, distributed=Distributed(process_group=False))
    wanted = fit(model, optimizer, stream(5), 64)
    ranks = run(2, sums_of_ranks)
    for found, scale, told, events in ranks:
        assert (scale, told) == (32, 1)  # the average of two sums over 32 terms is 32 times the mean over 64
        assert [e[:2] for e in events] == [e[:2] for e in wanted]
        for key, value in weights(model).items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12, msg=key)
    assert all(torch.equal(value, ranks[1][0][key]) for key, value in ranks[0][0].items())
