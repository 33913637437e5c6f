"""Record the golden runs anew: `python tests/golden/record.py [NAME ...]`, all of them where none is named.

It says what has changed. That should be what you meant to change: commit the files by themselves, and say why.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.compare import content_of, differences, other_machine, path_of, read, write
from golden.runs import RUNS, UnavailableError, end_ranks, settled


def record(name: str) -> str:
    """Make a run and write its file, unless nothing has changed.

    Args:
        name: The run's.

    Returns:
        What there is to say.
    """
    try:
        with settled():
            now = content_of(RUNS[name]())
    except UnavailableError as error:
        return f"{name}: left out, its file stays as it is: {error}"
    golden = read(name)
    if golden is None:
        write(name, now)
        return f"{name}: new, {len(now['losses'])} steps"
    moved = other_machine(golden, now)
    # as on one machine: what is written is compared bit for bit from now on
    lines = differences(name, {**golden, "fingerprint": now["fingerprint"]}, now)
    if not lines and not moved:
        return f"{name}: unchanged"
    write(name, now)
    told = [f"{name}: recorded on another machine: {'; '.join(moved)}"] if moved else []
    return "\n".join([*told, *(lines or [f"{name}: the same bits"])])


def main(names: list[str]) -> int:
    """Record runs, and name the files of those that are no more.

    Args:
        names: Which; empty for all.

    Returns:
        The exit status.
    """
    unknown = [name for name in names if name not in RUNS]
    if unknown:
        print(f"no run is called {', '.join(unknown)}: there are {', '.join(RUNS)}")
        return 2
    for name in names or RUNS:
        print(record(name), flush=True)
    for path in path_of("*").parent.glob("*.json"):
        if path.stem not in RUNS:
            print(f"{path.stem}: there is no such run any more; delete {path.name}")
    end_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
