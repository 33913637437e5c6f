"""Recipes: typed, overridable, and mistakes are named with what was probably meant."""

import dataclasses

import pytest

from torch_thor.training import (
    ScheduleSpec,
    UserError,
    load_recipe,
    parse_recipe,
    recipe_list,
    recipe_names,
    recipe_yaml,
)
from torch_thor.training.models import build_model
from torch_thor.training.optimizers import OPTIMIZERS, THORSettings

MINIMAL = "data: {name: digits}\nepochs: 3\n"


@pytest.mark.parametrize("name", recipe_names())
def test_shipped_recipes_are_valid_and_say_what_they_are(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert set(recipe.optimizers) == set(OPTIMIZERS)
    assert (name, recipe.about, recipe.reaches) in recipe_list()
    assert len(recipe.about) > 20
    assert len(recipe.reaches) > 20


def test_text_round_trip_is_exact():
    recipe = load_recipe(
        "digits",
        ["lr=0.123", "targets=[0.5,0.75]", "optimizers.thor.split_dim=null", "decay_filter=['*.weight', -head]"],
    )
    assert parse_recipe(recipe_yaml(recipe), "other name", []) == recipe


def test_overrides_reach_their_keys():
    recipe = load_recipe("digits", ["epochs=7", "schedule.kind=linear", "data.root=/x", "optimizers.adamw.lr=1e-4"])
    assert (recipe.epochs, recipe.schedule.kind, recipe.data.root, recipe.optimizers["adamw"].lr) == (
        7, "linear", "/x", 1e-4,
    )  # fmt: skip


def test_bare_setting_goes_to_the_chosen_optimizers_that_have_it():
    plain = load_recipe("digits")
    recipe = load_recipe("digits", ["lr=0.7", "optimizer=thor,adamw", "damping=2"])  # the order does not matter
    assert recipe.optimizer == ("thor", "adamw")
    assert (recipe.optimizers["thor"].lr, recipe.optimizers["adamw"].lr) == (0.7, 0.7)
    assert recipe.optimizers["sgd"] == plain.optimizers["sgd"]
    assert isinstance(recipe.optimizers["thor"], THORSettings)
    assert recipe.optimizers["thor"].damping == 2


def test_one_optimizer_by_name():
    assert load_recipe("digits", ["optimizer=muon"]).optimizer == ("muon",)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("epoch=3", r"no key epoch .*did you mean epochs\?"),
        ("schedule.knd=linear", r"schedule\.knd .*did you mean schedule\.kind\?"),
        ("dampin=1", r"dampin .*did you mean damping\?"),
        ("optimizers.thor.dampin=1", r"optimizers\.thor\.dampin .*optimizers\.thor\.damping"),
        ("optimizers.tohr.lr=1", "tohr: no such optimizer"),
        ("optimizer=tohr", "optimizer=tohr is not an optimizer"),
        ("optimizer=sgd,sgd", "names an optimizer twice"),
        ("optimizer=[]", "optimizer is empty"),
        ("epochs=many", "epochs: .*'many'"),
        ("epochs=null", "epochs: "),
        ("epochs=0", "epochs=0 must be 1 or more"),
        ("batch_size=-3", "batch_size=-3"),
        ("seed=-1", "seed=-1"),
        ("lr=-1", "lr=-1.0 must be above 0"),
        ("label_smoothing=1", "label_smoothing=1"),
        ("eval_interval=0", "eval_interval=0"),
        ("checkpoint_interval=0", "checkpoint_interval=0"),
        ("keep_checkpoints=0", "keep_checkpoints=0"),
        ("keep_best=maybe", "keep_best: "),
        ("log_interval=0", "log_interval=0 must be 1 or more steps; null"),
        ("stop_at=76", r"stop_at=76.0 must lie in \(0, 1\]"),
        ("eval_epochs=0", "eval_epochs=0"),
        ("threads=0", "threads=0"),
        ("targets=[95]", r"targets=\[95\.0\] must lie in"),
        ("data.name=mnist", r"data\.name=mnist is not a data set"),
        ("schedule.kind=stpe", "kind=stpe is not a schedule"),
        ("schedule.kind=step", "kind=step needs milestones"),
        ("schedule.horizon_epochs=-1", "horizon_epochs=-1"),
        ("schedule=3", "schedule: "),
        ("epochs=[1", "epochs=.1"),
        ("=3", "is not an override"),
    ],
)
def test_wrong_overrides_name_key_and_remedy_in_one_line(word, said):
    with pytest.raises(UserError, match=said) as caught:
        load_recipe("digits", [word])
    assert "\n" not in str(caught.value)


