"""The text of Python's own help, the language reference as `help()` shows it, and windows of it as batches.

Another Python version has another text, so losses compare within one version only.
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
HELD_OUT = 20  # the last twentieth is held out


@cache
def python_text() -> str:
    """Read the text.

    Returns:
        Every paragraph once, without what is not ASCII.
    """
    topics = pydoc_data.topics.topics
    paragraphs = (paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    whole = "\n\n".join(dict.fromkeys(paragraphs))
    return "".join(character for character in whole if ord(character) < SYMBOLS)


def characters() -> tuple[Tensor, Tensor]:
    """Return the text as numbers.

    Returns:
        Training and held-out characters, (n,) each, int64, in [0, SYMBOLS).
    """
    codes = torch.tensor(list(python_text().encode()), dtype=torch.long)
    cut = len(codes) * (HELD_OUT - 1) // HELD_OUT
    return codes[:cut], codes[cut:]


def windows(codes: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Cut windows out of a text.

    Args:
        codes: (n,).
        starts: (N,), each below n - context.
        context: Characters of a window.

    Returns:
        The characters and those that follow each of them, (N, context) each.
    """
    rows = codes[starts[:, None] + torch.arange(context + 1, device=codes.device)]
    return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True)
class WindowOrder(TrainingOrder):
    """Windows that start anywhere, drawn anew for each batch; an epoch has as many as cover the text once.

    Which windows a batch holds is a function of (seed, epoch, batch), so a resumed run sees what it would have seen,
    and so do any number of processes.

    Args:
        count: Windows that cover the text once.
        batch_size: Windows in a batch, of all ranks together.
        seed: The run's seed.
        shard: Which rank.
        positions: Places where a window may start.
    """

    positions: int = field(default=1, kw_only=True)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        """Yield the batches of an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches to pass over.

        Yields:
            For each batch where its windows start.
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
        codes: The text, (n,), on the device to train on.
        context: Characters of a window.
        order: Where windows start.
    """

    def __init__(self, codes: Tensor, context: int, order: WindowOrder) -> None:
        super().__init__(codes, order)
        self.codes, self.context = codes, context

    def take(self, numbers: Tensor) -> Batch:
        """Cut the windows of a batch.

        Args:
            numbers: Where they start, (N,).

        Returns:
            Characters and next characters, (N, context) each.
        """
        return windows(self.codes, numbers, self.context)
