"""Which steps a profile holds, what it leaves out, and that training does not notice."""

import io
import json
from collections import Counter

import pytest
import torch
from rich.console import Console

from replaying import small_run
from torch_thor import THOR
from torch_thor.training import Callback, RunConfig, UserError, train
from torch_thor.training.callbacks import Profiler, profiling


def thor_run(interval, steps=40, **config):
    make = lambda model: THOR(model, lr=0.01, damping=0.1, update_interval=interval)  # noqa: E731
    return small_run(RunConfig(epochs=steps, batch_size=12, **config), make)  # an epoch is one step


def sgd_run(steps):
    return small_run(RunConfig(epochs=steps, batch_size=12, eval_epochs=1000))


def profile(run, folder, callbacks=()):
    console = Console(file=io.StringIO(), width=100)
    profiler = Profiler(folder, console)
    try:
        train(run, [*callbacks, profiler])
    finally:
        profiler.close()
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("run", "first", "last", "refreshes"),
    [
        (lambda: thor_run(9), 10, 15, 1),  # refreshes at 1, 10, 19, ...: the next one, and five ordinary steps
        (lambda: thor_run(30), 31, 36, 1),
        (lambda: thor_run(4), 9, 14, 2),  # 5 is over when the first steps are
        (lambda: thor_run(1), 7, 12, 6),
        (lambda: thor_run(100), 7, 12, 0),  # no refresh will come any more
        (lambda: sgd_run(40), 7, 12, 0),
        (lambda: sgd_run(9), 4, 9, 0),  # there is no time for first steps
        (lambda: sgd_run(4), 3, 4, 0),
    ],
)
def test_which_steps(tmp_path, run, first, last, refreshes):
    said = profile(run := run(), tmp_path / "profile")
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == f"steps-{first:08d}-{last:08d}.json"
    assert f"Steps {first} to {last}, {refreshes} of {last - first + 1} with a refresh" in said
    assert str(path) in said
    assert "Optimizer.step" in said
    assert run.step == run.total_steps  # training went on
    names = Counter(event.get("name") for event in json.loads(path.read_text())["traceEvents"])
    [stepped] = [count for name, count in names.items() if name and name.startswith("Optimizer.step#")]
    assert stepped == last - first + 1


def test_what_is_between_the_steps_is_not_in_the_table(tmp_path, monkeypatch):
    seen = {}

    def look(finished, points):
        seen["all"] = Counter(event.key for event in finished.events())
        seen["steps"] = Counter(event.key for event in profiling._in_steps(finished))
        return "table"

    monkeypatch.setattr(profiling, "top_operations", look)
    profile(thor_run(9, eval_interval=1), tmp_path)
    assert seen["steps"]["aten::linear"] == 6
    assert seen["all"]["aten::linear"] == 6 + 5  # the five evaluations between six steps
    assert profiling.BETWEEN not in seen["steps"]


def test_training_is_the_same_with_and_without(tmp_path):
    plain, profiled = thor_run(9), thor_run(9)
    train(plain)
    profile(profiled, tmp_path)
    assert torch.equal(plain.model.weight, profiled.model.weight)


def test_training_that_is_over_at_once_says_so(tmp_path):
    assert "nothing was profiled: training went on for 2 steps only" in profile(sgd_run(2), tmp_path / "profile")
    assert not (tmp_path / "profile").exists()


def test_stopped_in_the_middle_leaves_no_profiler_running(tmp_path):
    class Stop(Callback):
        def at_boundary(self, run):
            if run.step == 9:
                raise SystemExit

    with pytest.raises(SystemExit):
        profile(sgd_run(40), tmp_path / "profile", [Stop()])
    assert not torch.autograd._profiler_enabled()
    assert not (tmp_path / "profile").exists()
    profile(sgd_run(40), tmp_path / "profile")  # nothing is in the way of the next one
    assert len(list((tmp_path / "profile").iterdir())) == 1


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "profile").touch()
    with pytest.raises(UserError, match="cannot be written"):
        profile(sgd_run(40), tmp_path / "profile")
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", lambda me, path: None)  # it does not raise
    with pytest.raises(UserError, match=r"steps-00000007-00000012.json cannot be written: make room"):
        profile(sgd_run(40), tmp_path / "other")
