"""The multiplication of gradients with the inverses of a layer's factors.

``A_d⁻¹`` and ``G_d⁻¹`` are the damped inverses, see :meth:`torch_thor.curvature.layer.LayerCurvature.inverses`.
"""

import torch
from torch import Tensor

from torch_thor.curvature.blocks import scale_
from torch_thor.curvature.experts import bias_scales
from torch_thor.curvature.layer import LayerCurvature
from torch_thor.curvature.precision import ieee_float32


def precondition_inputs(layer: LayerCurvature, gradient: Tensor, into: Tensor) -> None:
    """Compute ``into ← ∇W A_d⁻¹``, for a layer that has A alone (the scale-free step).

    Must be called inside ``ieee_float32`` and with autograd disabled.

    Args:
        layer: the layer, which has factors.
        gradient: in the shape of the weight, or of the rows of the parameter that belong to the layer.
        into: in the shape of a result of :meth:`Kind.to_matrix`, in the dtype of the factors; overwritten.
    """
    matrix, inverse = layer.kind.to_matrix(gradient).to(into.dtype), layer.inverse("A")
    if layer.kind.transposed:
        into.copy_(inverse.left_multiply(matrix))
    else:
        inverse.accumulate_right_product_(matrix, 1.0, into, 0.0)


@torch.no_grad()
def accumulate_natural_gradient_(
    layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float, scale: float = 1.0
) -> None:
    """Compute ``into ← decay * into + (scale/T) · G_d⁻¹ ∇W A_d⁻¹``, which can update a momentum buffer at once.

    Args:
        layer: the layer, which has factors.
        gradient: in the shape of the weight, or of the rows of the parameter that belong to the layer. That of an
            embedding may be sparse.
        into: in the same shape, in the dtype of the factors; changed in place.
        decay: a number; with 0 the old values of ``into`` are overwritten.
        scale: a number that multiplies the gradient.
    """
    if gradient.is_sparse and layer.kind.diagonal_input and gradient.sparse_dim() == 1:
        _accumulate_rows_(layer, gradient.coalesce(), into, decay, scale)
        return
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    left, right = layer.inverse("G"), layer.inverse("A")
    if layer.kind.transposed:
        left, right = right, left
    matrix, target = layer.kind.to_matrix(gradient), layer.kind.to_matrix(into)
    with ieee_float32(gradient.device.type):
        solved = left.left_multiply(matrix.to(left.blocks.dtype))
        right.accumulate_right_product_(solved, scale / layer.rows_per_term, target, decay)
    layer.kind.from_matrix_(target, into)


def _accumulate_rows_(layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float, scale: float) -> None:
    """Do the same for the sparse gradient of an embedding, which changes the rows of its tokens only."""
    a_inverse, g_inverse = layer.inverse("A"), layer.inverse("G")
    tokens, rows = gradient.indices()[0], gradient.values().to(a_inverse.blocks.dtype)
    scaled = rows * a_inverse.blocks.view(-1)[tokens, None]
    solved = torch.zeros_like(scaled)
    with ieee_float32(gradient.device.type):
        g_inverse.accumulate_right_product_(scaled[None], scale / layer.rows_per_term, solved[None], 0.0)
    scale_(into, decay).index_add_(0, tokens, solved)


@torch.no_grad()
def accumulate_natural_bias_gradient_(
    layer: LayerCurvature, gradient: Tensor, into: Tensor, decay: float, scale: float = 1.0
) -> None:
    """Compute ``into ← decay * into + (scale/T) · G_d⁻¹ ∇b``: a bias has the constant input 1, so its A is 1.

    Args:
        layer: the layer, which has factors.
        gradient: ``(d_out,)``.
        into: in the same shape, in the dtype of the factors; changed in place.
        decay: a number; with 0 the old values of ``into`` are overwritten.
        scale: a number that multiplies the gradient.
    """
    g_inverse = layer.inverse("G")
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    column = gradient.to(g_inverse.blocks.dtype).reshape(layer.kind.groups, layer.kind.outputs, 1)
    with ieee_float32(gradient.device.type):
        solved = g_inverse.left_multiply(column)
    if layer.kind.routed:
        solved *= bias_scales(layer.state[layer.prefix + "group_rows_per_term"])[:, None, None]
    scale_(into, decay).add_(solved.reshape(into.shape), alpha=scale / layer.rows_per_term)
