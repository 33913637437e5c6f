"""The kinds of layers that can be preconditioned, one class per kind, and which kind a module is.

A new kind is a file with a class that implements :class:`Kind`, and one line below.
"""

from torch import nn

from torch_thor.curvature.kinds.base import Kind, MatrixWeight
from torch_thor.curvature.kinds.convolution import ConvKind
from torch_thor.curvature.kinds.embedding import EmbeddingKind, ScaledEmbeddingKind, is_scaled, why_not_counted
from torch_thor.curvature.kinds.linear import (
    LinearKind,
    TransposedLinearKind,
    is_hugging_face_conv1d,
    is_linear_of_a_library,
)
from torch_thor.curvature.kinds.lookup import class_of
from torch_thor.curvature.kinds.projection import ProjectionKind, SequenceCall
from torch_thor.curvature.kinds.registry import (
    check_weight,
    class_name_of,
    has_kind,
    kind_of,
    parameter_names_of,
    register_built_in,
    register_found,
    register_kind,
    why_not,
)
from torch_thor.curvature.kinds.standardised import (
    SameConvKind,
    StandardisedConvKind,
    is_same_padded,
    is_standardised,
)
from torch_thor.curvature.kinds.transposed_convolution import ConvTransposeKind

__all__ = [
    "Kind",
    "LinearKind",
    "MatrixWeight",
    "ProjectionKind",
    "SequenceCall",
    "check_weight",
    "class_name_of",
    "class_of",
    "has_kind",
    "kind_of",
    "parameter_names_of",
    "register_kind",
    "why_not",
]

register_built_in(nn.Linear, LinearKind)
register_built_in(nn.Embedding, EmbeddingKind, why_not=why_not_counted)
for _convolution in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    register_built_in(_convolution, ConvKind, fixed=("forward", "_conv_forward"))
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    register_built_in(_transposed, ConvTransposeKind)
register_found(is_standardised, StandardisedConvKind)
register_found(is_same_padded, SameConvKind)
register_found(is_scaled, ScaledEmbeddingKind, why_not=why_not_counted)
register_found(is_linear_of_a_library, LinearKind)
register_found(is_hugging_face_conv1d, TransposedLinearKind)
