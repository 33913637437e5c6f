"""What `torch-thor train --list` says of the keys: all of them, with defaults that can be given as they stand."""

import io

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from torch_thor.training import Phase, Recipe, ScheduleSpec, load_recipe, parse_recipe
from torch_thor.training.config.keys import key_tables, keys_of
from torch_thor.training.data import DataSpec, ImageTransform, TextSpec, Workers
from torch_thor.training.optimizers import OPTIMIZERS

WHOLE_SETTINGS = {"update_interval", "trace_thresholds", "decay_filter"}  # a number or a mapping, and the like
INSIDE = {
    "": Recipe,
    "data.": DataSpec,
    "data.transform.": ImageTransform,
    "data.workers.": Workers,
    "data.text.": TextSpec,
    "schedule.": ScheduleSpec,
    "damping_schedule.": ScheduleSpec,
    **{f"optimizers.{name}.": entry.settings for name, entry in OPTIMIZERS.items()},
}


def flat(tree, prefix=""):
    if not isinstance(tree, dict):
        return {prefix.removesuffix(".")}
    # a setting of more than one type is one key, whatever it holds
    return set().union(
        *(
            {f"{prefix}{name}"} if name in WHOLE_SETTINGS else flat(branch, f"{prefix}{name}.")
            for name, branch in tree.items()
        )
    )


def test_every_key_of_a_recipe_is_listed():
    listed = {f"{prefix}{key.name}" for prefix, kind in INSIDE.items() for key in keys_of(kind)}
    recipe = load_recipe("resnet18-cifar10-thor")  # the one recipe that sets its transform
    assert flat(OmegaConf.to_container(OmegaConf.structured(recipe))) <= listed


@pytest.mark.parametrize("prefix", INSIDE)
def test_keys_have_type_default_and_meaning(prefix):
    text = "data: {name: image-folder, transform: {size: 224}}"
    plain, defaults = parse_recipe(text, "plain", []), []
    for key in keys_of(INSIDE[prefix]):
        assert key.type
        assert len(key.meaning) > 7, key
        assert "`" not in key.meaning
        if key.default != "see below" and f"{prefix}{key.name}" not in ("data.name", "data.transform", "name"):
            value = key.default.replace("0.75, 1.333", "0.75, 1.3333333333333333")  # it is shown rounded
            defaults.append(f"{prefix}{key.name}={value}")
    assert parse_recipe(text, "plain", defaults) == plain


def test_types_are_words():
    words = {key.name: key.type for key in keys_of(Recipe)}
    assert words["epochs"] == "whole number"
    assert words["stop_at"] == "number or null"
    assert words["optimizer"] == "list (text)"
    assert words["compile"] == "true or false"


def test_the_keys_of_a_phase():
    keys = {key.name: key for key in keys_of(Phase)}
    assert [keys[name].default for name in ("steps", "batch_size", "lr_factor")] == ["to be given", "null", "1"]
    assert keys["schedule"].type == "mapping or null"
    assert next(key for key in keys_of(Recipe) if key.name == "phases").type == "list (mapping)"


def test_what_is_in_brackets_is_printed():
    file = io.StringIO()
    for table in key_tables():
        Console(file=file, width=300).print(table)
    assert '[-head, "-*norm*"]' in file.getvalue()
