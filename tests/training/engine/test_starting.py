"""Processes that are not about to do the same are told at the start, before one waits for another without end."""

import threading
from types import SimpleNamespace

import pytest
from torch import distributed as dist

from command_line import PATIENCE
from torch_thor.training import ElsewhereError, UserError, load_recipe
from torch_thor.training.engine import starting
from torch_thor.training.engine.starting import facts_of, join

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture
def impatient(monkeypatch):
    """A clock by which the time of every wait is over after one look; nobody really waits."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: now.append(now.pop() + 1e6))
    monkeypatch.setattr(starting, "time", clock)


def outcomes(*ranks, store=None):
    """What each rank hears, from its number of processes and its facts."""
    store = dist.HashStore() if store is None else store
    found, names = [None] * len(ranks), [None] * len(ranks)

    def one(rank, world, facts):
        try:
            names[rank] = join(store, rank, world, facts, PATIENCE)
        except UserError as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank, *about), daemon=True) for rank, about in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
        assert not thread.is_alive()
    assert len(set(names)) == 1 or any(found)
    return found


def facts(*words):
    return facts_of(load_recipe("digits", list(words)), resume=False)


def test_equal_processes_hear_nothing():
    assert outcomes(*[(3, facts())] * 3) == [None] * 3


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (facts("update_interval=7"), "optimizers.thor.update_interval=7, and rank 0 has"),
        (facts("epochs=3"), "epochs=3, and rank 0 has epochs="),
        ({**facts(), "torch": "1.13"}, "torch=1.13, and rank 0 has torch="),
        ({**facts(), "resume": "True"}, "resume=True, and rank 0 has resume=False"),
    ],
)
def test_one_message_names_the_rank_and_the_difference(other, said):
    first, second, third = outcomes((3, facts()), (3, facts()), (3, other))
    assert f"rank 2 has {said}" in str(first)
    assert [type(error) for error in (first, second, third)] == [UserError, ElsewhereError, ElsewhereError]


def test_another_number_of_processes_is_named_before_the_missing_one_is_waited_for(monkeypatch):
    real = starting.time
    still = SimpleNamespace(monotonic=lambda: 0.0, sleep=real.sleep)  # by this clock no wait is ever over
    monkeypatch.setattr(starting, "time", still)
    first, _ = outcomes((2, facts()), (3, facts()))
    assert "rank 1 has number of processes=3, and rank 0 has number of processes=2" in str(first)
    first, _ = outcomes((3, facts()), (2, facts()))
    assert "rank 1 has number of processes=2, and rank 0 has number of processes=3" in str(first)


def test_what_an_earlier_start_has_written_does_not_count(request):
    store = dist.HashStore()
    assert "rank 1 has" in str(outcomes((3, facts()), (3, facts("epochs=3")), (3, facts()), store=store)[0])
    assert outcomes(*[(3, facts())] * 3, store=store) == [None] * 3
    assert outcomes(*[(2, facts("epochs=5"))] * 2, store=store) == [None] * 2
    request.getfixturevalue("impatient")  # from here on
    assert "rank 1 of 2 processes has not started" in str(outcomes((2, facts()), store=store)[0])


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_never_starts_is_named():
    assert f"rank 1, 2 of 3 processes has not started in {PATIENCE} s" in str(outcomes((3, facts()))[0])


def test_places_of_data_may_differ():
    assert outcomes((2, facts("data.root=/a")), (2, facts("data.root=/b"))) == [None, None]


def test_values_of_the_environment_are_compared_and_not_shown(monkeypatch):
    monkeypatch.setenv("SECRET", "17")
    one = facts("seed=${oc.env:SECRET}")
    monkeypatch.setenv("SECRET", "18")
    first, _ = outcomes((2, one), (2, facts("seed=${oc.env:SECRET}")))
    assert "rank 1 has seed=a value with the digest" in str(first)
    assert "17" not in str(first).replace(one["seed"], "")
