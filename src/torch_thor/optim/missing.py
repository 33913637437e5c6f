"""Layers without statistics on a step that refreshes, and why they have none."""

from collections.abc import Collection, Iterable

from torch_thor.capture.gathering import Capture, Evidence
from torch_thor.capture.patterns import some
from torch_thor.curvature.layer import LayerCurvature, with_gradient


def layers_without_statistics(
    layers: Collection[LayerCurvature], capture: Capture
) -> list[tuple[LayerCurvature, str]]:
    """Return the layers without statistics, and why; an error if no process has any of any."""
    required = with_gradient(capture.awaited - capture.reached)
    without_statistics = [layer for layer in layers if layer in required]
    if without_statistics and not any(layer in capture.reached for layer in layers):
        message = _why_nothing_seen(without_statistics, capture)
        capture.evidence = Evidence()
        capture.discard()
        capture.listen(unseen=True)
        raise RuntimeError(message)
    reasons = []
    for layer in without_statistics:
        if layer not in capture.evidence.late:  # whose statistics come with the next step
            then = "keeps the inverses that it has" if layer.refreshes else "is trained plainly"
            what = (
                f"it has a gradient and no statistics: {_why_not_seen(layer, capture)}. It {then} "
                f"from now on, unless statistics come in a later refresh; layers= leaves it out "
                f"from the start"
            )
            reasons.append((layer, what))
    return reasons


def _first(rules: Iterable[tuple[object, str]]) -> str:
    """Return the text of the first rule that holds."""
    return next(text for holds, text in rules if holds)


def _why_not_seen(layer: LayerCurvature, capture: Capture) -> str:
    """Return why a layer has no statistics although others have."""
    return _first(
        (
            (
                layer.name in capture.inside_transform,
                "it ran inside a torch.func transform, where they cannot be seen",
            ),
            (
                capture.ran_as_replicas,
                f"it ran as a replica of torch.nn.DataParallel. {_DATA_PARALLEL}",
            ),
            (
                capture.sampler is not None,
                "the output given to sample_fisher() does not depend on it, or its module is not "
                "called",
            ),
            (layer in capture.evidence.beside, f"its gradient came from {_BESIDE}"),
            (True, "its weight is used without calling the module"),
        )
    )


def _why_nothing_seen(without_statistics: Collection[LayerCurvature], capture: Capture) -> str:
    """Return the text of the error for a step without any statistics."""
    evidence, sampler = capture.evidence, capture.sampler
    names = some([layer.name for layer in without_statistics])
    transformed = [
        layer.name for layer in without_statistics if layer.name in capture.inside_transform
    ]
    beside = [layer.name for layer in without_statistics if layer in evidence.beside]
    without = f"layers {names} have gradients and no statistics, and so has every other layer"
    return _first(
        (
            (
                transformed,
                f"layers {some(transformed)} ran inside a torch.func transform, where their "
                "statistics cannot be seen; take the gradients of refresh steps with "
                "loss.backward(), or leave the layers out with layers=",
            ),
            (
                capture.ran_as_replicas,
                f"{without}, because torch.nn.DataParallel ran replicas of the model, which are "
                f"other modules in each forward pass. {_DATA_PARALLEL}",
            ),
            (sampler is not None and sampler.passes, _OTHER_OUTPUT),
            (sampler is not None and sampler.nonfinite, _NONFINITE_OUTPUT),
            (sampler is not None, _NOT_SAMPLED),
            (
                beside,
                f"layers {some(beside)} have gradients and no statistics, because their gradients "
                f"came from {_BESIDE}. Call loss.backward() in steps that refresh; in a pipeline "
                "take a schedule with whole backward passes (Schedule1F1B, ScheduleGPipe or "
                "ScheduleInterleaved1F1B); or leave the layers out with layers=",
            ),
            (
                evidence.loaded and not evidence.late.isdisjoint(without_statistics),
                f"{without}, because load_state_dict() came between loss.backward() and step(): "
                "the loaded state refreshes in this step, and the state before did not. Load it "
                "before the forward pass, or call zero_grad() and repeat the forward and backward "
                "passes",
            ),
            (
                evidence.dropped,
                f"{without}, because zero_grad() came between loss.backward() and step(), and "
                "drops the statistics with the gradients. Call it after step(), and to replace "
                "gradients change them in place, as in p.grad.copy_(...)",
            ),
            (True, _NOTHING_SEEN.format(without)),
        )
    )


_BESIDE = (
    "torch.autograd.grad, or from a backward pass that is split into one for inputs and one for "
    "weights, as in zero-bubble pipelines: no pass through its output adds to .grad of its weight"
)
_DATA_PARALLEL = (
    "Use torch.nn.parallel.DistributedDataParallel, with one process for each device (torchrun, or "
    "accelerate launch). A trainer that takes DataParallel by itself where it sees several "
    "devices, as the Trainer of transformers, does not if it is started so, or with "
    "CUDA_VISIBLE_DEVICES=0"
)
_NOTHING_SEEN = (
    "{}, because no forward and backward pass through them was seen since the last step: step() "
    "was called again without another loss.backward(), the gradients were set without a forward "
    "pass or made before the optimizer was, a state was loaded between the two passes, a compiled "
    "or copied model ran in the place of the optimizer's, or the weights were used without calling "
    "the modules. Call loss.backward() on what this model returns before each step(), and "
    "zero_grad() after it; or leave the layers out with layers="
)
_OTHER_OUTPUT = (
    "the output given to sample_fisher() depends on no layer that waits for statistics: it was "
    "computed by a compiled or copied model in the place of the optimizer's, or before the "
    "optimizer was made. Give what this model returned in this step"
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
