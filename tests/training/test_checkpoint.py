"""One format for every division: a resumed run is one that never stopped, and what is damaged is
never loaded.
"""

import dataclasses
import errno
import json
import os
import pickle
import re
import shutil
import signal
import sys
from pathlib import Path

import noisy
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from command_line import contents
from tiny import assert_same
from torch_thor.errors import UserError
from torch_thor.training import checkpoint
from torch_thor.training import checkpoint_saving as saving
from torch_thor.training.checkpoint import Checkpoint, newest, open_checkpoint
from torch_thor.training.checkpoint_saving import Saver, listening
from torch_thor.training.errors import DamagedCheckpointError, StoppedError
from torch_thor.training.loop import train
from torch_thor.training.parallel import Ranks
from torch_thor.training.recipes import to_yaml
from torch_thor.training.run import build

WAYS = {"one": (1, "ddp"), "ddp": (2, "ddp"), "fsdp": (2, "fsdp"), "hsdp": (4, "hsdp")}


@pytest.fixture
def on(pool, tmp_path):
    """Run `go` as one of WAYS; gives the result of each rank."""

    def start(way, folder, given, name, **options):
        world, parallel = WAYS[way]
        shards = {"shards": 2} if parallel == "hsdp" else {}
        return pool.run(
            world, tmp_path, _go, folder, given | {"parallel": parallel, **shards}, name, options
        )

    return start


def _go(rank, world, folder, given, name, options):
    return noisy.go(folder, noisy.recipe(**given), name, Ranks(rank, world), **options)


SHARDED = ("fsdp", "hsdp")
CASES = [  # shards take seconds to start, so one way and one optimizer stand for the others
    pytest.param(
        way,
        name,
        marks=[pytest.mark.slow]
        * (way in (*SHARDED, "ddp") and (way, name) != ("fsdp", "thor-muon")),
    )
    for way in WAYS
    for name in noisy.OPTIMIZERS
    if (way, name) != ("hsdp", "sgd")
]


@pytest.mark.parametrize(("way", "name"), CASES)
def test_resumed_equals_never_stopped_bit_for_bit(on, tmp_path, way, name):
    whole = on(way, tmp_path / "whole", {}, name)
    for stop_at in (1, 4, 7):  # the first step, a refresh; none is that of an evaluation
        cut = on(way, tmp_path / f"cut{stop_at}", {}, name, stop_at=stop_at)
        rest = on(way, tmp_path / f"cut{stop_at}", {}, name, resume=True)
        for (seen, end), (before, _), (after, found) in zip(whole, cut, rest, strict=True):
            assert before + after == seen
            assert_same(found, end)


class Interrupted(noisy.Noisy):
    """A signal comes between two batches of an evaluation."""

    def __init__(self, number):
        super().__init__()
        self.number, self.stops, self.measured = number, [], 0

    def held_out(self, ranks):
        for i, batch in enumerate(super().held_out(ranks)):
            if i == 2 and self.number == 0:
                self.stops.append(15)
            yield batch
        self.number -= 1

    def measure(self, net, batch):
        self.measured += 1
        return super().measure(net, batch)


@pytest.mark.parametrize(("number", "step"), [(0, 3), (1, 3), (6, 12), (7, 12)])
def test_a_signal_in_an_evaluation_saves_within_the_batch(tmp_path, number, step):
    """Of the weights or of their average, in the middle or after the last step; the run that
    continues makes the evaluation up.
    """
    wanted, end = noisy.go(tmp_path / "whole", noisy.recipe(), "sgd")
    task = Interrupted(number)
    run, record = build(noisy.recipe(), "sgd", task, Ranks()), noisy.Losses()
    with pytest.raises(StoppedError, match=f"stopped at step {step}, checkpoint written"):
        train(run, [record, Saver(tmp_path / "cut", lambda: 0)], stops=task.stops)
    assert task.measured == 4 * number + 2
    assert run.unevaluated
    rest, found = noisy.go(tmp_path / "cut", noisy.recipe(), "sgd", resume=True)
    assert record.seen + rest == wanted
    assert_same(found, end)


