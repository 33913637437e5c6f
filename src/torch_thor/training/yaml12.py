"""YAML as version 1.2 defines it, with line and key in its errors.

PyYAML reads version 1.1, in which 010 is 8, 1:30 is 90 and no is false. Here the core schema of 1.2
decides what is a number, true, false or null; all else is text. There are two exceptions. A number
that begins with 0, which is 8 in one version and 10 in the other, is left as text, so that no key
takes it for a number. Digits may be grouped as in 1_000.
"""

import re
from typing import Any

import yaml

from torch_thor.errors import UserError, first_line, require

_MOST, _DEEPEST = 1_000_000, 20  # characters of a recipe, levels of its mappings and lists
_SIGNS, _DIGITS = "-+", "0123456789"
# of each type: what its scalars match, and the characters that they begin with
_CORE = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9](_?[0-9])*)|0o[0-7]+|0x[0-9a-fA-F]+", list(_SIGNS + _DIGITS)),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list(_SIGNS + _DIGITS + "."),
    ),
}
_REMEDIES = {  # by a word of the fault
    "\\t": "indent with spaces, not with tabs",
    "twice": "remove one of the two",
    "alias": "quote text that begins with *",
    "another document": "write one recipe in a file",
    "value that !!": "leave out tags such as !!int, and quote text",
    "levels": "a recipe has a few",
    "special characters": "save it as plain UTF-8 text",
}
_REMEDY = "write `key: value` lines, and quote text that contains brackets, colons or #"


class _Loader(yaml.SafeLoader):
    """Reads the core schema; a key that is given twice is an error."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # of a tag such as !!bool whose value is of another kind; PyYAML tells some of them only
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"a value that !!{kind} does not have", node.start_mark
            ) from error

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            name = str(key.value)
            if name in lines:
                raise yaml.YAMLError(
                    f"the key {name} is given twice, in lines {lines[name]} and {line}"
                )
            lines[name] = line
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes text that version 1.1 or 1.2 would not read as text."""


_Loader.yaml_implicit_resolvers = {}
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value, 0))
for _type, (_form, _first) in _CORE.items():
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(
            f"tag:yaml.org,2002:{_type}", re.compile(rf"(?:{_form})$"), _first
        )


def read_yaml(text: str, what: str) -> Any:
    """Read a document of YAML.

    Args:
        text: The document.
        what: Its name in messages.

    Returns:
        Its content.

    Raises:
        UserError: If it is not YAML, or is larger or deeper than a recipe.
    """
    require(
        len(text) <= _MOST,
        f"{what} has more than {_MOST} characters: a recipe is a few lines of YAML",
    )
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        fault = _fault(error, text)
        remedy = next((remedy for word, remedy in _REMEDIES.items() if word in fault), _REMEDY)
        raise UserError(f"{what} is not YAML ({fault}): {remedy}") from error


def read_texts(text: str) -> Any:
    """Read a document, which `read_yaml` has read, with each number as the text that is there."""
    return yaml.load(text, Loader=yaml.BaseLoader)


def comment_of(text: str) -> str:
    """Return the comment that a document, which can be read, ends with; "" if there is none."""
    node = yaml.compose(text, Loader=_Loader)
    rest = text[0 if node is None else node.end_mark.index :].strip()
    return rest if rest.startswith("#") else ""


def write_yaml(values: Any) -> str:
    """Write values as text that `read_yaml` makes equal values of."""
    return yaml.dump(
        values, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120,
        allow_unicode=True,
    )  # fmt: skip


def _check_size(text: str) -> None:
    """Refuse deep levels, of which a few thousand take minutes, and aliases.

    A few of these can stand for billions of values.

    Raises:
        UserError: With the fault and its line.
    """
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1  # type: ignore[union-attr]
        require(depth <= _DEEPEST, f"nested in more than {_DEEPEST} levels in line {line}")
        require(
            not isinstance(event, yaml.AliasEvent),
            f"an alias, *{getattr(event, 'anchor', '')}, in line {line}",
        )


def _fault(error: Exception, text: str) -> str:
    """Describe an error of PyYAML with its line, and the text of that line, which has the key."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f"{error.reason} in line {line}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(first_line(error).split())
    # the place where it is noticed may be behind the last line
    number = min(error.problem_mark.line, len(text.splitlines()) - 1)
    shown = text.splitlines()[number].strip()[:60]
    return f"{error.problem} in line {number + 1}, `{shown}`"
