"""How activations and output gradients reach the curvature: the layers of a model, their selection, and the hooks."""

from torch_thor.capture.composites import CompositeHook, InnerLayer, Report, register_composite

__all__ = ["CompositeHook", "InnerLayer", "Report", "register_composite"]
