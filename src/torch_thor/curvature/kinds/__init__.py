"""The kinds of layers that can be preconditioned, one class per kind, and which kind a module is.

A new kind is a file with a class that implements :class:`Kind`, and one line below.
"""

from functools import partial

from torch import nn

from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.kinds.embedding import EmbeddingKind, is_scaled
from torch_thor.curvature.kinds.matrix import (
    ConvKind,
    LinearKind,
    MatrixWeight,
    PackedCall,
    ProjectionKind,
    TransposedLinearKind,
)
from torch_thor.curvature.kinds.registry import (
    KINDS,
    KindRegistration,
    class_name_of,
    class_of,
    is_norm,
    kind_of,
    owner_of_forward,
    parameter_names_of,
    register_kind,
    runs_forward_of,
    why_not,
)
from torch_thor.curvature.kinds.standardised import StandardisedConvKind

__all__ = [
    "Kind",
    "LinearKind",
    "MatrixWeight",
    "PackedCall",
    "ProjectionKind",
    "class_name_of",
    "class_of",
    "is_norm",
    "kind_of",
    "owner_of_forward",
    "parameter_names_of",
    "register_kind",
    "why_not",
]

_STANDARDISED = runs_forward_of(
    timm=("StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame"),
    transformers=("WeightStandardizedConv2d",),
)

KINDS.classes[nn.Linear] = KindRegistration(LinearKind)
KINDS.classes[nn.Embedding] = KindRegistration(EmbeddingKind)
for _convolution in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
    KINDS.classes[_convolution] = KindRegistration(ConvKind, fixed=("forward", "_conv_forward"))
for _transposed in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
    KINDS.classes[_transposed] = KindRegistration(ConvKind)
KINDS.tests += [
    (_STANDARDISED, KindRegistration(StandardisedConvKind)),
    (runs_forward_of(timm=("Conv2dSame",)), KindRegistration(partial(ConvKind, same=True))),
    (runs_forward_of(timm=("Linear",), torch_geometric=("Linear",)), KindRegistration(LinearKind)),
    (runs_forward_of(transformers=("Conv1D",)), KindRegistration(TransposedLinearKind)),
    (is_scaled, KindRegistration(partial(EmbeddingKind, scaled=True))),
]
