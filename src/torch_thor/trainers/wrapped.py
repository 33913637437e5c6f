"""Optimizers that a trainer has wrapped: they are found, and tell how each parameter is trained."""

from typing import Any

from torch_thor.capture.coverage import Coverage
from torch_thor.optim.base import CurvatureOptimizer


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
            f"coverage({type(optimizer).__name__}): must be THOR or ThorMuon, or what holds one as "
            f"its attribute optimizer; give the optimizer itself"
        )
    return inner.coverage()


# attributes of wrappers
_HOLD = ("optimizer", "_optimizer", "base_optimizer", "opt", "optimizers", "policy")


def find_optimizer(holder: Any) -> CurvatureOptimizer | None:
    """Return THOR or ThorMuon from what holds it; None if there is none."""
    todo, seen = [holder], set[int]()
    while todo:
        candidate = todo.pop(0)
        if isinstance(candidate, CurvatureOptimizer):
            return candidate
        # a wrapper may answer every name with a new object
        if id(candidate) not in seen and len(seen) < 50:
            seen.add(id(candidate))
            inner = (getattr(candidate, name, None) for name in _HOLD)
            todo += (
                candidate
                if isinstance(candidate, list | tuple)
                else [part for part in inner if part is not None]
            )
    return None
