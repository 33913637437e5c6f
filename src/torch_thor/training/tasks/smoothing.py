"""Label smoothing, in torch's form and in that of THOR's reference trainings.

With K outputs and smoothing s, the target distribution of a label y is

    torch        1 - s + s / K on y, s / K on every other output
    reference    1 - s on y, s / (K - 1) on every other output

Torch spreads s over all outputs, y among them, the reference over the others alone. So the reference's with s is
torch's with s · K / (K - 1).
"""

from torch import Tensor
from torch.nn import functional

from torch_thor.training.errors import require

FORMS = ("torch", "reference")


def check_smoothing(smoothing: float, form: str, outputs: int) -> None:
    """Refuse a smoothing that leaves the label less than the other outputs have.

    Args:
        smoothing: s.
        form: One of `FORMS`.
        outputs: K.
    """
    require(
        smoothing == 0 or form == "torch" or smoothing < (outputs - 1) / outputs,
        f"label_smoothing={smoothing} with smoothing_form={form} must be below {(outputs - 1) / outputs:.4g} for "
        f"{outputs} outputs: the label would have no more than the others; lower it, or take smoothing_form=torch",
    )


def training_loss(scores: Tensor, labels: Tensor, smoothing: float, form: str) -> Tensor:
    """Return the mean cross-entropy against smoothed labels.

    Args:
        scores: (n, K).
        labels: (n,).
        smoothing: s, in [0, 1).
        form: One of `FORMS`.

    Returns:
        The mean over the n images, a tensor of no dimensions.
    """
    if smoothing and form == "reference":
        outputs = scores.shape[1]
        smoothing *= outputs / (outputs - 1)
    return functional.cross_entropy(scores, labels, label_smoothing=smoothing)
