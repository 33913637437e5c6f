"""Phases in a recipe: which one a step is in, by hand, and recipes whose phases cannot be right."""

import pytest

from torch_thor.training import Phase, RunConfig, ScheduleSpec, UserError, load_recipe, override, recipe_yaml
from torch_thor.training.config.phases import phase_at

THREE = [Phase(steps=3), Phase(steps=1, accumulation=4), Phase(steps=2, accumulation=2)]


def test_the_phase_of_each_step():
    found = [phase_at(THREE, step) for step in range(7)]
    assert [index for index, _ in found] == [0, 0, 0, 1, 2, 2, 2]
    assert [first for _, first in found] == [0, 0, 0, 3, 4, 4, 4]


def test_the_parts_of_each_step():
    config = RunConfig(phases=THREE, batch_size=8, accumulation=8)
    assert [config.accumulation_at(step) for step in range(6)] == [8, 8, 8, 4, 2, 2]
    assert [RunConfig(accumulation=3).accumulation_at(step) for step in (0, 9)] == [3, 3]


def test_phases_are_written_and_read_again():
    words = ["phases=[{steps: 4, length: 32}, {steps: 2, lr_factor: 0.5, schedule: {kind: linear, warmup_epochs: 1}}]"]
    recipe = load_recipe("bert-tiny", ["epochs=1", *words])
    assert recipe.phases == [
        Phase(steps=4, length=32),
        Phase(steps=2, lr_factor=0.5, schedule=ScheduleSpec("linear", warmup_epochs=1)),
    ]
    assert override(recipe, []) == recipe
    assert "warmup_epochs: 1" in recipe_yaml(recipe)
    assert override(recipe, ["phases=[]"]).phases == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["phases=[{steps: 0}]"], "phases: steps=0 must be 1 or more in each phase"),
        (["phases=[{length: 32}]"], r"phases\[0\]\.steps"),
        (["phases=[{steps: 4, length: 8}]"], "phases: length=8 must be 16 tokens or more"),
        (["phases=[{steps: 4, batch_size: 0}]"], "phases: batch_size=0 must be 1 or more"),
        (["phases=[{steps: 4, lr_factor: 0}]"], "phases: lr_factor=0.0 must be above 0"),
        (["phases=[{steps: 4, size: 8}]"], "there is no key .*size"),
        (["phases={steps: 4}"], "phases"),
        (["phases=[{steps: 4}, {steps: 3}]", "steps=8"], r"steps=8 is not the sum .*\(4 \+ 3 = 7\): leave steps out"),
        (["phases=[{steps: 4}]", "epochs=2"], "epochs=2: with phases a training ends after their 4 steps"),
        (["phases=[{steps: 4, batch_size: 4, accumulation: 5}]"], r"phases\[0\]: accumulation=5 is more than batch_si"),
        (["phases=[{steps: 4, batch_size: 4}]", "accumulation=5"], r"phases\[0\]: accumulation=5 is more than batch_s"),
        (["phases=[{steps: 4, schedule: {kind: linnear}}]"], "kind=linnear is not a schedule"),
    ],
)
def test_phases_that_cannot_be_right_are_refused(words, message):
    with pytest.raises(UserError, match=message) as caught:
        load_recipe("bert-tiny", ["epochs=1", *words])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["digits", "autoencoder", "char-lm"])
def test_other_tasks_have_one_phase(name):
    with pytest.raises(UserError, match=r"phases is set: task=.* trains in one phase; leave phases out"):
        load_recipe(name, ["epochs=1", "phases=[{steps: 4}]"])
    with pytest.raises(UserError, match=r"activation_checkpointing=true: task=.* has no network that can"):
        load_recipe(name, ["activation_checkpointing=true"])
