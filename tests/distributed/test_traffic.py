"""What a refresh is said to send is what it sends, byte for byte."""

import contextlib
import functools
from collections import Counter
from unittest import mock

import pytest
import torch
from torch import distributed as dist

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
    "ThorMuon": {"method": ThorMuon},
    "bfloat16": {"distributed": {"communication_dtype": torch.bfloat16}},
    "experts": {"make": routed, "split_dim": None},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*returns a view")
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_a_refresh(run, name):
    """G stays with the ranks that hold the rows; a replica gets it from another."""
    options = CASES[name]
    for world in (2, 4):
        for found, computed in run(world, functools.partial(sent, way="ddp", **options)):
            assert Counter(found) == Counter(computed)
    for mesh in [(2,), (4,), (2, 2), (2, 1)] if "make" not in options else ():
        for found, computed in run(world_of(mesh), functools.partial(sent, way=mesh, **options)):
            assert Counter(found) == Counter(computed)
            # ThorMuon has only A, and no weight of the network has the inputs first
            assert (found[-1].name == "broadcast") is (len(mesh) == 2 and name != "ThorMuon")
