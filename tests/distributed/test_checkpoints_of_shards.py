"""Checkpoints of torch.distributed.checkpoint, saved on some ranks and loaded on others, under DDP, FSDP2 and HSDP."""

import warnings

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
from torch.distributed.fsdp import fully_shard

from joined import OPTIONS, alone, mean_loss, parallel, share, stream
from sharded import GLOBAL, mesh_of, sharded, whole_weights
from torch_thor import THOR

WAYS = {"ddp-1": 1, "ddp-2": 2, "fsdp-2": 2, "fsdp-4": 4, "hsdp": 4}
STEPS, SAVED = 9, {"before": 2, "at": 3, "after": 4}  # steps 0, 3 and 6 refresh
FIXED = {**GLOBAL, "split_dim": 1, "skip": "images.3", "trace_thresholds": (0.0, 0.0)}


def made(way, rank, world, **options):
    warnings.simplefilter("ignore")  # FSDP2 warns of the view that attention returns
    options = {**FIXED, **options}
    if way.startswith("ddp"):
        return parallel(rank, world, **options)
    return sharded(mesh_of((2, 2) if way == "hsdp" else (world,)), inner=("attention",), **options)


def train(model, optimizer, batches, rank, world):
    for batch in batches:
        inputs, labels = share(batch, rank, world)
        mean_loss(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def save(rank, world, way, folder, count, options, in_background):
    model, optimizer = made(way, rank, world, **options)
    train(model, optimizer, list(stream(count)), rank, world)
    weights, state = get_state_dict(model, optimizer)
    if in_background:
        others = dist.new_group()  # its collectives would meet those of the training in the default group
        saving = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=folder, process_group=others)
        train(model, optimizer, list(stream(count)), rank, world)  # which must not change what is saved
        saving.result()
    else:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(rank, world, way, folder, count, options):
    """Go on from a checkpoint, beside one process that has never stopped."""
    model, optimizer = made(way, rank, world, **options)
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    batches = list(stream(STEPS))
    train(model, optimizer, batches[count:], rank, world)
    twin, its_optimizer = alone(**{**FIXED, **options})
    train(twin, its_optimizer, batches, 0, 1)
    ours = dict(model.module.named_parameters()) if way.startswith("ddp") else whole_weights(model)
    for name, theirs in twin.named_parameters():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-8, atol=1e-11, msg=lambda m, at=name: f"{at}: {m}")
    return [layer.refreshes for layer in optimizer.curvature.values()]


@pytest.mark.parametrize(
    ("before", "moment", "after"),
    [
        ("ddp-1", "before", "fsdp-2"),
        ("ddp-2", "after", "hsdp"),
        ("fsdp-2", "at", "ddp-1"),
        ("fsdp-2", "after", "fsdp-4"),
        ("fsdp-4", "before", "ddp-2"),
        ("fsdp-4", "at", "fsdp-2"),
        ("hsdp", "before", "ddp-1"),
        ("hsdp", "at", "hsdp"),
    ],
)
def test_goes_on_as_one_process_that_never_stopped(run, tmp_path, before, moment, after):
    """Blocks of one row are cut alike for any number of shards."""
    folder, count = str(tmp_path / "checkpoint"), SAVED[moment]
    run(WAYS[before], save, before, folder, count, {}, False)
    for refreshes in run(WAYS[after], load, after, folder, count, {}):
        assert refreshes == [3] * len(refreshes)


@pytest.mark.parametrize(
    ("options", "moment"),
    [({"scaling": "spectral"}, "at"), ({"factor_decay": 0.5}, "after")],
    ids=["spectral", "average"],
)
def test_other_options_and_saving_in_the_background(run, tmp_path, options, moment):
    folder, count = str(tmp_path / "checkpoint"), SAVED[moment]
    run(2, save, "fsdp-2", folder, count, options, True)
    run(4, load, "fsdp-4", folder, count, options)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 5)).double()


WIDE = {"split_dim": 4, "max_update_ratio": None, "trace_thresholds": (0.0, 0.0)}


def factors_after_saving(rank, world, folder):
    """Whole factors of a training on some ranks, which is saved."""
    model = small() if world == 1 else fully_shard(small(), mesh=mesh_of((world,)))
    optimizer = THOR(model, **{**OPTIONS, **WIDE})
    batch = next(stream(1))
    inputs, labels = share(batch, rank, world)
    mean_loss(model(inputs[0].flatten(1)[:, :6]), labels).backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return {name: [m.tolist() for m in layer.factors()] for name, layer in optimizer.curvature.items()}


def factors_after_loading(rank, world, folder):
    model = small() if world == 1 else fully_shard(small(), mesh=mesh_of((world,)))
    optimizer = THOR(model, **{**OPTIONS, **WIDE})
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return {
        name: [m.tolist() for m in (*layer.factors(), *layer.inverses())] for name, layer in optimizer.curvature.items()
    }


