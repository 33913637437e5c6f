"""What lies in a folder of data and is none, for images and text alike.

The names that a user has given, of a folder or a file, are never judged: only what is found inside.
"""

import os
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from typing import TypeVar

from torch_thor.errors import require

# Folders and files that systems and programs put beside those of a user, in lower case: of macOS,
# Synology, QNAP, Windows, Linux and Python. Hidden ones, as AppleDouble's ._photo.jpg, need no
# list.
_MADE = {
    "__macosx", "icon\r", "@eadir", "@tmp", "#recycle", "#snapshot", "@recycle",
    "@recently-snapshot", "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini",
    "$recycle.bin", "system volume information", "lost+found", "__pycache__",
}  # fmt: skip
T = TypeVar("T")
_SHOWN = 4  # kinds of entries in a line


def is_made_by_a_program(name: str) -> bool:
    """Return whether a file or folder of this name is hidden, or made by a system or a program."""
    return name.startswith(".") or name.lower() in _MADE


class LeftOut:
    """What is left out of a folder, counted by kind."""

    def __init__(self) -> None:
        self.made = Counter[str]()
        self.others = Counter[str]()

    def keeps(self, name: str) -> bool:
        """Return whether an entry may be data or hold any; counts it if not."""
        made = is_made_by_a_program(name)
        if made:
            self.made["._*" if name.startswith("._") else name] += 1
        return not made

    def other(self, name: str) -> None:
        """Count a file of another kind."""
        self.others[Path(name).suffix.lower() or "without a suffix"] += 1

    def parts(self, kind: str) -> list[str]:
        """Return what was left out, in words; `kind` is what other files are not."""
        return [
            f"{counts.total()} {name} ({_common(counts)})"
            for counts, name in (
                (self.made, "hidden or made by programs"),
                (self.others, f"that are no {kind}"),
            )
            if counts
        ]

    def tell(self, folder: Path | str, kind: str, say: Callable[[str], None]) -> None:
        """Say in a line what was left out, if anything."""
        if parts := self.parts(kind):
            say(f"{folder}: left out of its files and folders: {', '.join(parts)}")


def _common(counts: Counter[str]) -> str:
    shown = [f"{name.strip()} {number}" for name, number in counts.most_common(_SHOWN)]
    return ", ".join(shown + ["..."] * (len(counts) > _SHOWN))


def files_in(
    folder: str | Path, left: LeftOut, kind_of: Callable[[str, str], T | None]
) -> dict[str, T]:
    """Return the files anywhere in a folder that are data, sorted, and of which kind each is.

    Counts in `left` what is none. `kind_of` gets the folder and the name of a file, and returns
    None if it is none.

    Raises:
        UserError: If a link leads to a folder that contains it.
        OSError: If a folder in it cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    files = []
    for top, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        place = Path(top)
        require(
            not (place.is_symlink() and place.parent.resolve().is_relative_to(place.resolve())),
            f"{top} is a link to a folder that contains it, so listing would never end: remove "
            "the link",
        )
        folders[:] = filter(left.keeps, folders)
        for name in filter(left.keeps, names):
            kind = kind_of(top, name)
            if kind is None:
                left.other(name)
            else:
                files.append((top, name, kind))
    files.sort(key=itemgetter(0, 1))
    return {f"{top}{os.sep}{name}": kind for top, name, kind in files}


def refuse_a_link_to_nothing(path: Path, kind: str) -> None:
    """Refuse a link whose target is missing; `kind` is what it would have led to."""
    require(
        not path.is_symlink() or path.exists(),
        f"{path} is a link to nothing, so its {kind} would be missing: mount the disk that it "
        "leads to, or remove the link",
    )
