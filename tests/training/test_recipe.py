"""Recipes: typed, overridable and short; each mistake is one line."""

from pathlib import Path

import pytest

from torch_thor.errors import UserError
from torch_thor.training import recipes
from torch_thor.training.recipe_model import Phase, Recipe, Schedule
from torch_thor.training.recipes import keys, load_recipe, override, to_yaml

PHASES = (
    "phases=[{steps: 4, length: 32}, {steps: 2, lr_factor: 0.5, schedule: {kind: linear, "
    "warmup_epochs: 1}}]"
)


def refused(name, *words):
    """The lines of the error for a recipe that cannot be loaded."""
    with pytest.raises(UserError) as caught:
        load_recipe(name, words)
    return str(caught.value).splitlines()


def reread(text, folder):
    """The recipe in a file with this text."""
    (folder / "other.yaml").write_text(text)
    return load_recipe(str(folder / "other.yaml"))


def test_recipes_of_the_package_are_described_and_written_in_forty_lines(tmp_path):
    assert [name for name, _ in recipes.recipe_list()] == recipes.recipe_names()
    for name, about in recipes.recipe_list():
        recipe = load_recipe(name)
        assert (recipe.name, recipe.about) == (name, about)
        assert len(about) > 20 < len(recipe.reaches)
        text = to_yaml(recipe)
        assert len(text.splitlines()) <= 40
        assert reread(text, tmp_path) == recipe


def test_only_differences_from_the_defaults_are_written():
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
        ["task=masked-lm", "model=bert-tiny", "data.name=python-text", PHASES],
    ],
)
def test_a_written_recipe_is_read_as_an_equal_recipe(words, tmp_path):
    recipe = load_recipe("digits", ["optimizer=thor-muon", *words])
    assert reread(to_yaml(recipe), tmp_path) == recipe
    assert override(recipe, []) == recipe


def test_words_reach_their_keys_and_replace_the_values_of_the_recipe():
    recipe = load_recipe("digits", ["epochs=7", "schedule.warmup_epochs=2", "optimizer=[adam]"])
    assert (recipe.epochs, recipe.optimizer) == (7, ("adam",))
    assert recipe.schedule == Schedule(kind="cosine", warmup_epochs=2)
    assert override(recipe, ["schedule={kind: linear}"]).schedule == Schedule(kind="linear")
    assert load_recipe("digits", ["schedule.power=1e-4"]).schedule.power == 1e-4
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
        (["optimizer=muon"], {"muon": {"lr": 0.005}}),  # settings of unused optimizers are left out
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
    (line,) = refused("other.yaml")
    assert line.startswith("there is no recipe other.yaml: name a file that ends in .yaml, or ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"epochs: 1\nseed: [1\n", "line 3, column 1"),
        (b"lr: 0.1", "lr is a setting of optimizers: give it as optimizers.NAME.lr"),
    ],
)
def test_a_fault_of_a_file_is_one_line(tmp_path, content, said):
    (tmp_path / "mine.yaml").write_bytes(content)
    (line,) = refused(str(tmp_path / "mine.yaml"))
    assert said in line


WRONG = {
    "epoch=3": "there is no key epoch (did you mean epochs?)",
    "steps=5|epochs=2": "epochs=2 has no effect beside steps: leave it out, or set steps=null",
    "data.transform={}": "data.transform is set, but digits is used without crops",
    "schedule.end=1|schedule.final=0.5": "schedule.final=0.5 and end=1.0 say the same",
    "update_interval.first=3": "optimizers.thor.update_interval={first: 3}: kind must be one of",
    "epochs=[1": "epochs=[1: the value is not YAML: while parsing a flow sequence",
    "phases=[{steps: 4},{steps: 3}]|steps=8": "steps=8 is not the sum of the phases' steps, 7",
}


@pytest.mark.parametrize(("words", "said"), WRONG.items())
def test_a_fault_is_one_line_with_the_full_key_the_rule_and_the_remedy(words, said):
    lines = refused("digits", "optimizer=thor,sgd", *words.split("|"))
    assert lines[0].startswith(said), lines


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("model=deep-autoencoder", "model=deep-autoencoder is not a network of task=char-lm"),
        ("data.name=cifar10", "data is set, but task=char-lm has data of its own"),
        ("classes=3", "classes is set, but task=char-lm does not use it"),
    ],
)
def test_settings_that_the_task_cannot_use_are_refused(word, said):
    with pytest.raises(UserError) as caught:
        override(Recipe(task="char-lm", model="char-transformer"), [word])
    assert str(caught.value).startswith(said)


def test_total_steps_phases_and_accumulation():
    assert (Recipe(epochs=3).total_steps(7), Recipe(steps=5).total_steps(7)) == (21, 5)
    a, b, c = Phase(steps=3), Phase(steps=1, accumulation=4), Phase(steps=2, accumulation=2)
    recipe = Recipe(phases=(a, b, c), batch_size=8, accumulation=8)
    assert recipe.total_steps(6) == 6
    assert [recipe.phase_at(step) for step in range(7)] == [(a, 0)] * 3 + [(b, 3)] + [(c, 4)] * 3
    assert [recipe.accumulation_at(step) for step in range(6)] == [8, 8, 8, 4, 2, 2]
    assert Recipe().phase_at(9) == (None, 0)
    assert Recipe(accumulation=3).accumulation_at(9) == 3


def test_paths_name_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    (line,) = refused("fashion-mnist", "data.root=$PLACE/images")
    assert line.startswith("data.root=$PLACE/images: set the environment variable")
    monkeypatch.setenv("PLACE", "/some")
    monkeypatch.chdir(tmp_path)
    for text, place in (("data", f"{tmp_path}/data"), ("$PLACE", "/some"), ("~/b", "/home/me/b")):
        recipe = Recipe(data={"name": "cifar10", "root": text}, weights=text)
        assert (str(recipe.data.folder()), recipe.weights) == (place, place)


def test_the_table_of_keys_is_short_and_complete():
    listed = [row[0] for part in (None, "training") for row in keys(part)]
    assert sorted(listed) == sorted(Recipe.model_fields)
    assert keys("thor") == keys("optimizers.thor")
    for part in (None, *recipes.PARTS):
        assert len(keys(part)) <= 38
        assert all(kind and len(meaning) > 5 for _, kind, _, meaning in keys(part))
