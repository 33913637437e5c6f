"""What lies in a folder of data and is none, for images and text alike.

The names that a user has given, of a folder or a file, are never judged: only what is found inside.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

# Folders and files that systems and programs put beside those of a user, in lower case: of macOS,
# Synology, QNAP, Windows, Linux and Python. Hidden ones, as AppleDouble's
# ._photo.jpg, need no list.
_MADE = {
    "__macosx", "icon\r", "@eadir", "@tmp", "#recycle", "#snapshot", "@recycle",
    "@recently-snapshot", "thumbs.db", "ehthumbs.db", "ehthumbs_vista.db", "desktop.ini",
    "$recycle.bin", "system volume information", "lost+found", "__pycache__",
}  # fmt: skip
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

    def tell(self, folder: Path | str, kind: str, say: Callable[[str], None]) -> None:
        """Say in a line what was left out, if anything; `kind` is what other files are not."""
        parts = [
            f"{found.total()} {name} ({_common(found)})"
            for found, name in (
                (self.made, "hidden or made by programs"),
                (self.others, f"that are no {kind}"),
            )
            if found
        ]
        if parts:
            say(f"{folder}: left out of its files and folders: {', '.join(parts)}")


def _common(found: Counter[str]) -> str:
    shown = [f"{name.strip()} {number}" for name, number in found.most_common(_SHOWN)]
    return ", ".join(shown + ["..."] * (len(found) > _SHOWN))
