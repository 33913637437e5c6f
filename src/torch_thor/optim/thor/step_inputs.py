"""What a step knows before it changes anything, and how several processes come to know the same."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.processes import Processes
from torch_thor.distributed.consistency import agree, check_same_gradients
from torch_thor.optim.parameters import Group
from torch_thor.optim.thor.conform import Look

# Options that decide what becomes of weights and factors. An interval may be a function: told is what it leads to.
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


@dataclass(frozen=True)
class Reading:
    """What is known of a step.

    Args:
        terms: N, of this process; of all of them once they have agreed. 0 where no layer has counted.
        output_scale: what turns this process's output gradients into gradients of one loss term.
        refreshes: the step of each group's next refresh, as it will stand after this step.
        skipped: the step is not taken.
        counted: it is not taken because a gradient is not finite, which ``skipped_steps`` counts.
        largest: the largest norm of a gradient.
        decaying: ``id`` of the parameters that decay in this step.
        looked: what the state has to fit, see :mod:`torch_thor.optim.thor.conform`.
    """

    terms: int = 0
    output_scale: float = 1.0
    refreshes: tuple[int, ...] = ()
    skipped: bool = False
    counted: bool = False
    largest: float = 0.0
    decaying: frozenset[int] = frozenset()
    looked: Look = field(default_factory=list)


def read_alike(
    processes: Processes,
    read: Callable[[], Reading],
    groups: list[Group],
    layers: Iterable[LayerCurvature],
    settings: Iterable[str],
) -> Reading:
    """Read, and have all processes raise what one of them found wrong, skip what one skips, and know all loss terms.

    Args:
        processes: those that train together.
        read: reads what this process has.
        groups: the optimizer's parameter groups.
        layers: those that are about to refresh.
        settings: what else must be the same on all of them, a line each.

    Returns:
        This process's reading, with the decisions and the loss terms of all.
    """
    if processes.count == 1:
        return read()
    reading, error, facts = Reading(), None, []
    try:
        reading = read()
        facts = [*settings, *_facts(groups, layers, reading.refreshes)]
    except Exception as problem:  # it is raised on every process
        error = problem
    rows = agree(processes, error, facts, [reading.terms, reading.skipped, reading.counted, reading.largest])
    terms, skipped, counted, largest = zip(*rows, strict=True)
    if any(skipped):
        return replace(reading, skipped=True, counted=any(counted))
    check_same_gradients(largest)
    return replace(reading, terms=int(sum(terms)))


def _facts(groups: list[Group], layers: Iterable[LayerCurvature], refreshes: Sequence[int]) -> Iterator[str]:
    for i, group in enumerate(groups):
        for name in _OPTIONS:
            value = group[name]
            yield f"parameter group {i}: {name}={float(value) if hasattr(value, 'item') else value!r}"
        # where intervals differ, one rank would wait in a refresh that the others do not take: known one refresh before
        yield f"parameter group {i}: update_interval makes step {refreshes[i]} the next refresh"
    for layer in layers:
        weight = layer.weight
        yield (
            f"layer {layer.name!r}: factors {layer.layouts()}, {weight.dtype}, refreshes={layer.refreshes}, "
            f"gradient={weight.grad is not None}"
        )
