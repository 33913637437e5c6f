"""Makes all processes take the same decisions in a step, or raise the same error."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from torch_thor.curvature.processes import Processes
from torch_thor.distributed.consistency import NUMBERS, agree, check_same_gradients

if TYPE_CHECKING:
    from torch_thor.optim.step_inputs import StepInputs
    from torch_thor.optim.thor import THOR

# Options that affect weights and factors. update_interval may be a function, so its results are compared instead.
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


def read_together(thor: "THOR", processes: Processes, read_own: Callable[[], "StepInputs"]) -> "StepInputs":
    """Read the inputs of a step on every process, and combine them."""
    read, error, facts, numbers = None, None, [], [0.0] * NUMBERS
    try:
        read = read_own()
        facts = list(_facts(thor, read))
        numbers = [read.terms, read.skipped, read.counted, read.largest]
    except Exception as problem:  # it is raised on every process
        error = problem
    rows = agree(processes, error, facts, numbers)
    assert read is not None  # agree() raises the error of this process
    terms, skipped, counted, largest = zip(*rows, strict=True)
    if any(skipped):
        return replace(read, skipped=True, counted=any(counted))
    check_same_gradients(largest)
    return replace(read, terms=int(sum(terms)))


def _facts(thor: "THOR", inputs: "StepInputs") -> Iterator[str]:
    """Yield lines of text that must be the same on all processes."""
    yield f"loss_reduction={thor.loss_reduction!r}"
    yield f"fisher={thor.fisher!r}"
    yield f"divide_curvature={thor.divide_curvature!r}"
    yield f"whole_matrices={thor.whole_matrices!r}"
    yield f"communication_dtype={thor.communication_dtype!r}"
    sampler = thor._registry.capture.sampler
    if sampler is not None:
        yield f"sampled labels: {'yes' if sampler.passes else 'no'}"
    for i, group in enumerate(thor.param_groups):
        for name in _OPTIONS:
            value = group[name]
            yield f"parameter group {i}: {name}={float(value) if hasattr(value, 'item') else value!r}"
        # compared one refresh ahead: with other intervals one rank would wait in a refresh that the others do not take
        yield f"parameter group {i}: update_interval makes step {inputs.next_refreshes[i]} the next refresh"
    for layer in inputs.due:
        weight = layer.weight
        yield (
            f"layer {layer.name!r}: factors {layer.layouts()}, {weight.dtype}, refreshes={layer.refreshes}, "
            f"gradient={weight.grad is not None}"
        )
