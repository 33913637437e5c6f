"""Opening the data set that a recipe names, in memory or read during the training."""

from collections.abc import Callable

import torch

from torch_thor.training.config.data_spec import IN_MEMORY, DataSpec
from torch_thor.training.data.in_memory import load_data
from torch_thor.training.data.stream import DataSet, EvaluationSet
from torch_thor.training.engine import parallel


def open_data(
    spec: DataSpec, device: torch.device, say: Callable[[str], None], report: Callable[[str], None] | None = None
) -> DataSet:
    """Find and check a data set.

    Args:
        spec: Which, and how it is read.
        device: Where batches go.
        say: Told, in one line each, of what every process finds alike.
        report: Told, in one line each, of what this process alone has met; `None` is `say`.

    Returns:
        The data set.
    """
    if spec.name in IN_MEMORY:
        return load_data(spec).to(device)
    from torch_thor.training.data.image_set import ImageSet  # torchvision's transforms are slow to import

    return ImageSet(spec, device, say, report, processes=parallel.local_processes())


def open_evaluation(spec: DataSpec, device: torch.device, say: Callable[[str], None]) -> EvaluationSet:
    """Find and check what a network is evaluated on; of an image folder the training images need not be there.

    Args:
        spec: Which, and how it is read.
        device: Where batches go.
        say: Told, in one line each, what is odd about the images.

    Returns:
        The evaluation images.
    """
    if spec.name in IN_MEMORY:
        return load_data(spec).to(device)
    from torch_thor.training.data.image_set import EvaluationImages

    return EvaluationImages(spec, device, parallel.rank_zero_print(say), say, processes=parallel.local_processes())
