"""When a resumed run may have more epochs than it was started with.

A schedule that ends with the training has other values from the first step on if the training is longer. A schedule
that does not depend on the training's length, or has a horizon of its own, has the same values, so the steps taken so
far are those of the longer training.
"""

from torch_thor.training.config.recipe import Recipe
from torch_thor.training.errors import require


def check_epochs(stored: Recipe, recipe: Recipe) -> None:
    """Refuse a number of epochs with which the run would not be what it is.

    Args:
        stored: The recipe of the run so far.
        recipe: The recipe to go on with.
    """
    if recipe.epochs == stored.epochs:
        return
    require(
        recipe.steps is None,
        f"epochs={recipe.epochs}: the run ends after steps={recipe.steps} and not after epochs; leave epochs out, or "
        f"start another run with --out",
    )
    require(
        recipe.epochs > stored.epochs,
        f"epochs={recipe.epochs} is less than the run's {stored.epochs}: --resume can lengthen a run, not shorten it; "
        f"leave epochs out, or start another run with --out",
    )
    damped = any(hasattr(recipe.optimizers[name], "damping") for name in recipe.optimizer)
    schedules = {"schedule": stored.schedule, **({"damping_schedule": stored.damping_schedule} if damped else {})}
    for key, schedule in schedules.items():
        require(
            not schedule.ends_with_training,
            f"epochs={recipe.epochs}: {key}.kind={schedule.kind} ends with the training, so the run's steps so far "
            f"are those of {stored.epochs} epochs; start another run with --out, with {key}.horizon_epochs set if it "
            f"may be lengthened later, or from this one's weights with weights=CHECKPOINT",
        )
