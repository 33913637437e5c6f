"""Batches of a masked language model, made from a corpus as they are needed, by worker processes or without."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from torch_thor.training.config.data_spec import Workers
from torch_thor.training.data.shards import BatchOrder
from torch_thor.training.data.stream import Batch
from torch_thor.training.data.worker_loader import Key, Keys, shared, worker_loader
from torch_thor.training.errors import UserError
from torch_thor.training.text.pairs import PairMaker

NO_WORKERS = Workers(count=0)


class Examples(Dataset[Batch]):
    """Makes a whole batch at a time.

    Args:
        maker: Makes the examples.
        seed: The run's seed: with the epoch and the example it decides pairs and masks.
        fixed: Whether examples are the same in each epoch, as those of an evaluation are.
    """

    def __init__(self, maker: PairMaker, seed: int, *, fixed: bool) -> None:
        self.maker, self.seed, self.fixed = maker, seed, fixed

    def __getitems__(self, keys: list[Key]) -> Batch | UserError:  # the name that DataLoader looks for
        try:
            batch = self.take(keys)
            return batch if get_worker_info() is None else shared(batch)
        except UserError as error:
            return error  # not raised: a DataLoader would raise it anew with the worker's traceback as its message

    def take(self, keys: list[Key]) -> Batch:
        """Make one batch.

        Args:
            keys: Epoch and number of each example; there may be none.

        Returns:
            The arrays of :meth:`PairMaker.example` as a mapping of tensors, int64, `(n, length)` and `(n,)`.
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


class PairLoader:
    """Batches of examples.

    Args:
        maker: Makes the examples.
        order: Which examples, and when.
        seed: The run's seed: with the epoch and the example it decides pairs and masks.
        device: Where batches go; to a CUDA device through page-locked memory.
        workers: The processes that make them; batches are the same for any number.
        fixed: Whether examples are the same in each epoch, as those of an evaluation are.
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
        self.maker, self.order, self.device = maker, order, device
        self._keys = Keys(order)
        reader = Examples(maker, seed, fixed=fixed)
        self._loader = worker_loader(reader, self._keys, workers, pin_memory=device.type == "cuda")

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.order.batches

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Make the batches of an epoch.

        Only one iteration can be under way: a new one ends the one before.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches to pass over; they are not made.

        Yields:
            Mappings of tensors, on the device.
        """
        self._keys.epoch, self._keys.start = epoch, start
        for batch in self._loader:
            yield {key: value.to(self.device, non_blocking=True) for key, value in batch.items()}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: a corpus is whole.

        Returns:
            An empty mapping.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state.

        Args:
            state: From `state_dict`.
        """
