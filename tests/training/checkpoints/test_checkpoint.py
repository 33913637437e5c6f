"""Checkpoints: whole or not there, damage is noticed, and loading runs no code."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from sums import add_checksum, sha256
from torch_thor.training import DamagedCheckpointError, UserError
from torch_thor.training.checkpoints import checkpoint, newest_whole, open_checkpoint

FILES = [checkpoint.WEIGHTS, checkpoint.STATE, checkpoint.RECIPE, checkpoint.MANIFEST]


def save(folder, step, keep=5):
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    state = {"optimizer": {}, "step": step}
    return checkpoint.save(folder, model, state, step=step, optimizer="sgd", recipe=f"seed: {step}\n", keep=keep), model


def test_round_trip(tmp_path):
    path, model = save(tmp_path, 7)
    saved = newest_whole(tmp_path, pytest.fail)
    assert (saved.path, saved.step, saved.optimizer, saved.recipe_text) == (path, 7, "sgd", "seed: 7\n")
    assert saved.load_state() == {"optimizer": {}, "step": 7}
    other = nn.Linear(3, 2)
    saved.load_weights(other)
    assert torch.equal(other.weight, model.weight)


def test_shared_weights_are_written_once_and_always_as_the_same_bytes(tmp_path):
    layer = nn.Linear(3, 3)
    model = nn.Sequential(*[layer] * 8, nn.Linear(3, 2))
    about = {"step": 1, "optimizer": "sgd", "recipe": "seed: 1\n", "keep": 1}
    paths = [checkpoint.save(tmp_path / name, model, {}, average=model, **about) for name in ("one", "other")]
    for file in (checkpoint.WEIGHTS, checkpoint.AVERAGED):
        one, other = [(path / file).read_bytes() for path in paths]
        assert one == other
        assert load_file(paths[0] / file).keys() == {"0.weight", "0.bias", "8.weight", "8.bias"}
    loaded = nn.Sequential(*[nn.Linear(3, 3)] * 8, nn.Linear(3, 2))
    open_checkpoint(paths[0]).load_weights(loaded)
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_no_checkpoint_is_none(tmp_path):
    assert newest_whole(tmp_path, pytest.fail) is None
    assert newest_whole(tmp_path / "nothing", pytest.fail) is None


def test_the_newest_ones_are_kept(tmp_path):
    for step in (9, 10, 100):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000100"]


def die(*args, **options):
    raise SystemExit("killed here")


@pytest.mark.parametrize("moment", ["weights", "state", "manifest", "flush 1", "flush 4", "flush 5", "rename"])
def test_killed_while_writing_leaves_the_old_one_whole(tmp_path, monkeypatch, moment):
    old, _ = save(tmp_path, 1)
    with monkeypatch.context() as patch:
        if moment == "weights":
            patch.setattr(checkpoint, "save_file", die)
        elif moment == "state":
            patch.setattr(torch, "save", die)
        elif moment == "manifest":
            patch.setattr(json, "dumps", die)
        elif moment == "rename":
            patch.setattr(type(tmp_path), "rename", die)
        else:
            left, really = [int(moment.split()[1])], os.fsync
            patch.setattr(os, "fsync", lambda fd: die() if left.append(left.pop() - 1) or left[0] == 0 else really(fd))
        with pytest.raises(SystemExit):
            save(tmp_path, 2)
    assert newest_whole(tmp_path, pytest.fail).path == old
    new, _ = save(tmp_path, 2)  # the remains are no obstacle
    assert newest_whole(tmp_path, pytest.fail).path == new
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc to name what was flushed")
def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    flushed, really = [], os.fsync

    def note(descriptor):
        flushed.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        really(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(type(tmp_path), "rename", die)
    with pytest.raises(SystemExit):
        save(tmp_path, 2)
    assert set(flushed) == {*FILES, ".writing-step-00000002"}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "emptied", "removed", "altered"])
def test_damage_is_noticed_and_the_one_before_is_taken(tmp_path, name, damage):
    old, _ = save(tmp_path, 1)
    new, _ = save(tmp_path, 2)
    content = (new / name).read_bytes()
    if damage == "removed":
        (new / name).unlink()
    else:
        changed = {"cut": content[:-3], "emptied": b"", "altered": content[:-3] + b"xyz"}[damage]
        (new / name).write_bytes(changed)
    with pytest.raises(DamagedCheckpointError, match="step-00000002 is damaged"):
        open_checkpoint(new)
    said = []
    assert newest_whole(tmp_path, said.append).path == old
    assert len(said) == 1
    assert "step-00000002" in said[0]
    assert "falling back" in said[0]


def test_all_damaged_is_an_error(tmp_path):
    for step in (1, 2):
        path, _ = save(tmp_path, step)
        (path / checkpoint.WEIGHTS).write_bytes(b"")
    with pytest.raises(DamagedCheckpointError, match="every checkpoint"):
        newest_whole(tmp_path, lambda line: None)


def test_loading_runs_no_code(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "evil"),))

    path, _ = save(tmp_path, 1)
    (path / checkpoint.STATE).write_bytes(pickle.dumps({"optimizer": Evil()}, protocol=2))
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    del manifest["checksum"]
    manifest["sha256"][checkpoint.STATE] = sha256(path / checkpoint.STATE)  # a forger can do sums too
    (path / checkpoint.MANIFEST).write_text(json.dumps(add_checksum(manifest)))
    with pytest.raises(DamagedCheckpointError, match="cannot be loaded"):
        open_checkpoint(path).load_state()
    assert not (tmp_path / "evil").exists()


def test_weights_of_another_network_are_refused(tmp_path):
    path, _ = save(tmp_path, 1)
    for other in (nn.Linear(4, 2), nn.Linear(3, 2, bias=False)):
        with pytest.raises(
            UserError, match=r"does not contain the weights of this network \((size mismatch for weight|Unexpected key)"
        ):
            open_checkpoint(path).load_weights(other)
