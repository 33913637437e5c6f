"""The cores of a process are those that it may use."""

import os

import pytest

from torch_thor import commands
from torch_thor.cores import allowed_cores
from torch_thor.training.text import prepare


def test_they_are_those_of_the_process_not_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert allowed_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert allowed_cores() == 64


@pytest.mark.parametrize(("given", "used"), [(None, 2), (3, 3), (0, 0)])
def test_prepare_starts_as_many_workers(monkeypatch, tmp_path, given, used):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    found = []
    monkeypatch.setattr(prepare, "prepare", lambda *_, **options: found.append(options["workers"]))
    commands.prepare_text(["python"], tmp_path, workers=given)
    assert found == [used]  # 0 is refused there
