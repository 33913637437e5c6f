"""THOR under FSDP2 and HSDP takes the steps of one process that cuts its blocks at the same places, in float64.

Blocks of one row are cut alike however rows are divided. With larger blocks, the reference has a layer for each shard.
"""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from joined import OPTIONS, alone, mean_loss, part, share, stream
from sharded import GLOBAL, in_row_parts, joined_parts, mesh_of, sharded, whole_weights
from torch_thor import THOR, Distributed

MESHES = {"fsdp-1": (1,), "fsdp-2": (2,), "fsdp-4": (4,), "hsdp": (2, 2), "replicas-alone": (2, 1)}
INNER = ("images.0", "attention")  # these are sharded on their own
GROUPED = "images.3"  # a convolution of two groups, which shards would cut


def size(shape):
    return torch.Size(shape).numel()


def steps_of_both(model, optimizer, twin, its_optimizer, rank, world, *, count=8, micro=1, scaler=None, skipped=()):
    """Train both; return the collectives that each step of THOR started, and the decisions of both."""
    sent, decisions = [], []
    for number, batch in enumerate(stream(count)):
        for i in range(micro):
            inputs, labels = part(share(batch, rank, world), slice(i, None, micro))
            loss = mean_loss(model(inputs), labels) / micro
            (loss if scaler is None else scaler.scale(loss)).backward()
        mean_loss(twin(batch[0]), batch[1]).backward()
        if number in skipped:
            gradient = next(model.parameters()).grad
            if rank == world - 1:
                gradient.to_local().fill_(torch.nan)
            its_optimizer.param_groups[0]["params"][0].grad.fill_(torch.nan)
        with CommDebugMode() as counted:
            optimizer.step() if scaler is None else scaler.step(optimizer)
        its_optimizer.step()
        if scaler is not None:
            scaler.update()
        sent.append(counted.get_total_counts())
        decisions.append([{e.layer: e.decision for e in one.last_refresh} for one in (optimizer, its_optimizer)])
        optimizer.zero_grad()
        its_optimizer.zero_grad()
    return sent, decisions


def assert_same_weights(model, twin, **rounding):
    ours = whole_weights(model)
    for name, theirs in joined_parts(twin).items():
        torch.testing.assert_close(
            ours[name], theirs, **{"rtol": 1e-9, "atol": 1e-12, **rounding}, msg=lambda m, at=name: f"{at}: {m}"
        )


def both_ways(rank, world, shape, options, micro=1, fsdp=None, skipped=()):
    """The network of many kinds of layers, with blocks of one row, which lie alike however rows are divided."""
    warnings.simplefilter("ignore")  # FSDP2 warns of the view that attention returns
    options = {"split_dim": 1, **options}
    model, optimizer = sharded(mesh_of(shape), inner=INNER, fsdp=fsdp, **options)
    twin, its_optimizer = alone(**{**GLOBAL, **options, "skip": [GROUPED, *options.get("skip", ())]})
    sent, decisions = steps_of_both(model, optimizer, twin, its_optimizer, rank, world, micro=micro, skipped=skipped)
    rounding = {"rtol": 1e-6, "atol": 1e-8} if "scaling" in options else {}
    assert_same_weights(model, twin, **rounding)
    assert all(ours == theirs for ours, theirs in decisions)
    assert optimizer.skipped_steps == its_optimizer.skipped_steps == len(skipped)
    kinds = {decision.name for ours, _ in decisions for decision in ours.values()}
    on_others = [n for n, (ours, _) in zip(sent, decisions, strict=True) if not ours]
    return kinds, on_others


CASES = {
    "plain": {"options": {}},
    "accumulation": {"options": {"weight_decay": 0.1}, "micro": 3},
    "running-average": {"options": {"factor_decay": 0.6, "nesterov": True}},
    "spectral": {"options": {"scaling": "spectral", "damping": 0.1, "skip": ["attention.v_proj"]}},
    "kept-after-forward": {"options": {"momentum": 0.0}, "fsdp": {"reshard_after_forward": False}},
    "cpu-offload": {"options": {}, "fsdp": {"offload_policy": CPUOffloadPolicy(pin_memory=False)}},
}


