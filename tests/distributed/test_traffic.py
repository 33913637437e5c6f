"""What a refresh is said to send is what it sends, byte for byte."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn

from joined import made, network, optimizer_of, routed, shares, stream, train, world_of
from torch_thor import ThorMuon
from torch_thor.distributed import partitioned
from torch_thor.tools.traffic import (
    Collective,
    collectives_of_inverses,
    collectives_of_refresh,
    kept_bytes,
    laid_out,
)

GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"
NAMES = {GATHER: GATHER, SCATTER: SCATTER, "all_reduce": "all_reduce", "broadcast": "broadcast"}
# where torch has newer names, the older ones warn, and are not used
NEW = {"all_gather_single": GATHER, "reduce_scatter_single": SCATTER}
if hasattr(dist, "all_gather_single"):
    NAMES = {name: old for name, old in {**NAMES, **NEW}.items() if name not in NEW.values()}
DIVIDED = {"distributed": {"divide_curvature": True}}


class TwoDtypes(nn.Module):
    """Factors of two dtypes: the head computes in float64."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(50, 40), nn.Linear(40, 5).double()
        self.last = nn.Linear(5, 5)

    def forward(self, batch):
        pixels, _ = batch
        hidden = torch.tanh(self.first(pixels.float().flatten(1)))
        return self.last(self.head(hidden.double()).float())


def sent(rank, world, way, make=network, turn=2**23, **options):
    """The collectives of the third refresh; those that are computed; and the bytes that a rank
    keeps.
    """
    found = []

    def recording(name, really):
        def collective(output, *given, **options):
            passed = given[0] if given and torch.is_tensor(given[0]) else output
            found.append(
                Collective(
                    name, dist.get_world_size(options.get("group")), passed.nbytes, output.nbytes
                )
            )
            return really(output, *given, **options)

        return collective

    def recorded(optimizer):
        with contextlib.ExitStack() as stack:
            for name, known in NAMES.items():
                stack.enter_context(
                    mock.patch.object(dist, name, recording(known, getattr(dist, name)))
                )
            optimizer.step()

    with mock.patch.object(partitioned, "ELEMENTS", turn):
        model, optimizer = made(
            way, make, update_interval=1, trace_thresholds=(0.0, 0.0), **options
        )
        for layer in optimizer.curvature.values():  # every refresh takes new factors
            layer.weight_view.options["trace_thresholds"] = (0.0, 0.0)
        batches = shares(stream(3), rank, world)
        train(model, optimizer, batches[:2])
        (decisions,) = train(model, optimizer, batches[2:], step=recorded)
        assert set(decisions.values()) == {"UPDATE"}
        layers = list(optimizer.curvature.values())
        computed = collectives_of_refresh(layers, world, optimizer.distributed.communication_dtype)
        computed += collectives_of_inverses(model.parameters(), layers)
    state = [
        (k, v)
        for entries in optimizer.state.values()
        for k, v in entries.items()
        if torch.is_tensor(v)
    ]
    return found, computed, sum(value.nbytes for key, value in state if key != "momentum_buffer")


CASES = {
    "split": {},
    "whole": {"split_dim": None},
    "ThorMuon": {"method": ThorMuon},
    "divided": DIVIDED,  # then the inverses are collected in the same step
    "divided, ThorMuon": {**DIVIDED, "method": ThorMuon},
    "bfloat16": {"distributed": {"communication_dtype": torch.bfloat16}},
    "experts": {"make": routed, "split_dim": None},
    "two dtypes": {"make": TwoDtypes, "split_dim": None},
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
        for found, computed, _ in run(world, functools.partial(sent, way="ddp", **options)):
            assert found == computed
            if (
                name == "two dtypes" and world == 4
            ):  # few large blocks, whose padding would take more than twice the size
                assert [one.name for one in found].count("all_reduce") == 4
    for mesh in (
        [(2,), (4,), (2, 2), (2, 1)] if "make" not in options and "divided" not in name else ()
    ):
        for found, computed, _ in run(world_of(mesh), functools.partial(sent, way=mesh, **options)):
            assert found == computed
            # ThorMuon has A alone, and no weight of the network has the inputs first
            assert (found[-1].name == "broadcast") is (len(mesh) == 2 and name != "ThorMuon")


@pytest.mark.slow
@pytest.mark.parametrize("turn", [200, 2**23], ids=["in-turns", "at-once"])
def test_a_plan_of_divided_curvature_is_what_is_sent(run, turn):
    """Planned in one process, whose layers are not divided."""
    model = network()
    layers = list(optimizer_of(model).curvature.values())
    layers = laid_out(layers, 4, divided=True)
    with mock.patch.object(partitioned, "ELEMENTS", turn):
        planned = collectives_of_refresh(layers, 4) + collectives_of_inverses(
            model.parameters(), layers
        )
    most = kept_bytes(layers, 4)
    kept = []
    for found, _, bytes_kept in run(4, functools.partial(sent, way="ddp", turn=turn, **DIVIDED)):
        assert found == planned
        kept.append(bytes_kept)
    assert most == max(kept)
    assert [one.name for one in planned].count("all_gather_into_tensor") > (7 if turn == 200 else 4)


def test_what_a_ring_sends():
    """Of four pieces each rank sends three; of one piece it receives three; an all-reduce is one
    after the other.
    """
    assert Collective("broadcast", 4, 400, 400).sent == 400
    assert Collective("reduce_scatter_tensor", 4, 400, 100).sent == 300
    assert Collective("all_gather_into_tensor", 4, 100, 400).sent == 300
    assert Collective("all_reduce", 4, 400, 400).sent == 600
