"""The language reference that is part of Python, as `help()` shows it, and batches of windows of this text.

Each Python version has another text, so losses are comparable within one version only.
"""

import hashlib
import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from torch_thor.training.data.shards import TrainingOrder
from torch_thor.training.data.stream import Batch, MemoryLoader

SYMBOLS = 128  # ASCII
HELD_OUT = 20  # the last 1/20 of the text is held out


@cache
def python_text() -> str:
    """Read the text.

    Returns:
        Each distinct paragraph once, without characters that are not ASCII.
    """
    topics = pydoc_data.topics.topics
    paragraphs = (paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    whole = "\n\n".join(dict.fromkeys(paragraphs))
    return "".join(character for character in whole if ord(character) < SYMBOLS)


def characters() -> tuple[Tensor, Tensor]:
    """Return the text as character codes.

    Returns:
        The training and the held-out part, (n,) each, int64, in [0, SYMBOLS).
    """
    codes = torch.tensor(list(python_text().encode()), dtype=torch.long)
    cut = len(codes) * (HELD_OUT - 1) // HELD_OUT
    return codes[:cut], codes[cut:]


def windows(codes: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut windows out of a text.

    Args:
        codes: Character codes, (n,).
        starts: Start of each window, (N,), below n - context.
        context: Characters in a window.

    Returns:
        The characters and the next character of each, (N, context) each.
    """
    rows = codes[starts[:, None] + torch.arange(context + 1, device=codes.device)]
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class WindowOrder(TrainingOrder):
    """Windows with random starts, drawn anew for each batch. An epoch has as many windows as cover the text once.

    The windows of a batch are a function of (seed, epoch, batch), so they do not change when a run is resumed or has
    another number of processes.

    Args:
        count: Windows that cover the text once.
        batch_size: Windows per batch, on all ranks together.
        seed: The run's seed.
        shard: Rank and number of ranks.
        positions: Number of positions at which a window may start.
    """

    positions: int = field(default=1, kw_only=True)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start: Number of batches to skip.

        Yields:
            For each batch, the positions at which its windows start.
        """
        for batch in range(start, self.batches):
            digest = hashlib.sha256(f"{self.seed},{epoch},{batch}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
            starts = torch.randint(self.positions, (self.batch_size,), generator=generator)
            first = self.shard.rank * self._share
            yield starts[first : first + self._share].tolist()


class WindowLoader(MemoryLoader):
    """Batches of windows of a text.

    Args:
        codes: The text as character codes, (n,), on the device to train on.
        context: Characters in a window.
        order: The starts of the windows of each batch.
    """

    def __init__(self, codes: Tensor, context: int, order: WindowOrder) -> None:
        super().__init__(codes, order)
        self.codes, self.context = codes, context

    def take(self, numbers: Tensor) -> Batch:
        """Cut the windows of a batch.

        Args:
            numbers: The starts of the windows, (N,).

        Returns:
            Characters and next characters, (N, context) each.
        """
        return windows(self.codes, numbers, self.context)
