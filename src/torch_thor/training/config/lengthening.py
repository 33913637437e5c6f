"""The rule that says when a resumed run may have more epochs than it was started with.

If a schedule ends with the training, a longer training has other values of it from the first step on. If a schedule
does not depend on the length of the training, or has its own horizon, the values are the same, and the steps taken so
far are also those of the longer training.
"""

from torch_thor.training.config.recipe import Recipe
from torch_thor.training.errors import require


def check_epochs(stored: Recipe, recipe: Recipe) -> None:
    """Refuse a number of epochs with which the steps so far would have been different.

    Args:
        stored: The recipe of the run so far.
        recipe: The recipe to continue with.

    Raises:
        UserError: If the run cannot have that number of epochs.
    """
    if recipe.epochs == stored.epochs:
        return
    require(
        recipe.steps is None,
        f"epochs={recipe.epochs}: the length of the run is set by steps={recipe.steps}; leave epochs out, or "
        f"start another run with --out",
    )
    require(
        recipe.epochs > stored.epochs,
        f"epochs={recipe.epochs} is less than the run's {stored.epochs}: --resume can only lengthen a run; "
        f"leave epochs out, or start another run with --out",
    )
    damped = any(hasattr(recipe.optimizers[name], "damping") for name in recipe.optimizer)
    schedules = {"schedule": stored.schedule, **({"damping_schedule": stored.damping_schedule} if damped else {})}
    for key, schedule in schedules.items():
        require(
            not schedule.ends_with_training,
            f"epochs={recipe.epochs}: {key}.kind={schedule.kind} ends with the training, so the steps so far used the "
            f"schedule of {stored.epochs} epochs; start another run with --out, and set {key}.horizon_epochs if you "
            f"may lengthen it later, or weights=CHECKPOINT to start from the weights of this run",
        )
