"""Record the golden runs anew: `python tests/golden/record.py [--harmless REASON] [NAME ...]`.

All are recorded where none is named. It says what has changed. That should be what you meant to
change: commit the files by themselves, and say why.

Where a run computes other bits on the machine that recorded it, the number of its optimizer rises
in numbers.json, and rows of benchmarks that carry the former number are stale. On another machine
rounding differs too, so there no number rises. A small move of the losses may be declared
harmless: then no number rises either, and the reason is kept beside the numbers.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from golden import compare
from golden.runs import RUNS, RUNS_OF, UnavailableError, end_ranks, settled

# The largest relative move of the first loss that differs that may be declared harmless: about
# 1e-7, one rounding in float32.
HARMLESS = 2**-23


def run(name):
    """Make a run; return its content, or None where its file stays, and what there is to say."""
    try:
        with settled():
            now = compare.content_of(RUNS[name]())
    except UnavailableError as error:
        return None, f"{name}: left out, its file stays as it is: {error}"
    golden = compare.read(name)
    if golden is None:
        return now, f"{name}: new, {len(now['losses'])} steps"
    moved = compare.other_machine(golden, now)
    # as on one machine: what is written is compared bit for bit from now on
    here = {**golden, "fingerprint": now["fingerprint"]}
    lines = compare.differences(name, here, now)
    if not lines and not moved:
        return None, f"{name}: unchanged"
    if moved:
        found = f"{name}: recorded on another machine, so no number rises: {'; '.join(moved)}"
        lines = [found, *(lines or [f"{name}: the same bits"])]
    return now, "\n".join(lines)


def moves_of(contents):
    """The move of the first other loss of each run that computes other bits on the same machine."""
    found = {}
    for name, now in contents.items():
        golden = compare.read(name)
        if golden is None or compare.other_machine(golden, now):
            continue
        if compare.computed_differences(name, golden, now):
            found[name] = compare.move_of_losses(golden, now)
    return found


def settle(moves, reason):
    """Raise the number of each optimizer whose runs moved, or keep why the moves are harmless."""
    path = compare.FOLDER / "numbers.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    if reason:
        kept["harmless"].append({"date": f"{date.today()}", "reason": reason, "moves": moves})
        print(f"declared harmless: {', '.join(moves)}")
    for optimizer, own in {} if reason else RUNS_OF.items():
        if not moves.keys().isdisjoint(own):
            kept["numbers"][optimizer] += 1
            print(f"{optimizer}: its number is now {kept['numbers'][optimizer]}")
    path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def main(words):
    """Make the runs, then write the files of those that changed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"of {', '.join(RUNS)}")
    parser.add_argument(
        "--harmless", metavar="REASON", help=f"the first other loss moves by {HARMLESS:.1e} at most"
    )
    given, contents = parser.parse_args(words), {}
    if unknown := [name for name in given.names if name not in RUNS]:
        sys.exit(f"no run is called {', '.join(unknown)}: there are {', '.join(RUNS)}")
    for name in given.names or RUNS:
        now, told = run(name)
        print(told, flush=True)
        if now is not None:
            contents[name] = now
    end_ranks()
    moves = moves_of(contents)
    if given.harmless and (large := {name: by for name, by in moves.items() if by > HARMLESS}):
        by = ", ".join(f"{name} by {by:.1e}" for name, by in large.items())
        most = f"the first other loss may move by {HARMLESS:.1e} at most, and here that of {by}"
        sys.exit(f"not harmless: {most}. Nothing is written: without --harmless the numbers rise")
    for name, now in contents.items():
        compare.write(name, now)
    if moves:
        settle(moves, given.harmless)
    elif given.harmless:
        print("nothing is declared harmless: no run computes other bits on its machine")


if __name__ == "__main__":
    main(sys.argv[1:])
