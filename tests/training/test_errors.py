"""The line of an error that is shown."""

import pytest

from torch_thor.training.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (RuntimeError("\n  failed:\n  because"), "failed"),
        (AssertionError(), "AssertionError"),
        (ValueError("\n"), "ValueError"),
        (KeyError("key"), "'key'"),
    ],
)
def test_the_first_line_of_an_error(error, line):
    assert first_line(error) == line
