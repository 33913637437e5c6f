"""The built-in corpus: the language reference of Python, prepared automatically when it is first used."""

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

from filelock import FileLock
from rich.console import Console

from torch_thor.training.text.manifest import FORMAT, MANIFEST, Settings
from torch_thor.training.text.preparing import Preparation, prepare
from torch_thor.training.text.sources import PYTHON

HELD_OUT = 0.05  # fraction of the documents, of which there are about seventy


def python_corpus(cache: Path, vocab_size: int, lengths: Sequence[int], say: Callable[[str], None]) -> Path:
    """Return the corpus from a cache. If the cache does not contain it, prepare it there first.

    Args:
        cache: The cache folder.
        vocab_size: The vocabulary size of the tokenizer, in word pieces.
        lengths: The lengths of the examples, in tokens; one or more.
        say: Called with a message if the corpus has to be prepared.

    Returns:
        The folder of the corpus.
    """
    settings = Settings(vocab_size=vocab_size, lengths=tuple(sorted(set(lengths))), held_out=HELD_OUT)
    facts = json.dumps({**settings.plain(), "format": FORMAT, "python": platform.python_version()}, sort_keys=True)
    folder = cache / f"python-text-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # several processes may call this function at the same time
        if not (folder / MANIFEST).exists():
            say(f"preparing the text that Python carries, in {folder}")
            prepare(Preparation((PYTHON,), folder, settings), Console(file=StringIO()))
    return folder
