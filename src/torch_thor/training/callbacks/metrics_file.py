"""`metrics.jsonl`: a line for each step, each layer that a step refreshed, and each evaluation."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from torch_thor.files import whole_file
from torch_thor.training.engine.history import EvalPoint, History, Point, RefreshPoint, StepPoint, from_lines, to_line
from torch_thor.training.engine.loop import Callback, Run
from torch_thor.training.errors import UserError
from torch_thor.training.output_files import writing


class MetricsFile(Callback):
    """Writes `metrics.jsonl`: a line for each step, each layer that a step refreshed, and each evaluation.

    A resumed run first drops the lines that are newer than its checkpoint. Every method raises a `UserError` where the
    file cannot be written.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def before_training(self, run: Run) -> None:
        """Write the points that the run already has, then open the file to append more.

        Args:
            run: The training.
        """
        points = run.record.points()
        with writing(self.path):
            with whole_file(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
                file.writelines(_line(point) for point in points)
            self._file = self.path.open("a", encoding="utf-8")

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Write the step.

        Args:
            run: The training.
            point: What the step measured.
        """
        self._write(point)

    def after_refresh(self, run: Run, points: Sequence[RefreshPoint]) -> None:
        """Write what was decided, layer by layer.

        Args:
            run: The training.
            points: What was decided.
        """
        for point in points:
            self._write(point)

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Write the evaluation.

        Args:
            run: The training.
            point: What the evaluation measured.
        """
        self._write(point)

    def sync(self) -> None:
        """Flush to the disk: a checkpoint must never know more steps than this file."""
        assert self._file is not None
        with writing(self.path):
            _flush(self._file)

    def content(self) -> bytes:
        """Return the content of the file up to the latest `sync`.

        Returns:
            Its bytes.
        """
        with writing(self.path):
            return self.path.read_bytes()

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            with writing(self.path):
                file.close()

    def _write(self, point: Point) -> None:
        assert self._file is not None
        with writing(self.path):
            self._file.write(_line(point))


def _line(point: Point) -> str:
    return json.dumps(to_line(point), allow_nan=False) + "\n"


def _flush(file: TextIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def read_metrics(path: Path) -> History:
    """Read `metrics.jsonl`.

    Args:
        path: The file.

    Returns:
        Its record; a last line that a killed run left unfinished is not in it.

    Raises:
        UserError: If the file cannot be read.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): start again with --overwrite or --out") from error
    return parse_metrics(content, path)


def parse_metrics(content: bytes, path: Path) -> History:
    """Read the content of a `metrics.jsonl`.

    Args:
        content: The bytes.
        path: Where they are from.

    Returns:
        The record; a last line that a killed run left unfinished is not in it.

    Raises:
        UserError: If a line is no metrics line.
    """
    try:
        lines = content.decode("utf-8").split("\n")[:-1]  # what follows the last newline is unfinished
        return from_lines([json.loads(line) for line in lines])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): start again with --overwrite or --out") from error


def as_written_now(content: bytes, path: Path) -> bytes:
    """Convert the lines of an older version to those of this one.

    Args:
        content: The bytes of a `metrics.jsonl`.
        path: Where they are from.

    Returns:
        The bytes of the same points.
    """
    return "".join(_line(point) for point in parse_metrics(content, path).points()).encode("utf-8")
