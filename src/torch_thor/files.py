"""Writes files and folders under a temporary name, and renames them when they are complete.

They are flushed to the disk before they are renamed.

A process that is killed while it writes leaves a file of a name that begins with `REMAINS`; the
next process that writes the same file or folder replaces it.

Not every file system can do what others do (network shares, FUSE): what is for safety or comfort
alone is left out there, and said once.
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryFile

from filelock import BaseFileLock, FileLock, SoftFileLock

from torch_thor.errors import explaining, require
from torch_thor.printing import print_message

REMAINS = ".writing-"  # the prefix of the names of incomplete files and folders
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_OFFERED = {
    errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EBADF,
    errno.EPERM, errno.EACCES,
}  # fmt: skip
_told: set[str] = set()


def remedy_for(error: BaseException) -> str:
    """Return what to do about a file that cannot be written."""
    # Safetensors tells it in an error of its own.
    is_full = getattr(error, "errno", None) in _FULL or os.strerror(errno.ENOSPC) in str(error)
    first = "free some disk space" if is_full else "check the path, its permissions and its disk"
    return f"{first}, then continue with --resume"


@contextmanager
def if_offered(what: str) -> Iterator[None]:
    """Leave out of the block what the file system does not offer, and say so once."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
        if what not in _told:
            _told.add(what)
            reason = error.strerror or error
            print_message(f"this file system cannot {what} ({reason}): the work goes on without it")


def locked(path: Path) -> BaseFileLock:
    """Return the lock of a file, held, in a way that the file system offers.

    It is free again when this process ends, however it ends.

    Raises:
        Timeout: If another process holds it.
    """
    kind: type[BaseFileLock] = SoftFileLock  # its file names the process, which may have died
    with if_offered("lock files"):
        _lock_and_release(path.parent)
        kind = FileLock
    # filelock releases the lock in forked children, so a worker that outlives its parent does not
    # hold it
    lock = kind(path, blocking=False)
    lock.acquire()
    return lock


def _lock_and_release(folder: Path) -> None:
    """Raise the error of a file system that cannot lock files."""
    with suppress(ImportError):  # of Windows, where files are locked in another way
        import fcntl

        with TemporaryFile(dir=folder, prefix=REMAINS) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Replace a file when the block has written it completely.

    If the block raises an error, the old file stays.

    Args:
        path: The file; its folder must exist.
        shared: Whether several processes may write it at the same time. Each then uses a temporary
            name of its own, and the file is that of the process that finishes last.

    Yields:
        The path for the block to write, in the same folder and with the same suffix.
    """
    token = f"{secrets.token_hex(4)}-" if shared else ""
    temporary = path.with_name(f"{REMAINS}{token}{path.name}")
    try:
        yield temporary
        flush(temporary)
        temporary.rename(path)
    except Exception:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Replace a folder when the block has filled it completely.

    If the block raises an error, the old folder stays.

    Args:
        path: The folder; its parent folder must exist.

    Yields:
        The path of a new, empty folder for the block to fill with files.
    """
    temporary = path.with_name(f"{REMAINS}{path.name}")
    shutil.rmtree(temporary, ignore_errors=True)  # a process that was killed may have left it
    temporary.mkdir()
    try:
        yield temporary
        for file in (*temporary.iterdir(), temporary):
            flush(file)
        # a folder cannot be renamed to the name of one that has files
        shutil.rmtree(path, ignore_errors=True)
        temporary.rename(path)
        flush(path.parent)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_text(path: Path, text: str, *, shared: bool = False) -> None:
    """Replace a text file by a complete new one in UTF-8; its folder must exist.

    `shared` is as for `whole_file`.
    """
    with whole_file(path, shared=shared) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Wait until a file, or the list of the files of a folder, is on the disk."""
    with if_offered("flush folders to the disk") if path.is_dir() else nullcontext():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def writing(path: Path, remedy: str | None = None) -> AbstractContextManager[None]:
    """Convert an `OSError`, as of a full disk, into a `UserError` with path, reason and remedy."""
    return explaining(
        OSError,
        lambda error: (
            f"{path} cannot be written ({error.strerror or error}): {remedy or remedy_for(error)}"
        ),
    )


def check_place(folder: Path, option: str = "--out") -> None:
    """Refuse, before any work is done, a folder that cannot be created or written to.

    Nothing is changed.
    """
    places = (folder, *folder.absolute().parents)
    existing = next(place for place in places if place.exists() or place.is_symlink())
    below = "" if existing == folder else f" (which {folder} would be in)"
    usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    is_file = "is a file" if existing.exists() else "is a link to nothing"
    why = "cannot be written to" if existing.is_dir() else is_file
    require(
        usable, f"{option} {folder}: {existing} {why}{below}: choose another folder with {option}"
    )
