"""Writing pictures."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch_thor.files import whole_file

if TYPE_CHECKING:  # slow to import, and no window is wanted
    from matplotlib.figure import Figure


def save_picture(figure: "Figure", path: Path, dpi: int = 120) -> None:
    """Replace a picture as a whole: where it cannot be drawn or written, the one that was there stays.

    Args:
        figure: The figure.
        path: The file; its suffix says the format. Its folder must exist.
        dpi: Pixels per inch of the figure's size.
    """
    with whole_file(path) as temporary:
        figure.savefig(temporary, dpi=dpi)
