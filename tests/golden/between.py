"""Compare the golden runs of two commits on this machine, bit for bit:
`python tests/golden/between.py OLD NEW [RUN]*`.

Each commit trains with its own tests and its own `src`, in a worktree of its own that is removed
afterwards. Changes that are not committed are in none: name `$(git stash create)` for them. Nothing
recorded is read or written. The exit status is 1 where a run differs.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parents[1]))

from golden.compare import computed_differences  # noqa: E402

TRAIN = """
import json, sys
sys.path.insert(0, "tests")
from golden.compare import content_of
from golden.runs import RUNS, UnavailableError, end_ranks, settled
found = {}
for name in sys.argv[2:] or RUNS:
    if name not in RUNS:
        continue
    try:
        with settled():
            found[name] = content_of(RUNS[name]())
    except UnavailableError as error:
        print(f"{name}: left out: {error}", flush=True)
end_ranks()
json.dump(found, open(sys.argv[1], "w"))
"""


def runs_of(commit, names):
    """Train the golden runs of a commit: name to what came of each."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        tree, result = Path(folder) / "tree", Path(folder) / "runs.json"
        subprocess.run([*git, "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
            words = [sys.executable, "-c", TRAIN, str(result), *names]
            subprocess.run(words, cwd=tree, env=environment, check=True)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
        return json.loads(result.read_text(encoding="utf-8"))


def main(old, new, *names):
    """Print the first difference of each run, and return the exit status."""
    before, after = runs_of(old, names), runs_of(new, names)
    code = 0
    for name in names or {**before, **after}:
        both = ((old, before), (new, after))
        if missing := [commit for commit, runs in both if name not in runs]:
            lines = [f"{name}: no such run in {' and '.join(missing)}"]
        else:
            lines = computed_differences(name, before[name], after[name])
        print("\n".join(lines) or f"{name}: the same bits, {len(after[name]['losses'])} steps")
        code = max(code, bool(lines))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 2 else __doc__)
