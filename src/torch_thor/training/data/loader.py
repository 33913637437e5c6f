"""Batches of decoded images on the device."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_thor.training.config.data_spec import Workers
from torch_thor.training.data.broken_images import BrokenImages
from torch_thor.training.data.image_source import ImageSource
from torch_thor.training.data.reading import Crop, raw_loader
from torch_thor.training.data.shards import BatchOrder
from torch_thor.training.data.transforms import Normalize
from torch_thor.training.data.worker_loader import Keys
from torch_thor.training.errors import UserError


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
        self._keys = Keys(order)
        self._loader = raw_loader(source, crop, self._keys, workers, pin_memory=device.type == "cuda")

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.order.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches()

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch.

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

    def state_dict(self) -> dict[str, Any]:
        """Which images were broken.

        Returns:
            Plain values.
        """
        return self.broken.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what another loader knew of broken images.

        Args:
            state: From `state_dict`.
        """
        self.broken.load_state_dict(state)
