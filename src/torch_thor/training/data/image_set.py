"""Opening the image sets that are read from files or cropped, from the settings of a recipe."""

from collections.abc import Callable
from pathlib import Path

import torch

from torch_thor.training.config.data_spec import FOLDER, DataSpec
from torch_thor.training.data.broken_images import BrokenImages
from torch_thor.training.data.cache import Uncropped, open_cache
from torch_thor.training.data.cifar import open_cifar
from torch_thor.training.data.folder import FolderSource, open_evaluation_folder, open_folders
from torch_thor.training.data.image_source import ImageSource
from torch_thor.training.data.loader import ImageLoader
from torch_thor.training.data.reading import Crop
from torch_thor.training.data.shards import BatchOrder, EvaluationOrder, Shard, TrainingOrder, WholeBatches
from torch_thor.training.data.stream import Streams, TrainingStream
from torch_thor.training.data.transforms import EvaluationTransform, Normalize, TrainingTransform
from torch_thor.training.data.workers import check_workers
from torch_thor.training.errors import require


class EvaluationImages:
    """Evaluation images, which are read during the evaluation.

    Args:
        spec: The data set, and how it is read.
        device: The device of the batches.
        say: Prints a line; it is called for what is the same on every process, such as a warning about the workers.
        report: Prints a line; it is called for each broken image that this process meets. `None` stands for `say`.
        processes: Training processes on this machine, to count the workers of all.

    Raises:
        UserError: If images cannot be found.
    """

    evaluation: ImageSource

    def __init__(
        self,
        spec: DataSpec,
        device: torch.device,
        say: Callable[[str], None],
        report: Callable[[str], None] | None = None,
        *,
        processes: int = 1,
    ) -> None:
        check_workers(spec.workers, processes, say)
        self.spec, self.device, self.report = spec, device, report or say
        self.transform = spec.crops
        self._find(say)
        self._evaluation_crop: Crop = EvaluationTransform(self.transform)
        if spec.cache is not None and isinstance(self.evaluation, FolderSource):
            crop = EvaluationTransform(self.transform)
            self.evaluation = open_cache(Path(spec.cache), self.evaluation, crop, spec.workers, say)
            self._evaluation_crop = Uncropped(self.transform.size)

    def _find(self, say: Callable[[str], None]) -> None:
        root = _root(self.spec, "val/")
        if self.spec.name == FOLDER:
            self.evaluation = open_evaluation_folder(root, say)
        else:
            _, self.evaluation = open_cifar(self.spec.name, root, download=self.spec.download)

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.evaluation.classes)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(C, H, W) of an image as the network sees it."""
        return 3, self.transform.size, self.transform.size

    def open_evaluation(self, *, batch_size: int, shard: Shard) -> ImageLoader:
        """Open the images for an evaluation: each image once over all ranks, in the batches of a single process.

        Args:
            batch_size: Images per batch.
            shard: Rank and number of ranks.

        Returns:
            The rank's batches.
        """
        order = WholeBatches(len(self.evaluation.labels), batch_size, shard)
        return self._loader(self.evaluation, self._evaluation_crop, order)

    def _loader(self, source: ImageSource, crop: Crop, order: BatchOrder) -> ImageLoader:
        return ImageLoader(
            source,
            crop,
            order,
            normalize=Normalize(self.transform.mean, self.transform.std),
            workers=self.spec.workers,
            broken=BrokenImages(self.spec.max_broken, self.report),
            device=self.device,
        )


class ImageSet(EvaluationImages):
    """Training and evaluation images, which are read during the training.

    Args:
        spec: The data set, and how it is read.
        device: The device of the batches.
        say: Prints a line; it is called for what is the same on every process, such as a warning about the workers.
        report: Prints a line; it is called for each broken image that this process meets. `None` stands for `say`.
        processes: Training processes on this machine, to count the workers of all.

    Raises:
        UserError: If images cannot be found or are unsuitable for a training.
    """

    train: ImageSource

    def _find(self, say: Callable[[str], None]) -> None:
        root = _root(self.spec, "train/ and val/")
        if self.spec.name == FOLDER:
            self.train, self.evaluation = open_folders(root, say)
        else:
            self.train, self.evaluation = open_cifar(self.spec.name, root, download=self.spec.download)

    def open(self, *, batch_size: int, seed: int, shard: Shard) -> Streams:
        """Open the images at the beginning of a training.

        Args:
            batch_size: Images per step, on all ranks together; evaluation batches of a rank have as many as its
                training batches.
            seed: Determines, with the epoch's number, the order and the crops.
            shard: Rank and number of ranks.

        Returns:
            Training batches and evaluation batches.
        """
        order = TrainingOrder(len(self.train.labels), batch_size, seed, shard)
        evaluation = EvaluationOrder(len(self.evaluation.labels), batch_size // shard.world_size, shard)
        loader = self._loader(self.train, TrainingTransform(self.transform, seed), order)
        return Streams(TrainingStream(loader, order), self._loader(self.evaluation, self._evaluation_crop, evaluation))


def _root(spec: DataSpec, holds: str) -> Path:
    require(
        spec.root is not None or spec.name != FOLDER,
        f"data.root is not set: {FOLDER} needs the folder that contains {holds}; give it as data.root=FOLDER",
    )
    root = spec.folder()
    return root.expanduser()
