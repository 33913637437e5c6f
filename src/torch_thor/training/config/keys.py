"""The keys of a recipe with type, default and meaning, read from the classes that define them."""

import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from torch_thor.training.config.data_spec import DataSpec, ImageTransform, Workers
from torch_thor.training.config.phases import Phase
from torch_thor.training.config.recipe import WHOLE_SETTINGS, Recipe
from torch_thor.training.config.schedules.spec import ScheduleSpec
from torch_thor.training.config.text_spec import TextSpec
from torch_thor.training.optimizers.registry import OPTIMIZERS

TYPES = {int: "whole number", float: "number", str: "text", bool: "true or false", type(None): "null"}


@dataclass(frozen=True)
class Key:
    """One key of a recipe.

    Args:
        name: The name in a recipe, without the mapping that contains it.
        type: The type, in words.
        default: The default value, in YAML.
        meaning: The meaning, from the docstring of the class.
    """

    name: str
    type: str
    default: str
    meaning: str


def keys_of(kind: type) -> list[Key]:
    """Return the keys that a class of settings defines.

    Args:
        kind: A dataclass whose docstring describes each of its fields.

    Returns:
        One key for each field, in the order of the fields.
    """
    hints, meanings = typing.get_type_hints(kind), _meanings(kind)
    own = [item for item in fields(kind) if not item.metadata.get("omegaconf_ignore")]
    return [Key(item.name, _type(hints[item.name]), _default(item), meanings[item.name]) for item in own]


def key_tables() -> Iterator[Table]:
    """List all keys of a recipe.

    Yields:
        A table for the recipe's own keys, then one for each mapping in it.
    """
    yield _table("Keys of a recipe file, which KEY=VALUE on the command line overrides", keys_of(Recipe))
    yield _table("data.KEY: the data set", keys_of(DataSpec))
    yield _table("data.transform.KEY: crops of images", keys_of(ImageTransform))
    yield _table("data.workers.KEY: the processes that make batches", keys_of(Workers))
    yield _table("data.text.KEY: examples of a masked language model", keys_of(TextSpec))
    yield _table("phases: a list of mappings with these keys", keys_of(Phase))
    yield _table("schedule.KEY and damping_schedule.KEY: schedules", keys_of(ScheduleSpec))
    for name, entry in OPTIMIZERS.items():
        title = f"optimizers.{name}.KEY; KEY alone sets it for every optimizer of the training that has this setting"
        yield _table(title, keys_of(entry.settings))


def _table(title: str, keys: list[Key]) -> Table:
    table = Table("key", "type", "default", "meaning", title=title, title_justify="left")
    table.columns[0].no_wrap = True
    for key in keys:  # as Text, because Rich would read brackets in a string as markup
        table.add_row(*(Text(part) for part in (key.name, key.type, key.default, key.meaning)))
    return table


def _meanings(kind: type) -> dict[str, str]:
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__):  # a class may describe an inherited key anew
        arguments = (inspect.cleandoc(owner.__doc__ or "")).partition("\nArgs:\n")[2]
        for name, text in re.findall(r"^    (\w+): (.*(?:\n     .*)*)", arguments, re.MULTILINE):
            found[name] = " ".join(text.split()).replace("`None`", "null").replace("`", "")
    return found


def _type(hint: Any) -> str:
    if hint is Any:
        return "see meaning"
    if isinstance(hint, types.UnionType):
        return " or ".join(_type(one) for one in typing.get_args(hint))
    if typing.get_origin(hint) in (tuple, list):
        return f"list ({_type(typing.get_args(hint)[0])})"
    return TYPES.get(hint, "mapping")


def _default(item: Any) -> str:
    if item.default is MISSING and item.default_factory is MISSING:
        return "to be given"
    value = item.default_factory() if item.default is MISSING else item.default
    if item.name in WHOLE_SETTINGS and isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_yaml(part)}' for key, part in value.items())}}}"
    return "see below" if is_dataclass(value) or isinstance(value, dict) else _yaml(value)


def _yaml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(_yaml(one) for one in value)}]"
    plain = {None: "null", True: "true", False: "false", "": '""'}
    if value is None or isinstance(value, bool | str):
        return plain.get(value, str(value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
