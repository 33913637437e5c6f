"""How activations and output gradients reach the curvature: the layers of a model, their selection, and the hooks."""

from torch_thor.capture.composites import CompositeHook, InnerLayer, Report, register_composite
from torch_thor.capture.coverage import Covered

__all__ = ["CompositeHook", "Covered", "InnerLayer", "Report", "register_composite"]
