"""Images that cannot be read: each is reported once, left out and counted, and too many of them are an error.

A broken image is not replaced, so its batch is smaller by one. Workers report the images that they could not read along
with the batch. The process that receives the batches counts them, so the count does not depend on the number of
workers.
"""

from collections.abc import Callable
from typing import Any

from torch_thor.training.errors import UserError, require


class BrokenImages:
    """The broken images of one data set that one process has met.

    Args:
        max_share: Largest fraction of this process's images of an epoch that may be broken; 0 allows none.
        say: Prints a line; it is called once for each broken image.

    Raises:
        UserError: If `max_share` is out of range.
    """

    def __init__(self, max_share: float, say: Callable[[str], None]) -> None:
        require(
            0 <= max_share < 1, f"data.max_broken={max_share} must be a fraction in [0, 1); 0 allows no broken image"
        )
        self.max_share, self.say = max_share, say
        self.named: set[int] = set()
        self.epoch = -1
        self.in_epoch: set[int] = set()

    @property
    def count(self) -> int:
        """Number of different broken images so far, over all epochs."""
        return len(self.named)

    def begin(self, epoch: int, start: int) -> None:
        """Begin or resume an epoch.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches of the epoch that are already done.
        """
        if epoch != self.epoch or start == 0:
            self.epoch, self.in_epoch = epoch, set()

    def add(self, index: int, path: str, reason: str, images: int) -> None:
        """Count one broken image.

        Args:
            index: Its index in the data set.
            path: Its path.
            reason: Why it cannot be read.
            images: Images in the epoch, on this process.

        Raises:
            UserError: If there are now more broken images than `max_share` allows.
        """
        self.in_epoch.add(index)
        if index not in self.named:
            self.named.add(index)
            self.say(f"{path} cannot be read ({reason}) and is left out")
        if len(self.in_epoch) > self.max_share * images:
            raise UserError(
                f"{len(self.in_epoch)} of an epoch's {images} images cannot be read, more than "
                f"data.max_broken={self.max_share:g} allows; the latest is {path} ({reason}): repair or "
                "remove them, or raise data.max_broken"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue the count and to report no image twice.

        Returns:
            Plain values.
        """
        return {"named": sorted(self.named), "epoch": self.epoch, "in_epoch": sorted(self.in_epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of another run.

        Args:
            state: From `state_dict`.
        """
        self.named, self.epoch, self.in_epoch = set(state["named"]), int(state["epoch"]), set(state["in_epoch"])
