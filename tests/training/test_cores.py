"""The cores of a process are those that it may use."""

import os

import pytest

from command_line import call
from torch_thor.training.cores import allowed_cores


def test_they_are_those_of_the_process_not_of_the_machine(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert allowed_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert allowed_cores() == 64


@pytest.mark.parametrize(("given", "used"), [((), 2), (("--workers", 3), 3), (("--workers", 0), 0)])
def test_prepare_starts_as_many_workers(monkeypatch, capsys, tmp_path, given, used):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    found = []
    monkeypatch.setattr(
        "torch_thor.training.text.prepare.prepare",
        lambda *_, **options: found.append(options["workers"]),
    )
    call(monkeypatch, capsys, "prepare", "python", "--out", tmp_path, *given)
    assert found == [used]  # 0 is refused there
