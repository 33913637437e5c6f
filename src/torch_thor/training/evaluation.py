"""Top-1 and top-5 accuracy on a test set, as the reference trainings report them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

BATCH = 1000


@dataclass(frozen=True)
class Score:
    """Mean loss (without label smoothing) and accuracies in [0, 1]."""

    loss: float
    top1: float
    top5: float


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor, classes: int) -> Score:
    """Evaluate a model; its training mode is put back as it was.

    Args:
        model: The network.
        images: (N, C, H, W), on the model's device.
        labels: (N,).
        classes: Number of classes; with fewer than five, top-5 is top-`classes`.

    Returns:
        Loss and accuracies over all images.
    """
    from torchmetrics.classification import MulticlassAccuracy  # takes seconds to import

    top1 = MulticlassAccuracy(classes, top_k=1, average="micro").to(images.device)
    top5 = MulticlassAccuracy(classes, top_k=min(5, classes), average="micro").to(images.device)
    loss = torch.zeros((), dtype=torch.float64, device=images.device)
    was_training = model.training
    model.eval()
    for part, truth in zip(torch.split(images, BATCH), torch.split(labels, BATCH), strict=True):
        scores = model(part)
        loss += functional.cross_entropy(scores, truth, reduction="sum")
        top1.update(scores, truth)
        top5.update(scores, truth)
    model.train(was_training)
    return Score(float(loss) / len(labels), float(top1.compute()), float(top5.compute()))
