"""Reading a user's YAML as plain data, with limits on its size.

A few nested aliases can expand to billions of values, and an alias can refer to a node that contains it. Such a text is
refused before it is expanded.
"""

from pathlib import Path
from typing import Any

import yaml

from torch_thor.training.errors import UserError, require

MOST_BYTES = 1_000_000
MOST_VALUES = 100_000  # after aliases are expanded; the largest recipe of the package has about 300


def read_text(path: Path) -> str:
    """Read a text file that a user has named.

    Args:
        path: The file.

    Returns:
        Its text.

    Raises:
        UserError: If the file cannot be read, is not UTF-8, or is larger than `MOST_BYTES`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode("utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check the name and its permissions") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8 text") from error
    require(len(content) <= MOST_BYTES, f"{path} has more than {MOST_BYTES} bytes: a recipe is a few lines of YAML")
    return text


def check_yaml(text: str, what: str) -> None:
    """Refuse a text that is not YAML, is nested too deeply, or expands to too many values.

    Args:
        text: The YAML.
        what: The name of the text in error messages.

    Raises:
        UserError: If the text breaks one of these rules.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = 0 if root is None else _values(root, {}, frozenset())
    except yaml.YAMLError as error:
        raise UserError(_no_yaml(what, error)) from error
    except RecursionError as error:
        raise UserError(f"{what} is nested too deeply: write it as `key: value` lines") from error
    require(
        values <= MOST_VALUES, f"{what} has more than {MOST_VALUES} values when its aliases are expanded: use fewer"
    )


def load_yaml(text: str, what: str) -> Any:
    """Read YAML as plain data.

    Args:
        text: The YAML.
        what: The name of the text in error messages.

    Returns:
        Mappings, lists, text and numbers.

    Raises:
        UserError: If the text is not YAML, is nested too deeply, or expands to too many values.
    """
    check_yaml(text, what)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # such as a date in month 13
        raise UserError(_no_yaml(what, error)) from error


def _no_yaml(what: str, error: Exception) -> str:
    reason = " ".join(str(error).split())
    return f"{what} is not YAML ({reason}): quote values that begin with * or contain brackets or colons"


def _values(node: yaml.Node, known: dict[yaml.Node, int], above: frozenset[yaml.Node]) -> int:
    # `known` visits each node once, however many aliases refer to it; a node inside itself would never end
    if node in above:
        raise RecursionError
    if node not in known:
        inside: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inside = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inside = node.value
        known[node] = 1 + sum(_values(part, known, above | {node}) for part in inside)
    return known[node]
