"""Images that cannot be read: each is reported once, left out and counted, and too many of them are an error.

Nothing takes the place of a broken image: its batch is smaller by one. Workers send what they could not read along with
the batch, and the count is kept where batches arrive, so it does not depend on the number of workers.
"""

from collections.abc import Callable
from typing import Any

from torch_thor.training.errors import UserError, require


class BrokenImages:
    """The broken images of one set, as one process sees them.

    Args:
        max_share: Greatest share of the images of an epoch (those of this process) that may be broken; 0 allows none.
        say: Told of each broken image, once, in one line.
    """

    def __init__(self, max_share: float, say: Callable[[str], None]) -> None:
        require(0 <= max_share < 1, f"max_broken={max_share} must be a share in [0, 1); 0 allows no broken image")
        self.max_share, self.say = max_share, say
        self.named: set[int] = set()
        self.epoch = -1
        self.in_epoch: set[int] = set()

    @property
    def count(self) -> int:
        """Different broken images so far, over all epochs."""
        return len(self.named)

    def begin(self, epoch: int, start: int) -> None:
        """Note that an epoch begins or goes on.

        Args:
            epoch: Number of the epoch, from 0.
            start: Batches of it already done.
        """
        if epoch != self.epoch or start == 0:
            self.epoch, self.in_epoch = epoch, set()

    def add(self, index: int, path: str, reason: str, images: int) -> None:
        """Count one broken image.

        Args:
            index: Its number in the set.
            path: Its path.
            reason: Why it cannot be read.
            images: Images in the epoch, on this process.

        Raises:
            UserError: If there are now too many.
        """
        self.in_epoch.add(index)
        if index not in self.named:
            self.named.add(index)
            self.say(f"{path} cannot be read ({reason}) and is left out")
        if len(self.in_epoch) > self.max_share * images:
            raise UserError(
                f"{len(self.in_epoch)} of an epoch's {images} images cannot be read, more than "
                f"max_broken={self.max_share:g} allows; the latest is {path} ({reason}): repair or "
                "remove them, or raise max_broken"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue the count and to report no image twice.

        Returns:
            Plain values.
        """
        return {"named": sorted(self.named), "epoch": self.epoch, "in_epoch": sorted(self.in_epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where another run was.

        Args:
            state: From `state_dict`.
        """
        self.named, self.epoch, self.in_epoch = set(state["named"]), int(state["epoch"]), set(state["in_epoch"])
