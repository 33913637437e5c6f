"""The reference page that describes the program, written from it at each build of the site.

MkDocs calls `on_files` (see `hooks` in mkdocs.yml). The page is generated in memory, so it cannot
be out of date: keys, defaults and meanings come from the models of a recipe, commands and options
from the command line itself. `python docs/hooks/reference_pages.py` prints it.
"""

import inspect
import re
from collections.abc import Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.main import get_command

from torch_thor import AGCSGD, LAMB, THOR, ThorMuon
from torch_thor.commands import app
from torch_thor.optim.options import OPTIONS
from torch_thor.training.recipe_model import FREE_ON_RESUME
from torch_thor.training.recipes import PARTS, keys, load_recipe, recipe_names


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
    return {
        "reference/command-line.md": "\n".join([*command_line(), *recipes(), *recipe_keys()]),
        "reference/options.md": "\n".join(options()),
    }


# ---- options -------------------------------------------------------------------------------------


def options() -> Iterator[str]:
    """Write the table of the options of all optimizers.

    Yields:
        Lines.
    """
    kinds = (ThorMuon, THOR, LAMB, AGCSGD)
    yield f"""# Options of the optimizers

This page is generated from the declarations of the options. A column of an optimizer has the
default of an option, and is empty if the optimizer has no such option. An attribute is set after
construction, before any step.

| option | {" | ".join(kind.__name__ for kind in kinds)} | what it must be | meaning |
|---|{"---|" * len(kinds)}---|---|"""
    for name, option in OPTIONS.items():
        arguments = [inspect.signature(kind).parameters.get(name) for kind in kinds]
        shown = ["" if one is None else f"`{one.default}`" for one in arguments]
        if option.scope == "attribute":
            shown = [f"attribute, `{option.default}`"] * 2 + [""] * 2
        if any(shown):
            cells = [f"`{name}`", *shown, _text(option.rule), _text(option.meaning)]
            yield f"| {' | '.join(cells)} |"


# ---- recipes -------------------------------------------------------------------------------------


def recipe_keys() -> Iterator[str]:
    """Write the part about all keys of a recipe.

    Yields:
        Lines.
    """
    yield """## Recipe keys

`torch-thor keys` and `torch-thor keys PART` print the same in a terminal.
A recipe is a YAML file with these keys. On the command line `KEY=VALUE` overrides a key, with
dots between the levels:

```bash
torch-thor train digits epochs=3 schedule.kind=linear optimizers.thor.damping=0.1
```

A setting of an optimizer can be written without its prefix. `lr=0.01` then sets the learning rate
of every optimizer that the recipe trains with and that has this setting.

"On resume" says whether `torch-thor train --resume` accepts another value than the one the run
was started with. [Resume and lengthen](../how-to/command-line.md#resume-and-lengthen) describes
the conditions for `epochs`.
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
            one.endswith(".") and key.startswith(one) for one in FREE_ON_RESUME
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
    """Write the part that lists the recipes.

    Yields:
        Lines.
    """
    yield """## Recipes

Train one with `torch-thor train NAME`, or give the path of a YAML file of your own.
The column "should reach" repeats what the recipe file states, with its source.

| recipe | what it is | should reach |
|---|---|---|"""
    for name in recipe_names():
        recipe = load_recipe(name)
        yield f"| `{name}` | {_text(recipe.about)} | {_text(recipe.reaches)} |"
    yield ""


# ---- the command line ----------------------------------------------------------------------------


def command_line() -> Iterator[str]:
    """Write the beginning of the page, with all commands and options.

    Yields:
        Lines.
    """
    yield """# Commands, recipes and keys

This page is generated from the program and the recipe files.
`torch-thor COMMAND --help` prints the same text. `python -m torch_thor` is
another way to call `torch-thor`.

Exit codes: 0 for success; 2 for a mistake that the user can correct, described in one line on
stderr; 130 after Ctrl-C or another signal that stopped the training.

## Commands
"""
    for name, command in get_command(app).commands.items():
        yield f"### torch-thor {name}\n"
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
