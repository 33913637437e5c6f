"""A lock on a file, so that one process at a time writes to a folder; it is released when its process ends.

The file itself remains. It names the process that holds the lock, for the error message of another process.
"""

import contextlib
import os
import socket
from pathlib import Path
from types import TracebackType

from filelock import FileLock, Timeout

from torch_thor.training.errors import UserError
from torch_thor.training.output_files import writing

LOCK_FILE = ".lock"


class Lock:
    """A lock that is taken at once or refused, and released at the end of the `with` block.

    Args:
        path: The lock's file.
        what: What it guards, for the error message.
        remedy: What to do where another process has it.
    """

    def __init__(self, path: Path, what: str, remedy: str) -> None:
        self.path, self.what, self.remedy = path, what, remedy
        # filelock's own child-after-fork handling matters here: a worker that outlives its parent holds nothing
        self._lock = FileLock(path, blocking=False)

    def take(self) -> None:
        """Take the lock, if this process does not have it yet; the file's folder must be there.

        Raises:
            UserError: If another process has it, or the file cannot be written.
        """
        if self._lock.is_locked:
            return
        with writing(self.path, "choose another folder with --out"):
            try:
                self._lock.acquire()
            except Timeout as error:  # an OSError, too
                raise UserError(f"{self.what} is in use by {self._owner()}: {self.remedy}") from error
            # in place: the lock is on this very file, and a message cut short does no harm
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
            with contextlib.suppress(OSError):  # a disk that is gone is no reason to hide what the block raised
                self.path.write_text("", encoding="utf-8")
            self._lock.release()
