"""The interface of image sources, and a source of images in memory."""

from typing import Protocol

from torch import Tensor


class ImageSource(Protocol):
    """An indexed set of labelled images that any process can read in any order.

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
        """Return the name of one image, for messages.

        Args:
            index: In [0, N).

        Returns:
            Its path, or another name if it has no path.
        """
        ...


class MemorySource:
    """Images of one size that are kept in memory.

    Args:
        images: (N, 3, height, width), uint8.
        labels: (N,), int64.
        classes: Names of the classes.
        name: The name of the set in messages.
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
        """Return the name of one image, for messages.

        Args:
            index: In [0, N).

        Returns:
            The set's name and the index.
        """
        return f"{self.name}[{index}]"
