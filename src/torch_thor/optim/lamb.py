"""LAMB: Adam with each layer's step scaled in proportion to the norm of its weights.

It follows You et al., ICLR 2020.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from torch_thor.capture.patterns import Patterns
from torch_thor.curvature.blocks import factor_dtype
from torch_thor.curvature.view import local
from torch_thor.optim.excluding import ExcludingOptimizer, Found, gathered
from torch_thor.optim.model_argument import Group


class LAMB(ExcludingOptimizer):
    """Layer-wise adaptive moments for large batches: algorithm 2 of the paper.

    For a parameter x with gradient g, at its step t (counted from 1):

        m ← β1 m + (1 − β1) g                v ← β2 v + (1 − β2) g²
        r = (m / (1 − β1ᵗ)) / (√(v / (1 − β2ᵗ)) + ε)
        x ← x − lr · ‖x‖ / ‖r + λ x‖ · (r + λ x)

    φ of the paper is the identity; if one of the norms is 0, the trust ratio is 1. Norms are taken
    over the whole parameter. Excluded parameters have neither weight decay nor a trust ratio:
    ``x ← x − lr · r``. Gradients are not clipped: for recipes with a limit (BERT's: global norm 1),
    call ``torch.nn.utils.clip_grad_norm_`` before it.

    The state has the entries of ``torch.optim.AdamW``; moments of parameters of lower precision are
    float32. Of a state dict of AdamW, moments and betas are loaded, and ``lr``, ``eps`` and
    ``weight_decay``, which mean something else there, keep their values. ``exclude`` is not part of
    state dicts.

    Args:
        params: the model; or parameters, named parameters or parameter groups.
        lr: learning rate, a float or a one-element tensor: the norm of a step relative to the
            norm of its weight.
        betas: (β1, β2), the decay rates of the running means of the gradient and of its square.
        eps: ε > 0, added to the root of the second moment.
        weight_decay: λ, added to the update as λ x, before the trust ratio is computed.
        model: the model, if ``params`` are parameters and ``exclude`` contains names.
        exclude: the parameters without weight decay and trust ratio: names or patterns of
            ``fnmatch``, for parameters or for the modules that hold them, where a leading minus
            keeps what matches; or a callable ``(name, parameter) -> bool``. None excludes all of at
            most one dimension (biases, gains of normalisation layers), as the authors' code does;
            ``()`` excludes nothing.
        maximize: maximise the objective instead of minimising it.
        foreach: None or True handle tensors of one device and dtype in batches, False one at a
            time, with less memory.

    Raises:
        ValueError: an option is out of range, a pattern matches no parameter, or a parameter is not
            the model's.
        TypeError: ``exclude`` names parameters and the model is missing, or it is no pattern.
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
        exclude: Patterns = None,
        maximize: bool = False,
        foreach: bool | None = None,
    ) -> None:
        super().__init__(params, model, exclude, locals())

    def _excluded_by_default(self, params: list[Tensor]) -> set[Tensor]:
        return {p for p in params if p.dim() <= 1}

    def _make_state(self, parameter: Tensor, group: Group) -> None:
        state, wide = self.state[parameter], factor_dtype(parameter.dtype)
        if not state:
            # on the CPU, because every step reads it
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=wide)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=wide)

    def _adopt(self, group: Group, present: Group) -> None:
        if group.pop("amsgrad", None) is not None:  # AdamW's, for which these have another meaning
            group.update({name: present[name] for name in ("lr", "eps", "weight_decay")})
        super()._adopt(group, present)

    def _complete(self) -> None:
        for parameter, state in self.state.items():  # AdamW's moments may be narrower
            for key in {"exp_avg", "exp_avg_sq"} & state.keys():
                state[key] = state[key].to(factor_dtype(parameter.dtype))
        super()._complete()

    def _update(self, of_groups: list[list[Found]]) -> None:
        # of all, so that a checkpoint has the same keys on every rank and at every time
        self._make_states()
        for group, with_gradients in zip(self.param_groups, of_groups, strict=True):
            parts: dict[tuple[object, ...], list[list[Tensor]]] = {}
            for slot, p, gradient in with_gradients:
                state = self.state[p]
                reals = [
                    torch.view_as_real(tensor) if tensor.is_complex() else tensor
                    for tensor in (p, gradient, state["exp_avg"], state["exp_avg_sq"])
                ]
                own = len(parts) if group["foreach"] is False else None
                key = (slot.excluded, p.device, p.dtype, gradient.dtype, type(gradient), own)
                parts.setdefault(key, []).append([*reals, state["step"]])
            for (excluded, *_), part in parts.items():
                _update(group, part, adapted=not excluded)


def _update(group: Group, part: list[list[Tensor]], *, adapted: bool) -> None:
    params, gradients, means, squares, counts = map(list, zip(*part, strict=True))
    beta1, beta2 = map(float, group["betas"])
    lr, weight_decay = float(group["lr"]), float(group["weight_decay"])
    wide = means[0].dtype
    gradients = [gradient.to(wide) for gradient in gradients]
    if group["maximize"]:
        gradients = list(torch._foreach_neg(gradients))
    torch._foreach_add_(counts, 1)
    steps = [float(count) for count in counts]
    torch._foreach_lerp_(means, gradients, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    denominators = torch._foreach_sqrt(squares)
    torch._foreach_div_(denominators, [math.sqrt(1 - beta2**t) for t in steps])
    torch._foreach_add_(denominators, float(group["eps"]))
    updates = list(torch._foreach_div(means, [1 - beta1**t for t in steps]))
    torch._foreach_div_(updates, denominators)
    if adapted:
        weights = [parameter.to(wide) for parameter in params]
        if weight_decay:
            torch._foreach_add_(updates, weights, alpha=weight_decay)
        # torch 2.9 can neither stack norms of DTensors nor unbind them
        norms = [
            torch.stack([gathered(norm) for norm in torch._foreach_norm(x, 2)])
            for x in (weights, updates)
        ]
        ratios = torch.where((norms[0] > 0) & (norms[1] > 0), norms[0] / norms[1], 1.0)
        torch._foreach_mul_([local(update) for update in updates], list(ratios.unbind()))
    torch._foreach_add_(params, updates, alpha=-lr)
