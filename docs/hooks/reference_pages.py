"""The lists of reference/api.md, written from the program at each build of the site.

Where a page says `<!-- generated: NAME -->`, MkDocs puts the list of this name (see `hooks` in
mkdocs.yml), so it cannot be out of date: keys, defaults and meanings come from the models of a
recipe, commands from the command line, options of optimizers from their declarations. On GitHub a
page names what prints the same. `python docs/hooks/reference_pages.py` prints the lists.
"""

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from typer.main import get_command

from torch_thor import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.commands import app
from torch_thor.optim.options import OPTIONS
from torch_thor.training.recipe_model import FREE_ON_RESUME
from torch_thor.training.recipes import PARTS, keys, load_recipe, recipe_names

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

PAGES = ("reference/api.md",)


def on_page_markdown(markdown: str, /, *, page: "Page", **_: object) -> str:
    """Fill in the lists of the pages that have them.

    Args:
        markdown: The text of any page.
        page: Which page it is.

    Returns:
        The text with the lists.
    """
    return filled(markdown) if page.file.src_uri in PAGES else markdown


def filled(markdown: str) -> str:
    """Replace each marker by its list.

    Args:
        markdown: The text of the page.

    Returns:
        The text with the lists.
    """
    lists = {
        "commands": command_line, "recipes": recipes, "keys": recipe_keys, "options": options,
    }  # fmt: skip
    return re.sub(
        "<!-- generated: ([a-z]+) -->", lambda match: "\n".join(lists[match[1]]()), markdown
    )


# ---- options -------------------------------------------------------------------------------------


def options() -> Iterator[str]:
    """List the options of all optimizers.

    Yields:
        Lines.
    """
    kinds = (ThorMuon, THOR, LAMB, AGCSGD)
    yield f"| option | meaning | {' | '.join(kind.__name__ for kind in kinds)} | what it must be |"
    yield f"|---|---|{'---|' * len(kinds)}---|"
    for name, option in OPTIONS.items():
        arguments = [inspect.signature(kind).parameters.get(name) for kind in kinds]
        shown = ["" if item is None else f"`{item.default}`" for item in arguments]
        if any(shown):
            cells = [f"`{name}`", _text(option.meaning), *shown, _text(option.rule)]
            yield f"| {' | '.join(cells)} |"


# ---- recipes -------------------------------------------------------------------------------------


def recipe_keys() -> Iterator[str]:
    """List all keys of a recipe.

    Yields:
        Lines.
    """
    yield from _section("All recipes", "", [*keys(), *keys("training")])
    for part in PARTS:
        if part != "training":
            title = (
                "schedule and damping_schedule"
                if part == "schedule"
                else part.removeprefix("optimizers.")
            )
            yield from _section(title, f"{part}.", keys(part))


def _section(title: str, prefix: str, rows: list[tuple[str, str, str, str]]) -> Iterator[str]:
    yield f"### {title}\n"
    yield "| key | type | default | meaning | on resume |"
    yield "|---|---|---|---|---|"
    for name, kind, default, meaning in rows:
        key = f"{prefix}{name}"
        free = key in FREE_ON_RESUME or any(
            item.endswith(".") and key.startswith(item) for item in FREE_ON_RESUME
        )
        cells = [
            f"`{name}`",
            _text(kind),
            f"`{default}`",
            _text(meaning),
            "may change" if free else "",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def recipes() -> Iterator[str]:
    """List the recipes.

    Yields:
        Lines.
    """
    yield "| recipe | what it is | should reach |"
    yield "|---|---|---|"
    for name in recipe_names():
        recipe = load_recipe(name)
        yield f"| `{name}` | {_text(recipe.about)} | {_text(recipe.reaches)} |"
    yield ""


# ---- the command line ----------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    """List all commands and options.

    Yields:
        Lines.
    """
    for name, command in get_command(app).commands.items():
        yield f"### torch-thor {name}\n"
        yield f"{inspect.cleandoc(command.help or '')}\n"
        arguments = [item for item in command.params if item.param_type_name == "argument"]
        options = [item for item in command.params if item.param_type_name == "option"]
        if arguments:
            yield "| argument | meaning |\n|---|---|"
            for item in arguments:
                yield f"| `{item.metavar or item.name.upper()}` | {_text(item.help or '')} |"
            yield ""
        if options:
            yield "| option | default | meaning |\n|---|---|---|"
            for item in options:
                value = "" if item.is_flag else f" {item.name.upper()}"
                has_default = item.default is not None and item.default is not False
                default = f"`{item.default}`" if has_default else ""
                yield f"| `{', '.join(item.opts)}{value}` | {default} | {_text(item.help or '')} |"
            yield ""


def _text(text: str) -> str:
    """Plain text as Markdown in a table: nothing in it is markup."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


if __name__ == "__main__":
    for lines in (command_line(), recipes(), recipe_keys(), options()):
        print("\n".join(lines))
