"""With `divide_curvature=True` each process keeps its own blocks, and collects the inverses of
others in turns.

That the steps are the same is told by the files that compare processes with one.
"""

import weakref
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from joined import OPTIONS, counted, made, network, optimizer_of, shares, stream, train, weights_of
from torch_thor import THOR, Distributed
from torch_thor.distributed import partitioned

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a view")
STEPS = 8  # steps 0, 3 and 6 refresh
DIVIDED, WHOLE = {"divide_curvature": True}, {"divide_curvature": False}


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10)


def in_small_turns(rank, world, way):
    """Inverses are collected layer by layer, also where a weight and its bias are in different
    groups.
    """
    batches, found, sent = shares(stream(STEPS), rank, world), [], []
    for elements in (1, 2**23):
        model, _ = made(way)
        named = dict(model.named_parameters())
        groups = [
            {"params": [p for name, p in named.items() if name.endswith("bias")], "lr": 0.01},
            {"params": [p for name, p in named.items() if not name.endswith("bias")]},
        ]
        optimizer = THOR(
            groups,
            model=getattr(model, "module", model),
            **OPTIONS,
            distributed=Distributed(**DIVIDED),
        )
        with mock.patch.object(partitioned, "ELEMENTS", elements):
            train(model, optimizer, batches[:-1])
            train(
                model,
                optimizer,
                batches[-1:],
                step=lambda optimizer: sent.append(sum(counted(optimizer).values())),
            )
        found.append(weights_of(model))
    assert_same(*found)
    return sent


@pytest.mark.parametrize("way", ["ddp", (2,)])
def test_inverses_are_collected_in_turns(run, way):
    for many, few in run(2, in_small_turns, way):
        # all agree on the step; then one for each group that needs inverses of others (FSDP2: not
        # for biases)
        assert few == (3 if way == "ddp" else 2)
        assert many > 6


def elements(rank, world):
    def elements_of(states):
        entries = {
            (i, k): v
            for i, entries in enumerate(states)
            for k, v in entries.items()
            if torch.is_tensor(v)
        }
        return entries, sum(v.numel() for (_, k), v in entries.items() if k != "momentum_buffer")

    model, optimizer = made("ddp", distributed=DIVIDED)
    batches = shares(stream(1), rank, world)
    train(model, optimizer, batches)
    held = elements_of(optimizer.state.values())[1]
    with pytest.raises(
        RuntimeError, match=r"divided among the processes .*consolidate_state_dict\(to=RANK\)"
    ):
        optimizer.state_dict()
    optimizer.consolidate_state_dict(to=1)
    whole, collected = None, lambda: None
    if rank == 1:
        entries, whole = elements_of(optimizer.state_dict()["state"].values())
        collected = weakref.ref(next(v for (_, k), v in entries.items() if k == "A_inverse"))
        del entries
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    train(model, optimizer, batches)
    assert collected() is None, "a step drops what was collected before it"
    with pytest.raises(RuntimeError, match="after the last step"):
        optimizer.state_dict()
    return held, whole


def test_each_process_keeps_its_part(run):
    held, whole = zip(*run(4, elements), strict=True)
    assert whole[0] is whole[2] is whole[3] is None
    # the factors of a grouped convolution are on all processes, and rows may be narrower where no
    # block is large
    assert 0.8 * whole[1] < sum(held) < 1.5 * whole[1]
    assert max(held) < 0.6 * whole[1]


def replaced(rank, world):
    """A new head, in the place of the one that has been trained."""
    batches, found = shares(stream(STEPS), rank, world), []
    for setting in (DIVIDED, WHOLE):
        model = network()
        optimizer = optimizer_of(model, distributed=setting)
        train(DDP(model), optimizer, batches[:2])
        torch.manual_seed(1)
        model.head = nn.Linear(7, 5).double()
        optimizer.add_param_group({"params": list(model.head.parameters())})
        train(DDP(model), optimizer, batches[2:])
        assert optimizer.curvature["head"].refreshes
        assert optimizer.curvature["head"].stored[0].layout.is_partitioned is (setting is DIVIDED)
        found.append(weights_of(model))
    assert_same(*found)


def test_a_replaced_layer_is_divided_too(run):
    run(2, replaced)
