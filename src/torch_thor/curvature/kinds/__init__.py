"""The kinds of layers that can be preconditioned, one class per kind, and which kind a module is.

A new kind is a file with a class that implements :class:`Kind`, and one line below.
"""

from torch import nn

from torch_thor.curvature.kinds.base import Kind, MatrixWeight
from torch_thor.curvature.kinds.convolution import ConvKind
from torch_thor.curvature.kinds.embedding import EmbeddingKind, ScaledEmbeddingKind, is_scaled, why_not_counted
from torch_thor.curvature.kinds.linear import (
    LinearKind,
    PackedCall,
    ProjectionKind,
    TransposedLinearKind,
    is_hugging_face_conv1d,
    is_linear_of_a_library,
)
from torch_thor.curvature.kinds.registry import (
    KINDS,
    KindRegistration,
    class_name_of,
    class_of,
    kind_of,
    parameter_names_of,
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
    "PackedCall",
    "ProjectionKind",
    "class_name_of",
    "class_of",
    "kind_of",
    "parameter_names_of",
    "register_kind",
    "why_not",
]

KINDS.classes[nn.Linear] = KindRegistration(LinearKind)
KINDS.classes[nn.Embedding] = KindRegistration(EmbeddingKind, why_not=why_not_counted)
for _convolution in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    KINDS.classes[_convolution] = KindRegistration(ConvKind, fixed=("forward", "_conv_forward"))
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    KINDS.classes[_transposed] = KindRegistration(ConvTransposeKind)
KINDS.tests += [
    (is_standardised, KindRegistration(StandardisedConvKind)),
    (is_same_padded, KindRegistration(SameConvKind)),
    (is_scaled, KindRegistration(ScaledEmbeddingKind, why_not=why_not_counted)),
    (is_linear_of_a_library, KindRegistration(LinearKind)),
    (is_hugging_face_conv1d, KindRegistration(TransposedLinearKind)),
]
