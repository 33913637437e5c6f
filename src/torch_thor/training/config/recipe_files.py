"""The recipes that come with the package, and recipes in files of the user."""

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

import yaml

from torch_thor.training.config.recipe import Recipe
from torch_thor.training.config.recipe_text import parse_recipe
from torch_thor.training.config.yaml_text import load_yaml, read_text
from torch_thor.training.errors import UserError, require
from torch_thor.training.models.library import nearest

DEFAULT_RECIPE = "digits"


def recipe_folder() -> Traversable:
    """Find the folder of the recipes: inside an installed package, or at the top of a source tree.

    Returns:
        The folder.

    Raises:
        UserError: If neither is there.
    """
    installed = files("torch_thor") / "recipes"
    if installed.is_dir():
        return installed
    source = Path(__file__).parents[4] / "recipes"
    if source.is_dir():
        return source
    raise UserError(f"no recipes in {installed} or {source}: install torch-thor again")


def recipe_names() -> list[str]:
    """List the names of the recipes.

    Returns:
        Their names, sorted.
    """
    return sorted(item.name.removesuffix(".yaml") for item in recipe_folder().iterdir() if item.name.endswith(".yaml"))


def recipe_list() -> list[tuple[str, str, str]]:
    """List the recipes with their descriptions.

    Read as plain YAML: what a recipe needs (timm for its network, say) need not be installed to list it.

    Returns:
        Name, `about` and `reaches` of each.
    """
    folder = recipe_folder()
    contents = {name: yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8")) for name in recipe_names()}
    return [(name, str(content["about"]), str(content["reaches"])) for name, content in contents.items()]


def load_recipe(name: str, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe by name and apply overrides.

    Args:
        name: A recipe's name, or the path of a YAML file.
        overrides: `key=value` words; a key is a recipe's (dots go inside: `schedule.kind`), or a setting of
            the chosen optimizers (`lr`, `damping`, ...).

    Returns:
        The checked recipe.
    """
    text, own = _text_of(name)
    return parse_recipe(text, own, overrides or [])


def name_of(name: str) -> str:
    """Find out a recipe's name, which `name:` in its file may set, without checking the rest of it.

    Args:
        name: As for `load_recipe`.

    Returns:
        The name.
    """
    text, own = _text_of(name)
    content = load_yaml(text, f"recipe {own}")
    return str(content.get("name", own)) if isinstance(content, dict) else own


def _text_of(name: str) -> tuple[str, str]:
    # of a recipe, with the name that it has where the text has none
    path = Path(name)
    if path.suffix in {".yaml", ".yml"}:
        require(
            path.is_file(),
            f"{path} is not a file: name a recipe ({', '.join(recipe_names())}) or a YAML file",
        )
        return read_text(path), path.stem
    names = recipe_names()
    require(name in names, f"there is no recipe {name}{nearest(name, names)}: the recipes are {', '.join(names)}")
    return (recipe_folder() / f"{name}.yaml").read_text(encoding="utf-8"), name
