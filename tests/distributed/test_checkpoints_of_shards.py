"""Checkpoints of torch.distributed.checkpoint, saved on some ranks and loaded on others."""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from joined import (
    OPTIONS,
    ROWS,
    alone,
    assert_same_weights,
    digest,
    linear,
    made,
    shares,
    stream,
    train,
)
from torch_thor import ThorMuon

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a view")
WAYS = {"ddp-1": ("ddp", 1), "ddp-2": ("ddp", 2), "ddp-4": ("ddp", 4)}
WAYS |= {"fsdp-2": ((2,), 2), "fsdp-4": ((4,), 4), "hsdp": ((2, 2), 4)}
STEPS, SAVED = 9, {"before": 2, "at": 3, "after": 4}  # steps 0, 3 and 6 refresh
FIXED = {**ROWS, "trace_thresholds": (0.0, 0.0)}
HOW = {
    "plainly": {},
    "in the background": {},
    "flattened": {"flatten_optimizer_state_dict": True},  # keys are made of the names of parameters
    "whole": {"full_state_dict": True, "cpu_offload": True},  # as a file of one process
}


def save(rank, world, way, path, how, count, **options):
    """Train, save, and go on; returns the bits in the end."""
    model, optimizer = made(way, **{**FIXED, **options})
    batches = shares(stream(STEPS), rank, world)
    train(model, optimizer, batches[:count])
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**HOW[how]))
    saved = {"model": weights, "optimizer": state}
    saving = None
    # its collectives would meet those of the training in the default group
    if how == "in the background":
        saving = dcp.async_save(saved, checkpoint_id=path, process_group=dist.new_group())
    elif how != "whole":
        dcp.save(saved, checkpoint_id=path)
    elif rank == 0:
        torch.save(saved, path)
    train(model, optimizer, batches[count:])  # which must not change what is being saved
    if saving is not None:
        saving.result()
    return digest(model, optimizer)


def load(rank, world, way, path, how, count, **options):
    """Go on from a checkpoint, as one process that has never stopped; returns the bits."""
    model, optimizer = made(way, **{**FIXED, **options})
    if how == "whole":
        given = torch.load(path) if rank == 0 else {"model": {}, "optimizer": {}}
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world > 1)
        set_model_state_dict(model, given["model"], options=whole)
        set_optimizer_state_dict(model, optimizer, given["optimizer"], options=whole)
    else:
        form = StateDictOptions(**HOW[how])
        weights, state = get_state_dict(model, optimizer, options=form)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        loaded = {"model_state_dict": weights, "optim_state_dict": state}
        set_state_dict(model, optimizer, **loaded, options=form)
    train(model, optimizer, shares(stream(STEPS), rank, world)[count:])
    twin, other = alone(**{**FIXED, **options})
    train(twin, other, stream(STEPS))
    assert_same_weights(model, twin)
    counts = [[layer.refreshes for layer in one.curvature.values()] for one in (optimizer, other)]
    assert counts[0] == counts[1]
    return digest(model, optimizer)


ANYTIME = {"method": ThorMuon, "anytime": True}
CASES = [
    ("fsdp-2", "at", "ddp-1", "plainly", {}),
    ("fsdp-2", "at", "fsdp-4", "in the background", {"method": ThorMuon}),
    ("fsdp-2", "at", "ddp-1", "plainly", ANYTIME),
    ("ddp-2", "after", "fsdp-2", "whole", ANYTIME),
    ("ddp-2", "after", "ddp-2", "flattened", {}),
    ("fsdp-2", "after", "fsdp-2", "flattened", {}),
    ("fsdp-2", "after", "ddp-1", "whole", {}),
    ("ddp-2", "after", "fsdp-4", "plainly", {}),
]
SLOW = [
    ("ddp-1", "before", "fsdp-2", "plainly", {}),
    ("ddp-2", "after", "hsdp", "plainly", {}),
    ("fsdp-4", "at", "fsdp-2", "plainly", {}),
    ("hsdp", "at", "hsdp", "plainly", {}),
    ("fsdp-2", "after", "fsdp-4", "in the background", {"factor_decay": 0.5}),
    ("fsdp-2", "after", "hsdp", "whole", {}),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]


@pytest.mark.parametrize(("before", "moment", "after", "how", "options"), CASES)
def test_goes_on_as_one_process_that_never_stopped(
    run, tmp_path, before, moment, after, how, options
):
    """On as many ranks, with the bits of the first training."""
    (way, world), (others, other_world) = WAYS[before], WAYS[after]
    given = {"path": str(tmp_path / "checkpoint"), "how": how, "count": SAVED[moment], **options}
    wanted = run(world, functools.partial(save, way=way, **given))
    found = run(other_world, functools.partial(load, way=others, **given))
    assert before != after or found == wanted


WIDE = {"split_dim": 4, "max_update_ratio": None, "trace_thresholds": (0.0, 0.0)}


def narrow():
    """With four rows in the middle, of which each of four shards has one."""
    model = linear()
    model[3], model[5] = nn.Linear(11, 4, bias=False).double(), nn.Linear(4, 5).double()
    return model


def factors(rank, world, path, loads, build):
    """Whole factors, and inverses, of a training that is saved, or of one that loads it."""
    model, optimizer = made((world,) if world > 1 else "ddp", build, **{**OPTIONS, **WIDE})
    if not loads:
        train(model, optimizer, shares(stream(1), rank, world))
    weights, state = get_state_dict(model, optimizer)
    if loads:
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    else:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    layers = optimizer.curvature.items()
    return {name: (*layer.factors(), *layer.inverses()) for name, layer in layers}


def blocks(rows, shards, split_dim):
    """True where a factor of so many rows has elements."""
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    for shard in torch.arange(rows).chunk(shards):
        for block in shard.split(split_dim):
            mask[block[0] : block[-1] + 1, block[0] : block[-1] + 1] = True
    return mask


@pytest.mark.parametrize("build", [linear, narrow])
@pytest.mark.parametrize(
    ("before", "after"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 2), (4, 1), (2, 2)]
)
def test_blocks_are_cut_again_at_the_new_shards(run, tmp_path, before, after, build):
    """What is in an old and a new block stays, and is inverted with the damping of now."""
    path = str(tmp_path / "checkpoint")
    saved, *_ = run(before, factors, path, False, build)
    loaded, *others = run(after, factors, path, True, build)
    for name, (a, g, a_inverse, g_inverse) in loaded.items():
        assert all(all(map(torch.equal, other[name], loaded[name])) for other in others)
        old_a, old_g, *_ = saved[name]
        assert torch.equal(a, old_a)
        stays = blocks(len(g), after, 4) & blocks(len(g), before, 4)
        assert torch.equal(g, torch.where(stays, old_g, 0.0))
        for matrix, inverse, shards in ((a, a_inverse, 1), (g, g_inverse, after)):
            identity = torch.eye(len(matrix), dtype=torch.float64)
            damped = matrix + OPTIONS["damping"] ** 0.5 * identity
            wanted = torch.where(blocks(len(matrix), shards, 4), torch.linalg.inv(damped), 0.0)
            torch.testing.assert_close(inverse, wanted)
