"""What a step has seen beside its statistics, to tell why a layer with a gradient has none."""

from dataclasses import dataclass, field

from torch_thor.curvature.layer import LayerCurvature


@dataclass
class Evidence:
    """What a step has seen beside its statistics."""

    # layers whose outputs received gradients in passes that add nothing to .grad of their weights
    beside: set[LayerCurvature] = field(default_factory=set)
    # layers that had a gradient already when their statistics were asked for
    late: set[LayerCurvature] = field(default_factory=set)
    loaded: bool = False  # whether a state dict has asked for them
    dropped: bool = False  # whether zero_grad() has dropped statistics
