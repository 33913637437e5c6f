"""The interface of sources of images, which reading, caching and sharding use."""

from typing import Protocol

from torch import Tensor


class ImageSource(Protocol):
    """A numbered set of labelled images, readable in any order and from any process.

    Attributes:
        labels: (N,), int64, in [0, len(classes)).
        classes: Names of the classes, in the order of their labels.
    """

    labels: Tensor
    classes: tuple[str, ...]

    def load(self, index: int) -> Tensor:
        """Read one image.

        Args:
            index: In [0, N).

        Returns:
            (3, height, width), uint8.
        """
        ...

    def where(self, index: int) -> str:
        """Name one image for a message.

        Args:
            index: In [0, N).

        Returns:
            Its path, or a name in the place of one.
        """
        ...


class MemorySource:
    """Images of one size, held in memory.

    Args:
        images: (N, 3, height, width), uint8.
        labels: (N,), int64.
        classes: Names of the classes.
        name: What messages call the set.
    """

    def __init__(self, images: Tensor, labels: Tensor, classes: tuple[str, ...], name: str) -> None:
        self.images, self.labels, self.classes, self.name = images, labels, classes, name

    def load(self, index: int) -> Tensor:
        """Read one image.

        Args:
            index: In [0, N).

        Returns:
            (3, height, width), uint8.
        """
        return self.images[index]

    def where(self, index: int) -> str:
        """Name one image for a message.

        Args:
            index: In [0, N).

        Returns:
            The set's name and the index.
        """
        return f"{self.name}[{index}]"
