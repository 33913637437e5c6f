"""Listing the image files of a folder, and reading them. Only regular files are ever opened."""

import errno
import os
import stat
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from torch_thor.training.data.decoding import BrokenImageError
from torch_thor.training.errors import UserError

LARGEST = 2**31  # bytes; an image of 179 million pixels needs less in any format
KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # the machine lacks resources; the image itself may be valid


def read_image(path: Path) -> bytes:
    """Read one image file.

    Args:
        path: Its path; a symbolic link is followed.

    Returns:
        The content of the file.

    Raises:
        BrokenImageError: If it is not a regular file, is too large for an image, or cannot be read.
        UserError: If this process cannot open more files or has no memory left.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe waits for its writer, and a device may never end
            raise BrokenImageError(f"{KINDS.get(stat.S_IFMT(found.st_mode), 'a folder')}, not a file")
        if found.st_size > LARGEST:
            raise BrokenImageError(f"{found.st_size / 1e9:.1f} GB are too much for an image")
        return path.read_bytes()
    except OSError as error:  # removed since the folder was listed, a dangling link, or a failing disk
        reason = error.strerror or type(error).__name__
        if error.errno in SCARCE:
            raise UserError(
                f"{path} cannot be opened ({reason}): use fewer data.workers.count, or raise the limit (ulimit -n); "
                "then continue with --resume"
            ) from error
        raise BrokenImageError(reason) from error


def list_files(folder: Path) -> list[str]:
    """List the images below a folder by their file name extensions. Symbolic links are followed.

    Args:
        folder: The folder of a class.

    Returns:
        Full paths, in the order of `torchvision.datasets.ImageFolder`.

    Raises:
        UserError: If a folder below it is a link to a folder that contains it.
    """
    around = {folder.parent: [folder.parent.resolve()]}  # for each folder: itself, and the folders on the way to it
    found: list[tuple[str, str]] = []
    for top, _, names in os.walk(folder, onerror=_raise, followlinks=True):
        place = Path(top)
        above, own = around[place.parent], place.resolve()
        if place.is_symlink() and any(holder.is_relative_to(own) for holder in above):
            raise UserError(f"{top} is a link to {own}, which contains it, so listing would never end: remove the link")
        around[place] = [*above, own]
        found += [(top, name) for name in names if name.lower().endswith(IMG_EXTENSIONS)]
    return [f"{top}{os.sep}{name}" for top, name in sorted(found)]


def _raise(error: OSError) -> None:
    raise error
