"""Checks whether a state dict belongs to THOR, and whether what was loaded from it fits the layers."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from torch_thor.capture.layers import Layer
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.layer_state import misfitting_entry, missing_entries
from torch_thor.optim.checkpoint import StateDict, check_origin
from torch_thor.optim.gradient_checks import some


def check_is_of_thor(state_dict: StateDict) -> None:
    """Raise an error for a state dict that was not saved by THOR."""
    remedy = (
        "Momentum, learning rate and schedule of another optimizer mean nothing to THOR: load the model's weights, and "
        "let THOR start anew"
    )
    check_origin(state_dict, "THOR", ("damping", "trace_thresholds", "update_interval"), remedy)
    scale_free = any(group.get("scaling") == "spectral" for group in state_dict["param_groups"])
    if scale_free and any(str(key).endswith("G_inverse") for kept in state_dict["state"].values() for key in kept):
        raise ValueError(
            "the state dict is of a version whose scale-free step took fourth roots of A and G; this one takes the "
            "inverse of A alone, with other defaults, and cannot go on from there; nothing was loaded. Load the "
            "model's weights and let THOR start anew, or end the training with the version that began it"
        )


def check_selection(
    layers: Iterable[LayerCurvature], left_out: Iterable[Layer], states: Mapping[Tensor, Mapping[str, Any]]
) -> None:
    """Check that the loaded state was saved with the same ``skip=`` and ``only=``."""
    present = [one for one in left_out if one.weight.is_there]  # the others are pruned
    saved = [one.name for one in present if _has_factors(states.get(one.weight.parameter, {}), one.prefix)]
    lacking = [layer.name for layer in layers if layer.state and not _has_factors(layer.state, layer.prefix)]
    if saved or lacking:
        differences = [f"it has factors of {some(saved)}, which skip= or only= leaves out here"] if saved else []
        differences += [f"it has no factors of {some(lacking)}, which THOR preconditions here"] if lacking else []
        raise ValueError(
            f"the state dict was saved with other preconditioned layers: {', and '.join(differences)}. Make THOR with "
            f"the skip= and only= that it was saved with, or let the optimizer start anew"
        )


def _has_factors(state: Mapping[str, Any], prefix: str) -> bool:
    return f"{prefix}refreshes" in state


def check_factors(layers: Iterable[LayerCurvature]) -> None:
    """Check that the loaded state of each layer is complete, and that its tensors have the shapes that it needs."""
    for layer in layers:
        missing = missing_entries(layer)
        if missing:
            raise ValueError(
                f"layer {layer.name!r}: the state dict has a part of its state, and not {some(missing)}; load one that "
                f"is whole, or let the optimizer start anew"
            )
        misfit = misfitting_entry(layer)
        if misfit is not None:
            key, needed = misfit
            found = layer.state[key]
            raise ValueError(
                f"layer {layer.name!r}: {key} in the state dict has shape "
                f"{tuple(found.shape) if isinstance(found, Tensor) else found!r}, this model and split_dim need "
                f"{needed}; load it into the model and with the split_dim that it was saved with"
            )
        if layer.refreshes and not layer.rows_per_term > 0:
            raise ValueError(
                f"layer {layer.name!r}: rows_per_term={layer.rows_per_term!r} in the state dict must be a number > 0 "
                f"where there are factors; load an earlier checkpoint"
            )
