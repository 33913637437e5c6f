"""The refreshes of THOR, as the application records them. Other optimizers have none."""

import math
from collections.abc import Mapping

import torch

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.training.engine.history import RefreshPoint


def curvature_of(optimizer: torch.optim.Optimizer) -> Mapping[str, LayerCurvature]:
    """Return the layers with curvature of an optimizer.

    Args:
        optimizer: Any optimizer.

    Returns:
        The curvature of each layer by module name; empty for first-order optimizers.
    """
    return optimizer.curvature if isinstance(optimizer, CurvatureOptimizer) else {}


def refresh_points(optimizer: torch.optim.Optimizer, step: int) -> list[RefreshPoint]:
    """Return the decisions of the trace rule in the latest step.

    Args:
        optimizer: Any optimizer.
        step: The number of the step, from 1.

    Returns:
        One point for each layer that was due; empty for first-order optimizers.
    """
    events = optimizer.last_refresh if isinstance(optimizer, CurvatureOptimizer) else ()
    return [
        RefreshPoint(
            step=step,
            layer=event.layer,
            decision=event.decision.value,
            trace_change=_finite(event.trace_change),
            trace=_finite(event.trace),
        )
        for event in events
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None  # JSON has no infinity and no NaN


def refresh_due(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the next step gathers statistics of any layer, whatever the trace rule then decides.

    Args:
        optimizer: Any optimizer.

    Returns:
        True if a layer is due; False for first-order optimizers.
    """
    return any(layer.due for layer in curvature_of(optimizer).values())


def steps_to_refresh(optimizer: torch.optim.Optimizer) -> int | None:
    """Return the number of steps before the next refresh.

    Args:
        optimizer: Any optimizer.

    Returns:
        0 if the next step is a refresh; `None` if there will be none, because there are no layers or all have stopped.
    """
    if refresh_due(optimizer):
        return 0
    if all(layer.stopped for layer in curvature_of(optimizer).values()):
        return None
    return min(int(group["next_refresh"] - group["step"]) for group in optimizer.param_groups)
