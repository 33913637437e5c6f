"""The capture of the activations and output gradients of a model's layers.

It consists of inspection, selection and hooks.
"""

from torch_thor.capture.composites import CompositeHook, InnerLayer, Report, register_composite
from torch_thor.capture.coverage import Covered

__all__ = ["CompositeHook", "Covered", "InnerLayer", "Report", "register_composite"]
