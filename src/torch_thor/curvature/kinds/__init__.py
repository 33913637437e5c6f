"""What a layer is, to the curvature: one class a kind of layer, and which kind a module is."""

from torch import nn

from torch_thor.curvature.kinds.attention import PROJECTIONS, ProjectionKind
from torch_thor.curvature.kinds.base import Kind
from torch_thor.curvature.kinds.convolution import ConvKind, ConvTransposeKind
from torch_thor.curvature.kinds.embedding import EmbeddingKind, ScaledEmbeddingKind, is_scaled
from torch_thor.curvature.kinds.experts import fused_experts
from torch_thor.curvature.kinds.linear import LinearKind, TransposedLinearKind
from torch_thor.curvature.kinds.recurrent import RecurrentKind
from torch_thor.curvature.kinds.standardised import StandardisedConvKind, is_same_padded, is_standardised

__all__ = [
    "PROJECTIONS",
    "Kind",
    "ProjectionKind",
    "RecurrentKind",
    "fused_experts",
    "is_hugging_face_conv1d",
    "kind_of",
    "parent_of",
    "why_not",
]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_KNOWN = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED, nn.Embedding)


def kind_of(module: nn.Module) -> Kind | None:
    """Return the geometry of a module, or None where THOR has none for it.

    A subclass counts as its parent only while it computes what the parent computes: one that overrides ``forward``
    (a weight-standardised convolution, a quantised layer) may use the weight in another way.

    Args:
        module: any module.

    Returns:
        Its kind, or None.
    """
    if why_not(module) is not None:
        return None
    if isinstance(module, nn.Conv2d) and is_standardised(module):
        return StandardisedConvKind(module)
    if isinstance(module, nn.Conv2d) and is_same_padded(module):
        return ConvKind(module, same=True)
    if isinstance(module, nn.Linear):
        return LinearKind(module)
    if isinstance(module, _CONVOLUTIONS):
        return ConvKind(module)
    if isinstance(module, _TRANSPOSED):
        return ConvTransposeKind(module)
    if isinstance(module, nn.Embedding):
        return ScaledEmbeddingKind(module) if is_scaled(module) else EmbeddingKind(module)
    return TransposedLinearKind(module)


def why_not(module: nn.Module) -> str | None:
    """Return why a module has no geometry of its own.

    Args:
        module: any module.

    Returns:
        The reason; None where :func:`kind_of` has a kind.
    """
    label = type(module).__name__
    if is_hugging_face_conv1d(module) or is_standardised(module) or is_same_padded(module):
        return None
    parent = parent_of(module)
    if parent is None:
        return f"no curvature for {label}"
    if type(module).forward is not parent.forward and not is_scaled(module):
        return f"{label} overrides the forward of {parent.__name__}"
    if isinstance(module, _CONVOLUTIONS) and type(module)._conv_forward is not parent._conv_forward:  # type: ignore[attr-defined]
        return f"{label} overrides the forward of {parent.__name__}"
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        return "scale_grad_by_freq divides its gradient by the token counts, which the factors do not know"
    return None


def parent_of(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of torch that a module is, or comes from, among those that have a kind.

    Args:
        module: any module.

    Returns:
        The class, or None.
    """
    return next((known for known in _KNOWN if isinstance(module, known)), None)


def is_hugging_face_conv1d(module: nn.Module) -> bool:
    """Return whether a module is the linear layer of GPT-2, whose weight is ``(in, out)``.

    Args:
        module: any module.

    Returns:
        Whether it is.
    """
    # by name: transformers is no dependency, and looking must not import it
    return type(module).__module__.partition(".")[0] == "transformers" and type(module).__name__ == "Conv1D"
