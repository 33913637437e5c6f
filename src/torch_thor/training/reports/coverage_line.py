"""The printed line that says which part of a network THOR preconditions."""

import torch

from torch_thor.optim.base import CurvatureOptimizer
from torch_thor.optim.report import sizes
from torch_thor.training.engine.refreshes import curvature_of


def coverage_line(optimizer: torch.optim.Optimizer) -> str | None:
    """Summarise `optimizer.coverage()`.

    Args:
        optimizer: Any optimizer.

    Returns:
        One line with the number of preconditioned layers, their share of the trained parameters, and the numbers of
        the other modules with trained parameters, by class; `None` for optimizers without curvature.
    """
    if not isinstance(optimizer, CurvatureOptimizer):
        return None
    entries = optimizer.coverage()
    covered, total = sizes(entries)
    layers = curvature_of(optimizer)
    others: dict[str, set[str]] = {}
    for entry in entries:
        if entry.trained and not entry.preconditioned:
            module = entry.name.rpartition(".")[0]
            # with ThorMuon the bias of a preconditioned layer is not
            kind = f"biases of {entry.kind}" if module in layers and entry.name.endswith("bias") else entry.kind
            others.setdefault(kind, set()).add(module)
    share = f"{covered / max(1, total):.2%} of the trained parameters"
    line = f"{type(optimizer).__name__} preconditions {len(layers)} layers with {share}"
    if not others:
        return line
    rest = sorted({entry.rest for entry in entries if entry.trained and not entry.preconditioned})
    counts = ", ".join(f"{kind} ({len(modules)})" for kind, modules in sorted(others.items()))
    return f"{line}; {' and '.join(rest)} for the rest: {counts}; optimizer.coverage() lists each parameter"
