"""Recipes: typed, overridable, written as short as they are meant; each mistake is one line."""

from pathlib import Path
from pkgutil import resolve_name

import pytest

from torch_thor.errors import UserError
from torch_thor.training import recipes
from torch_thor.training.optimizers import OPTIMIZERS
from torch_thor.training.recipe_model import FREE_ON_RESUME, Data, Phase, Recipe, Schedule
from torch_thor.training.recipes import keys, load_recipe, override, to_yaml
from torch_thor.training.tasks import TASKS
from torch_thor.training.tasks.task import primary

PHASES = (
    "phases=[{steps: 4, length: 32}, {steps: 2, lr_factor: 0.5, schedule: {kind: linear, "
    "warmup_epochs: 1}}]"
)


def refused(name, *words):
    """Load what cannot be right, and return the lines of the error."""
    with pytest.raises(UserError) as caught:
        load_recipe(name, words)
    return str(caught.value).splitlines()


def reread(text, folder):
    """The recipe in a file with this text."""
    (folder / "other.yaml").write_text(text)
    return load_recipe(str(folder / "other.yaml"))


def test_the_recipes_of_the_package_say_what_they_are_and_are_written_in_forty_lines(tmp_path):
    assert [name for name, _ in recipes.recipe_list()] == recipes.recipe_names()
    for name, about in recipes.recipe_list():
        recipe = load_recipe(name)
        assert (recipe.name, recipe.about) == (name, about)
        assert len(about) > 20 < len(recipe.reaches)
        text = to_yaml(recipe)
        assert len(text.splitlines()) <= 40
        assert reread(text, tmp_path) == recipe


def test_what_is_written_are_the_differences_from_the_defaults():
    assert to_yaml(Recipe()) == "{}\n"
    recipe = load_recipe("digits", ["optimizer=sgd", "lr=1e-4", "model=small-resnet"])
    assert to_yaml(recipe) == (
        f"name: digits\nabout: {recipe.about}\nreaches: {recipe.reaches}\nmodel: small-resnet\n"
        "optimizer: [sgd]\noptimizers:\n  sgd: {lr: 0.0001}\nepochs: 20\nbatch_size: 64\n"
        "schedule: {kind: cosine}\ntargets: [0.95, 0.97, 0.98]\nthreads: 1\n"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["lr=0.123", "targets=[0.5,0.75]", "split_dim=null", "decay_filter=['*.weight', -head]"],
        ["data.name=cifar10", "data.transform={}", "ema_decay=0.5", "name='3'"],
        ["update_interval={kind: piecewise, boundaries: [3], intervals: [1, 2]}"],
        ["about='ä: #'", "model='1e5'", "reaches='null'"],
        ["task=masked-lm", "model=bert-tiny", "data.name=python-text", PHASES],
    ],
)
def test_what_is_written_is_read_as_an_equal_recipe(words, tmp_path):
    recipe = load_recipe("digits", ["optimizer=thor-muon", *words])
    assert reread(to_yaml(recipe), tmp_path) == recipe
    assert override(recipe, []) == recipe


def test_words_reach_their_keys_and_replace_what_stood_there():
    recipe = load_recipe("digits", ["epochs=7", "schedule.warmup_epochs=2", "optimizer=[adam]"])
    assert (recipe.epochs, recipe.optimizer) == (7, ("adam",))
    assert recipe.schedule == Schedule(kind="cosine", warmup_epochs=2)
    assert override(recipe, ["schedule={kind: linear}"]).schedule == Schedule(kind="linear")
    for word, value in (("1e-4", 1e-4), ("+.5e-1", 0.05), ("3", 3)):
        assert load_recipe("digits", [f"schedule.power={word}"]).schedule.power == value
    assert load_recipe("bert-tiny", [PHASES]).phases[1] == Phase(
        steps=2, lr_factor=0.5, schedule=Schedule(kind="linear", warmup_epochs=1)
    )
    # a length in steps replaces the epochs of the file
    recipe = load_recipe("digits", ["steps=5", "eval_interval=2"])
    assert (recipe.steps, recipe.epochs, recipe.eval_interval) == (5, 1, 2)
    assert load_recipe("characters", ["steps=null", "epochs=3"]).epochs == 3


def test_a_setting_goes_to_the_chosen_optimizers_that_have_it():
    for words, expected in (
        (
            ["lr=0.7", "damping=2", "optimizer=thor,adamw"],  # in any order
            {"thor": {"lr": 0.7, "damping": 2, "update_interval": 20}, "adamw": {"lr": 0.7}},
        ),
        (["optimizer=muon"], {"muon": {"lr": 0.005}}),  # only those in use
        (["optimizer=muon", "optimizers.muon.lr=2"], {"muon": {"lr": 2}}),
    ):
        recipe = load_recipe("digits", words)
        assert recipe.optimizers == expected
        assert recipe.optimizer == tuple(expected)


