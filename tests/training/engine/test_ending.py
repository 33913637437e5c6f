"""A process that is killed is named, and `torchrun --max-restarts` brings the training to the same end."""

import os
import signal
import threading
import time
from unittest import mock

import pytest
from torch import distributed as dist
from torch.distributed import run as torchrun

import killed_script
from command_line import PATIENCE, assert_same_runs, command, finish, newest, start, state, succeed
from tiny import assert_same
from torch_thor.training import UserError
from torch_thor.training.engine import ending
from torch_thor.training.engine.ending import Answers, end_together, is_lost_connection, report

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
LOST = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711")
LIMIT = 1500  # seconds for all starts of a killed training on a busy machine


class Clock(threading.local):
    """A clock of each thread, by which no time passes before all that will report has done so, and then much."""

    def __init__(self, store, keys):
        self.store, self.keys, self.now = store, list(keys), 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        if self.store.check(self.keys):
            self.now += 0.6 * ending.QUIET  # so that everyone looks once more
        else:
            time.sleep(0.001)


def clock(store, *keys):
    return mock.patch.object(ending, "time", Clock(store, keys))


def heard(world, errors, store=None):
    """What each of the ranks that are alive hears."""
    store, found = dist.HashStore() if store is None else store, {}

    def one(rank, error):
        try:
            end_together(store, rank, world, error)
            found[rank] = None
        except UserError as message:
            found[rank] = message

    threads = [threading.Thread(target=one, args=item, daemon=True) for item in errors.items()]
    with clock(store, *map(str, errors)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    return found


def test_one_message_names_the_rank_that_was_killed():
    found = heard(4, dict.fromkeys((0, 1, 3), LOST))
    assert all("rank 2 of 4 processes no longer answers" in str(message) for message in found.values())
    assert sorted(type(found[rank]).__name__ for rank in (0, 1, 3)) == ["ElsewhereError", "ElsewhereError", "UserError"]


def test_a_rank_that_failed_keeps_its_own_error_and_is_named_to_the_others():
    found = heard(3, {0: LOST, 1: ZeroDivisionError("no such image"), 2: LOST})
    assert "rank 1 has failed: no such image" in str(found[0])
    assert found[1] is None
    assert sorted(type(found[rank]).__name__ for rank in (0, 2)) == ["ElsewhereError", "UserError"]


def test_a_rank_that_still_waits_in_a_collective_is_not_named():
    """Rank 1 has heard nothing yet, because its own connections are whole; its thread answers for it."""
    store, found = dist.HashStore(), []
    with Answers(store, 1, 3), clock(store, "0", "alive/1"):
        thread = threading.Thread(target=lambda: found.append(_error_of(store)), daemon=True)
        thread.start()
        thread.join(PATIENCE)
    assert "rank 2 of 3 processes no longer answers" in str(found[0])


@pytest.fixture
def left(monkeypatch):
    """What a process does that would end without destructors; SIGTERM is ignored."""
    before, calls = signal.signal(signal.SIGTERM, lambda *_: None), []
    monkeypatch.setattr(ending, "leave", lambda: calls.append("left"))
    monkeypatch.setattr(ending, "_GRACE", 0.01)
    yield calls
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("others", [{2}, {1, 2}], ids=["one-is-gone", "stopped-by-the-user"])
def test_a_process_that_waits_without_end_leaves_when_another_is_gone(left, capsys, others):
    """At the signal of torchrun; if everyone is there, somebody stops the training, and it ends as usual."""
    store = dist.HashStore()
    for rank in others:
        store.set(f"alive/{rank}", "")
    with Answers(store, 0, 3) as answers, clock(store, "alive/0"):
        os.kill(os.getpid(), signal.SIGTERM)
        answers._thread.join(PATIENCE)  # it has decided
        assert not answers._thread.is_alive()
    assert left == ([] if len(others) == 2 else ["left"])
    said = capsys.readouterr().err
    assert ("torch-thor, rank 0: rank 1 of 3 processes no longer answers" in said) is (len(others) == 1)


def test_the_main_thread_may_end_by_itself(left, monkeypatch):
    monkeypatch.setattr(ending, "_GRACE", PATIENCE)
    store = dist.HashStore()
    with Answers(store, 0, 2), clock(store, "alive/0"):
        os.kill(os.getpid(), signal.SIGTERM)
        store.wait(["begun"])  # the thread looks who is gone
    assert left == []


def _error_of(store):
    with pytest.raises(UserError) as caught:
        end_together(store, 0, 3, LOST)
    return caught.value


def test_a_rank_that_has_ended_by_itself_is_not_taken_for_the_one_that_was_killed():
    store = dist.HashStore()
    with Answers(store, 2, 3):
        pass
    assert "rank 1 of 3 processes no longer answers" in str(heard(3, {0: LOST}, store)[0])


def test_an_error_that_a_rank_has_told_is_named_to_the_others():
    store = dist.HashStore()
    report(store, 1, UserError("no such file\nand more"))
    assert "rank 1 has failed: no such file; the others end too" in str(heard(2, {0: LOST}, store)[0])


def test_a_connection_is_recognised_behind_other_errors():
    error = ValueError("the checkpoint cannot be written")
    error.__cause__ = LOST
    assert is_lost_connection(error)
    assert not is_lost_connection(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


DIGITS = ("train", "digits", "optimizer=thor", "epochs=2", "batch_size=160", "device=cpu", "threads=1", "targets=[]")
DIGITS += ("checkpoint_interval=3", "eval_interval=4", "update_interval=5", "keep_checkpoints=9", "ema_decay=0.5")
# step 6 refreshes: there processes wait for each other without a connection; every start is a fresh interpreter, so few
KILLS = {"fsdp": "1:step:6,0:writing:9,1:evaluation:12", "ddp": "0:checkpoint:6"}


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_killed_ranks_change_nothing(tmp_path, way):
    kills = KILLS[way]
    count = len(kills.split(","))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    succeed(tmp_path, *DIGITS, f"parallel={way}", "--out", whole, ranks=2)
    words = (killed_script.__file__, kills, *DIGITS, f"parallel={way}", "--out", killed)
    options = ("--standalone", "--nproc-per-node=2", f"--max-restarts={count}")
    code, out, err = finish(start(tmp_path, *options, *words, script=torchrun.__file__, cold=True), timeout=LIMIT)
    assert code == 0, f"{out}\n{err}"
    if way == "fsdp":
        ours, theirs = newest(killed, "thor"), newest(whole, "thor")
        for rank in range(2):
            assert (ours / f"__{rank}_0.distcp").read_bytes() == (theirs / f"__{rank}_0.distcp").read_bytes()
        assert_same(state(ours), state(theirs), "state")
    else:
        assert_same_runs(killed, whole, "thor")
    assert err.count("no longer answers") == count, err
    for kill in kills.split(","):
        assert f"rank {kill[0]} of 2 processes no longer answers" in err


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch has no gloo")
def test_an_error_on_one_rank_alone_is_not_taken_for_a_kill(tmp_path):
    words = ("1:error:2", *DIGITS, "parallel=fsdp", "--out", tmp_path / "run")
    code, _, err = command(tmp_path, *words, ranks=2, script=killed_script.__file__)
    assert code != 0
    assert "torch-thor, rank 1: this rank cannot go on" in err
    assert "rank 1 has failed: this rank cannot go on; the others end too" in err
    assert "no longer answers" not in err
