"""Checkpoints of torch.distributed.checkpoint, saved on some ranks and loaded on others."""

import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
    assert_same_weights,
    digest,
    linear,
    made,
    shares,
    single,
    stream,
    train,
)
from torch_thor import ThorMuon

pytestmark = pytest.mark.filterwarnings("ignore:.*returns a view")
WAYS = {"ddp-1": ("ddp", 1), "ddp-2": ("ddp", 2)}
WAYS |= {"fsdp-2": ((2,), 2), "fsdp-4": ((4,), 4), "hsdp": ((2, 2), 4)}
STEPS, SAVED = 9, {"at": 3, "after": 4}  # steps 0, 3 and 6 refresh
FIXED = {**ROWS, "trace_thresholds": (0.0, 0.0)}
HOW = {
    "plainly": {},
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
    if how != "whole":
        dcp.save(saved, checkpoint_id=path)
    elif rank == 0:
        torch.save(saved, path)
    train(model, optimizer, batches[count:])
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
    twin, other = single(**{**FIXED, **options})
    train(twin, other, stream(STEPS))
    assert_same_weights(model, twin)
    assert [layer.refreshes for layer in optimizer.curvature.values()] == [
        layer.refreshes for layer in other.curvature.values()
    ]
    return digest(model, optimizer)


ANYTIME = {"method": ThorMuon, "anytime": True}
AVERAGE = {"factor_decay": 0.5}
CASES = [
    ("fsdp-2", "at", "ddp-1", "plainly", {}),
    ("fsdp-2", "at", "fsdp-4", "plainly", AVERAGE),
    ("ddp-2", "after", "fsdp-2", "whole", ANYTIME),
    ("ddp-2", "after", "ddp-2", "flattened", {}),
    ("fsdp-2", "after", "fsdp-2", "flattened", {}),
    ("fsdp-2", "after", "ddp-1", "whole", {}),
    ("ddp-2", "after", "fsdp-4", "plainly", {}),
    pytest.param("fsdp-4", "at", "fsdp-2", "plainly", {}, marks=pytest.mark.slow),
    pytest.param("hsdp", "at", "hsdp", "plainly", {}, marks=pytest.mark.slow),
    pytest.param("fsdp-2", "after", "hsdp", "whole", {}, marks=pytest.mark.slow),
]


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


def factors(rank, world, path, loads):
    """Whole factors, and inverses, of a training that is saved, or that loads what was saved."""
    model, optimizer = made((world,) if world > 1 else "ddp", linear, **WIDE)
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


@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1), (2, 4), (4, 2), (2, 2)])
def test_blocks_are_cut_again_at_the_new_shards(run, tmp_path, before, after):
    """What is in an old and a new block stays, and is inverted with the damping of now."""
    path = str(tmp_path / "checkpoint")
    saved, *_ = run(before, factors, path, False)
    loaded, *others = run(after, factors, path, True)
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
