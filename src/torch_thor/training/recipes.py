"""Reading and writing recipes, the package's and users' files, with `key=value` words on top."""

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from importlib.resources import files
from importlib.resources.abc import Traversable
from operator import getitem
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from torch_thor.errors import UserError, require
from torch_thor.training.optimizers import KEYS_OF, Settings
from torch_thor.training.recipe_keys import as_written, lines_of, meanings_of, nearest, rows
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
from torch_thor.training.yaml12 import comment_of, read_texts, read_yaml, write_yaml

_ABSENT = object()  # stands for the value of a key that is not there
# the tables of `torch-thor keys PART`; without a part, the keys that are of no other
PARTS: dict[str, type[BaseModel]] = {
    "training": Training, "data": Data, "data.transform": Transform, "data.workers": Workers,
    "data.text": Text,
    "phases": Phase, "schedule": Schedule,
    **{f"optimizers.{name}": keys for name, keys in KEYS_OF.items()},
}  # fmt: skip


def recipe_folder() -> Traversable:
    """Find the folder of the recipes: in the installed package, or at the top of a source tree."""
    installed, source = files("torch_thor") / "recipes", Path(__file__).parents[3] / "recipes"
    require(
        installed.is_dir() or source.is_dir(),
        f"no recipes in {installed} or {source}: install torch-thor again",
    )
    return installed if installed.is_dir() else source


def recipe_names() -> list[str]:
    """List the names of the package's recipes, sorted."""
    return sorted(
        [item.name[:-5] for item in recipe_folder().iterdir() if item.name.endswith(".yaml")]
    )


def recipe_list() -> list[tuple[str, str]]:
    """List name and description of the package's recipes, without checking them."""
    folder = recipe_folder()
    return [
        (name, read_yaml((folder / f"{name}.yaml").read_text("utf-8"), name)["about"])
        for name in recipe_names()
    ]


