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
    """The batches of one rank. Iterating over it gives epoch 0 from its beginning, as an evaluation needs.

    Args:
        source: The images.
        crop: The transform of each image, which the workers apply.
        order: The images of each batch.
        normalize: The normalisation of a batch, which the device applies.
        workers: The processes that read and crop.
        broken: Counts the images that cannot be read.
        device: The device of the batches; a CUDA device receives them through page-locked memory.
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
        """Return the number of batches in an epoch."""
        return self.order.batches

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.batches()

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of an epoch.

        Only one iteration can be active: a new one ends the previous one.

        Args:
            epoch: Number of the epoch, from 0.
            start: Number of batches to skip, which are not read.

        Yields:
            Images (n, 3, size, size), float32, channels_last, normalised, and labels (n,), int64, both on the device. n
            is the batch size minus the broken images.

        Raises:
            UserError: If too many images are broken, or all images of a training batch.
        """
        self.broken.begin(epoch, start)
        self._keys.epoch, self._keys.start = epoch, start
        for images, labels, broken in self._loader:
            for index, reason in broken:
                self.broken.add(index, self.source.where(index), reason, self.order.images)
            if not len(labels) and not self.order.may_be_empty:
                path = self.source.where(broken[-1][0])
                raise UserError(f"no image of a batch can be read; the last one is {path}: check the disk")
            # from page-locked memory the copies overlap with computation; on a CPU they do nothing
            images = images.to(self.device, non_blocking=True)
            yield self.normalize(images), labels.to(self.device, non_blocking=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the record of broken images.

        Returns:
            Plain values.
        """
        return self.broken.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore another loader's record of broken images.

        Args:
            state: From `state_dict`.
        """
        self.broken.load_state_dict(state)
