"""What a layer's curvature is: statistics, blocks, inverses and the rule that refreshes them.

Nothing in this package knows of optimizers or of processes: state is handed to it as a mapping, and what it returns
is tensors and decisions.
"""

from torch_thor.curvature.blocks import BlockDiagonal
from torch_thor.curvature.kinds import Kind, LinearKind, MatrixWeight, register_kind

__all__ = ["BlockDiagonal", "Kind", "LinearKind", "MatrixWeight", "register_kind"]
