"""`metrics.jsonl`: a line for each step, for each layer that was due on a refresh, and for each evaluation."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from torch_thor.files import whole_file
from torch_thor.training.engine.history import EvalPoint, History, Point, RefreshPoint, StepPoint
from torch_thor.training.engine.history_format import from_lines, to_line
from torch_thor.training.engine.loop import Callback, Run
from torch_thor.training.errors import UserError
from torch_thor.training.output_files import writing


class MetricsFile(Callback):
    """Writes `metrics.jsonl`: a line for each step, for each layer that was due on a refresh, and for each evaluation.

    A resumed run first removes the lines that are newer than its checkpoint. Every method raises a `UserError` if the
    file cannot be written.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def before_training(self, run: Run) -> None:
        """Write the points that a resumed run has already, then open the file for appending.

        Args:
            run: The training.
        """
        points = run.record.points()
        with writing(self.path):
            with whole_file(self.path) as temporary, temporary.open("w", encoding="utf-8") as file:
                file.writelines(_line(point) for point in points)
            self._file = self.path.open("a", encoding="utf-8")

    def after_step(self, run: Run, point: StepPoint) -> None:
        """Write the line of the step.

        Args:
            run: The training.
            point: The measurements of the step.
        """
        self._write(point)

    def after_refresh(self, run: Run, points: Sequence[RefreshPoint]) -> None:
        """Write a line for each layer that was due.

        Args:
            run: The training.
            points: The decisions of the trace rule.
        """
        for point in points:
            self._write(point)

    def after_evaluation(self, run: Run, point: EvalPoint) -> None:
        """Write the line of the evaluation.

        Args:
            run: The training.
            point: The metrics of the evaluation.
        """
        self._write(point)

    def sync(self) -> None:
        """Flush the file to the disk, so that a checkpoint never has more steps than this file."""
        assert self._file is not None
        with writing(self.path):
            _flush(self._file)

    def content(self) -> bytes:
        """Return the content of the file up to the latest `sync`.

        Returns:
            The bytes of the file.
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
        The record, without an incomplete last line that a killed run has left.

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
        path: The file that they are from, for the error message.

    Returns:
        The record, without an incomplete last line that a killed run has left.

    Raises:
        UserError: If a line is not a valid line of the file.
    """
    try:
        lines = content.decode("utf-8").split("\n")[:-1]  # text after the last newline is incomplete
        return from_lines([json.loads(line) for line in lines])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}): start again with --overwrite or --out") from error
