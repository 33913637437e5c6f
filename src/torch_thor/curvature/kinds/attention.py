"""The four projections of ``nn.MultiheadAttention``: query, key and value (one fused weight or three), and output.

The module computes them inside one function, without calling a layer, so how their rows are seen stands in
:mod:`torch_thor.capture.attention`; once seen, each is a linear layer on a slice of a weight.
"""

from torch import Tensor

from torch_thor.curvature.kinds.linear import LinearKind

# In the order of the fused weight's rows.
PROJECTIONS = ("q", "k", "v")


class ProjectionKind(LinearKind):
    """One projection.

    Args:
        weight: the projection's weight, ``(out, in)``.
    """

    label = "MultiheadAttention"

    def __init__(self, weight: Tensor) -> None:
        self.outputs, self.inputs = weight.shape
