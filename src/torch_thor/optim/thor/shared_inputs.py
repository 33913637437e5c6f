"""How several processes come to know the same of a step that refreshes, or raise the same."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_thor.distributed.consistency import agree, check_same_gradients

if TYPE_CHECKING:
    from torch_thor.optim.thor.optimizer import THOR
    from torch_thor.optim.thor.step_inputs import StepInputs

# Options that affect weights and factors. An interval may be a function: what it gives is compared in its place.
_OPTIONS = (
    "lr",
    "damping",
    "momentum",
    "nesterov",
    "weight_decay",
    "trace_thresholds",
    "split_dim",
    "factor_decay",
    "kl_clip",
    "max_update_ratio",
    "loss_scale",
    "scaling",
    "step",
    "next_refresh",
)


def read_together(
    thor: "THOR", inputs: "StepInputs", read_own: Callable[["THOR", "StepInputs"], "StepInputs"]
) -> "StepInputs":
    """Read, and have all processes raise what one of them found wrong, skip what one skips, and know all loss terms.

    Args:
        thor: the optimizer.
        inputs: what is known of the step so far, the processes among it.
        read_own: what one process does that trains alone; it may raise.

    Returns:
        This process's inputs, with the decisions and the loss terms of all.

    Raises:
        Exception: what ``read_own`` raised here or on another process.
        RuntimeError: the processes differ.
    """
    read, error, facts = inputs, None, []
    try:
        read = read_own(thor, inputs)
        facts = list(_facts(thor, read))
    except Exception as problem:  # it is raised on every process
        error = problem
    rows = agree(inputs.processes, error, facts, [read.terms, read.skipped, read.counted, read.largest])
    terms, skipped, counted, largest = zip(*rows, strict=True)
    if any(skipped):
        return replace(read, skipped=True, counted=any(counted))
    check_same_gradients(largest)
    return replace(read, terms=int(sum(terms)))


def _facts(thor: "THOR", inputs: "StepInputs") -> Iterator[str]:
    """Yield what must be the same on all processes."""
    yield f"loss_reduction={thor.loss_reduction!r}"
    yield f"fisher={thor.fisher!r}"
    sampler = thor._registry.capture.sampler
    if sampler is not None:
        yield f"sampled labels: {'yes' if sampler.passes else 'no'}"
    for i, group in enumerate(thor.param_groups):
        for name in _OPTIONS:
            value = group[name]
            yield f"parameter group {i}: {name}={float(value) if hasattr(value, 'item') else value!r}"
        # where intervals differ, one rank would wait in a refresh that the others do not take: known one refresh before
        yield f"parameter group {i}: update_interval makes step {inputs.next_refreshes[i]} the next refresh"
    for layer in inputs.due:
        weight = layer.weight
        yield (
            f"layer {layer.name!r}: factors {layer.layouts()}, {weight.dtype}, refreshes={layer.refreshes}, "
            f"gradient={weight.grad is not None}"
        )
