"""Which files of a folder are images by their names, and their bytes. Nothing but an ordinary file is ever opened."""

import errno
import os
import stat
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from torch_thor.training.data.decoding import BrokenImageError
from torch_thor.training.errors import UserError

LARGEST = 2**31  # bytes: more than 179 million pixels of any format need, and than a worker should take
KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # of these the machine runs short: the image may be sound


def read_image(path: Path) -> bytes:
    """Read one image file.

    Args:
        path: Its path; a link is followed.

    Returns:
        The whole content.

    Raises:
        BrokenImageError: If it is no ordinary file, too large for an image, or cannot be read.
        UserError: If this process may open no more files, or has no memory for them.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # to open a pipe is to wait for its writer, and a device may have no end
            raise BrokenImageError(f"{KINDS.get(stat.S_IFMT(found.st_mode), 'a folder')}, no file")
        if found.st_size > LARGEST:
            raise BrokenImageError(f"{found.st_size / 1e9:.1f} GB are too many for an image")
        return path.read_bytes()
    except OSError as error:  # removed since the folder was listed, a link to nowhere, or a failing disk
        reason = error.strerror or type(error).__name__
        if error.errno in SCARCE:
            raise UserError(
                f"{path} cannot be opened ({reason}): use fewer data.workers.count, or raise the limit (ulimit -n); "
                "then go on with --resume"
            ) from error
        raise BrokenImageError(reason) from error


def list_files(folder: Path) -> list[str]:
    """Find the images below a folder by the endings of their names; links are followed.

    Args:
        folder: A class's folder.

    Returns:
        Full paths in the order of `torchvision.datasets.ImageFolder`.

    Raises:
        UserError: If a folder below it is a link to one that holds it.
    """
    around = {folder.parent: [folder.parent.resolve()]}  # of each folder: itself and all that it was come to through
    found: list[tuple[str, str]] = []
    for top, _, names in os.walk(folder, onerror=_raise, followlinks=True):
        place = Path(top)
        above, own = around[place.parent], place.resolve()
        if place.is_symlink() and any(holder.is_relative_to(own) for holder in above):
            raise UserError(f"{top} is a link to {own}, which holds it: its images have no end; remove the link")
        around[place] = [*above, own]
        found += [(top, name) for name in names if name.lower().endswith(IMG_EXTENSIONS)]
    return [f"{top}{os.sep}{name}" for top, name in sorted(found)]


def _raise(error: OSError) -> None:
    raise error
