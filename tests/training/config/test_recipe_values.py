"""How two recipes differ."""

from torch_thor.training import load_recipe, override
from torch_thor.training.config.recipe_values import differences


def test_differences_are_listed_by_key():
    recipe = load_recipe("digits")
    assert differences(recipe, recipe) == []
    changed = override(recipe, ["seed=9", "optimizers.sgd.momentum=0.5"])
    assert differences(recipe, changed) == ["seed: 0 -> 9", "optimizers.sgd.momentum: 0.9 -> 0.5"]
