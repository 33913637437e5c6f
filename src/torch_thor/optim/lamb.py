"""LAMB: Adam with the step of each layer scaled in proportion to the norm of its weights (You et al., ICLR 2020)."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.curvature.precision import factor_dtype
from torch_thor.curvature.shards import local
from torch_thor.optim.checkpoint import check_origin
from torch_thor.optim.checks import check_flags, in_range, require
from torch_thor.optim.exclusion import Exclude, ExcludingOptimizer


class LAMB(ExcludingOptimizer):
    """Layer-wise adaptive moments for large batches: algorithm 2 of the paper.

    For a parameter x with gradient g, at its step t (counted from 1):

        m ← β1 m + (1 − β1) g                v ← β2 v + (1 − β2) g²
        r = (m / (1 − β1ᵗ)) / (√(v / (1 − β2ᵗ)) + ε)
        x ← x − lr · ‖x‖ / ‖r + λ x‖ · (r + λ x)

    φ of the paper is the identity; if one of the norms is 0, the trust ratio is 1. Norms are taken over the whole
    parameter. Excluded parameters have neither weight decay nor a trust ratio: ``x ← x − lr · r``. Gradients are not
    clipped: if a recipe requires it (BERT's: global norm 1), call :func:`torch.nn.utils.clip_grad_norm_` before
    ``step``.

    The state has the entries of :class:`torch.optim.AdamW`, whose state dicts can be loaded; moments of parameters of
    lower precision are float32.

    Args:
        params: the model; or parameters, named parameters or parameter groups.
        lr: learning rate, a float or a one-element tensor: the norm of a step relative to that of its weight.
        betas: (β1, β2), the decay rates of the running means of the gradient and of its square.
        eps: ε > 0, added to the root of the second moment.
        weight_decay: λ, added to the update as λ x, before the trust ratio is computed.
        model: the model, if ``params`` are parameters and ``exclude`` contains names.
        exclude: the parameters without weight decay and trust ratio: names or patterns of :mod:`fnmatch`, for
            parameters or for the modules that hold them; modules; a list of these; or a callable
            ``(name, parameter) -> bool``. None excludes every parameter of at most one dimension (biases and gains of
            normalisation layers), as in the code of the authors; ``()`` excludes nothing.
        maximize: maximise the objective instead of minimising it.
        foreach: whether tensors of one device and dtype are handled in batches. None means True; False handles one
            tensor at a time, which takes less memory.

    Raises:
        ValueError: an option is out of range, a pattern matches no parameter, or a parameter is not the model's.
        TypeError: ``exclude`` names parameters and the model is missing.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        model: nn.Module | None = None,
        exclude: Exclude = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
            "foreach": foreach,
        }
        super().__init__(params, defaults, model, exclude)

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
        if self._materialise() and self._creates_state_only(found):
            return loss
        for i, group in enumerate(self.param_groups):
            for part, adapted in self._parts(i, found[i]):
                _update(part, group, adapted=adapted)
        return loss

    def _parts(self, group_index: int, found: list[tuple[int, Tensor, Tensor]]) -> Iterable[tuple["_Part", bool]]:
        """Yield the batches of parameters to update, and whether they have weight decay and a trust ratio."""
        together = self.param_groups[group_index]["foreach"] is not False
        parts: dict[tuple[object, ...], _Part] = {}
        for position, parameter, gradient in found:
            if not parameter.numel():
                continue
            adapted = not self._excluded[group_index][position]
            key = (adapted, parameter.device, parameter.dtype, gradient.dtype, type(gradient))
            part = parts.setdefault(key if together else (position,), _Part(adapted, [], [], [], [], []))
            part.add(parameter, gradient, self._state_of(parameter))
        for part in parts.values():
            yield part, part.adapted

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if "step" not in state:
            wide = factor_dtype(parameter.dtype)
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU, because every step reads it
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)
        return state

    def _materialise(self) -> bool:
        """Create the state of all parameters in the first step; return whether there was none."""
        # all at once, so that a checkpoint has the same keys on every rank and at every time, as with THOR
        fresh = not self.state
        if fresh:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        self._state_of(parameter)
        return fresh

    def _check_group(self, group: Mapping[str, Any]) -> None:
        check_flags(group, "maximize")
        in_range("lr", group["lr"], lambda v: v >= 0, "a finite number ≥ 0", "start from 0.002")
        in_range("eps", group["eps"], lambda v: v > 0, "a finite number > 0", "1e-6 is the paper's")
        in_range("weight_decay", group["weight_decay"], lambda v: v >= 0, "a finite number ≥ 0", "0 switches it off")
        betas = group["betas"]
        pair = isinstance(betas, tuple | list) and len(betas) == 2
        require("betas", betas, pair, "a pair (β1, β2)", "use (0.9, 0.999)")
        for beta in betas:
            in_range("betas", beta, lambda v: 0 <= v < 1, "two numbers in [0, 1)", "use (0.9, 0.999)")

    def _check_origin(self, state_dict: dict[str, Any]) -> None:
        remedy = "LAMB takes those of LAMB and torch.optim.AdamW: load the model's weights, and let it start anew"
        check_origin(state_dict, "LAMB", ("betas", "eps", "weight_decay"), remedy)

    def _restore_options(self, group: dict[str, Any], own: dict[str, Any]) -> None:
        if "amsgrad" in group:  # AdamW's: betas belong to the moments, the others have another meaning there
            group.update({key: own[key] for key in ("lr", "eps", "weight_decay")})

    def _excluded_by_default(self, params: list[Tensor]) -> set[int]:
        return {id(p) for p in params if p.dim() <= 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict; if it raises an error, nothing has changed. Moments are converted to at least float32.

        Args:
            state_dict: a result of ``state_dict()`` of this optimizer or of :class:`torch.optim.AdamW`. Of the latter,
                moments and betas are loaded; ``lr``, ``eps`` and ``weight_decay``, which have another meaning for
                LAMB, keep their values.

        Raises:
            ValueError: it is the state dict of another optimizer, or does not fit the parameters.
        """
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if key in state:
                    state[key] = state[key].to(factor_dtype(parameter.dtype))
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device="cpu")


@dataclass
class _Part:
    """A batch of parameters that are updated together; the lists have one element per parameter."""

    adapted: bool
    params: list[Tensor]
    gradients: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    steps: list[Tensor]

    def add(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any]) -> None:
        real = [parameter, gradient, state["exp_avg"], state["exp_avg_sq"]]
        if parameter.is_complex():
            real = [torch.view_as_real(tensor) for tensor in real]
        lists = (self.params, self.gradients, self.means, self.squares)
        for one, tensor in zip(lists, real, strict=True):
            one.append(tensor)
        self.steps.append(state["step"])


def _update(part: _Part, group: dict[str, Any], *, adapted: bool) -> None:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    wide = part.means[0].dtype
    gradients = [gradient.to(wide) for gradient in part.gradients]
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    torch._foreach_add_(part.steps, 1)
    steps = [float(step) for step in part.steps]

    torch._foreach_lerp_(part.means, gradients, 1 - beta1)
    torch._foreach_mul_(part.squares, beta2)
    torch._foreach_addcmul_(part.squares, gradients, gradients, value=1 - beta2)
    denominators = torch._foreach_sqrt(part.squares)
    torch._foreach_div_(denominators, [math.sqrt(1 - beta2**t) for t in steps])
    torch._foreach_add_(denominators, float(group["eps"]))
    updates = list(torch._foreach_div(part.means, [1 - beta1**t for t in steps]))
    torch._foreach_div_(updates, denominators)
    if not adapted:
        torch._foreach_add_(part.params, updates, alpha=-lr)
        return
    weights = [parameter.to(wide) for parameter in part.params]
    if weight_decay:
        torch._foreach_add_(updates, weights, alpha=weight_decay)
    of_weights, of_updates = (torch.stack([_whole(n) for n in torch._foreach_norm(x, 2)]) for x in (weights, updates))
    ratios = torch.where((of_weights > 0) & (of_updates > 0), of_weights / of_updates, 1.0)
    torch._foreach_mul_([local(update) for update in updates], list(ratios.unbind()))
    torch._foreach_add_(part.params, updates, alpha=-lr)


def _whole(norm: Tensor) -> Tensor:
    """Return the norm over all ranks; torch 2.9 can neither stack such norms of DTensors nor unbind them."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
