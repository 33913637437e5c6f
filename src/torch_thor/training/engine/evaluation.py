"""Top-1 and top-5 accuracy on a test set, as the reference trainings report them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training.engine import parallel


@dataclass(frozen=True)
class Score:
    """Mean loss (without label smoothing) and accuracies in [0, 1], over so many images."""

    loss: float
    top1: float
    top5: float
    images: int


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], classes: int, device: torch.device) -> Score:
    """Evaluate a model, together with all processes; its training mode is put back as it was.

    Args:
        model: The network itself: a wrapper may communicate in each forward pass, and batches may be empty.
        batches: Images (n, C, H, W) and labels (n,), on the model's device; each image in one process alone.
        classes: Outputs of the network; with fewer than five, top-5 is top-`classes`.
        device: The model's.

    Returns:
        Loss and accuracies over all images of all processes.
    """
    from torchmetrics.classification import MulticlassAccuracy  # takes seconds to import

    top1, top5 = (
        MulticlassAccuracy(classes, top_k=min(k, classes), average="micro", sync_on_compute=False).to(device)
        for k in (1, 5)
    )
    losses = []
    count = 0
    was_training = model.training
    model.eval()
    for images, labels in batches:
        if not len(labels):
            continue
        scores = model(images)
        losses.append(functional.cross_entropy(scores, labels, reduction="sum").double())
        top1.update(scores, labels)
        top5.update(scores, labels)
        count += len(labels)
    model.train(was_training)
    right = [round(float(metric.compute()) * count) if count else 0 for metric in (top1, top5)]  # exact again
    sums = parallel.total([*map(float, right), float(count)], device)
    own = torch.stack(losses).tolist() if losses else []
    # rounded once, so that the sum does not hang on which process had which batch
    loss = math.fsum(value for part in parallel.gathered(own) for value in part)
    return Score(loss / sums[2], sums[0] / sums[2], sums[1] / sums[2], int(sums[2]))
