"""Adaptive gradient clipping, AGC (Brock et al., ICML 2021, section 4.1).

For a unit i of a weight W with gradient G, both Frobenius norms over the unit:

    if ‖G_i‖ / max(‖W_i‖, ε) > λ:   G_i ← λ · max(‖W_i‖, ε) / ‖G_i‖ · G_i     else unchanged

λ is ``clip_factor`` and ε is ``eps``. Units are defined in :mod:`torch_thor.optim.agc_units`.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_thor.optim.agc_units import ROWS, Clippable, last_linear, layouts_of, unit_norms
from torch_thor.optim.checks import in_range, number, require
from torch_thor.optim.exclusion import Exclude, excluded_parameters


class ClipStatistics(NamedTuple):
    """How many units were clipped. Computing it does not synchronise host and device.

    Args:
        clipped: the number of units that were clipped, a 0-dimensional tensor on the device of the first parameter.
        units: the number of units that could have been clipped.
    """

    clipped: Tensor
    units: int

    @property
    def share(self) -> Tensor:
        """The share of units that were clipped, in [0, 1], as a tensor; 0 where there were no units."""
        return self.clipped / max(self.units, 1)


def check_clipping(options: Mapping[str, Any]) -> None:
    """Check λ and ε."""
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

    Call it in the place of :func:`torch.nn.utils.clip_grad_norm_`, between ``backward`` and ``step``, with any
    optimizer. With a GradScaler, call it after ``scaler.unscale_(optimizer)``: λ does not apply to scaled gradients.

    Args:
        parameters: the model; or parameters, all of which are then clipped along dim 0. If the model is given,
            transposed convolutions and Hugging Face's ``Conv1D`` are clipped along their outputs, which are in dim 1,
            and the last fully connected layer is not clipped. Parameters without a gradient are ignored.
        clip_factor: λ, the largest ratio of a unit's gradient norm to its weight norm; inf clips nothing.
        eps: ε, a lower bound on the weight norm of a unit, so that units at zero can move.
        exclude: the parameters of the model that are not clipped: names or patterns of :mod:`fnmatch`, for parameters
            or for the modules that hold them; modules; or a callable ``(name, parameter) -> bool``. None excludes the
            weight and the bias of the last ``nn.Linear`` of the model, ``()`` excludes nothing.
        foreach: whether small tensors are measured and scaled in batches. None means True; False handles one tensor
            at a time.

    Returns:
        The number of units that were clipped, without a host–device synchronisation. NaN or inf in a gradient is not
        detected: the gradient of that unit is NaN afterwards.

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
    """Return the parameters that are not to be clipped."""
    if exclude is not None:
        return excluded_parameters(exclude, model)
    head = last_linear(model)
    return set() if head is None else {id(p) for p in head.parameters()}


def clip_factors(
    entries: list[Clippable], clip_factor: float, eps: float, *, together: bool
) -> tuple[list[Tensor], ClipStatistics]:
    """Return the factors by which gradients are multiplied to clip them."""
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
    whole = [c.full_tensor() if hasattr(c, "full_tensor") else c for c in counts]  # the sum over ranks of a DTensor
    return torch.stack([c.to(whole[0].device, non_blocking=True) for c in whole]).sum()


def add_statistics(parts: list[ClipStatistics]) -> ClipStatistics:
    """Add up the statistics of several calls of :func:`clip_factors`."""
    return ClipStatistics(_sum([p.clipped for p in parts if p.units]), sum(p.units for p in parts))
