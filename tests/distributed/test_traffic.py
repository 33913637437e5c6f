"""What a refresh is said to send is what it sends, byte for byte."""

import contextlib
from unittest import mock

import pytest
import torch
from torch import distributed as dist
from torch import nn

from joined import OPTIONS, network, parallel, routed, share, stream, train
from sharded import mesh_of, sharded
from torch_thor import THOR
from torch_thor.training.reports import traffic as divided_curvature
from torch_thor.training.reports.plan_divided import divided_share
from torch_thor.training.reports.traffic import Collective, collectives_of_refresh, collectives_of_step

NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast")


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


def counted(rank, world, make, options, mesh=None):
    """The collectives of the third refresh, and those that are computed."""
    options = {"update_interval": 1, "trace_thresholds": (0.0, 0.0), **options}
    if mesh is None:
        model, optimizer = parallel(rank, world, make, **options)
    else:
        model, optimizer = sharded(mesh_of(mesh), make, **options)
    batches = [share(batch, rank, world) for batch in stream(3)]
    train(model, optimizer, batches[:2])
    found = []

    def counting(name, really):
        def collective(output, *given, **options):
            passed = given[0] if given and torch.is_tensor(given[0]) else output
            found.append(Collective(name, passed.nbytes, output.nbytes))
            return really(output, *given, **options)

        return collective

    inputs, labels = batches[2]
    nn.functional.cross_entropy(model(inputs), labels).backward()
    with contextlib.ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(mock.patch.object(dist, name, counting(name, getattr(dist, name))))
        optimizer.step()
    assert {event.decision.name for event in optimizer.last_refresh} == {"UPDATE"}
    if make is TwoDtypes and world == 4:  # few large blocks, of which padding would take more than twice the size
        assert [one.name for one in found].count("all_reduce") == 4
    layers = list(optimizer.curvature.values())
    computed = collectives_of_refresh(layers, world, options.get("communication_dtype"))
    return found, computed + collectives_of_step(model.parameters(), layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"split_dim": None}, {"scaling": "spectral"}], ids=["split", "whole", "spectral"]
)
@pytest.mark.parametrize("divided", [False, True], ids=["everywhere", "divided"])
def test_bytes_of_a_refresh(run, options, divided):
    """With divided curvature, the inverses are collected in the same step."""
    for world in (2, 4):
        for found, computed in run(world, counted, network, {**options, "divide_curvature": divided}):
            assert found == computed


@pytest.mark.slow
@pytest.mark.parametrize("elements", [200, 2**23], ids=["in-turns", "at-once"])
def test_a_plan_of_divided_curvature_is_what_is_sent(run, elements):
    """Planned in one process, whose layers are not divided."""
    model = network()
    layers = list(THOR(model, **OPTIONS).curvature.values())
    with mock.patch.object(divided_curvature, "ELEMENTS", elements):
        with divided_curvature.divided_among(layers, 4, 0):
            planned = collectives_of_refresh(layers, 4) + collectives_of_step(model.parameters(), layers)
            kept = divided_curvature.own_bytes(layers)
        for found, bytes_kept in run(4, in_turns_of, elements):
            assert found == planned
            kept = max(kept, bytes_kept)
        assert divided_share(model, layers, 4).state_bytes == kept
    assert [one.name for one in planned].count("all_gather_into_tensor") > (7 if elements == 200 else 4)


def in_turns_of(rank, world, elements):
    with mock.patch.object(divided_curvature, "ELEMENTS", elements):
        model, optimizer = parallel(rank, world, divide_curvature=True)
        return counted(rank, world, network, {"divide_curvature": True})[0], kept_bytes(model, optimizer, rank, world)


def kept_bytes(model, optimizer, rank, world):
    train(model, optimizer, [share(batch, rank, world) for batch in stream(1)])
    return sum(
        value.nbytes
        for p in model.parameters()
        for key, value in optimizer.state[p].items()
        if torch.is_tensor(value) and key != "momentum_buffer"
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", [routed, TwoDtypes], ids=["experts", "two-dtypes"])
def test_bytes_of_other_layers(run, make):
    for world in (2, 4):
        for found, computed in run(world, counted, make, {"split_dim": None}):
            assert found == computed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*returns a view")
@pytest.mark.parametrize(
    "options",
    [{}, {"split_dim": None}, {"scaling": "spectral"}, {"communication_dtype": torch.bfloat16}],
    ids=["split", "whole", "spectral", "bfloat16"],
)
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2), (2, 1)], ids=["fsdp-2", "fsdp-4", "hsdp", "replicas-alone"])
def test_bytes_of_sharded_rows(run, mesh, options):
    """G stays with the ranks that hold the rows; those that hold the same rows get it from one of them."""
    for found, computed in run(torch.Size(mesh).numel(), counted, network, options, mesh):
        assert found == computed
        # the scale-free step has A alone, and no weight of the network has the inputs first
        assert (found[-1].name == "broadcast") is (len(mesh) == 2 and "scaling" not in options)


def test_what_a_ring_sends():
    """Of four pieces each rank sends three; of one piece it receives three; an all-reduce is one after the other."""
    assert Collective("broadcast", 400, 400).sent(4) == 400
    assert Collective("reduce_scatter_tensor", 400, 100).sent(4) == 300
    assert Collective("all_gather_into_tensor", 100, 400).sent(4) == 300
    assert Collective("all_reduce", 400, 400).sent(4) == 600
