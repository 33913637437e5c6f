"""The size of the optimizers: what is to stay small is counted. CONTRIBUTING says why."""

from pathlib import Path

import torch_thor

SOURCE, TESTS = Path(torch_thor.__file__).parent, Path(__file__).parent
OPTIMIZERS = ("curvature", "capture", "distributed", "optim", "split")
LINES, LONGEST = 9_000, 300  # of all files of the optimizers together, and of one file
LINES_OF_TESTS = 11_000  # of the tests beside them


def lengths(root):
    paths = [path for package in OPTIMIZERS for path in (root / package).rglob("*.py")]
    return {path.relative_to(root).as_posix(): len(path.read_text().splitlines()) for path in paths}


def test_the_optimizers_stay_small():
    files = lengths(SOURCE)
    assert sum(files.values()) <= LINES
    assert not {name: length for name, length in files.items() if length > LONGEST}
    assert sum(lengths(TESTS).values()) <= LINES_OF_TESTS
