"""Checkpoints of networks that are divided among processes: each writes its parts, and any other number goes on."""

import json
import shutil

import pytest
import torch

from command_line import assert_refused, checkpoints, command, lines, newest, state, succeed
from tiny import assert_same
from torch_thor.training.checkpoints import open_checkpoint

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo"),
]
# 16 steps; a refresh in every sixth. Two halves of a row of the head have other blocks than the whole.
DIGITS = ("train", "digits", "epochs=2", "batch_size=160", "device=cpu", "threads=1", "checkpoint_interval=6")
DIGITS += ("keep_checkpoints=9", "eval_interval=9", "ema_decay=0.5", "targets=[]", "clip_norm=5", "accumulation=2")
THOR = ("optimizer=thor", "lr=0.01", "max_update_ratio=null", "update_interval=6")
THOR += ("trace_thresholds=[0.0,0.0]", "split_dim=1")
WAYS = {
    "alone": (None, ()),
    "ddp": (2, ("parallel=ddp",)),
    "fsdp-2": (2, ("parallel=fsdp", "shards=null")),
    "hsdp": (4, ("parallel=hsdp", "shards=2")),
}


def train(folder, way, *words, out, **options):
    ranks, chosen = WAYS[way]
    return succeed(folder, *words, *chosen, "--out", out, ranks=ranks, **options)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of an uninterrupted run of each way, made when it is first asked for."""
    folder = tmp_path_factory.mktemp("runs")

    def run(way):
        if not (folder / way).exists():
            train(folder, way, *DIGITS, *THOR, out=folder / way)
        return folder / way

    return run


def interrupted(run, folder, after):
    """A copy of a run that was killed after a step."""
    shutil.copytree(run, folder)
    for path in folder.glob("*/checkpoints/**/step-*"):
        if int(path.name[5:]) > after:
            shutil.rmtree(path)
    return folder


def whole(run, optimizer="thor"):
    return open_checkpoint(newest(run, optimizer)).whole_weights()


@pytest.mark.parametrize("way", ["fsdp-2", "hsdp"])
def test_the_same_processes_go_on_bit_for_bit(runs, tmp_path, way):
    again = interrupted(runs(way), tmp_path / "again", after=6)
    train(tmp_path, way, "train", "digits", "--resume", out=again)
    ours, theirs = newest(again, "thor"), newest(runs(way), "thor")
    parts = sorted(path.name for path in theirs.glob("*.distcp"))
    assert len(parts) == WAYS[way][0]
    for name in parts:
        assert (ours / name).read_bytes() == (theirs / name).read_bytes(), name
    assert_same(state(ours), state(theirs), "state")
    assert lines(again, "thor") == lines(runs(way), "thor")


CHANGES = [("fsdp-2", "alone"), ("ddp", "hsdp"), ("hsdp", "fsdp-2")]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_any_other_processes_go_on_as_one_that_never_stopped(runs, tmp_path, before, after):
    """Blocks of one row are cut alike for any number of processes."""
    again = interrupted(runs(before), tmp_path / "again", after=6)
    train(tmp_path, after, "train", "digits", "--resume", out=again)
    assert checkpoints(again, "thor") == [6, 12, 16]
    ours, theirs = open_checkpoint(newest(again, "thor")), open_checkpoint(newest(runs("alone"), "thor"))
    begin = open_checkpoint(again / "thor/checkpoints/step-00000006").whole_weights()
    for averaged in (False, True):
        found, wanted = (one.whole_weights(averaged=averaged) for one in (ours, theirs))
        for name, weight in wanted.items():
            error = (found[name] - weight).norm() / (weight - begin[name]).norm()
            assert error < 0.02, f"{name}: {error} of the way since the checkpoint"


def test_one_process_evaluates_them(runs, tmp_path):
    scores = json.loads(succeed(tmp_path, "eval", runs("fsdp-2"), "--json"))
    wanted = [line for line in lines(runs("fsdp-2"), "thor", "eval") if line["step"] == 16][-1]
    assert [score["averaged"] for score in scores] == [False, True]
    assert scores[0]["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert scores[1]["loss"] == pytest.approx(wanted["averaged_loss"], rel=1e-6)


def test_a_training_begins_with_their_weights(runs, tmp_path):
    best = runs("fsdp-2") / "thor/checkpoints/best"
    out = tmp_path / "next"
    words = ("train", "digits", "optimizer=sgd", "steps=1", "lr=1e-30", "device=cpu", f"weights={best}")
    succeed(tmp_path, *words, "--out", out)
    (path,) = best.iterdir()
    torch.testing.assert_close(whole(out, "sgd"), open_checkpoint(path).whole_weights())


def test_a_part_that_is_damaged_makes_the_checkpoint_before_it_the_newest(runs, tmp_path):
    again = interrupted(runs("fsdp-2"), tmp_path / "again", after=12)
    part = newest(again, "thor") / "__1_0.distcp"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    out = train(tmp_path, "fsdp-2", "train", "digits", "--resume", out=again)
    assert "__1_0.distcp does not match its checksum" in out
    assert "continues from step 6" in out
    assert lines(again, "thor") == lines(runs("fsdp-2"), "thor")


def test_a_part_that_is_missing_is_named(runs, tmp_path):
    again = interrupted(runs("fsdp-2"), tmp_path / "again", after=16)
    path = newest(again, "thor")
    (path / ".metadata").unlink()
    assert_refused(command(tmp_path, "eval", path), ".metadata is missing")


@pytest.mark.parametrize("optimizer", ["thor-muon", "adam", "lamb"])
def test_other_optimizers_go_on_bit_for_bit(tmp_path, optimizer):
    words = (*DIGITS, f"optimizer={optimizer}", "parallel=fsdp", "schedule.kind=linear")
    succeed(tmp_path, *words, "--out", tmp_path / "whole", ranks=2)
    again = interrupted(tmp_path / "whole", tmp_path / "again", after=6)
    succeed(tmp_path, "train", "digits", "--resume", "--out", again, ranks=2)
    ours, theirs = newest(again, optimizer), newest(tmp_path / "whole", optimizer)
    for part in ("__0_0.distcp", "__1_0.distcp"):
        assert (ours / part).read_bytes() == (theirs / part).read_bytes(), part
    assert_same(state(ours), state(theirs), "state")


def test_running_statistics_are_those_of_rank_0_and_go_on_bit_for_bit(tmp_path):
    """Each process has its own between two evaluations, and any of them may write them."""
    words = ("train", "fashion-mnist", "data.name=digits", "optimizer=sgd", "steps=6", "batch_size=64", "device=cpu")
    words += ("threads=1", "targets=[]", "checkpoint_interval=2", "eval_interval=6", "ema_decay=0.5", "parallel=fsdp")
    words += ("keep_best=false", "keep_checkpoints=9")
    succeed(tmp_path, *words, "--out", tmp_path / "whole", ranks=2)
    again = interrupted(tmp_path / "whole", tmp_path / "again", after=2)
    assert "continues from step 2" in succeed(tmp_path, "train", "fashion-mnist", "--resume", "--out", again, ranks=2)
    ours, theirs = newest(again, "sgd"), newest(tmp_path / "whole", "sgd")
    for part in ("__0_0.distcp", "__1_0.distcp"):
        assert (ours / part).read_bytes() == (theirs / part).read_bytes(), part
    assert lines(again, "sgd") == lines(tmp_path / "whole", "sgd")
