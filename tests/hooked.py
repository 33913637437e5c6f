"""The layers of a model, their curvature and their hooks, without an optimizer."""

from torch_thor.capture.inspection import inspect_model
from torch_thor.capture.module_hooks import hooks_of
from torch_thor.curvature import LayerCurvature


def hooked(model, **options):
    """(curvature of each layer that can be preconditioned, the hooks on the modules that run these)."""
    found = inspect_model(model, model.parameters()).layers
    layers = {
        name: LayerCurvature(name, one.kind, one.weight, one.biases, one.prefix, **options)
        for name, one in found.items()
    }
    return layers, hooks_of(found, layers)
