"""What the ranks tell each other: on refresh steps, in a few collectives, for any layers."""

import pytest
import torch
from torch import nn

from joined import (
    SIZE,
    Rows,
    TwoHeads,
    as_one_process,
    counted,
    made,
    network,
    shares,
    stream,
    train,
    weights_of,
    world_of,
)
from torch_thor import THOR, ThorMuon


def calls_of(model, optimizer, batches):
    """Train; returns the collectives of each step."""
    found = []
    train(model, optimizer, batches, step=lambda optimizer: found.append(counted(optimizer)))
    return found


def deep(layers):
    torch.manual_seed(3)
    stack = [m for _ in range(layers) for m in (nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())]
    return nn.Sequential(Rows(), nn.Linear(8, 6), *stack, nn.Linear(6, 5)).double()


def steps_of(rank, world, layers):
    model, optimizer = made("ddp", lambda: deep(layers), trace_thresholds=(0.0, 0.0))
    batches = shares(stream(8), rank, world)
    model(batches[0][0]).sum().backward()  # DDP sets itself up
    optimizer.zero_grad()
    return calls_of(model, optimizer, batches[:7])


def test_collectives_on_refresh_steps_only_and_as_many_for_any_number_of_layers(run):
    few, many = run(2, steps_of, 1), run(2, steps_of, 9)
    assert few == many
    # what is due and whether all are ready; rows; traces; blocks to their owners; failures; blocks
    # from their owners
    refresh = {"_allgather_base_": 5, "_reduce_scatter_base_": 1}
    assert all(calls == [refresh, {}, {}, refresh, {}, {}, refresh] for calls in many)


def heads(rank, world, reached):
    """The second head is reached by some examples of the joined batch, from step 4 on."""
    calls, seen = [], []

    def go(model, optimizer, first, step):
        batches = list(stream(14))
        for number, ((_, words), _) in enumerate(batches):
            words[:, 0] = 0
            if number >= 4:
                words[reached, 0] = 1
        optimizer.loss_terms = SIZE // step  # the layer sees only some of the examples
        calls.append(calls_of(model, optimizer, shares(batches, first, step)))
        seen.append(optimizer.curvature["heads.1"].refreshes)
        return []

    options = {"ddp": {"find_unused_parameters": True}, "update_interval": 6}
    _, bits = as_one_process(rank, world, go, TwoHeads, **options)
    assert seen[0] == seen[1]
    return {step for step, names in enumerate(calls[0]) if names}, bool(seen[0]), bits


@pytest.mark.parametrize("reached", [[1, 3], []], ids=["by one rank", "by none"])
def test_a_layer_that_only_some_ranks_reach(run, reached):
    (steps, refreshed, bits), *others = run(2, heads, reached)
    assert others == [(steps, refreshed, bits)]
    # the late layer refreshes by itself, in the step after the step that gave it a gradient
    assert steps == ({0, 5, 6, 12} if reached else {0, 6, 12})
    assert refreshed == bool(reached)


def flat(model):
    return torch.cat([weight.flatten() for weight in weights_of(model).values()])


def in_bfloat16(rank, world, way, method):
    """The errors of sending blocks in bfloat16 and float32, and the weights after the former."""
    trained = []
    for dtype in (None, torch.bfloat16, torch.float32):
        options = {"method": method, "distributed": {"communication_dtype": dtype}}
        model, optimizer = made(way, trace_thresholds=(0.0, 0.0), **options)
        train(model, optimizer, shares(stream(6), rank, world))
        trained.append(flat(model))
    exact, *others = trained
    moved = (exact - flat(network())).norm()
    return [float((each - exact).norm() / moved) for each in others], others[0].tolist()


@pytest.mark.filterwarnings("ignore:.*returns a view")
@pytest.mark.parametrize("method", [THOR, ThorMuon])
@pytest.mark.parametrize("way", ["ddp", (2,)], ids=str)
def test_steps_differ_by_the_rounding_of_bfloat16(run, way, method):
    """Its relative rounding is 2⁻⁹, and 2⁻²⁴ in float32; all ranks have equal bits."""
    (errors, bits), *others = run(world_of(way), in_bfloat16, way, method)
    assert all(found == (errors, bits) for found in others)
    assert 1e-6 < errors[0] < 0.2
    assert 0 < errors[1] < 1e-5
