"""Errors and warnings for statistics that are missing on a refresh step, or do not fit the options."""

from collections.abc import Collection

from torch_thor.capture.gathering import Capture
from torch_thor.capture.patterns import some
from torch_thor.curvature.layer import LayerCurvature


def check_blocks(layers: Collection[LayerCurvature]) -> None:
    """Raise an error for statistics with other blocks than the group's ``split_dim``."""
    for layer in layers:
        if layer.statistics.are_cut_otherwise():
            raise RuntimeError(
                f"split_dim={layer.weight_view.options['split_dim']!r}: the statistics of layer {layer.name!r} were "
                f"gathered with another, because the option was changed between a forward pass and step(); call "
                f"zero_grad() and repeat the forward and backward passes. Weights and optimizer state are as before"
            )


def check_row_mask(layers: Collection[LayerCurvature], capture: Capture) -> None:
    """Raise an error for a row mask that fits no layer."""
    mask = capture.row_mask
    if mask is None or capture.mask_taken or not any(layer.statistics.rows for layer in layers):
        return
    capture.discard()
    raise RuntimeError(
        f"row_mask of shape {tuple(mask.shape)} fits no layer: it must have the leading dimensions of the layers' "
        f"inputs, (N, L); set it before each forward pass, and to None where there is no padding"
    )


def check_statistics(layers: Collection[LayerCurvature], capture: Capture) -> list[tuple[LayerCurvature, str]]:
    """Raise an error for a refresh without any statistics, on any process, that names the cause."""
    required = [layer for layer in layers if layer in capture.awaited]
    silent = [layer for layer in required if layer not in capture.reached and layer.weight_view.has_gradient()]
    inside = capture.inside_transform
    if not silent or any(layer in capture.reached for layer in layers):
        return [
            (layer, _uncalled_message(layer, layer.name in inside, capture.sampler is not None)) for layer in silent
        ]
    names = some([layer.name for layer in silent if layer.name in inside])
    sampler, called, nonfinite = capture.sampler, False, False
    if sampler is not None:
        called, nonfinite = sampler.passes > 0, sampler.nonfinite
    capture.discard()
    capture.listen(unseen=True)
    if names:
        raise RuntimeError(
            f"layers {names} ran inside a torch.func transform, where their statistics cannot be seen; take "
            f"the gradients of refresh steps with loss.backward(), or leave the layers out with layers="
        )
    if sampler is not None:
        raise RuntimeError(_no_samples_message(called, nonfinite))
    raise RuntimeError(
        f"layers {some([layer.name for layer in silent])} have gradients and no statistics, and so has every other "
        f"layer, because no forward and backward pass through them was seen since the last step: step() was called "
        f"again without another loss.backward(), the gradients were set without a forward pass or made before THOR "
        f"was, a compiled or copied model ran in the place of the one that THOR has, or the weights were used without "
        f"calling the modules. Call loss.backward() on what this model returns before each step(), and zero_grad() "
        f"after it; or leave the layers out with layers="
    )


def _uncalled_message(layer: LayerCurvature, inside_transform: bool, sampled: bool) -> str:
    cause = "its weight is used without calling the module"
    if inside_transform:
        cause = "it ran inside a torch.func transform, where they cannot be seen"
    elif sampled:
        cause = "the output given to sample_fisher() does not depend on it, or its module is not called"
    then = "keeps the inverses that it has" if layer.refreshes else "is trained plainly"
    return (
        f"it has a gradient and no statistics: {cause}. It {then} from now on, unless statistics come in a later "
        f"refresh; layers= leaves it out from the start"
    )


def conflicting_terms_message(number: int, last: int) -> str:
    """Return the text of the warning for layers that see different numbers of loss terms."""
    return (
        f"THOR takes N = {number} for the number of loss terms of a backward pass, from the leading dimension of the "
        f"layers' inputs, while the last layer's input has {last}. If the loss averages over another number (predicted "
        f"tokens, groups of rows), set optimizer.loss_terms; {number} confirms this one"
    )


def _no_samples_message(called: bool, nonfinite: bool) -> str:
    if nonfinite and not called:
        return (
            "the output given to sample_fisher() held NaN or inf where the loss does not, so no labels could be drawn "
            "from it; give the part of it that the loss depends on"
        )
    if not called:
        return (
            'this step refreshes, and fisher="sampled" has no statistics for it: call optimizer.sample_fisher(output) '
            "in each step, between the forward pass and loss.backward(), with what the model returned; or make the "
            'optimizer with fisher="empirical"'
        )
    return (
        "the output given to sample_fisher() depends on no layer that waits for statistics: it was computed by a "
        "compiled or copied model in the place of the one that THOR has, or before THOR was made. Give what this model "
        "returned in this step"
    )
