"""Conversion of recipes: from YAML and `key=value` overrides to a `Recipe`, and from a `Recipe` to YAML.

OmegaConf merges the texts, checks types and resolves `${oc.env:NAME}`. Its errors are raised as a `UserError` of one
line that names the key.
"""

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from torch_thor.training.config.recipe import WHOLE_SETTINGS, Recipe
from torch_thor.training.config.recipe_values import flat, flat_values, is_inside
from torch_thor.training.config.yaml_text import check_yaml, load_yaml
from torch_thor.training.errors import UserError, first_line, require
from torch_thor.training.models.library import nearest
from torch_thor.training.optimizers.registry import OPTIMIZERS


def parse_recipe(text: str, name: str, overrides: list[str]) -> Recipe:
    """Turn YAML and overrides into a recipe.

    Args:
        text: The YAML.
        name: The name of the recipe if the YAML does not give one.
        overrides: `key=value` words, as for `load_recipe`.

    Returns:
        The checked recipe.
    """
    content = load_yaml(text, f"recipe {name}")
    require(isinstance(content, dict), f"recipe {name} has no keys: write it as `key: value` lines")
    config = _merged(OmegaConf.structured(Recipe), {"name": name, **content})
    pairs = [_split(word) for word in overrides]
    for key, value in pairs:
        if key == "optimizer":
            config = _merged(config, {key: value.split(",") if isinstance(value, str) else value})
    for key, value in pairs:
        if key != "optimizer":
            config = _merged(config, _spread(config, key, value))
    return _to_recipe(config)


def _to_recipe(config: DictConfig) -> Recipe:
    try:
        _check_schedules(config)
        recipe = cast(Recipe, OmegaConf.to_object(config))
        texts = flat(OmegaConf.to_container(config))
        return replace(recipe, written={key: text for key, text in texts.items() if _interpolates(text)})
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {first_line(error)}") from error


def _check_schedules(config: DictConfig) -> None:
    """Make each schedule on its own, because it does not know its key, which its errors have to name."""
    keys = ["schedule", "damping_schedule", *(f"phases[{number}].schedule" for number in range(len(config.phases)))]
    for key in keys:
        try:
            if (node := OmegaConf.select(config, key)) is not None:
                OmegaConf.to_object(node)
        except UserError as error:
            raise UserError(f"{key}.{error}") from error


def override(recipe: Recipe, overrides: list[str]) -> Recipe:
    """Apply overrides to a recipe.

    Args:
        recipe: The recipe.
        overrides: `key=value` words, as for `load_recipe`.

    Returns:
        A new, checked recipe.
    """
    return parse_recipe(recipe_yaml(recipe), recipe.name, overrides)


def recipe_yaml(recipe: Recipe) -> str:
    """Write a recipe as YAML with every key.

    Args:
        recipe: The recipe.

    Returns:
        Text that `parse_recipe` turns into an equal recipe.
    """
    written = recipe.written
    if written:
        with suppress(UserError):  # an environment variable is no longer set: the text cannot be resolved and compared
            again = flat_values(_to_recipe(_merged(OmegaConf.structured(Recipe), _with(recipe, written))))
            values = flat_values(recipe)
            replaced = {key for key in values if values[key] != again.get(key)}  # by `dataclasses.replace`
            written = {key: text for key, text in written.items() if not any(is_inside(one, key) for one in replaced)}
    return OmegaConf.to_yaml(OmegaConf.create(_with(recipe, written)))


def _with(recipe: Recipe, written: Mapping[str, Any]) -> dict[str, Any]:
    container = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.structured(recipe)))
    for key, text in written.items():
        node = container
        *above, last = key.split(".")
        for part in above:
            node = node[part]
        node[last] = text
    return container


def _interpolates(value: Any) -> bool:
    if isinstance(value, dict | list | tuple):
        return any(_interpolates(part) for part in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, str) and "${" in value


def _split(word: str) -> tuple[str, Any]:
    key, equals, value = word.partition("=")
    require(bool(key) and bool(equals), f"'{word}' is not an override: write key=value, for example lr=0.1")
    check_yaml(value, f"{word}: the value")
    try:
        return key, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))["value"]  # type: ignore[index, call-overload]
    except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
        raise UserError(
            f"{word}: the value is not YAML; quote it if it begins with * or contains brackets or colons"
        ) from error


def _spread(config: DictConfig, key: str, value: Any) -> dict[str, Any]:
    # a key of the recipe itself, or a setting of every chosen optimizer that has it
    if key.split(".")[0] in config:
        return _nested(key, value)
    chosen = [name for name in config.optimizer if name in OPTIMIZERS]
    setting = key.split(".")[0]
    takers = [name for name in chosen if setting in {item.name for item in fields(OPTIMIZERS[name].settings)}]
    known = [
        *flat(OmegaConf.to_container(config)),
        *(item for name in chosen for item in config.optimizers[name]),
    ]
    require(
        bool(takers),
        f"there is no key {key}{nearest(key, known)}: see the recipe's keys in `torch-thor train --list`",
    )
    return {"optimizers": {name: _nested(key, value) for name in takers}}


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return cast(dict[str, Any], value)


def _merged(config: DictConfig, change: dict[str, Any]) -> DictConfig:
    unknown = [name for name in _settings_in(change) if name not in OPTIMIZERS]
    require(
        not unknown, f"optimizers.{', '.join(map(str, unknown))}: no such optimizer; use one of {', '.join(OPTIMIZERS)}"
    )
    try:
        return cast(DictConfig, OmegaConf.merge(_without_replaced(config, change), OmegaConf.create(change)))
    except (ConfigKeyError, ConfigAttributeError) as error:
        known = list(flat(OmegaConf.to_container(config)))
        raise UserError(f"there is no key {error.full_key}{nearest(str(error.full_key), known)}") from error
    except TypeError as error:  # OmegaConf raises it for a mapping instead of a list
        raise UserError(f"{next(iter(flat(change)))}: {error}") from error
    except OmegaConfBaseException as error:
        key = error.full_key or next(iter(flat(change)))
        raise UserError(f"{key}: {first_line(error)}") from error


def _settings_in(change: dict[str, Any]) -> dict[str, Any]:
    settings = change.get("optimizers")
    return settings if isinstance(settings, dict) else {}


def _without_replaced(config: DictConfig, change: dict[str, Any]) -> DictConfig:
    # OmegaConf merges a mapping into a mapping and refuses a string for a list. Settings that may be of several types,
    # and mappings with a `kind`, are complete values, so they replace the old value instead.
    config = copy.deepcopy(config)
    for name, settings in _settings_in(change).items():
        for key, value in settings.items() if isinstance(settings, dict) else ():
            if (
                key in WHOLE_SETTINGS
                and key in config.optimizers[name]
                and (not isinstance(value, dict) or "kind" in value)
            ):
                own = config.optimizers[name]
                with read_write(own), open_dict(own):
                    own.pop(key)  # only a new node may have another type
                    own[key] = None
    return config