KEYS = [
    "data.name=mnist", "data.max_broken=1", "data.workers.count=-1", "data.workers.prefetch=0", "data.text.length=3",
    "data.transform.size=0", "data.transform.resize=1", "data.transform.scale=[0,1]", "data.transform.ratio=[2,1]",
    "data.transform.flip=2", "data.transform.padding=-1", "data.transform.std=[0,1,1]",
    *(
        f"{schedule}.{rest}"
        for schedule in ("schedule", "damping_schedule")
        for rest in (
            "kind=stpe", "kind=step", "warmup_epochs=-1", "warmup_steps=-1", "final=2", "rate=0", "end=-1", "power=0",
            "gamma=0", "milestones=[2,1]", "decay=0", "decay_epochs=-1", "horizon_epochs=0", "horizon_steps=0",
        )
    ),
    "phases=[{steps: 4, schedule: {kind: linnear}}]",
]  # fmt: skip


@pytest.mark.parametrize("word", KEYS)
def test_a_message_begins_with_the_key_as_it_is_given(word):
    key = word.partition("=")[0] if "phases" not in word else "phases[0].schedule.kind"
    recipe = "digits" if "transform" not in word else "resnet18-cifar10-thor"
    with pytest.raises(UserError) as caught:
        load_recipe(recipe, [word])
    assert str(caught.value).startswith(f"{key}=")


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(UserError, match=r"no recipe digit \(did you mean digits\?\).*fashion-mnist"):
        load_recipe("digit")


def test_a_users_own_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(MINIMAL)
    recipe = load_recipe(str(file), ["seed=4"])
    assert (recipe.name, recipe.epochs, recipe.seed) == ("mine", 3, 4)
    with pytest.raises(UserError, match="is not a file"):
        load_recipe(str(tmp_path / "other.yaml"))


@pytest.mark.parametrize("text", ["epochs: [", "just words", ""])
def test_files_that_are_no_recipe(text):
    with pytest.raises(UserError, match="recipe x"):
        parse_recipe(text, "x", [])


def test_recipes_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_recipe("digits").epochs = 3


def test_layers_to_leave_out_reach_the_optimizer():
    def optimizer(patterns):
        recipe = load_recipe("fashion-mnist", ["optimizer=thor", f"layers={patterns}"])
        return OPTIMIZERS["thor"].build(build_model(recipe.model, 1, 10), recipe.optimizers["thor"])

    reasons = {entry.name: entry.reason for entry in optimizer("['-*norm*', '-*.shortcut.1']").coverage()}
    assert all((reason is not None) == ("norm" in name or "shortcut.1" in name) for name, reason in reasons.items())
    with pytest.raises(UserError, match="'-nrom' matches no layer"):
        optimizer("[-nrom]")


def test_the_reference_schedules_of_resnet50_in_a_recipe():
    text = MINIMAL + (
        "schedule: {kind: thor-lr, decay: 4.0839, decay_epochs: 39, horizon_epochs: 53}\n"
        "damping_schedule: {kind: step, milestones: [1, 2], gamma: 0.5}\n"
    )
    recipe = parse_recipe(text, "x", ["label_smoothing=0.1", "damping_schedule.milestones=[1,2.5]"])
    assert recipe.schedule == ScheduleSpec("thor-lr", decay=4.0839, decay_epochs=39, horizon_epochs=53)
    assert recipe.damping_schedule == ScheduleSpec("step", milestones=(1, 2.5), gamma=0.5)
    assert recipe.label_smoothing == 0.1
    assert parse_recipe(recipe_yaml(recipe), "x", []) == recipe
