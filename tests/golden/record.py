"""Record the golden runs anew: `python tests/golden/record.py [NAME ...]`, all of them where none
is named.

It says what has changed. That should be what you meant to change: commit the files by themselves,
and say why.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.compare import FOLDER, content_of, differences, other_machine, read
from golden.runs import RUNS, UnavailableError, end_ranks, settled


def record(name):
    """Make a run and write its file, one value a line, unless nothing has changed; return what
    there is to say.
    """
    try:
        with settled():
            now = content_of(RUNS[name]())
    except UnavailableError as error:
        return f"{name}: left out, its file stays as it is: {error}"
    golden = read(name)
    moved = [] if golden is None else other_machine(golden, now)
    # as on one machine: what is written is compared bit for bit from now on
    lines = (
        []
        if golden is None
        else differences(name, {**golden, "fingerprint": now["fingerprint"]}, now)
    )
    if golden is not None and not lines and not moved:
        return f"{name}: unchanged"
    (FOLDER / f"{name}.json").write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    if golden is None:
        return f"{name}: new, {len(now['losses'])} steps"
    told = [f"{name}: recorded on another machine: {'; '.join(moved)}"] if moved else []
    return "\n".join([*told, *(lines or [f"{name}: the same bits"])])


if __name__ == "__main__":
    names = sys.argv[1:]
    if unknown := [name for name in names if name not in RUNS]:
        sys.exit(f"no run is called {', '.join(unknown)}: there are {', '.join(RUNS)}")
    for name in names or RUNS:
        print(record(name), flush=True)
    end_ranks()
