"""Learning rates of phases, and warm-up in steps, by hand."""

import pytest
import torch

from torch_thor.training import Phase, Run, RunConfig, ScheduleSpec, UserError
from torch_thor.training.data import DataBundle
from torch_thor.training.engine.schedule_step import apply_all, check_all, spans_at
from torch_thor.training.tasks import ImageClassification


def sgd(**settings):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.8, **settings}])


def values(config, key, total):
    optimizer, found = sgd(damping=2.0), []
    for step in range(total):
        apply_all(optimizer, config, step, total, total)
        found.append(optimizer.param_groups[0][key])
    return found


def test_a_phase_goes_on_with_the_schedule_of_the_whole_training():
    config = RunConfig(phases=[Phase(steps=2), Phase(steps=2, lr_factor=0.5)], schedule=ScheduleSpec("linear"))
    assert values(config, "lr", 4) == pytest.approx([0.8, 0.6, 0.2, 0.1])


def test_a_phase_begins_a_schedule_of_its_own():
    second = ScheduleSpec("linear", warmup_epochs=0.5, end=0.1)  # 2 of its 4 steps
    config = RunConfig(
        phases=[Phase(steps=3, schedule=ScheduleSpec("linear")), Phase(steps=4, lr_factor=0.5, schedule=second)],
        damping_schedule=ScheduleSpec("linear"),
    )
    # 0.8 (1 - t / 3); then 0.4 after a warm-up of two steps, from there to 0.1
    assert values(config, "lr", 7) == pytest.approx([0.8, 0.8 * 2 / 3, 0.8 / 3, 0.2, 0.4, 0.4, 0.25])
    assert values(config, "damping", 7) == pytest.approx([2 * (1 - t / 7) for t in range(7)])


def test_equal_phases_are_told_apart():
    config = RunConfig(phases=[Phase(steps=2, schedule=ScheduleSpec("linear"))] * 2)
    spans = [next(spans_at(config, step, 4, 4)) for step in range(4)]
    assert [span.name for span in spans] == ["phases[0].schedule"] * 2 + ["phases[1].schedule"] * 2
    assert [span.first for span in spans] == [0, 0, 2, 2]


def test_warm_up_in_steps():
    found = values(RunConfig(schedule=ScheduleSpec("linear", warmup_steps=4)), "lr", 10)
    assert found == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, *(0.8 * n / 6 for n in (5, 4, 3, 2, 1))])
    with pytest.raises(UserError, match="warmup_epochs=1 and warmup_steps=4 say the same"):
        ScheduleSpec("linear", warmup_epochs=1, warmup_steps=4)
    with pytest.raises(UserError, match="warmup_steps=-1 must be 0 or more"):
        ScheduleSpec("linear", warmup_steps=-1)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([Phase(steps=4), Phase(steps=2, schedule=ScheduleSpec("linear", warmup_steps=3))],
         r"phases\[1\]\.schedule\.warmup_steps=3 is longer than the training \(2 steps\)"),
        ([Phase(steps=4, schedule=ScheduleSpec("linear", horizon_steps=3)), Phase(steps=2)],
         r"phases\[0\]\.schedule\.horizon_steps=3 is shorter than the training \(4 steps\)"),
        ([Phase(steps=6, lr_factor=0.1, schedule=ScheduleSpec("linear", end=0.1))],
         r"phases\[0\]\.schedule\.end=0\.1 is above the initial lr=0\.08,"),
    ],
)  # fmt: skip
def test_schedules_of_phases_that_do_not_fit_are_refused(phases, message):
    with pytest.raises(UserError, match=message):
        check_all(sgd(), RunConfig(phases=phases), 6, 6)


def test_a_task_that_knows_no_phases_is_refused():
    data = DataBundle(torch.randn(12, 4), torch.randint(3, (12,)), torch.randn(6, 4), torch.randint(3, (6,)), 3)
    config, model = RunConfig(phases=[Phase(steps=5)], batch_size=4, device="cpu"), torch.nn.Linear(4, 3)
    with pytest.raises(UserError, match="phases have 5 steps, and the task's batches 3: this task has no phases"):
        Run(model, torch.optim.SGD(model.parameters(), lr=0.1), ImageClassification(data, config), config)
