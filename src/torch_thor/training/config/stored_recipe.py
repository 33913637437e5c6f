"""The recipe in a run folder: with a checksum, with `${oc.env:NAME}` unresolved, and digests of resolved values.

The first lines are comments, so that the file is still a recipe for `torch-thor train FILE.yaml`:

    # sha256 4f9c...: of all lines below this one
    # resolved {"seed": "81d0..."}: digests of what the values were when the run began, where they change what trains

A file without the first comment is of an older version, or someone has written it.
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

_SEAL = re.compile(r"# sha256 ([0-9a-f]{64}): of all lines below this one\n")
_RESOLVED = re.compile(r"^# resolved (\{.*\}): digests of ", re.MULTILINE)


class DamagedRecipeError(UserError):
    """A stored recipe that is not what was written."""


@dataclass(frozen=True)
class StoredRecipe:
    """What a run was made with.

    Args:
        recipe: The recipe, resolved anew.
        resolved: Digest of each value that was resolved when the run began, by key.
        sealed: Whether a checksum has vouched for it.
    """

    recipe: Recipe
    resolved: Mapping[str, str]
    sealed: bool

    def unchanged(self, recipe: Recipe) -> list[str]:
        """Return the keys whose values were resolved, and are in a recipe what they were then.

        Args:
            recipe: The recipe to go on with.

        Returns:
            Each key, and once more with a dot for all that is inside.
        """
        now = _digests(recipe, self.resolved)
        return [name for key in now if now[key] == self.resolved[key] for name in (key, f"{key}.")]

    def check_values(self, recipe: Recipe, what: str, but: Sequence[str] = ()) -> None:
        """Refuse a recipe whose resolved values are not those that the run began with.

        Args:
            recipe: The recipe to go on with.
            what: Run or checkpoint, for the error.
            but: Keys that may have changed, as `covers` takes them.
        """
        same = self.unchanged(recipe)
        changed = [key for key in self.resolved if key not in same and not covers(but, key)]
        texts = ", ".join(f"{key}={self.recipe.written.get(key)}" for key in changed)
        require(not changed, f"{what} began with another value of {texts}: set the environment variables as they were")


def stored_text(recipe: Recipe) -> str:
    """Return what is written into a run folder and into each checkpoint.

    Args:
        recipe: The recipe as run.

    Returns:
        YAML under its comments.
    """
    body = recipe_yaml(recipe)
    free = [key for key in FREE_ON_RESUME if key != "epochs"]  # which only a word on the command line may raise
    digests = _digests(recipe, sorted(key for key in recipe.written if not covers(free, key)))
    if digests:
        what = "digests of what the values were when the run began, where they change what trains"
        body = f"# resolved {json.dumps(digests)}: {what}\n{body}"
    return f"# sha256 {_sha256(body)}: of all lines below this one\n{body}"


def read_stored(text: str) -> StoredRecipe:
    """Read what `stored_text` gave, or a recipe of an older version.

    Args:
        text: The content of the file.

    Returns:
        The recipe and what is known of it.

    Raises:
        DamagedRecipeError: If the checksum does not fit.
    """
    seal = _SEAL.match(text)
    if seal is not None and _sha256(text[seal.end() :]) != seal[1]:
        raise DamagedRecipeError("it does not match its checksum")
    if seal is None and "sha256" in text[:80]:
        raise DamagedRecipeError("its checksum cannot be read")
    resolved = _RESOLVED.search(text)
    digests: dict[str, str] = json.loads(resolved[1]) if resolved and seal else {}
    return StoredRecipe(parse_recipe(text, "unnamed", []), digests, seal is not None)


def _digests(recipe: Recipe, keys: Iterable[str]) -> dict[str, str]:
    values = flat_values(recipe)
    inside = {key: {one: values[one] for one in values if is_inside(one, key)} for key in keys}
    return {key: _sha256(json.dumps(part, sort_keys=True, default=str)) for key, part in inside.items()}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
