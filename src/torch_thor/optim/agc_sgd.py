"""AGC-SGD: SGD with momentum and adaptive gradient clipping (Brock et al. 2021).

It is for networks without normalisation.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from torch_thor.capture.patterns import Patterns, some
from torch_thor.optim import counterparts as foreign
from torch_thor.optim.agc import (
    ClipStatistics,
    add_up,
    clip,
    last_linear,
    linear_layers,
    units_of,
)
from torch_thor.optim.excluding import ExcludingOptimizer, Found, Slot
from torch_thor.optim.model_argument import Group, parameters_of

# what torch's SGD takes
_SGD = ("lr", "weight_decay", "momentum", "dampening", "nesterov", "maximize", "foreach")


class AGCSGD(ExcludingOptimizer):
    """SGD with momentum on gradients that are clipped unit by unit against their weights' norms.

    A unit i of a weight W is one output: a row of the weight of a linear layer, a filter of a
    convolution; a bias or a gain is one unit. With its gradient G_i and Frobenius norms, if
    ``‖G_i‖ / max(‖W_i‖, ε) > λ``, then ``G_i ← λ · max(‖W_i‖, ε) / ‖G_i‖ · G_i``. Weight decay
    (``+ weight_decay · W``, not clipped) and momentum follow as in ``torch.optim.SGD``, dampening
    and Nesterov included. With ``clip_factor=float("inf")`` the whole step is that of
    ``torch.optim.SGD``, bit for bit. ``p.grad`` is not changed.

    The last fully connected layer is not clipped (section 4.1). It is looked up in the model, so
    the optimizer needs the model, or ``exclude=()``. A GradScaler passes unscaled gradients to
    ``step``, so it needs no special treatment. State dicts of ``torch.optim.SGD`` can be loaded;
    ``exclude`` is not part of state dicts.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``; or,
            with ``exclude=()``, parameters alone, whose units are then all along dim 0.
        lr: learning rate, a float or a one-element tensor, with the meaning that it has for SGD.
        momentum: μ in [0, 1).
        dampening: τ in ``v ← μ v + (1 − τ) d``; the first step has ``v = d``, as in torch's SGD.
        weight_decay: added to the clipped gradient as ``weight_decay · W``.
        nesterov: step along ``d + μ v`` instead of ``v``.
        dampen_first: whether the first step is dampened too, ``v = (1 − τ) d``, as in the code of
            the authors of AGC, whose momentum starts at zero. Nesterov momentum may then be
            dampened, as in that code.
        clip_factor: λ. The paper's grid at batch size 4096 ends at 0.01; smaller batches use larger
            values.
        eps: ε, a lower bound on the weight norm of a unit, so that units at zero can move.
        model: the model, if ``params`` are parameters.
        exclude: the parameters that are not clipped: names or patterns of ``fnmatch``, for
            parameters or for the modules that hold them, where a leading minus keeps what matches;
            or a callable ``(name, parameter) -> bool``. None excludes the ``nn.Linear`` that was
            registered last, ``()`` nothing; ``print(optimizer)`` says which.
        maximize: maximise the objective instead of minimising it.
        foreach: None clips in batches and leaves the rest to torch, as for its SGD; True handles
            tensors in batches; False one at a time, with less memory for the clipped copies.

    Raises:
        ValueError: an option is out of range, a pattern matches no parameter, or a parameter is not
            the model's.
        TypeError: the model is missing, or ``exclude`` is no pattern.
    """

    relative = "torch.optim.SGD"
    counterparts = foreign.AGC_SGD
    clip_statistics: ClipStatistics | None = None
    """How many units the latest step clipped; it is None before the first step.

    It is not part of checkpoints and copies.
    """

    @foreign.names_counterparts
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        dampen_first: bool = False,
        clip_factor: float = 0.01,
        eps: float = 1e-3,
        model: nn.Module | None = None,
        exclude: Patterns = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        if exclude is None and parameters_of(params, model, type(self).__name__)[1] is None:
            raise TypeError(
                "model=None: AGC leaves the last fully connected layer alone, so AGCSGD must know "
                "the model; pass AGCSGD(model, ...) or AGCSGD(parameters, model=model, ...), or "
                "exclude=() to clip every parameter"
            )
        super().__init__(params, model, exclude, locals())

    def _check_group(self, group: Group) -> None:
        super()._check_group(group)
        if group["nesterov"] and not (
            group["momentum"] > 0 and (group["dampening"] == 0 or group["dampen_first"])
        ):
            raise ValueError(
                "nesterov=True: nesterov must be False where momentum is 0, or where dampening is "
                "not and dampen_first is False; give a momentum > 0, and no dampening or "
                "dampen_first=True"
            )

    def _excluded_by_default(self, params: list[Tensor]) -> set[Tensor]:
        return last_linear(self.model)

    def _slots_of(self, group: Group) -> list[Slot]:
        units = units_of(self.model)
        pairs = zip(super()._slots_of(group), group["params"], strict=True)
        return [
            slot._replace(units=None if slot.excluded else units.get(p, 0)) for slot, p in pairs
        ]

    def __repr__(self) -> str:
        return f"{super().__repr__()}\n{self._described()}"

    def _described(self) -> str:
        """Say which parameters are not clipped, and why."""
        names = some(self.excluded, most=8)
        if self.exclude is not None:
            return f"not clipped, as exclude= says: {names or 'none'}"
        layers = linear_layers(self.model)
        if not layers:
            return (
                f"all are clipped: {type(self.model).__name__} has no nn.Linear, of which the last "
                "one would not be; exclude= names what is left alone"
            )
        last = repr(layers[-1][0]) if layers[-1][0] else "the model itself"
        return (
            f"not clipped is the last nn.Linear, {last}: "
            f"{names or 'its parameters are in no group'}"
        )

    def _make_state(self, parameter: Tensor, group: Group) -> None:
        # torch's SGD would take a step here, after which its momentum contains weight decay before
        # the first gradient. A step leaves hardly ever -0 alone, by which a checkpoint tells that
        # none was taken: the first is not dampened
        if group["momentum"]:
            buffer = self.state[parameter]["momentum_buffer"] = torch.full_like(parameter, -0.0)
            if parameter.is_complex():
                torch.view_as_real(buffer).fill_(-0.0)

    def _update(self, of_groups: list[list[Found]]) -> None:
        statistics: list[ClipStatistics] = []
        for group, together in zip(self.param_groups, of_groups, strict=True):
            for part in [[p] for p in together] if group["foreach"] is False else [together]:
                statistics += self._update_together(group, part)
        self.clip_statistics = add_up(statistics)

    def _update_together(self, group: Group, part: list[Found]) -> list[ClipStatistics]:
        params = [p for _, p, _ in part]
        entries = [(p, gradient, slot.units) for slot, p, gradient in part]
        clipped, statistics = clip(entries, group, torch.mul)
        # copies of what is not clipped, too, because torch's foreach SGD adds the momentum into the
        # gradients
        gradients = [
            new.to(g.dtype, copy=new is g) for new, (_, _, g) in zip(clipped, part, strict=True)
        ]
        buffers = [self.state.get(p, {}).get("momentum_buffer") for p in params]
        # without a buffer torch's first step is not dampened; with a zero buffer it is
        if group["dampen_first"]:
            buffers = [
                torch.zeros_like(g) if b is None else b
                for b, g in zip(buffers, gradients, strict=True)
            ]
        sgd(params, gradients, buffers, **{name: group[name] for name in _SGD})
        for p, buffer in zip(params, buffers, strict=True) if group["momentum"] else ():
            self.state[p]["momentum_buffer"] = buffer
        return statistics