def test_a_users_own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.yml").write_text("data: {name: digits}\nepochs: 3\n")
    recipe = load_recipe("mine.yml", ["seed=4"])
    assert (recipe.name, recipe.epochs, recipe.seed) == ("mine", 3, 4)
    Path("mine.toml").touch()
    for name in ("other.yaml", "mine.toml"):
        (line,) = refused(name)
        assert line.startswith(f"there is no recipe {name}: name a file that ends in .yaml, or ")
    assert refused("digit")[0].startswith("there is no recipe digit (did you mean digits?)")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"epochs: 1\nseed: [1\n", "line 3, column 1"),
        (b"name: \xe9", "position 6"),
        (b"just words", "has no keys"),
        (b"lr: 0.1", "lr is a setting of optimizers: give it as optimizers.NAME.lr"),
        (b"schedule.kind: step", "there is no key schedule.kind: write levels in a file, as in"),
    ],
)
def test_what_is_wrong_in_a_file(tmp_path, content, said):
    (tmp_path / "mine.yaml").write_bytes(content)
    (line,) = refused(str(tmp_path / "mine.yaml"))
    assert said in line


# ---- mistakes ------------------------------------------------------------------------------------

WRONG = {
    "epoch=3": "there is no key epoch (did you mean epochs?)",
    "dampin=1": "there is no key dampin (did you mean damping?)",
    "optimizers.tohr.lr=1": "there is no key optimizers.tohr (did you mean optimizers.thor?)",
    "optimizers.adam.lr=1": "optimizers.adam.lr: this run does not use adam: leave",
    "optimizer=tohr": "optimizer[0]=tohr should be 'thor-muon', 'thor', ",
    "optimizer=sgd,sgd": "optimizer=['sgd', 'sgd'] must name one or more optimizers, each once",
    "epochs=true": "epochs=true should be a valid integer (passes over",
    "epochs=0": "epochs=0 should be greater than or equal to 1",
    "steps=5|epochs=2": "epochs=2 has no effect beside steps: leave it out, or set steps=null",
    "stop_at=76": "stop_at must lie in (0, 1], not 76.0",
    "targets=[0.5,95]": "targets must lie in (0, 1], not 95.0",
    "targets=[0.5,-1]": "targets[1]=-1 should be greater than 0 (values of the primary metric",
    "accumulation=65": "accumulation=65 is more than batch_size=64",
    "shards=2": "shards=2 needs parallel=hsdp",
    "loss_scale=2": "loss_scale=2.0 needs precision=fp16",
    "weights_except=[head]": "weights is not set, but weights_except",
    "data.transform={}": "data.transform is set, but digits is used without crops",
    "data.root=/x": "data.root=/x: digits is part of scikit-learn and has no folder",
    "data.name=cifar10|data.transform.resize=1": "data.transform.resize=1 must be size=224 or more",
    "data.name=cifar10|data.transform.scale=[1,0.5]": "data.transform.scale=[1.0, 0.5] must be two",
    "data.name=cifar10|data.transform.ratio=[2,1]": "data.transform.ratio=[2.0, 1.0] must be",
    "damping_schedule.kind=step": "damping_schedule.milestones=[] must be",
    "schedule.milestones=[2,2]": "schedule.milestones=[2.0, 2.0] must be",
    "schedule.end=1|schedule.final=0.5": "schedule.final=0.5 and end=1.0 say the same",
    "lr=.nan": "optimizers.thor.lr=.nan should be a finite number",
    "momentum=1": "optimizers.thor.momentum=1: must be in [0, 1) (μ; 0 switches",
    "update_interval.first=3": "optimizers.thor.update_interval={first: 3}: kind must be one of",
    "epochs=[1": "epochs=[1: the value is not YAML: while parsing a flow sequence",
    "=3": "'=3' is not key=value",
    "phases=[{length: 32}]": "phases[0].steps is missing: give it",
    "phases=[{steps: 4},{steps: 3}]|steps=8": "steps=8 is not the sum of the phases' steps, 7",
    "phases=[{steps: 4, batch_size: 4}]|accumulation=5": "accumulation=5 is more than batch_size=4",
}


@pytest.mark.parametrize(("words", "said"), WRONG.items())
def test_a_fault_is_one_line_with_the_full_key_the_rule_and_the_remedy(words, said):
    lines = refused("digits", "optimizer=thor,sgd", *words.split("|"))
    assert lines[0].startswith(said), lines


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["epochs=0", "schedule.kind=x", "lr=-1", "optimizer=thor,lamb", "optimizers.sgd.lr=1"],
            ["optimizers.sgd.lr: ", "epochs=0 ", "schedule.kind=x ", "optimizers.thor.lr=-1 ",
             "optimizers.lamb.lr=-1 "],
        ),
        (
            ["parallel=fsdp", "optimizer=muon,thor", "split_dim=auto", "accumulation=99"],
            ["accumulation=99 is mor", "parallel=fsdp: muon or", "parallel=fsdp: split_d"],
        ),
    ],
)  # fmt: skip
def test_all_faults_are_named_at_once(words, said):
    lines = refused("digits", *words)
    assert all(line.startswith(one) for line, one in zip(lines, said, strict=True)), lines


