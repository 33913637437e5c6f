"""Captures the activations and output gradients of a model's layers: inspection, selection and hooks."""

from torch_thor.capture.composites import CompositeHook, InnerLayer, Report, register_composite

__all__ = ["CompositeHook", "InnerLayer", "Report", "register_composite"]
