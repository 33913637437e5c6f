"""Reading and writing recipes, the package's and users' files, with `key=value` words on top.

Recipes are YAML as PyYAML reads it, version 1.1; numbers such as 1e-3 are read as well.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from torch_thor.errors import UserError, require
from torch_thor.training.optimizers import KEYS_OF, Settings
from torch_thor.training.recipe_keys import lines_of, meanings_of, nearest, rows
from torch_thor.training.recipe_model import (
    Data,
    Phase,
    Recipe,
    Schedule,
    Text,
    Training,
    Transform,
    Workers,
)
from torch_thor.training.tasks.opening import check_task

# the tables of `torch-thor keys PART`; without a part, the keys that are of no other
PARTS: dict[str, type[BaseModel]] = {
    "training": Training, "data": Data, "data.transform": Transform, "data.workers": Workers,
    "data.text": Text,
    "phases": Phase, "schedule": Schedule,
    **{f"optimizers.{name}": keys for name, keys in KEYS_OF.items()},
}  # fmt: skip
# in the installed package, or at the top of a source tree
_FOLDER = next(
    folder
    for folder in (Path(__file__).parents[1] / "recipes", Path(__file__).parents[3] / "recipes")
    if folder.is_dir()
)
# A recipe begins with the keys that a person would write first.
_FIRST = ("name", "about", "reaches", "task", "data", "model", "optimizer", "optimizers")

# Of these keys, the first are in steps and go before the second, in epochs.
_SAME = (("steps", "epochs"), ("phases", "epochs"), ("eval_interval", "eval_epochs"))
_SETTINGS = meanings_of(Settings, "optimizers.")
_MEANINGS = {
    **{key.rpartition(".")[2]: meaning for key, meaning in _SETTINGS.items()},
    **_SETTINGS,
    **meanings_of(Recipe),
}


class _Loader(yaml.SafeLoader):
    """Reads numbers with an exponent."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that would be read as a number with an exponent."""


for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+.0123456789"),
    )


def recipe_names() -> list[str]:
    """List the names of the package's recipes, sorted."""
    return sorted(file.stem for file in _FOLDER.glob("*.yaml"))


def recipe_list() -> list[tuple[str, str]]:
    """List name and description of the package's recipes, without checking them."""
    return [(name, read_keys(name)["about"]) for name in recipe_names()]


