"""With `divide_curvature=True` each process keeps its own blocks, and the steps are the same but for rounding.

The order of a sum depends on who owns a block, and owners are dealt out once for all layers, and otherwise in each
refresh for those that take new factors. On two processes a sum has one order only, but a product's kernel may still
round in another way where its operands lie elsewhere in memory. All is float64, so what rounds alone stays below 1e-10.
"""

import copy
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel as DDP

from joined import OPTIONS, mean_loss, network, parallel, routed, share, stream, train
from sharded import GLOBAL, mesh_of, sharded, whole_weights
from torch_thor import THOR, Distributed
from torch_thor.training.reports import traffic as divided_curvature

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a view")
STEPS = 8  # steps 0, 3 and 6 refresh


def made(way, rank, world, make=network, **options):
    if way == "ddp":
        return parallel(rank, world, make, **options)
    return sharded(mesh_of((2, 2) if way == "hsdp" else (world,)), make, **options)


def weights_of(model, way):
    return dict(model.module.named_parameters()) if way == "ddp" else whole_weights(model)


def assert_same(ours, theirs, at):
    ours, theirs = (one.to_local() if hasattr(one, "to_local") else one for one in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-10, msg=lambda m: f"{at}: {m}")


def assert_same_state(ours, theirs):
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, entries in ours["state"].items():
        its = theirs["state"][key]
        assert entries.keys() == its.keys()
        for name, value in entries.items():
            other = its[name]
            if torch.is_tensor(value):
                assert_same(value, other, (key, name))
            else:
                assert value == pytest.approx(other, rel=1e-9), (key, name)


def both(rank, world, way, make, options, micro):
    batches = [share(batch, rank, world) for batch in stream(STEPS)]
    model, optimizer = made(way, rank, world, make, divide_curvature=True, **options)
    twin, other = made(way, rank, world, make, **options)
    decisions, wanted = (train(*one, batches, micro=micro) for one in ((model, optimizer), (twin, other)))
    assert [{k: e.decision for k, e in step.items()} for step in decisions] == [
        {k: e.decision for k, e in step.items()} for step in wanted
    ]
    theirs = weights_of(twin, way)
    for name, ours in weights_of(model, way).items():
        assert_same(ours, theirs[name], name)
    for layer, its in zip(optimizer.curvature.values(), other.curvature.values(), strict=True):
        for one, two in zip(layer.factors() + layer.inverses(), its.factors() + its.inverses(), strict=True):
            if one is None:
                assert two is None
            else:
                assert_same(torch.stack([*one]), torch.stack([*two]), layer.name)
    optimizer.consolidate_state_dict(to=None)
    assert_same_state(optimizer.state_dict(), other.state_dict())
    return {event.decision.name for step in decisions for event in step.values()}


CASES = {
    "plain": {},
    "whole-factors": {"split_dim": None, "kl_clip": 1e-3},
    "average": {"factor_decay": 0.6, "nesterov": True, "weight_decay": 0.1},
    "spectral": {"scaling": "spectral", "damping": 0.1},
}


