"""`python -m benchmarks WORDS` whose studies fork their processes, which so start at once."""

import multiprocessing
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.__main__ import main

    forked = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: forked
    main()
