"""Opening the data set that a recipe names: in memory, or read during the training."""

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
        spec: The data set, and how it is read.
        device: The device of the batches.
        say: Prints a line; it is called for what is the same on every process.
        report: Prints a line; it is called for what only this process has found, such as a broken image. `None` stands
            for `say`.

    Returns:
        The data set.

    Raises:
        UserError: If the data are missing or unsuitable for a training.
    """
    if spec.name in IN_MEMORY:
        return load_data(spec).to(device)
    from torch_thor.training.data.image_set import ImageSet  # its import of torchvision's transforms is slow

    return ImageSet(spec, device, say, report, processes=parallel.local_processes())


def open_evaluation(spec: DataSpec, device: torch.device, say: Callable[[str], None]) -> EvaluationSet:
    """Find and check the evaluation images of a data set. The training images of an image folder need not exist.

    Args:
        spec: The data set, and how it is read.
        device: The device of the batches.
        say: Prints a line; it is called for warnings about the images.

    Returns:
        The evaluation images.

    Raises:
        UserError: If the data are missing.
    """
    if spec.name in IN_MEMORY:
        return load_data(spec).to(device)
    from torch_thor.training.data.image_set import EvaluationImages

    return EvaluationImages(spec, device, parallel.rank_zero_print(say), say, processes=parallel.local_processes())
