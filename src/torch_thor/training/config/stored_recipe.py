"""The recipe in a run folder, with a checksum, with `${oc.env:NAME}` unresolved, and with digests of resolved values.

The first lines are comments, so that `torch-thor train FILE.yaml` accepts the file as a recipe:

    # sha256 4f9c...: of all lines below this one
    # resolved {"seed": "81d0..."}: digests of what the values were when the run began, where they change what trains

A file without the first comment was written by hand.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch_thor.training.config.recipe import FREE_ON_RESUME, Recipe
from torch_thor.training.config.recipe_text import parse_recipe, recipe_yaml
from torch_thor.training.config.recipe_values import covers, flat_values, is_inside
from torch_thor.training.errors import UserError, require

_CHECKSUM_LINE = re.compile(r"# sha256 ([0-9a-f]{64}): of all lines below this one\n")
_RESOLVED = re.compile(r"^# resolved (\{.*\}): digests of ", re.MULTILINE)


class DamagedRecipeError(UserError):
    """A stored recipe whose checksum does not match."""


@dataclass(frozen=True)
class StoredRecipe:
    """The recipe that a run was started with.

    Args:
        recipe: The recipe, with environment variables resolved at the time of reading.
        resolved: Digest of each value that was resolved when the run began, by key.
        has_checksum: Whether the file has a checksum, which then matched.
    """

    recipe: Recipe
    resolved: Mapping[str, str]
    has_checksum: bool

    def unchanged(self, recipe: Recipe) -> list[str]:
        """Return the resolved keys that have the same value in a recipe as when the run began.

        Args:
            recipe: The recipe to continue with.

        Returns:
            Each key twice, the second time with a dot at its end, which stands for all keys inside it.
        """
        now = _digests(recipe, self.resolved)
        return [name for key in now if now[key] == self.resolved[key] for name in (key, f"{key}.")]

    def check_values(self, recipe: Recipe, what: str, but: Sequence[str] = ()) -> None:
        """Refuse a recipe whose resolved values are not those that the run began with.

        Args:
            recipe: The recipe to continue with.
            what: The name of the run or checkpoint in the error message.
            but: Keys that may have changed, in the form of `covers`.

        Raises:
            UserError: If another value has changed.
        """
        same = self.unchanged(recipe)
        changed = [key for key in self.resolved if key not in same and not covers(but, key)]
        texts = ", ".join(f"{key}={self.recipe.written.get(key)}" for key in changed)
        require(not changed, f"{what} began with another value of {texts}: set the environment variables as they were")


def stored_text(recipe: Recipe) -> str:
    """Write a recipe as a run folder and each checkpoint store it.

    Args:
        recipe: The recipe of the run.

    Returns:
        YAML, with the comments in front.
    """
    body = recipe_yaml(recipe)
    free = [key for key in FREE_ON_RESUME if key != "epochs"]  # only the command line may change them
    digests = _digests(recipe, sorted(key for key in recipe.written if not covers(free, key)))
    if digests:
        what = "digests of what the values were when the run began, where they change what trains"
        body = f"# resolved {json.dumps(digests)}: {what}\n{body}"
    return f"# sha256 {_sha256(body)}: of all lines below this one\n{body}"


def read_stored(text: str) -> StoredRecipe:
    """Read a recipe that `stored_text` or a person has written.

    Args:
        text: The content of the file.

    Returns:
        The recipe, and the digests of its resolved values.

    Raises:
        DamagedRecipeError: If the checksum does not match.
    """
    checksum = _CHECKSUM_LINE.match(text)
    if checksum is not None and _sha256(text[checksum.end() :]) != checksum[1]:
        raise DamagedRecipeError("it does not match its checksum")
    if checksum is None and "sha256" in text[:80]:
        raise DamagedRecipeError("its checksum cannot be read")
    resolved = _RESOLVED.search(text)
    digests: dict[str, str] = json.loads(resolved[1]) if resolved and checksum else {}
    return StoredRecipe(parse_recipe(text, "unnamed", []), digests, checksum is not None)


def _digests(recipe: Recipe, keys: Iterable[str]) -> dict[str, str]:
    values = flat_values(recipe)
    inside = {key: {one: values[one] for one in values if is_inside(one, key)} for key in keys}
    return {key: _sha256(json.dumps(part, sort_keys=True, default=str)) for key, part in inside.items()}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
