"""What a prepared corpus says of itself: settings, versions, counts, and every file with its checksum."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch_thor.training.checksums import intact, sealed, sha256
from torch_thor.training.errors import require
from torch_thor.training.output_files import write_whole
from torch_thor.training.text.arrow_files import REMEDY
from torch_thor.training.text.encoding import ShardReport

MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"
FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What decides the contents of a corpus, apart from its sources.

    Args:
        vocab_size: Word pieces to train; of a tokenizer that is given it says nothing.
        lowercase: Whether case and accents are dropped.
        lengths: Lengths of examples, in tokens.
        held_out: Share of the documents that are not trained on.
        seed: Decides which documents those are.
        language: For the rules of sentence ends.
        tokenizer: SHA-256 of the tokenizer that was given; empty where it is trained.
    """

    vocab_size: int = 30522
    lowercase: bool = True
    lengths: tuple[int, ...] = (128, 512)
    held_out: float = 0.01
    seed: int = 0
    language: str = "en"
    tokenizer: str = ""

    def plain(self) -> dict[str, Any]:
        """The settings as JSON values."""
        return {**asdict(self), "lengths": list(self.lengths)}


@dataclass(frozen=True)
class Manifest:
    """A prepared corpus.

    Args:
        settings: What decided its contents.
        sources: Its files, as they were.
        vocab_size: Word pieces of its tokenizer.
        tokenizer_checksum: SHA-256 of `tokenizer.json`.
        shards: Its shards, in order.
        faults: What could not be read and is not in it.
        versions: Of what wrote it.
    """

    settings: Settings
    sources: list[dict[str, Any]]
    vocab_size: int
    tokenizer_checksum: str
    shards: list[ShardReport]
    faults: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def side(self, name: str) -> list[ShardReport]:
        """The shards of one side.

        Args:
            name: `train` or `held-out`.

        Returns:
            Those shards.
        """
        return [shard for shard in self.shards if shard.name.startswith(f"{name}-")]

    def write(self, folder: Path) -> None:
        """Write `manifest.json`; it is there when the corpus is finished.

        Args:
            folder: The corpus.
        """
        values = {"format": FORMAT, **asdict(self), "settings": self.settings.plain(), "totals": totals(self.shards)}
        plain = json.loads(json.dumps(values))  # lengths are keys: the checksum is of what is read again, all text
        write_whole(folder / MANIFEST, json.dumps(sealed(plain), indent=1), REMEDY)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read `manifest.json`.

        Args:
            folder: A prepared corpus.

        Returns:
            The manifest.

        Raises:
            UserError: If there is none, or it was changed, or another version wrote it.
        """
        file = folder / MANIFEST
        require(file.is_file(), f"{folder} is no prepared corpus (no {MANIFEST}): make one with torch-thor prepare")
        again = "prepare the corpus again"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            values = {}
        require(isinstance(values, dict) and intact(values), f"{file} was cut short or changed: {again}")
        require(
            values["format"] == FORMAT, f"{file} has format {values['format']}, this version reads {FORMAT}: {again}"
        )
        settings = Settings(**{**values["settings"], "lengths": tuple(values["settings"]["lengths"])})
        shards = [
            ShardReport(**{**one, "examples": {int(length): n for length, n in one["examples"].items()}})
            for one in values["shards"]
        ]
        rest = {key: values[key] for key in ("sources", "vocab_size", "tokenizer_checksum", "faults", "versions")}
        return cls(settings=settings, shards=shards, **rest)

    def check_files(self, folder: Path) -> None:
        """Compare every file with its checksum.

        Args:
            folder: The corpus.

        Raises:
            UserError: If a file is missing or has changed.
        """
        files = {TOKENIZER: self.tokenizer_checksum}
        for shard in self.shards:
            files |= shard.checksums
        for name, checksum in files.items():
            file = folder / name
            require(file.is_file(), f"{file} is missing: prepare the corpus again")
            require(sha256(file) == checksum, f"{file} was cut short or changed: prepare the corpus again")


def totals(shards: Sequence[ShardReport]) -> dict[str, dict[str, Any]]:
    """Add up what shards hold.

    Args:
        shards: Shards of both sides.

    Returns:
        Documents, sentences, tokens and examples of each side.
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
