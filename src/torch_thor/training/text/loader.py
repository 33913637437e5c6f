"""Batches of a masked language model, made from a corpus as they are needed."""

from collections.abc import Iterator
from typing import Any

import torch

from torch_thor.training.data.shards import BatchOrder
from torch_thor.training.data.stream import Batch
from torch_thor.training.text.pairs import PairMaker


class PairLoader:
    """Batches of examples.

    Args:
        maker: Makes the examples.
        order: Which examples, and when.
        seed: The run's seed: with the epoch and the example it decides pairs and masks.
        device: Where batches go.
        fixed: Whether examples are the same in each epoch, as those of an evaluation are.
    """

    def __init__(
        self, maker: PairMaker, order: BatchOrder, seed: int, device: torch.device, *, fixed: bool = False
    ) -> None:
        self.maker, self.order, self.seed, self.device, self.fixed = maker, order, seed, device, fixed

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.order.batches

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Make the batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches to pass over.

        Yields:
            The arrays of :meth:`PairMaker.example`, stacked, on the device.
        """
        for numbers in self.order.epoch(epoch, start):
            yield self.take(numbers, 0 if self.fixed else epoch)

    def take(self, numbers: list[int], epoch: int) -> Batch:
        """Make one batch.

        Args:
            numbers: Which examples.
            epoch: Number of the epoch.

        Returns:
            A mapping of tensors, int64, `(n, length)` and `(n,)`.
        """
        import numpy as np

        examples = [self.maker.example(number, self.seed, epoch) for number in numbers]
        keys = examples[0] if examples else self.maker.example(0, self.seed, 0)
        shapes = {key: np.shape(value) for key, value in keys.items()}
        return {
            key: torch.from_numpy(
                np.stack([one[key] for one in examples]) if examples else np.zeros((0, *shapes[key]), np.int64)
            ).to(self.device)
            for key in shapes
        }

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a corpus is whole.

        Returns:
            An empty mapping.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to take up.

        Args:
            state: From `state_dict`.
        """
