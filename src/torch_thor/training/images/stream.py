"""Batches on the device, epoch after epoch, from any position."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_thor.training.errors import UserError
from torch_thor.training.images.broken import BrokenImages
from torch_thor.training.images.reading import Crop, Key, Workers, raw_loader
from torch_thor.training.images.shards import BatchOrder, TrainingOrder
from torch_thor.training.images.source import ImageSource
from torch_thor.training.images.transforms import Normalize


class ImageLoader:
    """The batches of one rank. Iterating over it gives epoch 0 from its beginning, as evaluation wants.

    Args:
        source: The images.
        crop: What the workers do to each.
        order: Which images, and when.
        normalize: What the device does to each batch.
        workers: The processes that read and crop.
        broken: What happens to images that cannot be read.
        device: Where batches go; on a CUDA device through page-locked memory.
    """

    def __init__(
        self,
        source: ImageSource,
        crop: Crop,
        order: BatchOrder,
        *,
        normalize: Normalize,
        workers: Workers,
        broken: BrokenImages,
        device: torch.device,
    ) -> None:
        self.source, self.order, self.broken, self.device = source, order, broken, device
        self.normalize = normalize.to(device)
        self._keys = _Keys(order)
        self._loader = raw_loader(source, crop, self._keys, workers, pin_memory=device.type == "cuda")

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.order.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches()

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels."""
        return self.source.classes

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of an epoch.

        Only one iteration can be under way: a new one ends the one before.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches to pass over; they are not read.

        Yields:
            Images (n, 3, size, size), float32, channels_last, normalised; labels (n,), int64. Both on the device.
            n is the batch size less the broken images.

        Raises:
            UserError: If too many images are broken, or all of a training batch.
        """
        self.broken.begin(epoch, start)
        self._keys.epoch, self._keys.start = epoch, start
        for images, labels, broken in self._loader:
            for index, reason in broken:
                self.broken.add(index, self.source.where(index), reason, self.order.images)
            if not len(labels) and not self.order.may_be_empty:
                path = self.source.where(broken[-1][0])
                raise UserError(f"no image of a whole batch can be read, the last is {path}: check the disk")
            # the copies overlap with computing where the memory is page-locked, and do nothing on a CPU
            images = images.to(self.device, non_blocking=True)
            yield self.normalize(images), labels.to(self.device, non_blocking=True)


class TrainingStream:
    """Training batches without end, with a position that a checkpoint can hold.

    One iteration gives what is left of the current epoch. A batch counts as consumed when it is handed out, however
    many the workers have read ahead.

    Args:
        loader: Of training batches.
        order: The loader's.
    """

    def __init__(self, loader: ImageLoader, order: TrainingOrder) -> None:
        self.loader, self.order = loader, order
        self.epoch = 0
        self.batch = 0

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return len(self.loader)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their labels."""
        return self.loader.classes

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.loader.batches(self.epoch, self.batch):
            done = self.epoch * len(self) + self.batch + 1
            self.epoch, self.batch = divmod(done, len(self))
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in.

        Returns:
            Plain values.
        """
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "broken": self.loader.broken.state_dict(),
            **self._identity(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another stream was: the same images in the same batches with the same crops.

        Args:
            state: From `state_dict`, of this rank or, but for the broken images, of another.

        Raises:
            UserError: If the other stream had other data, another seed or another way of sharing.
        """
        for key, own in self._identity().items():
            if state[key] != own:
                raise UserError(
                    f"the checkpoint's data has {key}={state[key]}, this run {key}={own}: resume with the same"
                )
        self.epoch, self.batch = int(state["epoch"]), int(state["batch"])
        self.loader.broken.load_state_dict(state["broken"])

    def _identity(self) -> dict[str, int]:
        return {
            "images": self.order.count,
            "batch_size": self.order.batch_size,
            "seed": self.order.seed,
            "world_size": self.order.shard.world_size,
        }


class _Keys:
    # What the workers are asked for, taken down when an iteration begins: the position moves on while they read ahead
    def __init__(self, order: BatchOrder) -> None:
        self.order = order
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return self.order.batches - self.start

    def __iter__(self) -> Iterator[list[Key]]:
        epoch = self.epoch
        return ([(epoch, index) for index in batch] for batch in self.order.epoch(epoch, self.start))
