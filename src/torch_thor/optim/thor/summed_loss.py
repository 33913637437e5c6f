"""A loss that is a sum over the batch, given to an optimizer that takes it for a mean.

Many training scripts sum (pytorch/examples' VAE is one). Taken for a mean over N terms, such a loss has gradients N
times and a Fisher matrix N² times too large: damping has no effect, and the natural gradient is N times too short.

Gradients alone do not tell a sum from a mean of large numbers, only their size does: per loss term, those of a
log-likelihood or of a squared error of standardised targets are about 1 or less in every layer, and those of its sum
are N times that. So the limits are narrow, and what they leave out is trained as it is, under the bound on the step:

- Sums with small gradients are not noticed: batches below some 30, classifiers with convolutions (their hidden layers
  have 0.001 per pixel), many classes.
- A mean of unscaled numbers is taken for a sum where their size happens to be near N: a squared error of targets of 100
  at N = 128. The training is then that of its loss divided by N, under the same bound.
- N is that of the latest refresh, so a smaller batch between two refreshes has its smaller sum divided by the same N.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from torch_thor.curvature.layer import LayerCurvature

if TYPE_CHECKING:
    from torch_thor.optim.thor.optimizer import THOR
    from torch_thor.optim.thor.step_inputs import StepInputs

_LARGEST_OF_A_MEAN = (
    10.0  # in the median layer: 0.4 in the VAE, 0.1 to 1 for standardised targets, 1 and less in classifiers
)
_SMALLEST_OF_A_SUM = 0.05  # of N, in the median layer; below it, N is large and the targets are not scaled
_LARGEST_OF_A_SUM = (
    3.0  # of N, in every layer: 2 in the last one for standardised targets; above it, they are not scaled
)


def looks_summed(layers: Iterable[LayerCurvature], terms: int) -> bool:
    """Return whether the loss of a step looks like a sum over its terms, from the statistics of a refresh.

    Args:
        layers: those with statistics; the output gradients are scaled to one term of a mean loss.
        terms: N.

    Returns:
        Whether the root mean square of the output gradients is above 10 and at least N / 20 in the median layer, and at
        most 3 N in every layer (one host–device synchronisation).
    """
    means: list[torch.Tensor] = []
    for layer in layers:
        sums = layer.statistics.gathered()
        if sums is not None:
            groups = 1 if layer.kind.routed else layer.kind.groups  # a row of experts is a row of one of them
            mean = sums[1].group_traces().sum() / (layer.statistics.rows * groups * layer.kind.outputs)
            means.append(mean.to(means[0]) if means else mean)
    if terms < 2 or not means:
        return False
    squares = torch.stack(means)
    middle, largest = (math.sqrt(max(0.0, s)) for s in torch.stack([squares.median(), squares.max()]).tolist())
    return middle > max(_LARGEST_OF_A_MEAN, _SMALLEST_OF_A_SUM * terms) and largest <= _LARGEST_OF_A_SUM * terms


def message(terms: int) -> str:
    """Return the text of the warning.

    Args:
        terms: N.

    Returns:
        The message.
    """
    return (
        f"THOR: the gradients are so large that the loss looks like a sum over the {terms} loss terms of the batch, "
        f"not their mean, so THOR divides it by {terms}. Average the loss over the batch, or, if it is an average, "
        f"bring its targets to a scale of about 1; THOR(..., **THOR.preset('paper')) takes the loss as it is"
    )


def rescale_summed_loss(thor: "THOR", inputs: "StepInputs") -> None:
    """Divide gradients and statistics of a summed loss by N; whether it is one, the first refresh decides.

    Args:
        thor: the optimizer.
        inputs: what is known of the step; some layer was reached.
    """
    groups, registry, terms = thor.param_groups, thor._registry, inputs.terms
    first = not any(layer.refreshes for layer in registry.layers.values())
    bounded = any(group["max_update_ratio"] is not None for group in groups)
    comparable = thor.loss_reduction == "mean" and thor.fisher == "empirical"  # sampled statistics are not the loss's
    if first and bounded and comparable and looks_summed(inputs.due, terms):
        registry.warnings.note("summed loss", message(terms))
    elif all(group["loss_scale"] == 1.0 for group in groups):
        return
    scale = terms / inputs.processes.count  # ranks have averaged their gradients already
    for group in groups:
        group["loss_scale"] = scale
    for layer in inputs.due:
        layer.statistics.scale_outputs_(1.0 / scale)