def blocks(rows, shards, split_dim):
    """True where a factor of so many rows has elements."""
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    for shard in torch.arange(rows).chunk(shards):
        for block in shard.split(split_dim):
            mask[block[0] : block[-1] + 1, block[0] : block[-1] + 1] = True
    return mask


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, 4), (2, 1), (2, 4), (4, 2), (4, 1), (2, 2)])
def test_blocks_are_cut_again_at_the_new_shards(run, tmp_path, before, after):
    """Eleven and five rows: what is in an old and a new block stays, and is inverted with the damping of now."""
    folder = str(tmp_path / "checkpoint")
    saved, *_ = run(before, factors_after_saving, folder)
    loaded, *others = run(after, factors_after_loading, folder)
    assert all(other == loaded for other in others)
    for name, (a, g, a_inverse, g_inverse) in loaded.items():
        old_a, old_g = (torch.tensor(m, dtype=torch.float64) for m in saved[name])
        g, a = torch.tensor(g, dtype=torch.float64), torch.tensor(a, dtype=torch.float64)
        assert torch.equal(a, old_a)
        assert torch.equal(g, torch.where(blocks(len(g), after, 4) & blocks(len(g), before, 4), old_g, 0.0))
        for matrix, inverse, shards in ((a, a_inverse, 1), (g, g_inverse, after)):
            damped = matrix + OPTIONS["damping"] ** 0.5 * torch.eye(len(matrix), dtype=torch.float64)
            wanted = torch.where(blocks(len(matrix), shards, 4), torch.linalg.inv(damped), 0.0)
            torch.testing.assert_close(torch.tensor(inverse, dtype=torch.float64), wanted)


def state_of(way, rank, world, folder, options, **made_with):
    """A training of four steps, saved."""
    model, optimizer = made(way, rank, world, **made_with)
    train(model, optimizer, list(stream(4)), rank, world)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(**options))
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    return model, optimizer


def flattened(rank, world, before, after, folder):
    """With the keys that torch makes of the names of parameters and of their state."""
    options = {"flatten_optimizer_state_dict": True}
    model, optimizer = state_of(before, rank, world, folder, options, split_dim=4)
    twin, other = made(after, rank, world, split_dim=4)
    weights, state = get_state_dict(twin, other, options=StateDictOptions(**options))
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(twin, other, model_state_dict=weights, optim_state_dict=state, options=StateDictOptions(**options))
    for layer, own in optimizer.curvature.items():
        for ours, theirs in zip(own.factors(), other.curvature[layer].factors(), strict=True):
            assert torch.equal(ours, theirs)
    rest = list(stream(STEPS))[4:]
    train(model, optimizer, rest, rank, world)
    train(twin, other, rest, rank, world)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p, q = (one.to_local() if hasattr(one, "to_local") else one for one in (p, q))
        assert torch.equal(p, q)


@pytest.mark.parametrize("way", ["ddp-2", "fsdp-2", "hsdp"])
def test_a_flattened_state_goes_on_bit_for_bit(run, tmp_path, way):
    run(WAYS[way], flattened, way, way, str(tmp_path / "checkpoint"))


def whole_state(rank, world, folder):
    """What `full_state_dict` gathers on every rank, as a file of one process."""
    model, optimizer = made("fsdp-2", rank, world)
    train(model, optimizer, list(stream(4)), rank, world)
    weights, state = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save({"model": weights, "optimizer": state}, folder)


def from_whole_state(rank, world, way, folder):
    saved = torch.load(folder)
    model, optimizer = made(way, rank, world)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=world > 1)
    given = saved if rank == 0 or world == 1 else {"model": {}, "optimizer": {}}
    set_model_state_dict(model, given["model"], options=options)
    set_optimizer_state_dict(model, optimizer, given["optimizer"], options=options)
    batches = list(stream(STEPS))
    train(model, optimizer, batches[4:], rank, world)
    twin, its_optimizer = alone(**FIXED)
    train(twin, its_optimizer, batches, 0, 1)
    ours = dict(model.module.named_parameters()) if way.startswith("ddp") else whole_weights(model)
    for name, theirs in twin.named_parameters():
        torch.testing.assert_close(ours[name], theirs, rtol=1e-8, atol=1e-11, msg=lambda m, at=name: f"{at}: {m}")


@pytest.mark.parametrize("way", ["ddp-1", "ddp-2", "fsdp-2", "hsdp"])
def test_a_whole_state_dict_is_loaded(run, tmp_path, way):
    folder = str(tmp_path / "checkpoint.pt")
    run(2, whole_state, folder)
    run(WAYS[way], from_whole_state, way, folder)
