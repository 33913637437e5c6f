"""A loss that is a sum over the batch, given to an optimizer that takes it for a mean.

Many training scripts sum (pytorch/examples' VAE is one). Taken for a mean over N terms, such a loss has gradients N
times and a Fisher matrix N² times too large: damping has no effect, and the natural gradient is N times too short.
The gradients themselves tell: per loss term, those of a log-likelihood are about 1 per output or less.
"""

import math
from collections.abc import Iterable

import torch

from torch_thor.curvature.layer import LayerCurvature

# A mean over N has gradients per term of about 1 or less in most layers: 0.3 at ten classes, 2 for a squared error of
# standardised targets. A sum has N times that, and not more: a squared error of targets of 1e5 is no sum for that.
_LARGEST_OF_A_MEAN = 10.0
_LARGEST_OF_A_SUM = 2.0


def looks_summed(layers: Iterable[LayerCurvature], terms: int) -> bool:
    """Return whether the loss of a step looks like a sum over its terms, from the statistics of a refresh.

    Args:
        layers: those with statistics; the output gradients are scaled to one term of a mean loss.
        terms: N.

    Returns:
        Whether the root mean square of the output gradients of the median layer is above 10, and at most 2 once
        divided by N (one host–device synchronisation).
    """
    means = []
    for layer in layers:
        sums = layer.gathered()
        if sums is not None:
            groups = 1 if layer.kind.routed else layer.kind.groups  # a row of experts is a row of one of them
            count = layer.rows * groups * layer.kind.outputs
            means.append(sums[1].group_traces().sum().double().cpu() / count)
    if terms < 2 or not means:
        return False
    typical = math.sqrt(max(0.0, float(torch.stack(means).median())))
    return typical > _LARGEST_OF_A_MEAN and typical / terms <= _LARGEST_OF_A_SUM


def message(terms: int) -> str:
    """Return the text of the warning.

    Args:
        terms: N.

    Returns:
        The message.
    """
    return (
        f"THOR: the gradients are so large that the loss looks like a sum over the {terms} loss terms of the batch, "
        f"not their mean, so THOR divides them by {terms}. Average the loss over the batch to be rid of this warning; "
        f"THOR(..., **THOR.preset('paper')) takes the loss as it is"
    )