@pytest.mark.parametrize("way", ["ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("name", CASES)
def test_the_same_steps(run, name, way):
    for world in (4,) if way == "hsdp" else (2, 4) if name == "plain" else (2,):
        kinds = run(world, both, way, network, CASES[name], 1)
        assert all(found == kinds[0] for found in kinds)
        assert "UPDATE" in kinds[0]


@pytest.mark.parametrize("scaling", [None, "spectral"])
def test_the_same_steps_of_experts_and_of_accumulated_gradients(run, scaling):
    """Some experts have no rows in a refresh, and keep their factors; some have never had any."""
    for kinds in run(4, both, "ddp", routed, {"scaling": scaling, "factor_decay": 0.3, "split_dim": 3}, 2):
        assert "UPDATE" in kinds


def in_small_turns(rank, world, way):
    """Inverses are collected layer by layer, also where a weight and its bias are in different groups."""
    batches = [share(batch, rank, world) for batch in stream(STEPS)]
    found = []
    for elements in (1, 2**23):
        model, _ = made(way, rank, world)
        groups = [
            {"params": [p for name, p in model.named_parameters() if name.endswith("bias")], "lr": 0.01},
            {"params": [p for name, p in model.named_parameters() if not name.endswith("bias")]},
        ]
        optimizer = THOR(groups, model=model, **OPTIONS, distributed=Distributed(divide_curvature=True))
        with mock.patch.object(divided_curvature, "ELEMENTS", elements):
            train(model, optimizer, batches[:-1])
            inputs, labels = batches[-1]
            mean_loss(model(inputs), labels).backward()
            with CommDebugMode() as counted:
                optimizer.step()
        assert not optimizer.last_refresh
        found.append((weights_of(model, way), counted.get_total_counts()))
    (ours, many), (theirs, few) = found
    # all agree that they take the step; then one for each group that needs inverses of others (FSDP2: not for biases)
    assert few == (3 if way == "ddp" else 2)
    for name, weight in ours.items():
        assert_same(weight, theirs[name], name)
    return many


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_inverses_are_collected_in_turns(run, way):
    for many in run(2, in_small_turns, way):
        assert many > 6


def elements(rank, world):
    model, optimizer = made("ddp", rank, world, divide_curvature=True)
    train(model, optimizer, [share(batch, rank, world) for batch in stream(1)])
    own = sum(
        value.numel()
        for p in model.parameters()
        for key, value in optimizer.state[p].items()
        if torch.is_tensor(value) and key != "momentum_buffer"
    )
    with pytest.raises(RuntimeError, match=r"divided among the processes .*consolidate_state_dict\(to=RANK\)"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        copy.deepcopy(optimizer)
    with pytest.raises(RuntimeError, match="process_group=False: the curvature is divided"):
        optimizer.process_group = False
    optimizer.consolidate_state_dict(to=1)
    whole = None
    if rank == 1:
        state = optimizer.state_dict()["state"]
        tensors = [(k, v) for entries in state.values() for k, v in entries.items() if torch.is_tensor(v)]
        whole = sum(v.numel() for k, v in tensors if k != "momentum_buffer")
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    one_of_them = weakref.ref(dict(tensors)["A_inverse"]) if rank == 1 else lambda: None
    state = tensors = None
    train(model, optimizer, [share(batch, rank, world) for batch in stream(1)])
    assert one_of_them() is None, "a step drops what was collected before it"
    with pytest.raises(RuntimeError, match="after the last step"):
        optimizer.state_dict()
    return own, whole


def test_each_process_keeps_its_part(run):
    own, whole = zip(*run(4, elements), strict=True)
    assert whole[0] is whole[2] is whole[3] is None
    # the whole has rows that are wider than the last, smaller block of a factor
    assert 0.8 * whole[1] < sum(own) <= whole[1]
    assert max(own) < 0.45 * whole[1]


def from_one_to_another(rank, world, before, after, path):
    """Save in the middle with one setting, go on with the other as if nothing had happened."""
    batches = [share(batch, rank, world) for batch in stream(STEPS)]
    model, optimizer = made("ddp", rank, world, divide_curvature=before)
    train(model, optimizer, batches[:4])
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], path)
    torch.distributed.barrier()
    twin, other = made("ddp", rank, world, divide_curvature=after)
    weights, state = torch.load(path)
    twin.load_state_dict(weights)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match="state dict"):
        other.load_state_dict({"state": {}, "param_groups": []})
    train(model, optimizer, batches[4:])
    train(twin, other, batches[4:])
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_same(p, q, name)
    # the loaded state can be replaced again, also after its curvature was divided
    twin.load_state_dict(weights)
    with pytest.raises(ValueError, match="state dict"):
        other.load_state_dict({"state": {}, "param_groups": []})
    other.load_state_dict(state)
    train(twin, other, batches[4:])
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert_same(p, q, name)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_state_dict_goes_on_with_either_setting(run, tmp_path, before, after):
    run(2, from_one_to_another, before, after, str(tmp_path / "state.pt"))


# blocks of one row are cut alike for any number of shards; a grouped convolution has no curvature under FSDP2
FIXED = {**GLOBAL, "split_dim": 1, "skip": "images.3", "trace_thresholds": (0.0, 0.0)}


def saved(rank, world, way, path, divided):
    model, optimizer = made(way, rank, world, divide_curvature=divided, **FIXED)
    train(model, optimizer, [share(batch, rank, world) for batch in stream(4)])
    optimizer.consolidate_state_dict(to=None)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    train(model, optimizer, [share(batch, rank, world) for batch in list(stream(STEPS))[4:]])
    return {name: weight.tolist() for name, weight in weights_of(model, way).items()}


def loaded(rank, world, way, path, divided):
    model, optimizer = made(way, rank, world, divide_curvature=divided, **FIXED)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    train(model, optimizer, [share(batch, rank, world) for batch in list(stream(STEPS))[4:]])
    return {name: weight.tolist() for name, weight in weights_of(model, way).items()}


@pytest.mark.parametrize(
    ("before", "after", "divided"),
    [("ddp", "fsdp", (True, True)), ("fsdp", "ddp", (True, False)), ("ddp", "ddp", (False, True))],
)
def test_distributed_checkpoints(run, tmp_path, before, after, divided):
    """Saved on two ranks, loaded on four."""
    path = str(tmp_path / "checkpoint")
    wanted = run(2, saved, before, path, divided[0])[0]
    found = run(4, loaded, after, path, divided[1])[0]
    for name, weight in found.items():
        numbers, its = (torch.tensor(one, dtype=torch.float64) for one in (weight, wanted[name]))
        torch.testing.assert_close(numbers, its, rtol=1e-8, atol=1e-10)


def replaced(rank, world):
    """A new head, in the place of the one that has been trained."""
    batches = [share(batch, rank, world) for batch in stream(STEPS)]
    found = []
    for divided in (True, False):
        model = network()
        optimizer = THOR(model, **OPTIONS, distributed=Distributed(divide_curvature=divided))
        train(DDP(model), optimizer, batches[:2])
        torch.manual_seed(1)
        model.head = nn.Linear(7, 5).double()
        optimizer.add_param_group({"params": list(model.head.parameters())})
        train(DDP(model), optimizer, batches[2:])
        assert optimizer.curvature["head"].refreshes
        assert bool(optimizer.curvature["head"].stored.owners) is divided
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, p in found[0].items():
        assert_same(p, found[1][name], name)


def test_a_replaced_layer_is_divided_too(run):
    run(2, replaced)


def test_one_process_keeps_everything():
    model = network()
    optimizer = THOR(model, **OPTIONS, distributed=Distributed(divide_curvature=True))
    train(model, optimizer, stream(2))
    optimizer.consolidate_state_dict()
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))


def test_the_option_is_checked():
    with pytest.raises(ValueError, match="divide_curvature='yes': divide_curvature must be True or False"):
        THOR(network(), distributed=Distributed(divide_curvature="yes"))
