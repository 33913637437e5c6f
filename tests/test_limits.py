"""The size of the optimizers and of the application: what is to stay small is counted. CONTRIBUTING says why."""

from pathlib import Path

import torch_thor

SOURCE, TESTS = Path(torch_thor.__file__).parent, Path(__file__).parent
OPTIMIZERS = ("curvature", "capture", "distributed", "optim", "split")
LINES, LONGEST = 9_000, 300  # of all files of the optimizers together, and of one file
LINES_OF_TESTS = 11_000  # of the tests beside them
APPLICATION = ("training", "tools")
LINES_OF_THE_APPLICATION = 7_500  # with the command line, without torch_thor.bench
LINES_OF_ITS_TESTS = 6_500


def lengths(root, packages=OPTIMIZERS):
    paths = [path for package in packages for path in (root / package).rglob("*.py")]
    return {path.relative_to(root).as_posix(): len(path.read_text().splitlines()) for path in paths}


def test_the_optimizers_stay_small():
    files = lengths(SOURCE)
    assert sum(files.values()) <= LINES
    assert not {name: length for name, length in files.items() if length > LONGEST}
    assert sum(lengths(TESTS).values()) <= LINES_OF_TESTS


def test_the_application_stays_small():
    files = lengths(SOURCE, APPLICATION)
    files |= {name: len((SOURCE / name).read_text().splitlines()) for name in ("cli.py", "commands.py", "files.py")}
    assert sum(files.values()) <= LINES_OF_THE_APPLICATION
    assert not {name: length for name, length in files.items() if length > LONGEST}
    tests = lengths(TESTS, APPLICATION)
    assert sum(tests.values()) + len((TESTS / "test_cli.py").read_text().splitlines()) <= LINES_OF_ITS_TESTS
