"""What a step asks before it touches anything: are the gradients finite, and did the statistics come?"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from torch_thor.capture.capture import Capture
from torch_thor.capture.phases import Phase
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.optim.parameters import Group, with_gradient
from torch_thor.optim.thor.parameter_index import ParameterIndex


def numbers_of(gradient: Tensor) -> Tensor:
    """Return the real numbers that a gradient holds, whatever its layout.

    Args:
        gradient: dense or sparse (COO), real or complex.

    Returns:
        A dense real tensor, for looking at.
    """
    values = gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient
    return torch.view_as_real(values) if values.is_complex() else values


def largest_norm(gradients: Sequence[Tensor]) -> float:
    """Return the largest Euclidean norm among the gradients, NaN or inf if one holds a number that is not finite.

    One pass over the gradients and one wait for each device: the price of the promise that NaN reaches no weight.

    Args:
        gradients: dense tensors.

    Returns:
        The norm, 0 for no gradients. A float32 norm that overflows (beyond 1e19) counts as inf.
    """
    batches: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for gradient in gradients:
        batches.setdefault((gradient.device, gradient.dtype == torch.float64), []).append(gradient)
    largest = 0.0
    for (_, wide), batch in batches.items():
        # float16 norms would overflow at 65,504, where the gradients themselves are sound
        norms = torch._foreach_norm(batch, 2, dtype=torch.float64 if wide else torch.float32)
        value = float(torch.stack(norms).max())
        if not math.isfinite(value):
            return value
        largest = max(largest, value)
    return largest


def largest_gradient(groups: list[Group], index: ParameterIndex) -> float:
    """Return the largest norm of a gradient; inf if a natural gradient, at most |∇| / λ, could overflow.

    Args:
        groups: parameter groups.
        index: knows the parameters' names.

    Returns:
        The norm, NaN or inf where a gradient holds one.

    Raises:
        RuntimeError: a gradient is neither dense nor sparse COO.
    """
    gradients, damping = [], math.inf
    for group in groups:
        damping = min(damping, float(group["damping"]))
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.layout not in (torch.strided, torch.sparse_coo):
                raise RuntimeError(
                    f"parameter {index.name(parameter)!r} has a gradient of layout {gradient.layout}; THOR takes dense "
                    f"and sparse COO gradients"
                )
            if gradient.numel():
                usual = gradient.layout is torch.strided and not gradient.is_complex()
                gradients.append(gradient if usual else numbers_of(gradient))
    largest = largest_norm(gradients)
    return math.inf if largest / damping > torch.finfo(torch.float32).max else largest


def nonfinite_names(groups: list[Group], index: ParameterIndex) -> list[str]:
    """Return the parameters whose gradients hold NaN or inf.

    Args:
        groups: parameter groups.
        index: knows the parameters' names.

    Returns:
        Their names.
    """
    return [index.name(p) for _, p, g in with_gradient(groups) if not bool(numbers_of(g).isfinite().all())]


def check_row_mask(layers: Collection[LayerCurvature], capture: Capture) -> None:
    """Refuse a row mask that fits no layer.

    Args:
        layers: the preconditioned layers.
        capture: who gathers their statistics; it forgets them where this raises.

    Raises:
        RuntimeError: statistics came, and the mask fits no layer.
    """
    mask = capture.row_mask
    if mask is None or capture.mask_taken or not any(layer.rows for layer in layers):
        return
    capture.discard()
    raise RuntimeError(
        f"row_mask of shape {tuple(mask.shape)} fits no layer: it must have the leading dimensions of the layers' "
        f"inputs, (N, L); set it before each forward pass, and to None where there is no padding"
    )


def check_statistics(layers: Collection[LayerCurvature], capture: Capture) -> list[tuple[LayerCurvature, str]]:
    """Refuse a refresh whose statistics never came, on any process, with the cause.

    Args:
        layers: the preconditioned layers.
        capture: who gathers their statistics; it forgets them where this raises.

    Returns:
        The layers that have a gradient and no statistics while others have theirs, and what to say of each: their
        weights are used without calling them.

    Raises:
        RuntimeError: layers that are due have gradients, and none has statistics.
    """
    required = [layer for layer in layers if capture.phase(layer) is Phase.REQUIRED]
    silent = [layer for layer in required if layer not in capture.reached and layer.has_gradient()]
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
    if names:
        raise RuntimeError(
            f"layers {names} ran inside a torch.func transform, where their statistics cannot be seen; take "
            f"the gradients of refresh steps with loss.backward(), or leave the layers out with skip="
        )
    if sampler is not None:
        raise RuntimeError(_unsampled(called, nonfinite))
    raise RuntimeError(
        f"layers {some([layer.name for layer in silent])} have gradients and no statistics, and so has every other "
        f"layer, because their forward was not seen: the gradients were not made by loss.backward() (or before THOR "
        f"was made), a compiled or copied model ran in the place of the one that THOR has, or the weights were used "
        f"without calling the modules. Call the modules, or leave the layers out with skip="
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
        f"refresh; skip= leaves it out from the start"
    )


def doubtful_terms_message(number: int, last: int) -> str:
    """Return the text of the warning for a number of loss terms that the layers do not agree on.

    Args:
        number: N, as taken from a backward pass.
        last: what the layer nearest to the loss saw.

    Returns:
        The message.
    """
    return (
        f"THOR takes N = {number} for the number of loss terms of a backward pass, from the leading dimension of the "
        f"layers' inputs, while the last layer's input has {last}. If the loss averages over another number (predicted "
        f"tokens, groups of rows), set loss_terms; loss_terms={number} confirms this one"
    )


def _unsampled(called: bool, nonfinite: bool) -> str:
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


def nonfinite_message(step: int, names: Sequence[str]) -> str:
    """Return the text of the error for a step that is refused.

    Args:
        step: its number.
        names: the parameters at fault, if single ones are.

    Returns:
        The message.
    """
    return (
        f"step {step}: the gradients of {some(names) or 'the model'} hold NaN, inf or numbers that would overflow; "
        f"weights and optimizer state are as before this step. Lower lr or raise damping, clip the gradients, or pass "
        f'nonfinite="skip" to skip and count such steps'
    )


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names as text.

    Args:
        names: all of them.
        most: how many to spell out.

    Returns:
        ``"a, b and 3 more"``.
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
