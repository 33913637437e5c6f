"""Label smoothing, in torch's form and in the form of THOR's reference trainings.

With K outputs and smoothing s, the target distribution of a label y is

    torch        1 - s + s / K on y, s / K on every other output
    reference    1 - s on y, s / (K - 1) on every other output

torch distributes s over all outputs including y, the reference over all outputs except y. The reference form with s is
therefore torch's form with s · K / (K - 1).
"""

from torch import Tensor
from torch.nn import functional

from torch_thor.training.errors import require

FORMS = ("torch", "reference")


def check_smoothing(smoothing: float, form: str, outputs: int) -> None:
    """Refuse a smoothing with which the label has no larger probability than the other outputs.

    Args:
        smoothing: s.
        form: One of `FORMS`.
        outputs: K, the number of outputs.

    Raises:
        UserError: If the smoothing is too large.
    """
    require(
        smoothing == 0 or form == "torch" or smoothing < (outputs - 1) / outputs,
        f"label_smoothing={smoothing} with smoothing_form={form} must be below {(outputs - 1) / outputs:.4g} for "
        f"{outputs} outputs, or the label would not be the most probable one: lower it, or use smoothing_form=torch",
    )


def training_loss(scores: Tensor, labels: Tensor, smoothing: float, form: str) -> Tensor:
    """Compute the mean cross-entropy against smoothed labels.

    Args:
        scores: Logits, (n, K).
        labels: Labels, (n,), int64.
        smoothing: s, in [0, 1).
        form: One of `FORMS`.

    Returns:
        The mean over the n images, a tensor without dimensions.
    """
    if smoothing and form == "reference":
        outputs = scores.shape[1]
        smoothing *= outputs / (outputs - 1)
    return functional.cross_entropy(scores, labels, label_smoothing=smoothing)
