"""A disk that fills up under a checkpoint: one line, what was there stays whole, and the run goes on later."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from command_line import assert_same_runs, checkpoints, command, succeed
from torch_thor.training import UserError
from torch_thor.training.checkpoints import checkpoint, newest_whole, open_checkpoint


def save(folder, step, keep=5):
    torch.manual_seed(step)
    model, average = nn.Linear(30, 20), nn.Linear(30, 20)
    state = {"step": step, "moments": torch.randn(100)}
    return checkpoint.save(
        folder, model, state, step=step, optimizer="sgd", recipe="seed: 0\n", keep=keep, average=average
    )


def full(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for_safetensors(*args, **options):
    raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def full_for_torch(*args, **options):
    try:
        full()
    except OSError:
        raise RuntimeError("[enforce fail at inline_container.cc:671] . unexpected pos 704 vs 598") from None


def on_call(number, really, instead):
    """Fails from the call of that number on."""
    calls = []

    def either(*args, **options):
        calls.append(args)
        return (instead if len(calls) >= number else really)(*args, **options)

    return either


def break_writer(patch, writer):
    kind, number = writer.rsplit(" ", 1)
    target, name, instead = {
        "weights": (checkpoint, "save_file", full_for_safetensors),
        "state": (torch, "save", full_for_torch),
        "text": (Path, "write_text", full),
        "flush": (os, "fsync", full),
        "folder": (Path, "mkdir", full),
        "rename": (Path, "rename", full),
    }[kind]
    patch.setattr(target, name, on_call(int(number), getattr(target, name), instead))


WRITERS = ["weights 1", "weights 2", "state 1", "text 1", "text 2", "flush 1", "flush 3", "folder 2", "rename 1"]


@pytest.mark.parametrize("writer", WRITERS)
def test_the_older_ones_stay_whole_and_nothing_else_is_left(tmp_path, monkeypatch, writer):
    for step in (1, 2):
        save(tmp_path, step)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        break_writer(patch, writer)
        with pytest.raises(UserError) as caught:
            save(tmp_path, 3, keep=1)
    message = str(caught.value)
    assert "\n" not in message
    assert f"{tmp_path / 'step-00000003'} cannot be written (" in message
    assert "No space left on device" in message
    assert "the newest complete one is step-00000002: free some disk space, then continue with --resume" in message
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert newest_whole(tmp_path, pytest.fail).step == 2
    assert open_checkpoint(save(tmp_path, 3, keep=1)).step == 3  # with room again
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_the_first_one_of_all(tmp_path, monkeypatch):
    break_writer(monkeypatch, "state 1")
    with pytest.raises(UserError, match="there is no earlier one: free some disk space"):
        save(tmp_path / "new", 3)
    assert list((tmp_path / "new").iterdir()) == []


def test_what_a_kill_left_half_written_goes(tmp_path):
    (tmp_path / ".writing-step-00000017").mkdir()
    (tmp_path / ".writing-step-00000017" / "model.safetensors").write_bytes(b"half")
    save(tmp_path, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


def test_an_old_one_that_cannot_be_removed_ends_nothing(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", full)
        save(tmp_path, 3, keep=2)
    assert newest_whole(tmp_path, pytest.fail).step == 3
    save(tmp_path, 4, keep=2)  # tried again
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


# The limit on the size of a file stands for the disk: what is written beyond it fails in the kernel, in every library.
LIMITED = """
import resource, sys
from torch_thor.cli import main
from torch_thor.training.checkpoints import checkpoint

limit, really = int(sys.argv.pop(1)), checkpoint.save

def save(*args, **options):
    path = really(*args, **options)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return path

checkpoint.save = save
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs a limit on the size of files")
def test_training_ends_with_one_line_and_goes_on_when_there_is_room(tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    words = ["train", "digits", "optimizer=adamw", "epochs=1", "checkpoint_interval=8", "ema_decay=0.9", "device=cpu"]
    succeed(tmp_path, *words, "--out", "whole")
    weights, state = (
        (tmp_path / "whole/adamw/checkpoints/step-00000016" / name) for name in ("model.safetensors", "state.pt")
    )
    for limit, more in ((weights.stat().st_size - 100, []), (state.stat().st_size - 100, ["--resume"])):
        code, _, err = command(tmp_path, limit, *words, "--out", "run", *more, script=tmp_path / "limited.py")
        assert code == 2, err
        said = [line for line in err.splitlines() if "Warning" not in line]
        assert len(said) == 1, err
        assert "cannot be written (" in said[0]
        assert "File too large" in said[0]
        kept = checkpoints(tmp_path / "run", "adamw")
        assert f"the newest complete one is step-{kept[-1]:08d}" in said[0]
        folder = tmp_path / "run/adamw/checkpoints"
        assert len(list(folder.iterdir())) == len(kept)
        assert all(open_checkpoint(path) for path in folder.iterdir())
    assert kept == [8, 16]
    assert json.loads((tmp_path / "run/adamw/metrics.jsonl").read_text().splitlines()[0])["step"] == 1
    succeed(tmp_path, *words, "--out", "run", "--resume")
    assert_same_runs(tmp_path / "whole", tmp_path / "run", "adamw")
