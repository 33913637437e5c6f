"""Batches for a masked language model, made from a corpus on demand, with or without worker processes."""

from collections.abc import Iterator

import torch
from torch.utils.data import Dataset, get_worker_info

from torch_thor.training.config.data_spec import Workers
from torch_thor.training.data.shards import BatchOrder
from torch_thor.training.data.stream import Batch, StatelessLoader
from torch_thor.training.data.worker_loader import Key, Keys, shared, worker_loader
from torch_thor.training.errors import UserError
from torch_thor.training.text.pairs import PairMaker

NO_WORKERS = Workers(count=0)


class Examples(Dataset[Batch]):
    """A dataset that makes one whole batch at a time.

    Args:
        maker: Makes the examples.
        seed: The seed of the run. Together with the epoch and the example, it determines the pairs and the masks.
        fixed: Whether examples are the same in each epoch, as in an evaluation.
    """

    def __init__(self, maker: PairMaker, seed: int, *, fixed: bool) -> None:
        self.maker, self.seed, self.fixed = maker, seed, fixed

    def __getitems__(self, keys: list[Key]) -> Batch | UserError:  # DataLoader calls the method of this name
        try:
            batch = self.take(keys)
            return batch if get_worker_info() is None else shared(batch)
        except UserError as error:
            return error  # not raised: DataLoader would raise it again with the worker's traceback as the message

    def take(self, keys: list[Key]) -> Batch:
        """Make one batch.

        Args:
            keys: The epoch and the index of each example; may be empty.

        Returns:
            The arrays of :meth:`PairMaker.example`, stacked into int64 tensors: `next_sentence_label` of shape `(n,)`,
            the others of shape `(n, length)`.
        """
        import numpy as np

        examples = [self.maker.example(number, self.seed, 0 if self.fixed else epoch) for epoch, number in keys]
        shapes = {key: np.shape(value) for key, value in (examples or [self.maker.example(0, self.seed, 0)])[0].items()}
        return {
            key: torch.from_numpy(
                np.stack([one[key] for one in examples]) if examples else np.zeros((0, *shape), np.int64)
            )
            for key, shape in shapes.items()
        }


class PairLoader(StatelessLoader):
    """Loads batches of examples onto a device.

    Args:
        maker: Makes the examples.
        order: The examples of each batch, and the order of the batches.
        seed: The seed of the run. Together with the epoch and the example, it determines the pairs and the masks.
        device: The device of the batches. Batches for a CUDA device are copied from page-locked memory.
        workers: The worker processes that make the batches. Their number does not change the batches.
        fixed: Whether examples are the same in each epoch, as in an evaluation.
    """

    def __init__(
        self,
        maker: PairMaker,
        order: BatchOrder,
        seed: int,
        device: torch.device,
        *,
        workers: Workers = NO_WORKERS,
        fixed: bool = False,
    ) -> None:
        super().__init__(order)
        self.maker, self.device = maker, device
        self._keys = Keys(order)
        reader = Examples(maker, seed, fixed=fixed)
        self._loader = worker_loader(reader, self._keys, workers, pin_memory=device.type == "cuda")

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Make the batches of an epoch.

        Only one iteration can be active at a time: starting a new one ends the previous one.

        Args:
            epoch: The index of the epoch, counted from 0.
            start: Number of batches to skip at the beginning; these are not made.

        Yields:
            Mappings of tensors on the device.
        """
        self._keys.epoch, self._keys.start = epoch, start
        for batch in self._loader:
            yield {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}
