"""AGC-SGD: SGD with momentum and adaptive gradient clipping, for networks without normalisation (Brock et al. 2021)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from torch_thor.optim.agc import ClipStatistics, add_statistics, check_clipping, clip_factors, excluded_from_clipping
from torch_thor.optim.agc_units import ROWS, Clippable, UnitLayout, layouts_of
from torch_thor.optim.checkpoint import check_origin
from torch_thor.optim.checks import check_flags, in_range, require
from torch_thor.optim.exclusion import Exclude, ExcludingOptimizer


class AGCSGD(ExcludingOptimizer):
    """SGD with momentum on gradients that are clipped unit by unit against the norms of their weights.

    A unit i of a weight W is one output: a row of the weight of a linear layer, a filter of a convolution; a bias or a
    gain is one unit. With its gradient G_i and Frobenius norms, if ``‖G_i‖ / max(‖W_i‖, ε) > λ``, then
    ``G_i ← λ · max(‖W_i‖, ε) / ‖G_i‖ · G_i``. Weight decay (``+ weight_decay · W``, not clipped) and momentum follow
    as in :class:`torch.optim.SGD`, dampening and Nesterov included. With ``clip_factor=float("inf")`` the whole step
    is that of :class:`torch.optim.SGD`, bit for bit. ``p.grad`` is not changed.

    The last fully connected layer is not clipped (section 4.1). It is looked up in the model, so the optimizer needs
    the model, or ``exclude=()``. A GradScaler needs no special treatment: it passes unscaled gradients to ``step``.

    Args:
        params: the model; or parameters or parameter groups of it, together with ``model``; or, with ``exclude=()``,
            parameters alone, whose units are then all along dim 0.
        lr: learning rate, a float or a one-element tensor, with the meaning that it has for SGD.
        momentum: μ in [0, 1).
        dampening: τ in ``v ← μ v + (1 − τ) d``, from the second step on; in the first step ``v = d``, as in torch's
            SGD.
        weight_decay: added to the clipped gradient as ``weight_decay · W``.
        nesterov: step along ``d + μ v`` instead of ``v``.
        dampen_first: whether the first step is dampened too, ``v = (1 − τ) d``, as in the code of the authors of AGC,
            whose momentum starts at zero. Nesterov momentum may then be dampened, as in that code.
        clip_factor: λ. The paper's grid at batch size 4096 ends at 0.01; smaller batches use larger values.
        eps: ε, a lower bound on the weight norm of a unit, so that units at zero can move.
        model: the model, if ``params`` are parameters.
        exclude: the parameters that are not clipped: names or patterns of :mod:`fnmatch`, for parameters or for the
            modules that hold them; modules; a list of these; or a callable ``(name, parameter) -> bool``. None
            excludes the weight and the bias of the ``nn.Linear`` that was registered last, ``()`` excludes nothing.
        maximize: maximise the objective instead of minimising it.
        foreach: whether tensors are handled in batches. None clips in batches and leaves the rest to torch, as for its
            SGD; False handles one tensor at a time, which takes less memory for the clipped copies.

    Raises:
        ValueError: an option is out of range, a pattern matches no parameter, or a parameter is not the model's.
        TypeError: the model is missing.
    """

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
        exclude: Exclude = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        if model is None and exclude is None and not isinstance(params, nn.Module):
            raise TypeError(
                "AGC does not clip the last fully connected layer, so AGCSGD must know the model; pass "
                "AGCSGD(model, ...) or AGCSGD(parameters, model=model, ...), or exclude=() to clip every parameter"
            )
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "dampen_first": dampen_first,
            "clip_factor": clip_factor,
            "eps": eps,
            "maximize": maximize,
            "foreach": foreach,
        }
        self._layouts: list[list[UnitLayout]] = []
        self._clip_statistics: ClipStatistics | None = None
        self._state_is_placeholder = False
        super().__init__(params, defaults, model, exclude)

    @property
    def clip_statistics(self) -> ClipStatistics | None:
        """How many units the latest step clipped; None before the first step. Not part of checkpoints."""
        return self._clip_statistics

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step.

        Args:
            closure: evaluates the model again and returns the loss; called first, with gradients enabled.

        Returns:
            The closure's loss, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [list(self._with_gradient(i)) for i in range(len(self.param_groups))]  # raises before anything moves
        if self._state_is_placeholder:
            self.state.clear()
            self._state_is_placeholder = False
        if not self.state and self._creates_state_only(found):
            self._make_placeholder(found)
            return loss
        parts = []
        for i, group in enumerate(self.param_groups):
            at_a_time = 1 if group["foreach"] is False else max(1, len(found[i]))
            for start in range(0, len(found[i]), at_a_time):
                parts.append(self._update(i, found[i][start : start + at_a_time]))
        self._clip_statistics = add_statistics(parts)
        return loss

    def _make_placeholder(self, found: list[list[tuple[int, Tensor, Tensor]]]) -> None:
        # torch's SGD would take a step here, after which its momentum contains weight decay before the first gradient
        for group, one in zip(self.param_groups, found, strict=True):
            for _, parameter, gradient in one if group["momentum"] else ():
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        self._state_is_placeholder = bool(self.state)

    def _update(self, group_index: int, found: list[tuple[int, Tensor, Tensor]]) -> ClipStatistics:
        group = self.param_groups[group_index]
        params = [parameter for _, parameter, _ in found]
        gradients, statistics = self._clipped(group_index, found)
        buffers: list[Tensor | None] = [None] * len(params)
        if group["momentum"]:
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in params]
            if group["dampen_first"]:  # without a buffer torch's first step is not dampened; with a zero buffer it is
                pairs = zip(buffers, gradients, strict=True)
                buffers = [torch.zeros_like(gradient) if buffer is None else buffer for buffer, gradient in pairs]
        sgd(
            params,
            gradients,
            buffers,
            foreach=group["foreach"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"]:
            for parameter, buffer in zip(params, buffers, strict=True):
                self.state[parameter]["momentum_buffer"] = buffer
        return statistics

    def _clipped(
        self, group_index: int, found: list[tuple[int, Tensor, Tensor]]
    ) -> tuple[list[Tensor], ClipStatistics]:
        """Return the gradients, with clipped copies of those that may be clipped, and the statistics."""
        group = self.param_groups[group_index]
        excluded, layouts = self._excluded[group_index], self._layouts[group_index]
        gradients = [gradient for _, _, gradient in found]
        places, entries = [], []
        for place, (position, parameter, gradient) in enumerate(found):
            if not excluded[position] and gradient.numel():
                places.append(place)
                entries.append(Clippable(parameter, gradient, layouts[position]))
            elif group["nesterov"]:  # torch's foreach SGD adds the momentum to the gradients in place
                gradients[place] = gradient.clone()
        factors, statistics = clip_factors(
            entries, group["clip_factor"], group["eps"], together=group["foreach"] is not False
        )
        if entries:
            products = torch._foreach_mul([entry.gradient for entry in entries], factors)
            for place, product in zip(places, products, strict=True):
                gradients[place] = product.to(gradients[place].dtype)  # factors of bfloat16 gradients are float32
        return gradients, statistics

    def _check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "nesterov", "maximize", "dampen_first")
        check_clipping(group)
        in_range("lr", group["lr"], lambda v: v >= 0, "a finite number ≥ 0", "start from SGD's")
        in_range("momentum", group["momentum"], lambda v: 0 <= v < 1, "in [0, 1)", "0.9 is usual, 0 switches it off")
        in_range("dampening", group["dampening"], lambda v: 0 <= v <= 1, "in [0, 1]", "0 switches it off")
        in_range("weight_decay", group["weight_decay"], lambda v: v >= 0, "a finite number ≥ 0", "0 switches it off")
        require(
            "nesterov",
            group["nesterov"],
            not group["nesterov"] or (group["momentum"] > 0 and (group["dampening"] == 0 or group["dampen_first"])),
            "False where momentum is 0, or where dampening is not and dampen_first is False",
            "give a momentum > 0, and no dampening or dampen_first=True",
        )

    def _check_origin(self, state_dict: dict[str, Any]) -> None:
        remedy = "AGCSGD takes those of AGCSGD and torch.optim.SGD: load the model's weights, and let it start anew"
        check_origin(state_dict, "AGCSGD", ("momentum", "dampening", "nesterov"), remedy)

    def _excluded_by_default(self, params: list[Tensor]) -> set[int]:
        return set() if self.model is None else excluded_from_clipping(self.model, None)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Args:
            param_group: as for :meth:`torch.optim.Optimizer.add_param_group`.
        """
        super().add_param_group(param_group)
        layouts = {} if self.model is None else layouts_of(self.model)
        self._layouts.append([layouts.get(id(p), ROWS) for p in self.param_groups[-1]["params"]])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; if it raises an error, nothing has changed. ``exclude`` is not loaded.

        Args:
            state_dict: a result of ``state_dict()`` of this optimizer or of :class:`torch.optim.SGD`, whose options
                have the same meaning.

        Raises:
            ValueError: it is the state dict of another optimizer, or does not fit the parameters.
        """
        super().load_state_dict(state_dict)
        self._state_is_placeholder = False

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("_layouts", "_clip_statistics", "_state_is_placeholder")}
        return {**super().__getstate__(), **own}
