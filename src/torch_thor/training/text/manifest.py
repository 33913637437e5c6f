"""The manifest of a prepared corpus: its settings, software versions, counts, and the checksum of each file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from torch_thor.training.checksums import add_checksum, checksum_matches, sha256
from torch_thor.training.errors import require
from torch_thor.training.output_files import write_whole
from torch_thor.training.text.arrow_files import AGAIN, REMEDY
from torch_thor.training.text.encoding import ShardReport

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
FORMAT = 2


@dataclass(frozen=True)
class Settings:
    """The settings that, together with the sources, determine the contents of a corpus.

    Args:
        vocab_size: Number of word pieces of a tokenizer that is trained; has no meaning for a given tokenizer.
        lowercase: Whether text is converted to lower case and accents are removed.
        lengths: The lengths of the examples, in tokens.
        held_out: The fraction of the documents that are held out from training.
        seed: The seed for the choice of the held-out documents.
        language: The language code that selects the rules for splitting sentences.
        tokenizer: The SHA-256 checksum of the given tokenizer; empty if the tokenizer is trained.
    """

    vocab_size: int = 30522
    lowercase: bool = True
    lengths: tuple[int, ...] = (128, 512)
    held_out: float = 0.01
    seed: int = 0
    language: str = "en"
    tokenizer: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {**asdict(self), "lengths": list(self.lengths)}


@dataclass(frozen=True)
class Manifest:
    """The description of a prepared corpus.

    Args:
        settings: The settings that the corpus was prepared with.
        sources: The source files, as they were when the corpus was prepared.
        vocab_size: Number of word pieces of the tokenizer.
        tokenizer_checksum: The SHA-256 checksum of `tokenizer.json`.
        shards: The shards, in order.
        faults: Descriptions of the parts of the sources that could not be read and were left out.
        versions: The version of each software package that wrote the corpus, by name.
    """

    settings: Settings
    sources: list[dict[str, Any]]
    vocab_size: int
    tokenizer_checksum: str
    shards: list[ShardReport]
    faults: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def side(self, name: str) -> list[ShardReport]:
        """Return the shards of one side.

        Args:
            name: `train` or `held-out`.

        Returns:
            The shards of that side, in order.
        """
        return [shard for shard in self.shards if shard.name.startswith(f"{name}-")]

    def write(self, folder: Path) -> None:
        """Write `manifest.json`. The file marks the corpus as finished.

        Args:
            folder: The folder of the corpus.
        """
        values = {"format": FORMAT, **asdict(self), "settings": self.settings.plain(), "totals": totals(self.shards)}
        plain = json.loads(json.dumps(values))  # turns integer keys into strings, as they are read
        write_whole(folder / MANIFEST, json.dumps(add_checksum(plain), indent=1), REMEDY)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read `manifest.json`.

        Args:
            folder: The folder of a prepared corpus.

        Returns:
            The manifest.

        Raises:
            UserError: If the file is missing, was changed, or has another format version.
        """
        file = folder / MANIFEST
        require(file.is_file(), f"{folder} is no prepared corpus (no {MANIFEST}): make one with torch-thor prepare")
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            values = {}
        require(isinstance(values, dict) and checksum_matches(values), f"{file} was cut short or changed: {AGAIN}")
        require(
            values["format"] == FORMAT, f"{file} has format {values['format']}, this version reads {FORMAT}: {AGAIN}"
        )
        settings = Settings(**{**values["settings"], "lengths": tuple(values["settings"]["lengths"])})
        shards = [
            ShardReport(**{**one, "examples": {int(length): n for length, n in one["examples"].items()}})
            for one in values["shards"]
        ]
        rest = {key: values[key] for key in ("sources", "vocab_size", "tokenizer_checksum", "faults", "versions")}
        return cls(settings=settings, shards=shards, **rest)

    def check_files(self, folder: Path, names: Sequence[str] | None = None) -> None:
        """Compare files of the corpus with their checksums.

        Args:
            folder: The folder of the corpus.
            names: The names of the files; `None` stands for all.

        Raises:
            UserError: If a file is missing or has changed.
        """
        files = {TOKENIZER: self.tokenizer_checksum}
        for shard in self.shards:
            files |= shard.checksums
        for name in files if names is None else names:
            file = folder / name
            require(file.is_file(), f"{file} is missing: {AGAIN}")
            found = file.stat()
            require(
                _sha256(file, found.st_size, found.st_mtime_ns) == files[name],
                f"{file} was cut short or changed, because its SHA-256 is not that of {MANIFEST}: {AGAIN}",
            )


@cache
def _sha256(file: Path, size: int, modified: int) -> str:
    """Read a file once per process: the examples of all lengths share the files of the tokens."""
    return sha256(file)


def totals(shards: Sequence[ShardReport]) -> dict[str, dict[str, Any]]:
    """Add up the counts of shards.

    Args:
        shards: The shards of both sides.

    Returns:
        The number of documents, of sentences, of tokens, and of examples by length, for each side.
    """
    found: dict[str, dict[str, Any]] = {}
    for shard in shards:
        side = found.setdefault(
            shard.name.rpartition("-")[0], {"documents": 0, "sentences": 0, "tokens": 0, "examples": {}}
        )
        for key in ("documents", "sentences", "tokens"):
            side[key] += getattr(shard, key)
        for length, count in shard.examples.items():
            side["examples"][length] = side["examples"].get(length, 0) + count
    return found
