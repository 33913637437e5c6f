"""The raw data of a figure: one JSON file with the runs, the settings, and the description of the machine.

A figure is measured run by run, and the file is written after each run, so an interrupted measurement can be continued
with the missing runs. `RawFile` is the store of these runs. A checksum detects a file that is incomplete or was
changed by hand.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_thor.bench.stores import key_of, write_whole
from torch_thor.training.checkpoint import digest
from torch_thor.training.errors import UserError, require

FORMAT = 1
DIGITS = 6  # the number of significant digits of stored numbers
MOST_NAMED = 6  # the largest number of differences that an error names


@dataclass
class RawData:
    """The raw data of a figure.

    Args:
        figure: The name of the figure.
        settings: The settings of the measurement, as JSON values.
        machine: The description of the machine.
        runs: The finished runs; the entry `job` of each identifies it.
    """

    figure: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)

    def run(self, **job: Any) -> dict[str, Any] | None:
        """Look up a run."""
        return next((run for run in self.runs if run["job"] == job), None)

    def only(self, jobs: Sequence[Mapping[str, Any]]) -> "RawData":
        """Return the same data with only some of the runs."""
        found = [run for job in jobs if (run := self.run(**job)) is not None]
        assert len(found) == len(jobs)
        return replace(self, runs=found)

    def chosen(self, **part: Any) -> list[dict[str, Any]]:
        """Return the finished runs whose jobs have given values."""
        return [run for run in self.runs if part.items() <= run["job"].items()]

    def write(self, path: Path) -> None:
        """Write the file; an existing one is replaced when the new one is complete."""
        lines = {"format": FORMAT, "checksum": digest(asdict(self)), **asdict(self)}
        text = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in lines.items())
        write_whole(path, f"{{{text}}}\n", "choose another folder with --out")


@dataclass
class RawFile:
    """The store of the runs of a figure; the entry `job` of a result identifies the run.

    Args:
        raw: The raw data so far.
        path: The file.
    """

    raw: RawData
    path: Path

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self.path.parent

    def holds(self, key: str) -> bool:
        """Return whether a run is finished."""
        return any(key_of(run["job"]) == key for run in self.raw.runs)

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Add a run and write the file."""
        assert key_of(result["job"]) == key
        self.raw.runs.append(dict(result))
        self.raw.write(self.path)
        for ending in (".png", ".md"):  # they show other data, and are made again when these are complete
            self.path.with_suffix(ending).unlink(missing_ok=True)


def plain(values: Any) -> Any:
    """Convert values into the form in which JSON stores them."""
    return json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.{DIGITS}g}"))


def read(path: Path, figure: str) -> RawData | None:
    """Read raw data."""
    remedy = "measure anew with --overwrite, or choose another folder with --out"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): {remedy}") from error
    require(
        isinstance(content, dict) and content.get("format") == FORMAT,
        f"{path} does not hold raw data of a figure in format {FORMAT}: {remedy}",
    )
    parts = {key: value for key, value in content.items() if key not in {"format", "checksum"}}
    require(content.get("checksum") == digest(parts), f"{path} is damaged, its checksum does not fit: {remedy}")
    require(parts["figure"] == figure, f"{path} holds figure {parts['figure']}, not {figure}: {remedy}")
    return RawData(**parts)


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe the differences between two mappings."""
    before, now = dict(_flat(old)), dict(_flat(new))
    found = [
        f"{key}: {before.get(key)} -> {now.get(key)}" for key in {**before, **now} if before.get(key) != now.get(key)
    ]
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more


def _lines(value: Any) -> str:
    """Format a list with one line per item, so that files of many runs can be read and compared."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        yield prefix.removesuffix("."), tree
        return
    for name, branch in tree.items():
        yield from _flat(branch, f"{prefix}{name}.")
