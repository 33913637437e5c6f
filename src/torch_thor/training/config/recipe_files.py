"""Finding recipes: those that come with the package, and the user's own YAML files."""

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
    """Find the folder of the recipes: in the installed package, or at the top of a source tree.

    Returns:
        The folder.

    Raises:
        UserError: If neither exists.
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

    The files are read as plain YAML, so the packages that a recipe needs (such as timm) need not be installed.

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
        overrides: `key=value` words. A key is one of the recipe's, with dots between the levels (`schedule.kind`), or
            a setting of the chosen optimizers (`lr`, `damping`, ...).

    Returns:
        The checked recipe.
    """
    text, default_name = _text_and_name(name)
    return parse_recipe(text, default_name, overrides or [])


def name_of(name: str) -> str:
    """Return the name of a recipe, which `name:` in its file may set, without checking the other keys.

    Args:
        name: A recipe's name, or the path of a YAML file.

    Returns:
        The name.
    """
    text, default_name = _text_and_name(name)
    content = load_yaml(text, f"recipe {default_name}")
    return str(content.get("name", default_name)) if isinstance(content, dict) else default_name


def _text_and_name(name: str) -> tuple[str, str]:
    # the text of a recipe, and the name that it has unless the text gives another one
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
