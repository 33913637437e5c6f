"""The times of a run in the raw data: of which clock, of which steps, and to a target."""

from torch_thor.bench.figures.run_times import (
    epochs_to,
    median_step,
    milliseconds,
    processor_time_counts,
    seconds_of,
    seconds_to,
    step_to,
)


def test_time_is_the_processors_or_the_walls():
    run = {
        "steps": {"seconds": [1.0, 3.0, 4.0], "refresh": [True, False, False]},
        "processor_seconds": [0.5, 0.75, 1.25],
    }
    assert seconds_of(run, processor=True) == [0.5, 0.75, 1.25]
    assert median_step(run, refresh=True, processor=True) == 0.5
    assert median_step(run, refresh=False, processor=True) == 0.375
    assert median_step(run, refresh=False, processor=False) == 1.5
    assert median_step({**run, "steps": {**run["steps"], "refresh": [True] * 3}}, refresh=False, processor=True) is None


def test_times_to_a_target_are_those_of_the_first_evaluation_that_reaches_it():
    seconds = [1.0, 3.0, 4.0, 6.0, 9.0]
    run = {
        "steps": {"seconds": seconds},
        "evaluations": {"step": [2, 4, 5], "top1": [0.5, 0.75, 0.7], "averaged_top1": [None] * 3},
        "processor_seconds": [0.5, 0.75, 1.25, 2.0, 2.5],
        "steps_per_epoch": 8,
    }
    assert [step_to(run, target) for target in (0.5, 0.625, 0.75, 0.8)] == [2, 4, 4, None]
    assert [epochs_to(run, target) for target in (0.5, 0.625, 0.8)] == [0.25, 0.5, None]
    assert [seconds_to(run, target, processor=False) for target in (0.5, 0.625, 0.8)] == [3.0, 6.0, None]
    assert [seconds_to(run, target, processor=True) for target in (0.5, 0.625, 0.8)] == [0.75, 2.0, None]


def test_the_target_is_a_value_of_the_metric_that_is_named():
    found = {"step": [2, 4], "loss": [0.5, 0.25], "averaged_loss": [0.75, 0.5], "top1": [1.0, 1.0]}
    found |= {"primary": ["loss"] * 2, "higher_is_better": [False] * 2}
    assert step_to({"evaluations": found}, 0.5) == 4  # that of the averaged weights
    assert step_to({"evaluations": {**found, "averaged_loss": [None] * 2}}, 0.5) == 2
    assert step_to({"evaluations": {name: [] for name in found}}, 0.5) is None


def test_milliseconds_are_the_mean_of_the_runs_that_have_such_steps():
    runs = [
        {"steps": {"seconds": [0.1, 0.2], "refresh": [True, False]}},
        {"steps": {"seconds": [0.3, 0.6], "refresh": [True, False]}},
        {"steps": {"seconds": [0.5, 9.5], "refresh": [True, True]}},
    ]
    assert milliseconds(runs, refresh=False, processor=False) == "200 ms"
    assert milliseconds(runs[:1], refresh=True, processor=False) == "100 ms"
    assert milliseconds(runs[2:], refresh=False, processor=False) == "none"


def test_processor_time_is_shown_on_one_thread_of_a_cpu_alone():
    assert processor_time_counts({"device": "cpu"}, {"threads": 1})
    assert not processor_time_counts({"device": "cpu"}, {"threads": 2})
    assert not processor_time_counts({"device": "cuda:0"}, {"threads": 1})
