"""The layers of a model, their curvature and their hooks, without an optimizer."""

from torch_thor.capture.inspection import hooks_of, inspect
from torch_thor.curvature import LayerCurvature


def hooked(model, **options):
    """(the curvature of each layer by name, the hooks on the modules)."""
    found = inspect(model, model.parameters()).layers
    layers = {name: LayerCurvature(layer, **options) for name, layer in found.items()}
    return layers, hooks_of(found, layers)
