"""Writes the reference pages that describe the program from the program, each time the site is built.

MkDocs calls `on_files` (see `hooks` in mkdocs.yml). The pages are generated in memory, so they cannot be out of date:
keys, defaults and meanings of a recipe come from its dataclasses and their docstrings, commands and options from the
command line itself. `python docs/hooks/reference_pages.py` prints them.
"""

import dataclasses
import inspect
import re
import typing
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


def program() -> SimpleNamespace:
    """Import what is documented. All imports of torch-thor stand here.

    Returns:
        The names that the pages are generated from.
    """
    from typer.main import get_command

    from torch_thor.cli import app
    from torch_thor.training import Recipe, recipe_list
    from torch_thor.training.config.keys import keys_of
    from torch_thor.training.config.recipe import FREE_ON_RESUME
    from torch_thor.training.config.recipe_values import covers
    from torch_thor.training.optimizers import OPTIMIZERS

    return SimpleNamespace(
        command=get_command(app),
        keys_of=keys_of,
        optimizers=OPTIMIZERS,
        recipe=Recipe,
        recipes=recipe_list(),
        may_change=lambda key: covers(FREE_ON_RESUME, key),
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages to the site.

    Args:
        files: The files of the site.
        config: The configuration of the site.

    Returns:
        The files, with the pages among them.
    """
    for path, content in pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def pages() -> dict[str, str]:
    """Generate the pages.

    Returns:
        Their text in Markdown, by their path inside docs/.
    """
    known = program()
    return {
        "reference/recipe-keys.md": "\n".join(recipe_keys(known)),
        "reference/recipes.md": "\n".join(recipes(known)),
        "reference/command-line.md": "\n".join(command_line(known)),
    }


# ---- recipes ----------------------------------------------------------------------------------------------------


def recipe_keys(known: SimpleNamespace) -> Iterator[str]:
    """Write the page of all keys of a recipe.

    Args:
        known: What `program` returns.

    Yields:
        Lines.
    """
    yield """# Recipe keys

This page is generated from the code. `torch-thor train --list` prints the same keys in a terminal.

A recipe is a YAML file with these keys. On the command line `KEY=VALUE` overrides a key, with dots between the levels:

```bash
torch-thor train digits epochs=3 schedule.kind=linear optimizers.thor.damping=0.1
```

A setting of an optimizer can be written without its prefix. `lr=0.01` then sets the learning rate of every optimizer
that the recipe trains with and that has this setting.

"On resume" says whether `torch-thor train --resume` accepts another value than the one the run was started with.
[Resume, evaluate and inspect runs](../how-to/runs.md) describes the conditions for `epochs`.
"""
    yield from _section(known, "Keys of a recipe", [""], known.recipe)
    for prefixes, kind in _nested(known.recipe):
        yield from _section(known, _title(prefixes), prefixes, kind)
    yield "## Settings of the optimizers\n"
    for name, entry in known.optimizers.items():
        text = _summary(entry.settings)
        yield from _section(known, f"optimizers.{name}", [f"optimizers.{name}."], entry.settings, level=3, about=text)


def _section(
    known: SimpleNamespace, title: str, prefixes: list[str], kind: type, level: int = 2, about: str = ""
) -> Iterator[str]:
    yield f"{'#' * level} {title}\n"
    if about:
        yield f"{about}\n"
    yield "| key | type | default | meaning | on resume |"
    yield "|---|---|---|---|---|"
    for key in known.keys_of(kind):
        free = any(known.may_change(f"{prefix}{key.name}") for prefix in prefixes)
        cells = [f"`{key.name}`", _text(key.type), f"`{key.default}`", _text(key.meaning), "may change" if free else ""]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _nested(kind: type, prefix: str = "") -> list[tuple[list[str], type]]:
    """The mappings inside a recipe: where each stands, and its class. Two that have the same class share a section."""
    found: dict[type, list[str]] = {}
    for item in dataclasses.fields(kind):
        for one in _dataclasses_in(typing.get_type_hints(kind)[item.name]):
            found.setdefault(one, []).append(f"{prefix}{item.name}.")
    result: list[tuple[list[str], type]] = []
    for one, prefixes in found.items():
        result.append((prefixes, one))
        result.extend(_nested(one, prefixes[0]))
    return result


def _dataclasses_in(hint: Any) -> list[type]:
    if typing.get_origin(hint) is dict:  # the optimizers, which have sections of their own
        return []
    return [one for one in (hint, *typing.get_args(hint)) if isinstance(one, type) and dataclasses.is_dataclass(one)]


def _title(prefixes: list[str]) -> str:
    return " and ".join(prefix.removesuffix(".") for prefix in prefixes)


def _summary(kind: type) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())


def recipes(known: SimpleNamespace) -> Iterator[str]:
    """Write the page that lists the recipes.

    Args:
        known: What `program` returns.

    Yields:
        Lines.
    """
    yield """# Recipes

This page is generated from the recipe files. Train one with `torch-thor train NAME`, or give the path of a YAML file of
your own. The column "should reach" repeats what the recipe file states, with its source.

| recipe | what it is | should reach |
|---|---|---|"""
    for name, about, reaches in known.recipes:
        yield f"| `{name}` | {_text(about)} | {_text(reaches)} |"


# ---- the command line -------------------------------------------------------------------------------------------


def command_line(known: SimpleNamespace) -> Iterator[str]:
    """Write the page of all commands and options.

    Args:
        known: What `program` returns.

    Yields:
        Lines.
    """
    yield """# Command line

This page is generated from the program. `torch-thor COMMAND --help` prints the same text. `python -m torch_thor` is
another way to call `torch-thor`.

Exit codes: 0 for success; 2 for a mistake that the user can correct, described in one line on stderr; 130 after Ctrl-C
or another signal that stopped the training.
"""
    for name, command in known.command.commands.items():
        yield f"## torch-thor {name}\n"
        yield f"{inspect.cleandoc(command.help or '')}\n"
        arguments = [one for one in command.params if one.param_type_name == "argument"]
        options = [one for one in command.params if one.param_type_name == "option"]
        if arguments:
            yield "| argument | meaning |\n|---|---|"
            for one in arguments:
                yield f"| `{one.metavar or one.name.upper()}` | {_text(one.help or '')} |"
            yield ""
        if options:
            yield "| option | default | meaning |\n|---|---|---|"
            for one in options:
                value = "" if one.is_flag else f" {one.name.upper()}"
                default = "" if one.default is None or one.default is False else f"`{one.default}`"
                yield f"| `{', '.join(one.opts)}{value}` | {default} | {_text(one.help or '')} |"
            yield ""


def _text(text: str) -> str:
    """Plain text as Markdown in a table: nothing in it is markup."""
    return re.sub(r"([\\`*_\[\]<>|])", r"\\\1", " ".join(text.split()))


if __name__ == "__main__":
    for path, content in pages().items():
        print(f"<!-- {path} -->\n{content}\n")
