"""Layers without statistics on a step that refreshes, and why they have none."""

from collections.abc import Collection

from torch_thor.capture.gathering import Capture
from torch_thor.capture.patterns import some
from torch_thor.curvature.layer import LayerCurvature


def silent_layers(
    layers: Collection[LayerCurvature], capture: Capture
) -> list[tuple[LayerCurvature, str]]:
    """Return the layers without statistics, and why."""
    # Raise an error if no layer has any on any process.
    required = [layer for layer in layers if layer in capture.awaited]
    silent = [
        layer
        for layer in required
        if layer not in capture.reached and layer.weight_view.has_gradient()
    ]
    inside, sampler = capture.inside_transform, capture.sampler
    if not silent or any(layer in capture.reached for layer in layers):
        found = []
        for layer in silent:
            cause = "its weight is used without calling the module"
            if layer.name in inside:
                cause = "it ran inside a torch.func transform, where they cannot be seen"
            elif sampler is not None:
                cause = (
                    "the output given to sample_fisher() does not depend on it, or its module is "
                    "not called"
                )
            then = "keeps the inverses that it has" if layer.refreshes else "is trained plainly"
            what = (
                f"it has a gradient and no statistics: {cause}. It {then} from now on, unless "
                f"statistics come in a later refresh; layers= leaves it out from the start"
            )
            found.append((layer, what))
        return found
    transformed = some([layer.name for layer in silent if layer.name in inside])
    message = _NOTHING_SEEN.format(some([layer.name for layer in silent]))
    if transformed:
        message = (
            f"layers {transformed} ran inside a torch.func transform, where their statistics "
            "cannot be seen; take the gradients of refresh steps with loss.backward(), or leave "
            "the layers out with layers="
        )
    elif sampler is not None and sampler.passes:
        message = _OTHER_OUTPUT
    elif sampler is not None:
        message = _NONFINITE_OUTPUT if sampler.nonfinite else _NOT_SAMPLED
    capture.discard()
    capture.listen(unseen=True)
    raise RuntimeError(message)


_NOTHING_SEEN = (
    "layers {} have gradients and no statistics, and so has every other layer, because no forward "
    "and backward pass through them was seen since the last step: step() was called again without "
    "another loss.backward(), the gradients were set without a forward pass or made before THOR "
    "was, a compiled or copied model ran in the place of the one that THOR has, or the weights "
    "were used without calling the modules. Call loss.backward() on what this model returns before "
    "each step(), and zero_grad() after it; or leave the layers out with layers="
)
_OTHER_OUTPUT = (
    "the output given to sample_fisher() depends on no layer that waits for statistics: it was "
    "computed by a compiled or copied model in the place of the one that THOR has, or before THOR "
    "was made. Give what this model returned in this step"
)
_NONFINITE_OUTPUT = (
    "the output given to sample_fisher() held NaN or inf where the loss does not, so no labels "
    "could be drawn from it; give the part of it that the loss depends on"
)
_NOT_SAMPLED = (
    'this step refreshes, and fisher="sampled" has no statistics for it: call '
    "optimizer.sample_fisher(output) in each "
    "step, between the forward pass and loss.backward(), with what the model returned; or make the "
    "optimizer with "
    'fisher="empirical"'
)
