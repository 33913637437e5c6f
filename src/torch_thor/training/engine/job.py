"""What the processes of one `torchrun` know of the starts before their own.

`torchrun --max-restarts` starts its processes again after a failure. They continue a run only if an earlier start of
the same `torchrun` has begun it: a start that was refused because the folder contains another run, or that was killed
before `--overwrite` took effect, must not make the next one continue that other run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_thor.training.checksums import digest
from torch_thor.training.engine.starting import join


class Job:
    """One `torchrun` with all its starts, and the run that it trains.

    Args:
        path: The run folder.
        facts: What must be the same on all processes.
    """

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        self._key, self._facts = f"begun/{digest({'path': str(path)})}", facts
        self._store: Any = None
        self.has_begun = False  # whether an earlier start has; without `torchrun` there is none

    def join(self, store: Any, rank: int, world: int) -> str:
        """Wait for all processes, as `starting.join` does, and look whether an earlier start has begun the run.

        Args:
            store: The store of `torchrun`, which outlives its processes.
            rank: The rank of this process.
            world: The number of processes.

        Returns:
            The name of this start.

        Raises:
            UserError: If the processes differ, or one has not started in time.
        """
        self._store = store
        self.has_begun = store.check([self._key])
        return join(store, rank, world, self._facts)

    def begin(self) -> None:
        """Record that the run in the folder is that of this job, for later starts."""
        if self._store is not None:
            self._store.set(self._key, "yes")
