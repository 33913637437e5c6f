"""The curvature of one layer: statistics, block-diagonal factors, inverses, and the rule that refreshes them.

Nothing in this package knows of optimizers or processes: state is passed to it as a mapping, and it returns tensors and
decisions.
"""

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.kinds import Kind, LinearKind, MatrixWeight, ProjectionKind, register_kind
from torch_thor.curvature.parameter_view import ParameterView

__all__ = ["BlockDiagonal", "Kind", "LinearKind", "MatrixWeight", "ParameterView", "ProjectionKind", "register_kind"]
