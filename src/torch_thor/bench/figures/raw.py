"""The raw data of a figure: one JSON file with the settings and the machine that it was measured with.

A figure is measured run by run, and the file is written anew after each one: a measurement that was interrupted goes on
with the runs that are missing. `RawFile` is the store of these runs. A checksum tells a file that was cut short or
changed by hand.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch_thor.bench.stores import key_of
from torch_thor.training.checksums import digest
from torch_thor.training.errors import UserError, require
from torch_thor.training.output_files import write_whole

FORMAT = 1
DIGITS = 6  # significant ones that a number keeps
MOST_NAMED = 6  # differences in one error


@dataclass
class RawData:
    """What was measured.

    Args:
        figure: The figure's name.
        settings: What it was measured with: plain JSON values.
        machine: What it was measured on.
        runs: One mapping for each run done; `job` says which one it is.
    """

    figure: str
    settings: dict[str, Any]
    machine: dict[str, Any]
    runs: list[dict[str, Any]] = field(default_factory=list)

    def run(self, **job: Any) -> dict[str, Any] | None:
        """Look a run up.

        Args:
            **job: Which one.

        Returns:
            The run, or `None` if it is not done yet.
        """
        return next((run for run in self.runs if run["job"] == job), None)

    def only(self, jobs: Sequence[Mapping[str, Any]]) -> "RawData":
        """Return the same data with only some of the runs.

        Args:
            jobs: Which; each one is done.

        Returns:
            Raw data with these runs, in this order.
        """
        found = [run for job in jobs if (run := self.run(**job)) is not None]
        assert len(found) == len(jobs)
        return replace(self, runs=found)

    def chosen(self, **part: Any) -> list[dict[str, Any]]:
        """Return the finished runs of some kind.

        Args:
            **part: What their jobs have in common.

        Returns:
            The runs, in the order in which they were done.
        """
        return [run for run in self.runs if part.items() <= run["job"].items()]

    def write(self, path: Path) -> None:
        """Write the file as a whole: it is renamed into its place when it is complete.

        Args:
            path: The file.
        """
        lines = {"format": FORMAT, "checksum": digest(asdict(self)), **asdict(self)}
        text = ",\n".join(f"{json.dumps(key)}: {_lines(value)}" for key, value in lines.items())
        write_whole(path, f"{{{text}}}\n", "choose another folder with --out")


@dataclass
class RawFile:
    """The store of a figure's runs; a result says in `job` which run it is.

    Args:
        raw: What is there so far.
        path: The file.
    """

    raw: RawData
    path: Path

    @property
    def folder(self) -> Path:
        """The folder of the file."""
        return self.path.parent

    def holds(self, key: str) -> bool:
        """Tell whether a run is done.

        Args:
            key: Of its job, see `stores.key_of`.

        Returns:
            True if it is.
        """
        return any(key_of(run["job"]) == key for run in self.raw.runs)

    def keep(self, key: str, result: Mapping[str, Any]) -> None:
        """Add a run and write the file.

        Args:
            key: Of its job, see `stores.key_of`.
            result: The run.
        """
        assert key_of(result["job"]) == key
        self.raw.runs.append(dict(result))
        self.raw.write(self.path)
        for ending in (".png", ".md"):  # of other data, until these are complete
            self.path.with_suffix(ending).unlink(missing_ok=True)


def plain(values: Any) -> Any:
    """Turn values into what JSON gives back.

    Args:
        values: Mappings, sequences, text and numbers.

    Returns:
        The same with lists for sequences, text for keys and numbers of six significant digits.
    """
    return json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.{DIGITS}g}"))


def read(path: Path, figure: str) -> RawData | None:
    """Read raw data.

    Args:
        path: The file.
        figure: Whose data it must be.

    Returns:
        The data, or `None` if there is no such file.

    Raises:
        UserError: If the file is damaged, or belongs to something else.
    """
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
    """Say in what two mappings differ.

    Args:
        old: Plain JSON values.
        new: The same.

    Returns:
        `key: old -> new; ...`, empty if they are equal.
    """
    before, now = dict(_flat(old)), dict(_flat(new))
    found = [
        f"{key}: {before.get(key)} -> {now.get(key)}" for key in {**before, **now} if before.get(key) != now.get(key)
    ]
    more = f"; and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return "; ".join(found[:MOST_NAMED]) + more


def _lines(value: Any) -> str:
    """Write a list with a line per item, so that people can read and compare files of many runs."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        yield prefix.removesuffix("."), tree
        return
    for name, branch in tree.items():
        yield from _flat(branch, f"{prefix}{name}.")