PAIRS = [
    *(
        (before, after, name)
        for before, after in (("ddp", "one"), ("one", "ddp"))
        for name in noisy.OPTIMIZERS
    ),
    # thor-muon is left out: each process orthogonalises its own rows
    *(
        (*pair, name)
        for pair in (("fsdp", "one"), ("one", "fsdp"), ("fsdp", "ddp"))
        for name in ("thor", "sgd")
    ),
]


@pytest.mark.parametrize(("before", "after", "name"), PAIRS)
def test_loads_into_another_division(on, tmp_path, before, after, name):
    """Without dropout and batch statistics, and with blocks of one row, which are cut alike, all
    train alike.
    """
    free = {"split_dim": 1, "max_update_ratio": None}
    own = {
        key: {**values, **free} if key != "sgd" else values
        for key, values in noisy.OPTIMIZERS.items()
    }
    given = {"ema_decay": None, "optimizers": own}
    task = noisy.Noisy(noisy.Quiet)
    on(before, tmp_path, given, name, stop_at=4, task=task)
    (seen, (weights, state)), *_ = on(after, tmp_path, given, name, resume=True, task=task)
    (wanted, (expected, end)), *_ = on("one", tmp_path / "whole", given, name, task=task)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(seen, wanted[-len(seen) :])
    for parameter, values in end["optimizer"]["state"].items():
        found = state["optimizer"]["state"][parameter]
        torch.testing.assert_close({**found, "row_shards": 1}, {**values, "row_shards": 1})


# ---- the files -----------------------------------------------------------------------------------

FILES = ("model.safetensors", "averaged.safetensors", "state.pt", "recipe.yaml", "manifest.json")


@pytest.fixture
def trained():
    """A run after two steps."""
    run = build(
        noisy.recipe(name="noisy", steps=2, eval_interval=1), "thor", noisy.Noisy(), Ranks()
    )
    train(run)
    return run


def save(folder, run, step, keep=5, best=None):
    run.step, run.recipe = step, run.recipe.model_copy(update={"keep_checkpoints": keep})
    run.best = None if best is None else dataclasses.replace(run.score, step=best)
    saving.save(folder, run, 7)
    return folder / f"step-{step:08d}"


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.glob("**/*step-*"))


def harm(path, kind):
    content = path.read_bytes()
    place = {"first": 0, "middle": len(content) // 2, "last": -2}.get(kind)
    if place is not None:
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
    elif kind == "missing":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if kind == "cut" else b"")


def test_round_trip(trained, tmp_path):
    path = save(tmp_path, trained, 2)
    saved = newest(tmp_path, pytest.fail)
    assert saved == Checkpoint(path, 2, "thor", None, {}, 7)
    assert to_yaml(saved.recipe) == to_yaml(trained.recipe)
    assert {file.name for file in path.iterdir()} == {*FILES}
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1
    again = build(trained.recipe, "thor", trained.task, Ranks())
    saved.restore(again, pytest.fail)
    assert_same(noisy.state(again), noisy.state(trained))
    assert again.done
    assert (again.score, again.best) == (trained.score, trained.best)


@pytest.mark.parametrize("kind", ["first", "middle", "last", "cut", "empty", "missing"])
def test_damage_is_named_and_the_one_before_is_taken(trained, tmp_path, kind):
    old = save(tmp_path, trained, 1)
    for name in FILES:
        new, said = save(tmp_path, trained, 2), []
        harm(new / name, kind)
        assert newest(tmp_path, said.append).path == old, name
        assert len(said) == 1
        assert re.search(rf"{new} is damaged: .*{name}.*; falling back", said[0])
    harm(old / FILES[0], kind)
    with pytest.raises(
        DamagedCheckpointError, match=r"every checkpoint in .* is damaged: start again with"
    ):
        newest(tmp_path, said.append)


