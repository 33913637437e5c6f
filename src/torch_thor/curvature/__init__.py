"""The curvature of one layer: statistics, block-diagonal factors, inverses, and the rule that refreshes them.

Nothing in this package knows of optimizers or processes: state is passed to it as a mapping, and it returns tensors and
decisions.
"""

from torch_thor.curvature.blocks import BlockDiagonal, BlockLayout
from torch_thor.curvature.kinds import Kind, LinearKind, MatrixWeight, ProjectionKind, register_kind
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.parameter_view import ParameterView
from torch_thor.curvature.refresh import Decision, RefreshEvent

__all__ = [
    "BlockDiagonal",
    "BlockLayout",
    "Decision",
    "Kind",
    "LayerCurvature",
    "LinearKind",
    "MatrixWeight",
    "ParameterView",
    "ProjectionKind",
    "RefreshEvent",
    "register_kind",
]
