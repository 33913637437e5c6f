"""Top-1 and top-5 accuracy on a test set, as the reference trainings report them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torch_thor.training import parallel


@dataclass(frozen=True)
class Score:
    """Mean loss (without label smoothing) and accuracies in [0, 1]."""

    loss: float
    top1: float
    top5: float


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

    # the sums are added up by `parallel.total`, the loss's among them: one way for all three, of the same bits on all
    top1, top5 = (
        MulticlassAccuracy(classes, top_k=min(k, classes), average="micro", sync_on_compute=False).to(device)
        for k in (1, 5)
    )
    loss = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    was_training = model.training
    model.eval()
    for images, labels in batches:
        if not len(labels):
            continue
        scores = model(images)
        loss += functional.cross_entropy(scores, labels, reduction="sum")
        top1.update(scores, labels)
        top5.update(scores, labels)
        count += len(labels)
    model.train(was_training)
    right = [round(float(metric.compute()) * count) if count else 0 for metric in (top1, top5)]  # exact again
    sums = parallel.total([float(loss), *map(float, right), float(count)], device)
    return Score(*(value / sums[3] for value in sums[:3]))
