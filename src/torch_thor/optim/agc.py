"""Adaptive gradient clipping, AGC (Brock et al., ICML 2021, section 4.1).

For a unit i of a weight W with gradient G, both Frobenius norms over the unit:

    if ‖G_i‖ / max(‖W_i‖, ε) > λ:   G_i ← λ · max(‖W_i‖, ε) / ‖G_i‖ · G_i     else unchanged

λ is ``clip_factor``, ε ``eps``. What a unit is stands in :mod:`torch_thor.optim.agc_units`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_thor.optim.agc_units import ROWS, Clippable, last_linear, layouts_of, unit_norms
from torch_thor.optim.checks import in_range, number, require
from torch_thor.optim.exclusion import Exclude, excluded_parameters


class ClipStatistics(NamedTuple):
    """How much was clipped in one go; made without waiting for the device.

    Args:
        clipped: how many units were clipped, a tensor of no dimensions on the device of the first parameter.
        units: of how many, those that may not be clipped left out.
    """

    clipped: Tensor
    units: int

    @property
    def share(self) -> Tensor:
        """The share of units that were clipped, in [0, 1], as a tensor; 0 where there were no units."""
        return self.clipped / max(self.units, 1)


def check_clipping(options: Mapping[str, Any]) -> None:
    """Check λ and ε.

    Args:
        options: a mapping with ``clip_factor`` and ``eps``.
    """
    factor = number(options["clip_factor"])
    require(
        "clip_factor",
        options["clip_factor"],
        factor is not None and factor > 0,
        "a number > 0",
        "0.01 is the paper's for batches of 4096, smaller ones take up to 0.16; float('inf') switches clipping off",
    )
    in_range("eps", options["eps"], lambda v: v > 0, "a finite number > 0", "1e-3 is the paper's")


@torch.no_grad()
def adaptive_clip_grad_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    clip_factor: float = 0.01,
    eps: float = 1e-3,
    *,
    exclude: Exclude = None,
    foreach: bool | None = None,
) -> ClipStatistics:
    """Clip gradients in place, unit by unit, against the norms of the weights (Brock et al. 2021, section 4.1).

    Call it where :func:`torch.nn.utils.clip_grad_norm_` would stand, between ``backward`` and ``step``, with any
    optimizer; with a GradScaler after ``scaler.unscale_(optimizer)``, because λ means nothing for scaled gradients.

    Args:
        parameters: the model; or parameters, all of which are clipped then, along dim 0. Given the model, transposed
            convolutions and Hugging Face's ``Conv1D`` are clipped along their outputs, which are in dim 1, and the
            last fully connected layer is left alone. Those without a gradient are passed over.
        clip_factor: λ, the largest ratio of a unit's gradient norm to its weight norm; inf clips nothing.
        eps: ε, the weight norm that a unit has at least, so that units at zero can move.
        exclude: what of the model is left alone: names or patterns as :mod:`fnmatch` has them, of parameters or of the
            modules that hold them; modules; or a callable ``(name, parameter) -> bool``. None is the last
            ``nn.Linear`` of the model, weight and bias; ``()`` nothing.
        foreach: whether small tensors are measured and scaled together; None and True do, False takes one at a time.

    Returns:
        How many units were clipped, as a tensor that nothing has waited for. A gradient that holds NaN or inf is not
        caught: its unit is NaN afterwards.

    Raises:
        ValueError: λ or ε is not above 0, or a pattern matches nothing.
        TypeError: ``exclude`` is given without the model.
        RuntimeError: a gradient is sparse.
    """
    check_clipping({"clip_factor": clip_factor, "eps": eps})
    layouts, left_alone = {}, set()
    if isinstance(parameters, nn.Module):
        layouts = layouts_of(parameters)
        left_alone = excluded_from_clipping(parameters, exclude)
        parameters = parameters.parameters()
    elif exclude is not None and exclude != ():
        raise TypeError(
            f"exclude={exclude!r} without the model: give adaptive_clip_grad_ the model, or only the parameters that "
            f"are to be clipped"
        )
    given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for p in given:
        if p.grad is not None and p.grad.layout is not torch.strided:
            raise RuntimeError(
                f"a parameter of shape {tuple(p.shape)} has a gradient of layout {p.grad.layout}: AGC needs whole "
                f"units and takes dense gradients; make the layer with sparse=False"
            )
    entries = [
        Clippable(p, p.grad, layouts.get(id(p), ROWS))
        for p in given
        if p.grad is not None and p.grad.numel() and id(p) not in left_alone
    ]
    factors, statistics = clip_factors(entries, clip_factor, eps, together=foreach is not False)
    if entries:
        torch._foreach_mul_([e.gradient for e in entries], factors)
    return statistics


def excluded_from_clipping(model: nn.Module, exclude: Exclude) -> set[int]:
    """Return the parameters that are not to be clipped.

    Args:
        model: the model.
        exclude: what the user wants left alone; None for the last fully connected layer.

    Returns:
        Their ``id``.
    """
    if exclude is not None:
        return excluded_parameters(exclude, model)
    head = last_linear(model)
    return set() if head is None else {id(p) for p in head.parameters()}


def clip_factors(
    entries: list[Clippable], clip_factor: float, eps: float, *, together: bool
) -> tuple[list[Tensor], ClipStatistics]:
    """Return what each gradient is to be multiplied by.

    Args:
        entries: parameters and gradients.
        clip_factor: λ.
        eps: ε.
        together: whether many are measured in one go.

    Returns:
        For each entry a tensor that broadcasts against its gradient, exactly 1 for units that stay; and the count.
    """
    factors: list[Tensor | None] = [None] * len(entries)
    counts, total = [], 0
    for positions, units, weights, gradients in unit_norms(entries, together=together):
        limits = clip_factor * weights.clamp(min=eps)
        too_long = gradients > limits
        values = torch.where(too_long, limits / gradients, 1.0)
        counts.append(too_long.sum())
        total += sum(units)
        pieces = values.split(units) if len(positions) > 1 else [values]
        for i, piece in zip(positions, pieces, strict=True):
            factors[i] = entries[i].layout.spread(piece, entries[i].gradient)
    return [f for f in factors if f is not None], ClipStatistics(_sum(counts), total)


def _sum(counts: list[Tensor]) -> Tensor:
    if not counts:
        return torch.zeros((), dtype=torch.int64)
    whole = [c.full_tensor() if hasattr(c, "full_tensor") else c for c in counts]  # a DTensor's, of all ranks
    return torch.stack([c.to(whole[0].device, non_blocking=True) for c in whole]).sum()


def add_statistics(parts: list[ClipStatistics]) -> ClipStatistics:
    """Add up what was clipped in several goes.

    Args:
        parts: each go's.

    Returns:
        The sum.
    """
    return ClipStatistics(_sum([p.clipped for p in parts if p.units]), sum(p.units for p in parts))
