"""The curvature of one layer: statistics, block-diagonal factors, inverses and trace rule.

The trace rule is what refreshes them.

This package does not depend on optimizers or on torch.distributed: state is passed to it as a
mapping, and it returns tensors and decisions.
"""

from torch_thor.curvature.blocks import Blocks, BlockSizes
from torch_thor.curvature.kinds import Kind, LinearKind, MatrixWeight, ProjectionKind, register_kind
from torch_thor.curvature.layer import Layer, LayerCurvature
from torch_thor.curvature.lifecycle import Decision
from torch_thor.curvature.refresh import RefreshEvent
from torch_thor.curvature.view import ParameterView

__all__ = [
    "BlockSizes",
    "Blocks",
    "Decision",
    "Kind",
    "Layer",
    "LayerCurvature",
    "LinearKind",
    "MatrixWeight",
    "ParameterView",
    "ProjectionKind",
    "RefreshEvent",
    "register_kind",
]
