"""Optimizers that a trainer has wrapped: they are found, and tell how each parameter is trained."""

from typing import Any

from torch_thor.capture.coverage import Coverage
from torch_thor.optim.base import CurvatureOptimizer

# attributes of wrappers
_HOLD = ("optimizer", "_optimizer", "base_optimizer", "opt", "optimizers", "policy")


def coverage(optimizer: Any) -> Coverage:
    """List how each parameter of a model is trained, also if a trainer has wrapped the optimizer.

    Args:
        optimizer: THOR or ThorMuon; or what holds it: a wrapper or a trainer of Accelerate,
            Lightning, Hugging Face, fastai, Stable-Baselines3, DeepSpeed or torchtitan, a
            scheduler.

    Returns:
        One entry per parameter, in the model's order: its kind and factor sizes, or the reason why
        it has none. It prints as a table.

    Raises:
        TypeError: it neither is nor holds such an optimizer.
    """
    inner = find_optimizer(optimizer)
    if inner is None:
        raise TypeError(
            f"coverage({type(optimizer).__name__}): must be THOR or ThorMuon, or have them as its "
            "attribute optimizer"
        )
    return inner.coverage()


def find_optimizer(holder: Any, depth: int = 4) -> CurvatureOptimizer | None:
    """Return THOR or ThorMuon from what holds it; None if there is none."""
    if isinstance(holder, CurvatureOptimizer):
        return holder
    if depth == 0:
        return None
    is_list = isinstance(holder, list | tuple)
    inner = holder if is_list else [getattr(holder, name, None) for name in _HOLD]
    found = (find_optimizer(part, depth - 1) for part in inner if part is not None)
    return next((optimizer for optimizer in found if optimizer is not None), None)
