"""A resumed run equals a run that never stopped, in any division; damaged files are not loaded."""

import dataclasses
import errno
import os
import shutil

import noisy
import pytest
import torch
from safetensors.torch import load_file, save_file

from command_line import contents
from sums import sha256
from tiny import assert_same
from torch_thor.errors import UserError
from torch_thor.training import checkpoint
from torch_thor.training.checkpoint import newest, open_checkpoint
from torch_thor.training.loop import train
from torch_thor.training.parallel import Ranks
from torch_thor.training.run import build

WAYS = {"one": (1, "ddp"), "ddp": (2, "ddp"), "fsdp": (2, "fsdp"), "hsdp": (4, "hsdp")}


@pytest.fixture
def on(pool, tmp_path):
    """Run `go` in one of the WAYS; gives the result of each rank."""

    def start(way, folder, given, name, **options):
        world, parallel = WAYS[way]
        given = {**given, "parallel": parallel, **({"shards": 2} if way == "hsdp" else {})}
        return pool.run(world, tmp_path, _go, folder, given, name, options)

    return start


def _go(rank, world, folder, given, name, options):
    return noisy.go(folder, noisy.recipe(**given), name, Ranks(rank, world), **options)


@pytest.mark.parametrize(
    ("way", "name"),
    [  # shards take seconds to start: the fast tests have one way and one optimizer
        pytest.param(way, name, marks=[pytest.mark.slow] * slow)
        for way in WAYS
        for name in noisy.OPTIMIZERS
        if (way, name) != ("hsdp", "sgd")
        for slow in [way != "one" and (way, name) != ("fsdp", "thor-muon")]
    ],
)
def test_resumed_equals_never_stopped_bit_for_bit(on, tmp_path, way, name):
    whole = on(way, tmp_path / "whole", {}, name)
    for stop_at in (1, 4, 7):  # the first step, a refresh, neither; none is an evaluation
        cut = on(way, tmp_path / f"cut{stop_at}", {}, name, stop_at=stop_at)
        rest = on(way, tmp_path / f"cut{stop_at}", {}, name, resume=True)
        for (seen, end), (before, _), (after, found) in zip(whole, cut, rest, strict=True):
            assert before + after == seen
            assert_same(found, end)


DIVISIONS = [("ddp", "one"), ("one", "ddp"), ("fsdp", "one"), ("one", "fsdp"), ("fsdp", "ddp")]


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (*pair, name)
        for pair in DIVISIONS
        for name in noisy.OPTIMIZERS
        # each process orthogonalises its own rows
        if (name, "fsdp" in pair) != ("thor-muon", True)
    ],
)
def test_loads_into_another_division(on, tmp_path, before, after, name):
    """Without dropout and batch statistics, and with blocks of one row, all train alike."""
    own = {key: dict(values) for key, values in noisy.OPTIMIZERS.items()}
    for key in ("thor", "thor-muon"):
        own[key] |= {"split_dim": 1, "max_update_ratio": None}
    given, task = {"ema_decay": None, "optimizers": own}, noisy.Noisy(noisy.Quiet)
    on(before, tmp_path, given, name, stop_at=4, task=task)
    (seen, (weights, state)), *_ = on(after, tmp_path, given, name, resume=True, task=task)
    (wanted, (expected, end)), *_ = on("one", tmp_path / "whole", given, name, task=task)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(seen, wanted[-len(seen) :])
    for parameter, values in end["optimizer"]["state"].items():
        found = state["optimizer"]["state"][parameter]
        torch.testing.assert_close({**found, "row_shards": 1}, {**values, "row_shards": 1})


FILES = ("model.safetensors", "averaged.safetensors", "state.pt", "recipe.yaml", "manifest.json")


def built(task=None, **given):
    return build(noisy.recipe(**given), "thor", task or noisy.Noisy(), Ranks())


@pytest.fixture
def trained():
    """A run after two steps."""
    run = built(name="noisy", steps=2, eval_interval=1)
    train(run)
    return run


def save(folder, run, step, keep=5, best=None):
    run.step, run.recipe = step, run.recipe.model_copy(update={"keep_checkpoints": keep})
    run.best = None if best is None else dataclasses.replace(run.score, step=best)
    checkpoint.save(folder, run, 7)
    return folder / f"step-{step:08d}"


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.glob("**/*step-*"))


def test_damage_is_named_and_the_checkpoint_before_is_taken(trained, tmp_path):
    old = save(tmp_path, trained, 1)
    for name in FILES:
        new, said = save(tmp_path, trained, 2), []
        content = (new / name).read_bytes()
        (new / name).write_bytes(content[: len(content) // 2])
        assert newest(tmp_path, said.append).path == old, name
        assert [line.partition(" (")[0] for line in said] == [f"checkpoint {new} is damaged"]
    (old / FILES[0]).unlink()
    with pytest.raises(UserError, match=r"every checkpoint in .* is damaged: start again with"):
        newest(tmp_path, said.append)


def test_a_full_disk_leaves_older_checkpoints_whole(trained, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(tmp_path, trained, 1)
    before = contents(tmp_path)
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(UserError, match="step-00000003 cannot be written"):
        save(tmp_path, trained, 3, keep=1)
    assert contents(tmp_path) == before


def test_newest_and_best_are_kept_and_copies_of_a_user_stay(trained, tmp_path):
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (12, 3)):
        save(tmp_path, trained, step, 2, best)
        assert open_checkpoint(tmp_path / "best").step == best
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000012"]
    shutil.copytree(tmp_path / "step-00000012", tmp_path / "step-00000012.bak")
    save(tmp_path, trained, 13, 1, 13)
    assert names(tmp_path) == ["step-00000012.bak", "step-00000013"]


def test_checkpoints_with_other_data_or_another_network_are_refused(trained, tmp_path):
    saved = open_checkpoint(save(tmp_path, trained, 2))
    more = noisy.Noisy()
    more.data = {"samples": 61}
    for task, said in (
        (more, r"began with other data \(samples\): give those"),
        (noisy.Noisy(noisy.Quiet), "does not contain the weights of this network: 19 differ"),
    ):
        with pytest.raises(UserError, match=said):
            saved.restore(built(task))


@pytest.fixture
def file(tmp_path):
    """Weights of another seed."""
    torch.manual_seed(7)
    save_file(noisy.Net().double().state_dict(), tmp_path / "mine.safetensors")
    return tmp_path / "mine.safetensors"


def started(path, task=None, **given):
    return built(task, weights=str(path), **given)


def test_a_training_and_its_average_start_from_the_weights(file):
    wanted = load_file(file)
    run = started(file, weights_sha256=sha256(file))
    for found in (run.model.state_dict(), run.average.module.state_dict()):
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    plain = built().model.state_dict()
    given = {name: value for name, value in wanted.items() if "num_batches_tracked" not in name}
    save_file({**given, "head.weight": torch.zeros(9, 8), "extra": torch.zeros(1)}, file)
    found = started(file, weights_except=("head", "extra", "lists.1*")).model.state_dict()
    for name, tensor in found.items():
        is_plain = name.startswith(("head", "lists.1"))
        assert torch.equal(tensor, (plain if is_plain else {**plain, **given})[name]), name


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"weights_except": ("haed",)}, "weights_except=haed matches no weight"),
        ({"weights_sha256": "0123"}, "not have the checksum weights_sha256=0123"),
    ],
)
def test_weights_that_do_not_fit_are_refused(file, given, said):
    with pytest.raises(UserError, match=said):
        started(file, **given)
