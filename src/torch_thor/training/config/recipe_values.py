"""The values of a recipe by dotted key (`schedule.kind`), and the keys in which two recipes differ."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from torch_thor.training.config.recipe import Recipe


def flat_values(recipe: Recipe) -> dict[str, Any]:
    """List the resolved values of a recipe.

    Args:
        recipe: The recipe.

    Returns:
        Each value by its dotted key.
    """
    return flat(OmegaConf.to_container(OmegaConf.structured(recipe)))


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """List the leaves of nested mappings.

    Args:
        tree: Mappings of mappings; anything else is a leaf.
        prefix: Text before each key.

    Returns:
        Each leaf by its dotted key.
    """
    if not isinstance(tree, dict):
        return {prefix.removesuffix("."): tree}
    return {key: value for name, branch in tree.items() for key, value in flat(branch, f"{prefix}{name}.").items()}


def is_inside(key: str, outer: str) -> bool:
    """Return whether a key is equal to another one or lies inside it.

    Args:
        key: A key such as `schedule.kind`.
        outer: A key such as `schedule`.

    Returns:
        True if `key` is `outer` or begins with `outer` and a dot.
    """
    return f"{key}.".startswith(f"{outer}.")


def covers(keys: Sequence[str], key: str) -> bool:
    """Return whether a list of keys includes a key.

    Args:
        keys: Keys; a key with a dot at its end stands for all keys inside it.
        key: A key.

    Returns:
        True if the list includes it.
    """
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in keys)


def differences(old: Recipe, new: Recipe, but: Sequence[str] = ()) -> list[str]:
    """List the keys in which two recipes differ.

    Args:
        old: One recipe.
        new: Another recipe.
        but: Keys to leave out, in the form of `covers`.

    Returns:
        `key: old -> new` for each difference, with the unresolved text of values that were resolved.
    """
    flat_old, flat_new = flat_values(old), flat_values(new)
    keys = [key for key in {**flat_old, **flat_new} if flat_old.get(key) != flat_new.get(key) and not covers(but, key)]
    return [f"{key}: {_shown(old, key, flat_old)} -> {_shown(new, key, flat_new)}" for key in keys]


def _shown(recipe: Recipe, key: str, values: Mapping[str, Any]) -> Any:
    return next((text for own, text in recipe.written.items() if is_inside(key, own)), values.get(key))
