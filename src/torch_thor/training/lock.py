"""A file lock, so that only one process at a time writes to a folder. It is released when its process ends.

The file names the process that holds the lock, for the error message of another process.
"""

import contextlib
import os
import socket
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from torch_thor.files import REMAINS
from torch_thor.training.errors import UserError
from torch_thor.training.output_files import writing

LOCK_FILE = ".lock"


def is_foreign(path: Path) -> bool:
    """Return whether a file shows that its folder is used for something else than a new run or corpus.

    Args:
        path: The file.

    Returns:
        False for the file of a lock, and for what a process has left that was killed while it wrote.
    """
    return path.name != LOCK_FILE and not path.name.startswith(REMAINS)


class Lock:
    """A lock that is either acquired at once or refused, and that is released at the end of the `with` block.

    Args:
        path: The file of the lock.
        what: What the lock protects, for the error message.
        remedy: What the user can do if another process holds the lock, for the error message.
        remove: Whether the file is removed when the lock is released. Otherwise it remains, empty.
    """

    def __init__(self, path: Path, what: str, remedy: str, *, remove: bool = False) -> None:
        self.path, self.what, self.remedy, self.remove = path, what, remedy, remove
        # filelock releases the lock in forked children, so a worker that outlives its parent does not hold it
        self._lock = FileLock(path, blocking=False)

    def take(self) -> None:
        """Acquire the lock, unless this process holds it already. The folder of the file must exist.

        Raises:
            UserError: If another process holds the lock, or the file cannot be written.
        """
        if self._lock.is_locked:
            return
        with writing(self.path, "choose another folder with --out"):
            try:
                self._lock.acquire()
            except Timeout as error:  # a subclass of OSError
                raise UserError(f"{self.what} is in use by {self._owner()}: {self.remedy}") from error
            # written in place, because the lock is on this very file; a truncated message does no harm
            self.path.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")

    def _owner(self) -> str:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if owner := self.path.read_text(encoding="utf-8").strip():
                return owner
        return "another process"

    def __enter__(self) -> "Lock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock.is_locked:
            with contextlib.suppress(OSError):  # an error of the disk must not hide an exception of the block
                if self.remove:  # filelock notices if it has acquired the lock of a file that was removed meanwhile
                    self.path.unlink(missing_ok=True)
                else:
                    self.path.write_text("", encoding="utf-8")
            self._lock.release()
