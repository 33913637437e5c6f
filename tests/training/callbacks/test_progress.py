"""What is printed and drawn while a training goes on: hand-made steps, expected words."""

import io
import math
from types import SimpleNamespace

import pytest
from rich.console import Console

from replaying import accuracy_point, replay, small_run
from torch_thor import THOR
from torch_thor.training import History, Phase, RefreshPoint, RunConfig, StepPoint
from torch_thor.training.callbacks import Bar, Display, Lines
from torch_thor.training.callbacks.progress import place

PLAN = RunConfig(epochs=3, batch_size=4)  # three steps an epoch, nine in all


def record(*, damping=None, refreshes=(), averaged=None):
    steps = []
    for step in range(1, 10):
        duration = 0.5 if damping and step in (1, 5) else 0.01 * step
        at = sum(point.duration for point in steps) + duration
        loss = math.nan if step == 2 else float(step)
        steps.append(
            StepPoint(
                step,
                loss,
                0.1 / step,
                at,
                duration,
                bool(damping) and step in (1, 5),
                4,
                duration / 4,
                damping,
                step == 2,
            )
        )
    evaluations = [accuracy_point(6, 0.8, 1.25, 0.5, 0.75, *((1.0, averaged, 0.9) if averaged else ()))]
    return History(steps, evaluations, list(refreshes))


def printed(run, told, interval, start=0):
    console = Console(file=io.StringIO(), width=40)  # a line is a line however narrow the console
    replay(Lines(Display(console=console, disable=True), "mine", interval), run, told, start)
    return console.file.getvalue().splitlines()


def test_first_order_lines():
    lines = printed(small_run(PLAN), record(), 3)
    assert lines == [
        "mine: step 3 of 9, epoch 1, loss 2, lr 0.03333, 200 images/s, step 20.0 ms, 25% waiting for data, "
        "skipped steps 1",
        "mine: step 6 of 9, epoch 2, 0.8 s, accuracy 50.00%, test loss 1.25",
        "mine: step 6 of 9, epoch 2, loss 5, lr 0.01667, 80 images/s, step 50.0 ms, 25% waiting for data, "
        "skipped steps 1",
        "mine: step 9 of 9, epoch 3, loss 8, lr 0.01111, 50 images/s, step 80.0 ms, 25% waiting for data, "
        "skipped steps 1",
    ]


def thor_run():
    return small_run(PLAN, lambda model: THOR(model, lr=0.1, damping=0.1))


REFRESHES = [RefreshPoint(1, "", "update", None, 1.0), RefreshPoint(5, "", "stop", 0.0, 1.0)]


def test_thor_lines():
    lines = printed(thor_run(), record(damping=0.03, refreshes=REFRESHES, averaged=0.625), 6)
    assert lines == [
        "mine: step 6 of 9, epoch 2, 0.8 s, accuracy 50.00%, of the averaged weights 62.50%, test loss 1.25",
        "mine: step 6 of 9, epoch 2, loss 3.8, lr 0.01667, damping 0.03, 20.87 images/s, step 35.0 ms, "
        "refresh step 500 ms, 25% waiting for data, refreshes 2, stopped layers 1 of 1, skipped steps 1",
    ]


@pytest.mark.parametrize("start", range(1, 6))
def test_a_resumed_run_prints_what_an_uninterrupted_one_does(start):
    told = record(damping=0.03, refreshes=REFRESHES)
    assert printed(thor_run(), told, 6, start) == printed(thor_run(), told, 6)


def test_no_interval_prints_evaluations_alone():
    assert len(printed(small_run(PLAN), record(), None)) == 1


def test_bar():
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with Display(console=console, auto_refresh=False) as display:
        first, second = display.add_run("mine"), display.add_run("next")
        run, told = thor_run(), record(damping=0.03, refreshes=REFRESHES, averaged=0.625)
        bar = Bar(display, first)
        replay(bar, run, told.up_to(7))
        # the run has ended here, before its last step: accurate enough
        assert (display.tasks[first].completed, display.tasks[first].total) == (7, 7)
        assert display.tasks[second].total is None
        assert display.tasks[first].fields["metric"] == "accuracy 62.50%"
        said = "loss 4.333, lr 0.01429, damping 0.03, 22.95 images/s, step 40.0 ms, refresh step 500 ms"
        assert display.tasks[first].fields["figures"].startswith(said)
        assert len(list(display.get_renderables())) == 1  # nobody is at work: no figures
        replay(bar, run, told.up_to(5), start=3)
        display.update(first, total=9)
        display.refresh()
    shown = console.file.getvalue()
    for word in ("mine", "next", "5/9", "refreshes 2, stopped layers 1 of 1"):
        assert word in shown


def test_the_place_in_a_training_of_phases():
    phased = RunConfig(phases=[Phase(steps=3), Phase(steps=1), Phase(steps=2)])
    run = SimpleNamespace(step=0, total_steps=6, steps_per_epoch=6, config=phased)
    said = []
    for run.step in range(1, 7):
        said.append(place(run))
    assert said == [f"step {n} of 6, phase {phase} of 3" for n, phase in enumerate([1, 1, 1, 2, 3, 3], 1)]
    assert place(SimpleNamespace(step=3, total_steps=9, steps_per_epoch=6, config=PLAN)) == "step 3 of 9, epoch 0.5"
