"""How many worker processes a machine has cores for."""

import pytest

from torch_thor.training.data import Workers
from torch_thor.training.data.workers import check_workers


def test_more_workers_than_cores_are_a_warning(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    check_workers(Workers(count=8), 1, pytest.fail)
    check_workers(Workers(count=4), 2, pytest.fail)
    said = []
    check_workers(Workers(count=9), 1, said.append)
    check_workers(Workers(count=5), 2, said.append)
    assert said == [
        "data.workers.count=9: 9 worker processes share 8 cores; data.workers.count=8 would be enough",
        "data.workers.count=5 on each of 2 processes: 10 worker processes share 8 cores; data.workers.count=4 would be "
        "enough",
    ]
