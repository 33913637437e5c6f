"""Writing matplotlib figures to files."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch_thor.files import whole_file

if TYPE_CHECKING:  # slow to import
    from matplotlib.figure import Figure


def save_picture(figure: "Figure", path: Path, dpi: int = 120) -> None:
    """Write a figure atomically: if it cannot be drawn or written, an existing file stays unchanged.

    Args:
        figure: The figure.
        path: The file; its suffix determines the format. Its folder must exist.
        dpi: Resolution in pixels per inch.
    """
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