@pytest.mark.parametrize(
    ("words", "said"),
    {
        "model=deep-autoencoder": ["model=deep-autoencoder is not a network of task=char-"],
        "data.name=cifar10": ["data is set, but task=char-lm has data of its own"],
        "phases=[{steps: 1}]|classes=3": [
            "classes is set, but task=char-lm does not use it", "phases is set, but",
        ],
        "task=autoencoder|model=deep-autoencoder|data.name=cifar10": [
            "data.name=cifar10 cannot be used for task=autoencoder: use digits, fashion-mnist",
        ],
    }.items(),
)  # fmt: skip
def test_settings_that_the_task_cannot_use(words, said):
    recipe = Recipe(task="char-lm", model="char-transformer", targets=(7,))
    assert override(recipe, []) == recipe  # a loss may have any value
    with pytest.raises(UserError) as caught:
        override(recipe, words.split("|"))
    lines = str(caught.value).splitlines()
    assert all(line.startswith(one) for line, one in zip(lines, said, strict=True)), lines


def test_the_list_of_tasks_agrees_with_their_classes():
    for entry in TASKS.values():
        task = resolve_name(f"torch_thor.training.tasks.{entry.place}")
        assert primary(task.metrics).share == entry.has_accuracy
        assert {*entry.keys} <= Recipe.model_fields.keys()
        for data_set in entry.data_sets:
            assert Data(name=data_set)


def test_what_a_recipe_answers():
    assert (Recipe(epochs=3).total_steps(7), Recipe(steps=5).total_steps(7)) == (21, 5)
    a, b, c = Phase(steps=3), Phase(steps=1, accumulation=4), Phase(steps=2, accumulation=2)
    recipe = Recipe(phases=(a, b, c), batch_size=8, accumulation=8)
    assert recipe.total_steps(6) == 6
    assert [recipe.phase_at(step) for step in range(7)] == [(a, 0)] * 3 + [(b, 3)] + [(c, 4)] * 3
    assert [recipe.accumulation_at(step) for step in range(6)] == [8, 8, 8, 4, 2, 2]
    assert Recipe().phase_at(9) == (None, 0)
    assert Recipe(accumulation=3).accumulation_at(9) == 3
    assert load_recipe("resnet50-imagenet-sgd").data.crops.size == 224
    assert load_recipe("digits", ["data.name=cifar100"]).data.image_shape == (3, 32, 32)
    assert Recipe().data.image_shape == (1, 8, 8)


def test_paths_name_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    assert Recipe().data.folder() == Path("/home/me/.cache/torch-thor")
    monkeypatch.delenv("PLACE", raising=False)
    (line,) = refused("fashion-mnist", "data.root=$PLACE/images")
    assert line.startswith("data.root=$PLACE/images: set the environment variable")
    monkeypatch.setenv("PLACE", "/some")
    monkeypatch.chdir(tmp_path)
    for text, place in (("data", f"{tmp_path}/data"), ("$PLACE", "/some"), ("~/b", "/home/me/b")):
        recipe = Recipe(data={"name": "cifar10", "root": text}, weights=text, model=f"{text}.json")
        assert (str(recipe.data.folder()), recipe.weights) == (place, place)
        assert recipe.model == f"{place}.json"


def test_differences_are_listed_by_key():
    recipe = load_recipe("digits")
    changed = override(recipe, ["seed=9", "momentum=0.5", "data.workers.count=1", "optimizer=sgd"])
    found = recipes.differences(recipe, changed, (*FREE_ON_RESUME, "optimizer", "optimizers.thor."))
    assert found == ["seed: 0 -> 9", "optimizers.sgd.momentum: None -> 0.5"]


def test_the_table_of_keys_is_short_and_complete():
    listed = [row[0] for part in (None, "training") for row in keys(part)]
    assert sorted(listed) == sorted(Recipe.model_fields)
    assert keys("thor") == keys("optimizers.thor")
    assert keys("workers")[0] == (
        "count", "whole number", "4", "processes that make batches; 0: the training itself",
    )  # fmt: skip
    for part in (None, *recipes.PARTS):
        assert len(keys(part)) <= 38
        assert all(kind and len(meaning) > 5 for _, kind, _, meaning in keys(part))
    assert {row[0]: row[1] for row in keys("training")}["stop_at"] == "number or null"
    assert {row[0]: row[2] for row in keys("phases")}["steps"] == "to be given"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_defaults_in_the_table_can_be_given(name):
    for key, _, default, _ in keys(name):
        recipe = Recipe(optimizer=(name,))
        changed = override(recipe, [f"{key}={default}"])
        assert changed.optimizers == {
            name: {key: getattr(recipes.PARTS[f"optimizers.{name}"](), key)}
        }