def load_recipe(name: str, words: Sequence[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        name: The name of one of the package's recipes, or the path of a YAML file.
        words: `key=value`. A key is one of the recipe's, with dots between the levels
            (`schedule.kind`), or a setting of the chosen optimizers (`lr`, `damping`, ...), for all
            that have it. The value is YAML, and replaces the old one as a whole.

    Returns:
        The checked recipe.

    Raises:
        UserError: With one line for each fault.
    """
    return _recipe(read_keys(name), words)


def is_file_name(name: str) -> bool:
    """Whether a recipe is named as a file, not as one of the package."""
    return Path(name).suffix.lower() in {".yaml", ".yml"}


def read_keys(name: str) -> dict[str, Any]:
    """Read the keys of a recipe as for `load_recipe`, as they are written."""
    path = Path(name)
    if is_file_name(name):
        try:
            return _keys(path.read_text("utf-8"), path.stem)
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror}): name a YAML file or a recipe: "
                f"{', '.join(recipe_names())}"
            ) from error
        except UnicodeDecodeError as error:
            line = error.object.count(b"\n", 0, error.start) + 1
            raise UserError(
                f"{path} is not UTF-8 (line {line}, byte {error.start}): save it as UTF-8 text"
            ) from error
    names = recipe_names()
    require(
        name in names or not path.is_file(),
        f"{path} is not read as a recipe: the name of its file must end in .yaml or .yml: rename "
        "it",
    )
    require(
        name in names,
        f"there is no recipe {name}{nearest(name, names)}: the recipes are {', '.join(names)}",
    )
    return _keys((recipe_folder() / f"{name}.yaml").read_text("utf-8"), name)


def parse(text: str, name: str, words: Sequence[str] = ()) -> Recipe:
    """Make a recipe of YAML, and of words as for `load_recipe`; `name` is its default name."""
    return _recipe(_keys(text, name), words)


def _keys(text: str, name: str) -> dict[str, Any]:
    content = read_yaml(text, f"recipe {name}")
    require(
        isinstance(content, dict),
        f"recipe {name} has no keys: write it as `key: value` lines",
    )
    return {"name": name, **as_written(content, read_texts(text), Recipe)}


def edited(
    recipe: Recipe, then: Mapping[str, Any] | None, now: Mapping[str, Any], words: Sequence[str]
) -> Recipe:
    """Return a recipe with what changed between two readings of its keys, and with words on top.

    Without an earlier reading, all keys of the recipe are compared with the later one.
    """
    tree = _tree(recipe)
    if then is None:
        # The run has added the checksum itself.
        then = {key: value for key, value in tree.items() if key != "weights_sha256"}
    return _recipe(_edited(tree, then, now), words)


def _edited(tree: Any, then: Any, now: Any) -> Any:
    if then == now:
        return tree
    if not (isinstance(then, Mapping) and isinstance(now, Mapping)):
        return now
    tree = tree if isinstance(tree, Mapping) else {}  # it has the defaults
    merged = {
        key: _edited(*(mapping.get(key, _ABSENT) for mapping in (tree, then, now)))
        for key in {**tree, **then, **now}
    }
    return {key: value for key, value in merged.items() if value is not _ABSENT}


def override(recipe: Recipe, words: Sequence[str]) -> Recipe:
    """Return a recipe with words on top, as for `load_recipe`.

    Optimizers that it did not use have their defaults.
    """
    return _recipe(_tree(recipe), words)


def to_yaml(recipe: Recipe) -> str:
    """Write the non-default values, as text that `parse` makes an equal recipe of."""
    return write_yaml(_tree(recipe))


def differences(old: Recipe, new: Recipe, but: Sequence[str] = ()) -> list[str]:
    """Return `key: old -> new` where recipes differ, but for some keys (see `FREE_ON_RESUME`)."""
    free = tuple(key for key in but if key.endswith("."))
    return [
        line
        for key, line in changes(old.model_dump(), new.model_dump()).items()
        if not (key in but or key.startswith(free))
    ]


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """Return `key: old -> new` by full key, where mappings differ."""
    before, after = (dict(_flat(tree)) for tree in (old, new))
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    return {key: f"{key}: {before.get(key)} -> {after.get(key)}" for key in keys}


def keys(part: str | None = None) -> list[tuple[str, str, str, str]]:
    """Return key, type, default and meaning of each key of a part of recipes (see `PARTS`).

    Raises:
        UserError: If there is no such part.
    """
    if part is None:
        return [row for row in rows(Recipe) if row[0] not in Training.model_fields]
    known = {name.rpartition(".")[2]: name for name in PARTS} | {name: name for name in PARTS}
    require(
        part in known,
        f"there is no part {part}{nearest(part, known)}: the parts are {', '.join(PARTS)}",
    )
    return rows(PARTS[known[part]])


def _recipe(tree: dict[str, Any], words: Sequence[str]) -> Recipe:
    # The optimizers come first, because they decide who takes the other settings.
    for word in sorted(words, key=lambda word: not word.startswith("optimizer=")):
        key, equals, text = word.partition("=")
        require(key != "" and equals != "", f"'{word}' is not key=value: write it as in lr=0.1")
        value = read_yaml(text, f"{word}: the value")
        comment = comment_of(text)
        require(
            comment == "",
            f"{word}: YAML takes {comment} for a comment: leave it out, or quote the value, as in "
            f"\"{key}='{text}'\"",
        )
        if key == "optimizer" and isinstance(value, str):
            value = value.split(",")
        path = key.split(".")
        chosen = tree.get("optimizer", Recipe.model_fields["optimizer"].default)
        takers = [
            name
            for name, keys in KEYS_OF.items()
            if isinstance(chosen, list | tuple) and name in chosen and path[0] in keys.model_fields
        ]
        places = [["optimizers", name, *path] for name in takers]
        if path[0] in Recipe.model_fields:
            written = as_written(_put({}, path, value), _put({}, path, read_texts(text)), Recipe)
            value = reduce(getitem, path, written)
        for place in [path] if path[0] in Recipe.model_fields or not takers else places:
            tree = _put(tree, place, value)
    try:
        recipe = Recipe.model_validate(tree)
    except ValidationError as error:
        settings = meanings_of(Settings, "optimizers.")
        short = {key.rpartition(".")[2]: meaning for key, meaning in settings.items()}
        raise UserError(
            "\n".join(lines_of(error, short | settings | meanings_of(Recipe)))
        ) from None
    faults = check_task(recipe)
    require(not faults, "\n".join(faults))
    return recipe


def _put(tree: Any, path: Sequence[str], value: Any) -> dict[str, Any]:
    tree = tree if isinstance(tree, Mapping) else {}
    return {**tree, path[0]: value if len(path) == 1 else _put(tree.get(path[0]), path[1:], value)}


def _tree(recipe: Recipe) -> dict[str, Any]:
    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    # A recipe begins with the keys that a person would write first.
    first = ("name", "about", "reaches", "task", "data", "model", "optimizer", "optimizers")
    return {key: tree[key] for key in (*first, *tree) if key in tree}


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