def load_recipe(name: str, words: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        name: The name of one of the package's recipes, or the path of a YAML file.
        words: `key=value`. A key of the recipe, with dots between the levels
            (`schedule.kind`), or a setting of the chosen optimizers (`lr`, `damping`, ...), for all
            that have it. The value is YAML, and replaces the old value as a whole.

    Returns:
        The checked recipe.

    Raises:
        UserError: With one line for each fault.
    """
    return _recipe(read_keys(name), words)


def is_file_name(name: str) -> bool:
    """Whether a recipe is named as a file, not as a recipe of the package."""
    return Path(name).suffix.lower() in {".yaml", ".yml"}


def read_keys(name: str) -> dict[str, Any]:
    """Read the keys of a recipe as for `load_recipe`, without checking them."""
    names = recipe_names()
    require(
        name in names or (is_file_name(name) and Path(name).is_file()),
        f"there is no recipe {name}{nearest(name, names)}: name a file that ends in .yaml, or one "
        f"of {', '.join(names)}",
    )
    file = _FOLDER / f"{name}.yaml" if name in names else Path(name)
    return _keys(file.read_bytes(), file.stem)


def override(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """Return a recipe with words on top, as for `load_recipe`.

    Optimizers that it did not use have their defaults.
    """
    return _recipe(recipe.model_dump(mode="json", exclude_defaults=True), words)


def to_yaml(recipe: Recipe) -> str:
    """Write the non-default values, as text that `load_recipe` makes an equal recipe of."""
    values = recipe.model_dump(mode="json", exclude_defaults=True)
    return yaml.dump(
        {key: values[key] for key in (*_FIRST, *values) if key in values},
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=None,
        width=120,
        allow_unicode=True,
    )


def differences(old: Recipe, new: Recipe, but: Sequence[str] = ()) -> list[str]:
    """Return `key: old -> new` where recipes differ, but for some keys (see `FREE_ON_RESUME`)."""
    before, after = (dict(_flat(recipe.model_dump())) for recipe in (old, new))
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
        and not any(key == each or (each[-1] == "." and key.startswith(each)) for each in but)
    ]


def keys(part: str | None = None) -> list[tuple[str, str, str, str]]:
    """Return key, type, default and meaning of each key of a part of recipes (see `PARTS`).

    Raises:
        UserError: If there is no such part.
    """
    if part is None:
        return [row for row in rows(Recipe) if row[0] not in Training.model_fields]
    known = PARTS | {name.rpartition(".")[2]: model for name, model in PARTS.items()}
    require(
        part in known,
        f"there is no part {part}{nearest(part, known)}: the parts are {', '.join(PARTS)}",
    )
    return rows(known[part])


def _keys(text: bytes, name: str) -> dict[str, Any]:
    content = _read(text, f"recipe {name}")
    require(isinstance(content, dict), f"recipe {name} has no keys: write it as `key: value` lines")
    return {"name": name, **content}


def _read(text: bytes, what: str) -> Any:
    try:
        return yaml.load(BytesIO(text), Loader=_Loader)  # of a file, errors quote no lines
    except (yaml.YAMLError, ValueError) as error:  # ValueError: of a date such as 2024-13-01
        raise UserError(f"{what} is not YAML: {' '.join(str(error).split())}") from error


def _read_word(word: str) -> tuple[str, Any]:
    require("=" in word[1:], f"'{word}' is not key=value: write it as in lr=0.1")
    key, text = word.split("=", 1)
    value = _read(text.encode(), f"{word}: the value")
    return key, value.split(",") if key == "optimizer" and isinstance(value, str) else value


def _recipe(tree: dict[str, Any], words: Sequence[str]) -> Recipe:
    given = dict(map(_read_word, words))
    # A word in steps replaces what the file says in epochs.
    replaced = {in_epochs for in_steps, in_epochs in _SAME if given.get(in_steps)}
    tree = {key: value for key, value in tree.items() if key not in replaced}
    chosen = ({"optimizer": Recipe().optimizer} | tree | given)["optimizer"]
    used = [name for name in KEYS_OF if isinstance(chosen, list | tuple) and name in chosen]
    for key, value in given.items():
        path = key.split(".")
        takers = [name for name in used if path[0] in KEYS_OF[name].model_fields]
        is_own = path[0] in Recipe.model_fields or not takers
        for place in [path] if is_own else [["optimizers", name, *path] for name in takers]:
            tree = _put(tree, place, value)
    faults = [
        f"{key}: this run does not use {name}: leave the setting out, or add {name} to optimizer"
        for key in given
        for name in KEYS_OF
        if name not in used and key.startswith(f"optimizers.{name}.")
    ] + [
        f"{in_epochs}={tree[in_epochs]} has no effect beside {in_steps}: leave it out, or set "
        f"{in_steps}={'[]' if in_steps == 'phases' else 'null'}"
        for in_steps, in_epochs in _SAME
        # a recipe that a program has written out names its defaults too
        if tree.get(in_steps) and (in_epochs in given or tree.get(in_epochs, 1) != 1)
    ]
    try:
        recipe = Recipe.model_validate(tree)
        faults += check_task(recipe)
    except ValidationError as error:
        faults += lines_of(error, _MEANINGS)
    require(not faults, "\n".join(faults))
    return recipe


def _put(tree: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    tree = tree if isinstance(tree, Mapping) else {}
    return {**tree, path[0]: value if len(path) == 1 else _put(tree.get(path[0]), path[1:], value)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
