"""The scale-free step: precondition the momentum of the raw gradient, orthogonalise, give it a norm of its own.

For a matrix W (``d_out × d_in``) with momentum ``v ← μ v + ∇W`` (Nesterov: ``u = ∇W + μ v``, else ``u = v``)

    d = orth( G_d^(-1/4) u A_d^(-1/4) ),    ‖d‖_F = √min(d_out, d_in) · √max(1, d_out / d_in)
    W ← (1 − lr · weight_decay) W − lr · d

so that lr means the same on every layer and task: neither the loss's scale nor the layer's width is in it. A matrix
without factors (a layer that THOR does not know, or whose statistics never came) takes the same step with identities in
their place. What is no matrix (biases, norms, embeddings) takes a step of :class:`torch.optim.AdamW`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from torch_thor.curvature.kinds import Kind
from torch_thor.curvature.matrices import PlainMatrix
from torch_thor.curvature.precision import factor_dtype, ieee_float32
from torch_thor.optim.parameters import Group, ParameterIndex, with_gradient

# p of the inverse p-th roots of A and G.
ROOT = 4

# AdamW's learning rate is this share of lr, and its betas these.
ADAMW_SHARE = 0.2
ADAMW_BETAS = (0.9, 0.95)
_ADAMW_EPS = 1e-8

# The quintic iteration of Muon (Jordan et al. 2024): five rounds bring every singular value into about [0.7, 1.2].
_ROUNDS = 5
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def spectral_update(
    groups: list[Group],
    index: ParameterIndex,
    states: Callable[[Tensor], dict[str, Any]],
    decays: Callable[[nn.Parameter], bool],
) -> None:
    """Update every parameter that has a gradient.

    Args:
        groups: parameter groups.
        index: which layer preconditions which parameter.
        states: returns a parameter's state, complete, see :func:`complete_state`.
        decays: whether weight decay applies to a parameter.
    """
    for group in groups:
        rest: list[nn.Parameter] = []
        for _, parameter, gradient in with_gradient([group]):
            if group["weight_decay"] and decays(parameter):
                parameter.mul_(1 - float(group["lr"]) * float(group["weight_decay"]))
            if is_matrix(index, parameter):
                buffer = states(parameter)["momentum_buffer"]
                _matrix_step_(parameter, gradient, buffer, index, group)
            else:
                rest.append(parameter)
        _adamw_step_(rest, states, float(group["lr"]) * ADAMW_SHARE)


def is_matrix(index: ParameterIndex, parameter: Tensor) -> bool:
    """Return whether a parameter takes the matrix step.

    Args:
        index: which layer preconditions which parameter.
        parameter: any of the model's.

    Returns:
        Whether it is one: no bias, no norm, no embedding, and not left out by ``skip=`` or ``only=``.
    """
    return bool(index.shares(parameter)) or index.plain_matrix(parameter) is not None


def complete_state(index: ParameterIndex, parameter: Tensor, state: dict[str, Any]) -> None:
    """Add what a parameter's state lacks.

    Args:
        index: which layer preconditions which parameter.
        parameter: any of the model's.
        state: gets ``momentum_buffer`` for a matrix, else what :class:`torch.optim.AdamW` keeps.
    """
    dtype = factor_dtype(parameter.dtype)
    if is_matrix(index, parameter):
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, dtype=dtype)
    elif "exp_avg" not in state:
        state["step"] = torch.zeros(())
        state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
        state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)


def step_norm(outputs: int, inputs: int) -> float:
    """Return the Frobenius norm of a matrix's step at lr 1.

    An orthogonal matrix of this shape times ``√max(1, d_out / d_in)``: a step that changes an output of RMS 1 by about
    lr, whatever the widths (Bernstein et al. 2024, "Old optimizer, new norm").

    Args:
        outputs: d_out.
        inputs: d_in.

    Returns:
        ``√min(d_out, d_in) · √max(1, d_out / d_in)``.
    """
    return math.sqrt(min(outputs, inputs) * max(1.0, outputs / inputs))


def orthogonalise(matrices: Tensor) -> Tensor:
    """Bring all singular values near each other, by Newton-Schulz iterations (Jordan et al. 2024, Muon).

    Args:
        matrices: ``(count, rows, columns)``.

    Returns:
        Of the same shape: about ``U Vᵀ`` of each matrix's ``U S Vᵀ``; zeros stay zeros.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = with_norm(x, 1.0)
    for _ in range(_ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if tall else x


def with_norm(matrices: Tensor, norm: float) -> Tensor:
    """Scale matrices to a Frobenius norm.

    Args:
        matrices: ``(count, rows, columns)``, finite, of any scale.
        norm: the norm.

    Returns:
        Of the same shape; zeros stay zeros.
    """
    # by the largest entry first: squares of numbers below 1e-23 or beyond 1e19 leave the range of float32
    tiny = torch.finfo(matrices.dtype).tiny
    unit = matrices / matrices.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=tiny)
    norms: Tensor = torch.linalg.matrix_norm(unit, keepdim=True)
    return unit * (norm / norms.clamp(min=0.5))


def _matrix_step_(
    parameter: nn.Parameter, gradient: Tensor, buffer: Tensor, index: ParameterIndex, group: Group
) -> None:
    momentum, lr = float(group["momentum"]), float(group["lr"])
    fresh = (gradient.to_dense() if gradient.is_sparse else gradient).to(buffer.dtype)
    buffer.mul_(momentum).add_(fresh)
    ahead = fresh.add(buffer, alpha=momentum) if group["nesterov"] else buffer
    plain = index.plain_matrix(parameter)
    if plain is not None:
        parameter.add_(_orthogonal_step(plain, ahead.clone()), alpha=-lr)
        return
    for share in index.shares(parameter):
        ours = share.piece.of(ahead)
        direction = torch.zeros_like(ours)
        if share.layer.refreshes:
            share.layer.accumulate_natural_gradient_(ours, direction, 0.0)
        else:
            direction.copy_(ours)
        share.piece.of(parameter).add_(_orthogonal_step(share.layer.kind, direction), alpha=-lr)


def _orthogonal_step(geometry: Kind | PlainMatrix, direction: Tensor) -> Tensor:
    """Return the step at lr 1 along a direction, which is overwritten."""
    with ieee_float32(direction.device.type):
        matrix = orthogonalise(geometry.to_matrix(direction))
    geometry.from_matrix_(with_norm(matrix, step_norm(geometry.outputs, geometry.inputs)), direction)
    return direction


def _adamw_step_(parameters: list[nn.Parameter], states: Callable[[Tensor], dict[str, Any]], lr: float) -> None:
    if not parameters:
        return
    kept = [states(p) for p in parameters]
    # AdamW's averages decay for every row, so a sparse gradient saves nothing here
    gradients = [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None]
    adamw(
        list[Tensor](parameters),
        [g.to(s["exp_avg"].dtype) for g, s in zip(gradients, kept, strict=True)],
        [s["exp_avg"] for s in kept],
        [s["exp_avg_sq"] for s in kept],
        [],
        [s["step"] for s in kept],
        # torch's batched kernels want parameters of the state's dtype, which is float32 under bfloat16
        foreach=False if any(p.dtype != s["exp_avg"].dtype for p, s in zip(parameters, kept, strict=True)) else None,
        has_complex=any(p.is_complex() for p in parameters),
        amsgrad=False,
        beta1=ADAMW_BETAS[0],
        beta2=ADAMW_BETAS[1],
        lr=lr,
        weight_decay=0.0,
        eps=_ADAMW_EPS,
        maximize=False,
    )
