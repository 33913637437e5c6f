"""What a refresh is said to send is what it sends, byte for byte."""

import contextlib
import functools
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn

from joined import made, network, routed, shares, stream, train, world_of
from torch_thor import ThorMuon
from torch_thor.distributed import data_parallel
from torch_thor.tools.traffic import GATHER, SCATTER, Collective, collectives_of_refresh

# what calls them: torch has newer names for two of them
CALLS = [
    (data_parallel, "all_gather", GATHER),
    (data_parallel, "reduce_scatter", SCATTER),
    (dist, "all_reduce", "all_reduce"),
    (dist, "broadcast", "broadcast"),
]


class Few(nn.Module):
    """Few large blocks, whose padding would take more than twice their size on 4 processes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(50, 20), nn.Tanh(), nn.Linear(20, 5))

    def forward(self, batch):
        return self.layers(batch[0].float().flatten(1))


def sent(rank, world, way, make=network, **options):
    """The collectives of the third refresh, and those that are computed."""
    found = []

    def recording(name, really):
        def collective(output, *given, **options):
            passed = given[0] if given and torch.is_tensor(given[0]) else output
            size = dist.get_world_size(options.get("group"))
            found.append(Collective(name, size, max(passed.nbytes, output.nbytes)))
            return really(output, *given, **options)

        return collective

    def recorded(optimizer):
        with contextlib.ExitStack() as stack:
            for module, name, known in CALLS:
                really = recording(known, getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, really))
            optimizer.step()

    # every refresh takes new factors
    model, optimizer = made(way, make, update_interval=1, trace_thresholds=(0.0, 0.0), **options)
    batches = shares(stream(3), rank, world)
    train(model, optimizer, batches[:2])
    (decisions,) = train(model, optimizer, batches[2:], step=recorded)
    assert set(decisions.values()) == {"UPDATE"}
    layers = list(optimizer.curvature.values())
    return found, collectives_of_refresh(layers, world, optimizer.distributed.communication_dtype)


CASES = {
    "split": {},
    "whole": {"split_dim": None},
    "ThorMuon": {"method": ThorMuon},
    "bfloat16": {"distributed": {"communication_dtype": torch.bfloat16}},
    "experts": {"make": routed, "split_dim": None},
    "few": {"make": Few, "split_dim": None},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*returns a view")
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_refresh(run, name):
    """G stays with the ranks that hold the rows; those that hold the same rows get it from one of
    them.
    """
    options = CASES[name]
    for world in (2, 4):
        for found, computed in run(world, functools.partial(sent, way="ddp", **options)):
            assert Counter(found) == Counter(computed)
            if name == "few" and world == 4:
                assert [one.name for one in found].count("all_reduce") == 2
    for mesh in [(2,), (4,), (2, 2), (2, 1)] if "make" not in options else ():
        for found, computed in run(world_of(mesh), functools.partial(sent, way=mesh, **options)):
            assert Counter(found) == Counter(computed)
            # ThorMuon has A alone, and no weight of the network has the inputs first
            assert (found[-1].name == "broadcast") is (len(mesh) == 2 and name != "ThorMuon")


@pytest.mark.parametrize(
    ("name", "sent", "rounds"),
    [("broadcast", 400, 3), ("all_reduce", 600, 6), (GATHER, 300, 3), (SCATTER, 300, 3)],
)
def test_what_a_ring_of_four_sends(name, sent, rounds):
    """Of four pieces each rank sends three; an all-reduce is one ring after another."""
    collective = Collective(name, 4, 400)
    assert (collective.sent, collective.rounds) == (sent, rounds)