@pytest.mark.parametrize(
    "text", ["null", "[]", "7", "{}", "[" * 100_000, '{"checksum": []}', "\0", "\xff"]
)
def test_a_manifest_of_another_form_is_damage(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is truncated or altered"):
        open_checkpoint(tmp_path)


def test_a_checkpoint_of_another_step_is_damage(trained, tmp_path):
    save(tmp_path, trained, 99).rename(tmp_path / "step-00000100")
    with pytest.raises(
        DamagedCheckpointError, match="step-00000100 is damaged: it contains step 99"
    ):
        open_checkpoint(tmp_path / "step-00000100")


def test_nothing_in_it_is_executed(trained, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    path = save(tmp_path, trained, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    for content in (
        pickle.dumps({"optimizer": Evil()}),
        pickle.dumps(Evil(), protocol=2),
        b"PK\3\4",
    ):
        (path / "state.pt").write_bytes(content)
        del manifest["checksum"]
        # a forger can do sums too
        manifest["sha256"]["state.pt"] = checkpoint.sha256(path / "state.pt")
        manifest["checksum"] = checkpoint.digest(manifest)
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DamagedCheckpointError, match=r"state.pt cannot be loaded"):
            open_checkpoint(path).restore(build(trained.recipe, "thor", trained.task, Ranks()))
    assert not (tmp_path / "evil").exists()


def die(*args, **options):
    raise SystemExit("killed here")


def full(*args, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for_safetensors(*args, **options):
    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


def full_for_torch(*args, **options):
    try:
        full()
    except OSError:
        raise RuntimeError(
            "[enforce fail at inline_container.cc:671] . unexpected pos 704 vs 598"
        ) from None


MOMENTS = [  # where, and the call that fails there
    *((saving, "save_file", number, full_for_safetensors) for number in (1, 2)),
    (torch, "save", 1, full_for_torch),
    *((Path, "write_text", number, full) for number in (1, 2)),
    *((os, "fsync", number, full) for number in (1, 5, 6)),
    (Path, "mkdir", 2, full),
    (Path, "rename", 1, full),
]


@pytest.mark.parametrize(("where", "name", "number", "failing"), MOMENTS)
def test_a_full_disk_or_a_kill_leaves_the_older_ones_whole(
    trained, tmp_path, monkeypatch, where, name, number, failing
):
    for step in (1, 2):
        save(tmp_path, trained, step)
    before, really = contents(tmp_path), getattr(where, name)
    for instead in (failing, die):
        calls = []

        def either(*args, calls=calls, instead=instead, **options):
            calls.append(args)
            return (instead if len(calls) == number else really)(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, either)
            with pytest.raises(SystemExit if instead is die else UserError) as caught:
                save(tmp_path, trained, 3, keep=1)
        if instead is not die:
            assert "\n" not in str(caught.value)
            assert f"{tmp_path / 'step-00000003'} cannot be written (" in str(caught.value)
            assert "No space left on device" in str(caught.value)
            assert "the newest complete one is step-00000002: free some disk space, then" in str(
                caught.value
            )
            assert contents(tmp_path) == before
        assert newest(tmp_path, pytest.fail).step == 2
    save(tmp_path, trained, 3, keep=1)  # what a kill has left is no obstacle
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_everything_is_on_the_disk_before_the_rename(trained, tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(
        os, "fsync", lambda number: flushed.append(Path(f"/proc/self/fd/{number}").readlink().name)
    )
    monkeypatch.setattr(Path, "rename", die)
    with pytest.raises(SystemExit):
        save(tmp_path, trained, 2)
    assert set(flushed) == {*FILES, ".writing-step-00000002"}


def test_newest_and_best_are_kept(trained, tmp_path):
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3), (12, 3)):
        save(tmp_path, trained, step, 2, best)
        assert open_checkpoint(tmp_path / "best").step == best
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000012"]
    save(tmp_path, trained, 13, 1, 13)
    assert names(tmp_path) == ["step-00000013"]
    # of a run that continues because those of later steps are damaged
    save(tmp_path, trained, 11, 1, 11)
    assert names(tmp_path) == ["step-00000011", "step-00000013"]


def test_the_best_one_of_a_copy_that_followed_the_link_is_replaced(trained, tmp_path):
    save(tmp_path / "run", trained, 1, 2, 1)
    shutil.copytree(tmp_path / "run", tmp_path / "copy", symlinks=False)
    assert not (tmp_path / "copy" / "best").is_symlink()
    for step, best in ((2, 2), (3, 2)):
        save(tmp_path / "copy", trained, step, 1, best)
        assert (tmp_path / "copy" / "best").is_symlink()
        assert open_checkpoint(tmp_path / "copy" / "best").step == 2
    assert names(tmp_path / "copy") == ["step-00000002", "step-00000003"]


def test_an_old_one_that_cannot_be_removed_ends_nothing(trained, tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, trained, step)
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", full)
        save(tmp_path, trained, 3, keep=2)
    # whose files are gone is no checkpoint any more
    assert not (tmp_path / "step-00000001").exists()
    saving.settle(tmp_path, trained)  # tried again, as by a run that continues
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_shared_weights_are_written_once(tmp_path):
    given, task = noisy.recipe(steps=2), noisy.Noisy(noisy.Tied)
    noisy.go(tmp_path / "cut", given, "sgd", task=task, stop_at=1)
    stored = load_file(newest(tmp_path / "cut", pytest.fail).path / "model.safetensors")
    assert len(stored) == len(list(noisy.Tied().parameters()))
    assert_same(
        noisy.go(tmp_path / "cut", given, "sgd", task=task, resume=True)[1],
        noisy.go(tmp_path / "whole", given, "sgd", task=task)[1],
    )


def test_what_belongs_to_another_run_is_refused(trained, tmp_path):
    saved = open_checkpoint(save(tmp_path, trained, 2))
    more, words = noisy.Noisy(), noisy.Noisy()
    more.samples, words.tokenizer_checksum, words.tokenizer_file = 61, "b" * 64, "tokenizer.json"
    misfit = noisy.recipe(optimizers={"sgd": {"decay_filter": "*.weight"}})
    for change, given, name, task, said in (
        (
            {},
            trained.recipe,
            "thor",
            more,
            "began with 60 training samples, and the data have 61 now",
        ),
        (
            {},
            trained.recipe,
            "thor",
            noisy.Noisy(noisy.Tied),
            r"\(again.bias: missing, the network has \(8,\)",
        ),
        ({}, trained.recipe, "sgd", trained.task, "belongs to optimizer thor, not sgd: move it"),
        ({"optimizer": "sgd"}, misfit, "sgd", trained.task, "the state of sgd does not fit"),
        (
            {"tokenizer": "a" * 64},
            trained.recipe,
            "thor",
            words,
            r"tokenizer.json is not .* bbbbbbbbbbbb, not aaaaaaaaaaaa",
        ),
    ):
        with pytest.raises(UserError, match=said):
            dataclasses.replace(saved, **change).restore(build(given, name, task, Ranks()))


@pytest.mark.parametrize("name", saving.SIGNALS)
def test_each_signal_is_noted_once(name):
    number = getattr(signal, name)
    before = signal.signal(number, lambda *_: None)
    try:
        with listening() as received:
            os.kill(os.getpid(), number)
            assert received == [number]
            os.kill(os.getpid(), number)  # has its usual effect
            assert received == [number]
        # as nohup does with SIGHUP, and a shell with SIGINT of what it starts in the background
        signal.signal(number, signal.SIG_IGN)
        with listening() as received:
            os.kill(os.getpid(), number)
            assert received == ([] if name == "SIGHUP" else [number])
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("what", ["symlink_to", "chmod"])
def test_links_and_permissions_that_cannot_be_made_end_nothing(tmp_path, monkeypatch, capsys, what):
    def refuse(*_, **__):
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    wanted, end = noisy.go(tmp_path / "whole", noisy.recipe(keep_checkpoints=1), "sgd")
    told = sys.modules[saving.if_offered.__module__]  # told once in a process
    monkeypatch.setattr(told, "_told", set())
    monkeypatch.setattr(Path, what, refuse)
    given = noisy.recipe(keep_checkpoints=1)
    before, _ = noisy.go(tmp_path / "run", given, "sgd", stop_at=8)
    after, found = noisy.go(tmp_path / "run", given, "sgd", resume=True)
    assert before + after == wanted
    assert_same(found, end)
    # the best one is kept, although no link tells it
    names = {path.name for path in (tmp_path / "run").glob("step-*")}
    assert names == {path.name for path in (tmp_path / "whole").glob("step-*")}
    assert capsys.readouterr().err.count("this file system cannot") == 1
