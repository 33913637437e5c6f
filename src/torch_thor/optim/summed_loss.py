"""Detects a loss that is a sum over the batch although ``loss_reduction`` is "mean", and divides its gradients by N.

Many training scripts use a summed loss (the VAE of pytorch/examples is one). If it is treated as a mean over N terms,
its gradients are N times and its Fisher matrix is N² times too large: damping has no effect, and the natural gradient
is N times too short.

A sum and a mean of large numbers differ only in the size of their gradients. Per loss term, the gradients of a
log-likelihood or of a squared error of standardised targets are about 1 or less in every layer, and those of the sum
are N times larger. The limits of the detection are therefore narrow. A loss outside of them is trained as it is, under
the bound on the step:

- A sum with small gradients is not detected: batches of less than about 30, classifiers with convolutions (in whose
  hidden layers gradients are about 0.001 per pixel), many classes.
- A mean of unscaled numbers is treated as a sum if their size happens to be near N, such as the squared error of
  targets near 100 at N = 128. The loss is then divided by N in training, under the same bound.
- N is that of the latest refresh, so between two refreshes the sum of a smaller batch is divided by the same N.
"""

import math
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes

if TYPE_CHECKING:
    from torch_thor.optim.step_inputs import StepInputs
    from torch_thor.optim.thor import THOR

# The largest RMS gradient of a mean, in the median layer. Measured: 0.4 in the VAE, 0.1 to 1 for standardised targets,
# 1 and less in classifiers.
_LARGEST_OF_A_MEAN = 10.0
# The smallest RMS gradient of a sum, in the median layer, relative to N. Below it, N is large and targets are unscaled.
_SMALLEST_OF_A_SUM = 0.05
# The largest RMS gradient of a sum, in every layer, relative to N. It is 2 in the last layer for standardised targets;
# above the limit, targets are unscaled.
_LARGEST_OF_A_SUM = 3.0


def looks_summed(layers: Iterable[LayerCurvature], terms: int, processes: Processes) -> bool:
    """Return whether the loss of a refresh step looks like a sum over its terms."""
    means: list[torch.Tensor] = []
    for layer in layers:
        sums = layer.statistics.gathered()
        if sums is not None:
            groups = 1 if layer.kind.routed else layer.kind.groups  # a row of routed experts belongs to one group
            mean = sums[1].group_traces().sum() / (layer.statistics.rows * groups * layer.kind.outputs)
            means.append(mean.to(means[0]) if means else mean)
    if terms < 2 or not means:
        return False
    squares = [sum(of_processes) for of_processes in zip(*processes.gather(torch.stack(means).tolist()), strict=True)]
    middle, largest = (math.sqrt(max(0.0, s)) for s in (statistics.median_low(squares), max(squares)))
    return middle > max(_LARGEST_OF_A_MEAN, _SMALLEST_OF_A_SUM * terms) and largest <= _LARGEST_OF_A_SUM * terms


def message(terms: int) -> str:
    """Return the text of the warning."""
    return (
        f"THOR: the gradients are so large that the loss looks like a sum over the {terms} loss terms of the batch, "
        f"not their mean, so THOR divides it by {terms}. Average the loss over the batch, or, if it is an average, "
        f"bring its targets to a scale of about 1; THOR(..., **THOR.preset('paper')) takes the loss as it is"
    )


def rescale_summed_loss(thor: "THOR", inputs: "StepInputs") -> None:
    """Divide gradients and statistics of a summed loss by N; the first refresh decides whether the loss is a sum."""
    groups, registry, terms = thor.param_groups, thor._registry, inputs.terms
    first = not any(layer.refreshes for layer in registry.layers.values())
    bounded = any(group["max_update_ratio"] is not None for group in groups)
    # sampled gradients do not show the loss, and the scale-free step does not depend on it
    comparable = thor.loss_reduction == "mean" and thor.fisher == "empirical" and thor.scaling is None
    if first and bounded and comparable and looks_summed(inputs.due, terms, inputs.processes):
        registry.warnings.note("summed loss", message(terms))
    elif all(group["loss_scale"] == 1.0 for group in groups):
        return
    scale = terms / inputs.processes.count  # gradients have been averaged over the processes already
    for group in groups:
        group["loss_scale"] = scale
    for layer in inputs.due:
        layer.statistics.scale_outputs_(1.0 / scale)
