"""Reading YAML that a user has written: as plain data, and no more of it than a recipe can need.

A few aliases of aliases stand for billions of values, and an alias may stand for what it is itself in. Such a text is
refused before it is expanded.
"""

from pathlib import Path
from typing import Any

import yaml

from torch_thor.training.errors import UserError, require

MOST_BYTES = 1_000_000
MOST_VALUES = 100_000  # after aliases are expanded; the largest recipe of ours has some 300


def read_text(path: Path) -> str:
    """Read a text file that a user has named.

    Args:
        path: The file.

    Returns:
        Its text.

    Raises:
        UserError: If it cannot be read, is no UTF-8, or is too large for a recipe.
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
    """Refuse what is not YAML, or expands to too much.

    Args:
        text: The YAML.
        what: What an error calls it.

    Raises:
        UserError: If it breaks one of the rules.
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
        what: What an error calls it.

    Returns:
        Mappings, lists, text and numbers.

    Raises:
        UserError: If it is not YAML, or expands to too much.
    """
    check_yaml(text, what)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # such as a date of a 13th month
        raise UserError(_no_yaml(what, error)) from error


def _no_yaml(what: str, error: Exception) -> str:
    return f"{what} is not YAML ({' '.join(str(error).split())}): quote what begins with * or holds brackets or colons"


def _values(node: yaml.Node, known: dict[yaml.Node, int], above: frozenset[yaml.Node]) -> int:
    # each node is counted once, however many aliases there are; a node inside itself has no end
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
