"""Memory and speed of `torch-thor prepare` on synthetic Wikipedia dumps of several sizes.

    python benchmarks/prepare_memory.py                    # 10 MB and 1 GB of XML, two worker processes
    python benchmarks/prepare_memory.py --sizes 10 100     # other sizes, in MB
    python benchmarks/prepare_memory.py --table            # prints the table from the raw data only

The benchmark runs the command itself. Ten times per second it adds up the proportional set sizes (PSS, from
/proc/PID/smaps_rollup) of all its processes, so memory that several processes share is counted once. Sizes are those
of the uncompressed XML. The dump is compressed like Wikipedia's multi-stream files (wikipedia_dump.py).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_thor.bench import Folder, describe, write_json, write_tables
from torch_thor.bench.markdown import table
from torch_thor.training.text.corpus import TOKENIZER
from wikipedia_dump import write_dump

STORE = Folder(Path(__file__).parent / "results" / "prepare_memory")
STAGES = ("cleaning", "tokenizer", "encoding")
INTERVAL = 0.1  # seconds between two samples
KEPT = 300  # points of the series of samples that are stored, each the largest of its span
MB = 10**6


def process_tree(root: int) -> Iterator[int]:
    """Find a process and all that descend from it.

    Args:
        root: Its number.

    Yields:
        Numbers of processes.
    """
    found = [root]
    for one in found:
        yield one
        try:
            for thread in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (thread / "children").read_text().split())
        except OSError:  # it has ended
            continue


def proportional_set_size(process: int) -> int:
    """Read how much memory a process takes, its share of what it shares with others included.

    Args:
        process: Its number.

    Returns:
        Bytes; 0 where the process has ended.
    """
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def watch(words: Sequence[str], tokenizer: Path) -> dict[str, Any]:
    """Run the command, and note what its stages take.

    Args:
        words: The command.
        tokenizer: The file that it writes at the end of the second stage.

    Returns:
        For each stage its `seconds` and `peak` (bytes); `peak` of all; `samples`, (seconds, bytes) each.
    """
    ends: dict[str, float] = {}
    lines: list[str] = []
    started = time.monotonic()
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )

    def read() -> None:
        for line in process.stdout or ():
            lines.append(line)
            if "left out" in line:  # is said at the end of the first stage, also if nothing was
                ends.setdefault("cleaning", time.monotonic() - started)

    reader = threading.Thread(target=read)
    reader.start()
    samples: list[tuple[float, int]] = []
    while process.poll() is None:
        memory = sum(map(proportional_set_size, process_tree(process.pid)))
        samples.append((time.monotonic() - started, memory))
        if tokenizer.exists():
            ends.setdefault("tokenizer", time.monotonic() - started)
        time.sleep(INTERVAL)
    reader.join()
    ends["encoding"] = time.monotonic() - started
    if process.returncode or set(ends) != set(STAGES):
        raise SystemExit(f"{' '.join(words)} failed:\n{''.join(lines)}")
    stages, begin = {}, 0.0
    for stage in STAGES:
        memory = max((own for second, own in samples if begin <= second <= ends[stage]), default=0)
        stages[stage] = {"seconds": ends[stage] - begin, "peak": memory}
        begin = ends[stage]
    span = max(1, len(samples) // KEPT)
    series = [max(samples[i : i + span], key=lambda sample: sample[1]) for i in range(0, len(samples), span)]
    return {
        "peak": max(memory for _, memory in samples),
        "seconds": time.monotonic() - started,
        "stages": stages,
        "samples": [(round(second, 1), memory) for second, memory in series],
    }


def measure(megabytes: int, workers: int, scratch: Path) -> dict[str, Any]:
    """Write a dump, and prepare it.

    Args:
        megabytes: Its size.
        workers: Worker processes.
        scratch: Where the dump and the corpus go.

    Returns:
        The result.
    """
    dump = scratch / f"{megabytes}.xml.bz2"
    size = write_dump(dump, megabytes * MB)
    out = scratch / f"corpus-{megabytes}"
    words = ["prepare", str(dump), "--out", str(out), "--workers", str(workers)]
    found = watch([sys.executable, "-m", "torch_thor", *words], out / TOKENIZER)
    return {
        "machine": describe(),
        "megabytes": megabytes,
        "workers": workers,
        "bytes": size,
        "compressed": dump.stat().st_size,
        "load": os.getloadavg()[2],  # of the last quarter of an hour: other programs slow it down
        **found,
    }


def rows(results: Sequence[dict[str, Any]]) -> str:
    """Write the table.

    Args:
        results: Of :func:`measure`, the smallest dump first.

    Returns:
        Markdown.
    """
    cells = []
    for one in results:
        stages = [
            f"{stage['peak'] / MB:.0f} MB, {stage['seconds']:.0f} s ({one['bytes'] / MB / stage['seconds']:.2f} MB/s)"
            for stage in (one["stages"][name] for name in STAGES)
        ]
        ratio = one["peak"] / results[0]["peak"]
        cells.append([f"{one['megabytes']} MB", f"{one['peak'] / MB:.0f} MB", f"{ratio:.2f}", *stages])
    return table(["XML", "peak", "over the first", *STAGES], cells)


def main() -> None:
    """Measure what is missing, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 1000], metavar="MB")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="for dumps and corpora (default: a temporary folder)")
    parser.add_argument("--table", action="store_true", help="the table alone, from the raw data")
    options = parser.parse_args()
    for megabytes in [] if options.table else options.sizes:
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            found = measure(megabytes, options.workers, Path(scratch))
        write_json(STORE.file(f"{megabytes}MB"), found)
    files = sorted(STORE.folder.glob("*MB.json"), key=lambda file: int(file.stem[:-2]))
    text = rows([STORE.read(file.stem) for file in files])
    write_tables(STORE.folder, text)
    print(text)


if __name__ == "__main__":
    main()