# every mesh with the plain options, every case on two shards, and what replicas could spoil on two by two
MET = [("plain", mesh) for mesh in MESHES] + [(name, "fsdp-2") for name in CASES if name != "plain"]
MET += [("accumulation", "hsdp"), ("spectral", "hsdp")]


@pytest.mark.parametrize(("name", "mesh"), MET)
def test_equals_one_process_and_sends_nothing_on_ordinary_steps(run, mesh, name):
    shape = MESHES[mesh]
    case = {"micro": 1, "fsdp": None, **CASES[name]}
    for kinds, on_others in run(size(shape), both_ways, shape, case["options"], case["micro"], case["fsdp"]):
        assert on_others
        assert set(on_others) == {0}
        if name == "plain":
            assert kinds == {"UPDATE", "KEEP", "STOP"}


@pytest.mark.parametrize("mesh", ["fsdp-2", "hsdp"])
def test_the_global_bound_sends_one_number(run, mesh):
    """After all have agreed that they take the step."""
    shape = MESHES[mesh]
    for _, on_others in run(size(shape), both_ways, shape, {"kl_clip": 1e-4}):
        assert set(on_others) == {1 + (size(shape) > 1)}


@pytest.mark.parametrize("mesh", ["fsdp-2", "hsdp"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(run, mesh):
    """Steps 0 and 1 would refresh, and step 4 is ordinary."""
    shape = MESHES[mesh]
    for _, on_others in run(size(shape), both_ways, shape, {"nonfinite": "skip"}, 1, None, (0, 4)):
        assert set(on_others) == {1}


def linear():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 11),
        nn.Tanh(),
        nn.Linear(11, 7, bias=False),
        nn.Tanh(),
        nn.Linear(7, 5),
        nn.Tanh(),
        nn.Linear(5, 5),
    ).double()


def words(batch):
    """The first numbers of the images, as rows."""
    return batch[0].flatten(1)[:, :8]


def with_a_layer_for_each_shard(rank, world, options):
    """Eleven, seven and five rows: no shard has as many as the next, and the last of four have none."""
    options = {**OPTIONS, "split_dim": 3, "trace_thresholds": (0.0, 0.0), "update_interval": 2, **options}
    twin = in_row_parts(linear(), world)
    model = fully_shard(linear(), mesh=mesh_of((world,)))
    optimizer, its_optimizer = (
        THOR(model, **options),
        THOR(twin, **options, distributed=Distributed(process_group=False)),
    )
    for batch in stream(6):
        inputs, labels = share(batch, rank, world)
        mean_loss(model(words(inputs)), labels).backward()
        mean_loss(twin(words(batch[0])), batch[1]).backward()
        optimizer.step()
        its_optimizer.step()
        optimizer.zero_grad()
        its_optimizer.zero_grad()
    assert_same_weights(model, twin)
    return {name: [None if m is None else m.shape for m in one.factors()] for name, one in optimizer.curvature.items()}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"max_update_ratio": 0.01},
        {"max_update_ratio": None, "split_dim": None},
        {"factor_decay": 0.5, "lr": 0.5},
        {"scaling": "spectral", "max_update_ratio": 0.001, "lr": 0.5},  # all steps are bounded
    ],
    ids=["bounded", "whole-shards", "running-average", "scale-free"],
)
def test_equals_one_process_with_a_layer_for_each_shard(run, world, options):
    for shapes in run(world, with_a_layer_for_each_shard, options):
        wanted = {"0": [(8, 8), (11, 11)], "2": [(11, 11), (7, 7)], "4": [(7, 7), (5, 5)], "6": [(5, 5), (5, 5)]}
        assert shapes == ({n: [a, None] for n, (a, _) in wanted.items()} if "scaling" in options else wanted)
