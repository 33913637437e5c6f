"""`torch-thor prepare`: converts dumps and text files to a corpus to train a masked language model.

Processes clean units of the source text to files of documents; then a tokenizer is trained and the
documents are encoded, by threads of the library. All files are written under other names first. A
preparation can be stopped at any time, and the same command continues it: finished units and a
finished tokenizer stay.
"""

import hashlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import Progress

from torch_thor import __version__
from torch_thor.errors import UserError, require
from torch_thor.files import REMAINS, locked, whole_file, write_text
from torch_thor.training.text.corpus import (
    FORMAT,
    HELD_OUT,
    MANIFEST,
    TOKENIZER,
    TRAIN,
    mapped,
    open_manifest,
    sha256,
)
from torch_thor.training.text.documents import Document, read
from torch_thor.training.text.encoding import encode, is_in_share
from torch_thor.training.text.sources import PYTHON, Source, Unit, find_sources, units
from torch_thor.training.text.wordpiece import load_tokenizer, train_tokenizer

SAMPLE = 200_000_000  # the approximate number of characters that a tokenizer is trained on, at most
_BEGUN, _CLEAN, _LOCK = "begun.json", "clean", ".lock"  # names in the folder of a corpus
_SHOWN = 20  # faults that are printed
_LIBRARIES = ("pyarrow", "tokenizers", "sentencex", "mwparserfromhell", "beautifulsoup4")
# The languages for which sentencex has rules; for others it would take those of English. It has no
# list of them.
_LANGUAGES = (
    "am", "ar", "bg", "bn", "ca", "da", "de", "el", "en", "es", "fi", "fr", "gu", "hi", "hy", "it",
    "ja", "kk", "kn",
    "ml", "mr", "my", "nl", "pa", "pl", "pt", "ru", "sk", "ta", "te", "uk",
)  # fmt: skip


def prepare(
    sources: Sequence[str],
    out: Path,
    *,
    vocab_size: int = 30522,
    lowercase: bool = True,
    lengths: Sequence[int] = (128, 512),
    held_out: float = 0.01,
    seed: int = 0,
    language: str = "en",
    tokenizer: Path | None = None,
    workers: int = 1,
    max_faults: float = 0.01,
    console: Console | None = None,
) -> dict[str, Any]:
    """Prepare a corpus, or continue an unfinished preparation.

    Args:
        sources: Wikipedia dumps, text and HTML files, folders of such files, or `python`.
        out: The folder to write the corpus to.
        vocab_size: Number of word pieces of a tokenizer that is trained.
        lowercase: Whether text is converted to lower case and accents are removed.
        lengths: The lengths of the examples, in tokens.
        held_out: The fraction of the documents that are held out from training.
        seed: The seed for the choice of these documents.
        language: The language code that selects the rules for splitting sentences.
        tokenizer: A `tokenizer.json` or `vocab.txt`. With `None`, a tokenizer is trained.
        workers: The number of processes, which does not change the corpus.
        max_faults: The largest fraction of the documents that may be unreadable.
        console: Where progress and the result are printed; `None` prints nothing.

    Returns:
        The manifest of the corpus.

    Raises:
        UserError: If a value is out of range, a source is missing or has changed since the
            preparation was started, too many documents are unreadable, the corpus is empty or
            cannot be written, or another process is preparing it.
    """
    console = console or Console(file=StringIO())
    unequal = 0 < len(lengths) == len(set(lengths)) and min(lengths) >= 16
    for holds, rule in (
        (workers >= 1, f"--workers {workers} must be 1 or more"),
        (vocab_size >= 100, f"--vocab-size {vocab_size} must be 100 or more"),
        (0 < held_out < 1, f"--held-out {held_out} must lie between 0 and 1: it is a share"),
        (0 <= max_faults <= 1, f"--max-faults {max_faults} must lie in [0, 1]: it is a share"),
        (
            unequal,
            f"--seq-len {','.join(map(str, lengths))} must be different lengths of 16 tokens or "
            "more",
        ),
        (
            language in _LANGUAGES,
            f"--language {language}: give the nearest of {', '.join(_LANGUAGES)}",
        ),
    ):
        require(holds, rule)
    found = find_sources(sources, partial(_say, console))
    given = None if tokenizer is None else load_tokenizer(tokenizer, lowercase).to_str(pretty=True)
    settings = {
        "vocab_size": vocab_size, "lowercase": lowercase, "lengths": list(lengths),
        "held_out": held_out, "seed": seed,
        "language": language, "tokenizer": given and hashlib.sha256(given.encode()).hexdigest(),
    }  # fmt: skip
    require(not out.exists() or out.is_dir(), f"--out {out} is a file: give a folder")
    own = not out.exists() or (out / _BEGUN).exists()
    foreign = (
        [] if own else [one for one in out.iterdir() if not one.name.startswith((_LOCK, REMAINS))]
    )
    require(not foreign, f"--out {out} is not empty and holds no corpus: give another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = locked(out / _LOCK)
        try:
            return _prepare(found, out, settings, given, workers, max_faults, console)
        finally:
            lock.release()
    except Timeout as error:
        raise UserError(
            f"--out {out}: another process prepares it: wait for it, or give another --out"
        ) from error
    except OSError as error:
        raise UserError(
            f"--out {error.filename or out} cannot be written ({error.strerror or error}): make "
            "room or mend its permissions, then give the same command again: what is finished stays"
        ) from error


def _prepare(
    sources: list[Source],
    out: Path,
    settings: dict[str, Any],
    given: str | None,
    workers: int,
    max_faults: float,
    console: Console,
) -> dict[str, Any]:
    begun = {"format": FORMAT, **settings, "sources": list(map(asdict, sources))}
    if (out / _BEGUN).exists():
        before = json.loads((out / _BEGUN).read_text(encoding="utf-8"))
        changed = [key for key in begun if before.get(key) != begun[key]]
        rule = (
            f"{out} was begun with other {', '.join(changed)}: give the same as in its {_BEGUN}, "
            "or another --out"
        )
        require(not changed, rule)
    write_text(out / _BEGUN, json.dumps(begun, indent=1))
    if (out / MANIFEST).exists():
        manifest = open_manifest(out)
        _say(console, f"{out} is finished already, and whole; nothing was done")
        return manifest
    (out / _CLEAN).mkdir(exist_ok=True)
    with Progress(console=console) as progress:
        files, faults = _clean(sources, out / _CLEAN, settings, workers, max_faults, progress)
        for fault in faults[:_SHOWN]:
            _say(console, f"left out: {fault}")
        _say(
            console,
            f"left out: {len(faults)} in all, listed in {MANIFEST}"
            if faults
            else "nothing was left out",
        )
        if not (out / TOKENIZER).exists():
            progress.add_task("tokenizer", total=None)
            write_text(out / TOKENIZER, given or _trained(files, settings))
        totals = encode(files, out, settings, progress)
    for side, counted in totals.items():
        _say(
            console,
            f"{side}: "
            + ", ".join(f"{counted[key]} {key}" for key in ("documents", "sentences", "tokens")),
        )
    manifest = {
        **begun,
        "totals": totals,
        "faults": faults,
        "versions": {"torch-thor": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "sha256": {name: sha256(out / name) for name in (TOKENIZER, TRAIN, HELD_OUT)},
    }
    # the corpus is finished when it exists
    write_text(out / MANIFEST, json.dumps(manifest, indent=1))
    shutil.rmtree(out / _CLEAN, ignore_errors=True)
    _say(console, f"the corpus is in {out}")
    return manifest


def _clean(
    sources: list[Source],
    folder: Path,
    settings: dict[str, Any],
    workers: int,
    max_faults: float,
    progress: Progress,
) -> tuple[list[Path], list[str]]:
    """Clean the units that are not cleaned yet; returns the files of all units, and the faults."""
    size = max(1, sum(source.size for source in sources))
    bar = progress.add_task("cleaning", total=size)
    found = units(
        sources, lambda path: progress.wrap_file(path.open("rb"), total=size, task_id=bar)
    )
    jobs = ((unit, folder / f"{unit.number:06d}.arrow", settings["language"]) for unit in found)
    files = list(in_order(clean_unit, jobs, workers))
    tables = [mapped(file).schema for file in files]
    faults = [fault for table in tables for fault in json.loads(table.metadata[b"faults"])]
    documents = sum(int(table.metadata[b"documents"]) for table in tables)
    total = len(faults) + documents
    require(
        len(faults) <= max_faults * total,
        f"{len(faults)} of {total} documents cannot be read, and --max-faults {max_faults} allows "
        f"{int(max_faults * total)}; the first: {''.join(faults[:1])}. Mend the sources and give "
        "another --out, or raise --max-faults",
    )
    require(
        documents > 0,
        "the sources have no prose: paragraphs of five words or more, separated by blank lines (or "
        "<p> in HTML)",
    )
    progress.update(bar, completed=size)
    return files, faults


def in_order(
    work: Callable[..., Any], jobs: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[Any]:
    """Call a function with each job's arguments, few jobs at a time: they may need much memory."""
    if workers == 1:
        yield from (work(*job) for job in jobs)
        return
    pending: deque[Future[Any]] = deque()
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start) as pool:
        try:
            for job in jobs:
                pending.append(pool.submit(work, *job))
                if len(pending) == 2 * workers:
                    yield pending.popleft().result()
            yield from (future.result() for future in pending)
        except BrokenProcessPool as error:
            raise UserError(
                "a process that prepares text was ended from outside (was memory short?): give the "
                "same command again, it goes on with what is missing; fewer --workers need less "
                "memory"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _start() -> None:
    """Let a worker end with its parent process, and not by Ctrl-C."""
    # Otherwise it would wait for jobs of the parent for ever.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def clean_unit(unit: Unit, file: Path, language: str) -> Path:
    """Write the documents of a unit, as sentences, to a file, unless it exists."""
    # The metadata of the file are the faults.
    import pyarrow as pa
    from sentencex import segment

    if file.exists():
        return file
    found = [*unit.faults, *map(read, unit.pieces)]
    rows: list[dict[str, Any]] = []
    for one in found:
        if isinstance(one, Document):
            sentences = [
                text
                for whole in one.paragraphs
                for part in segment(language, whole)
                if (text := part.strip())
            ]
            rows += [{"name": one.name, "sentences": sentences}] if sentences else []
    faults = [one for one in found if isinstance(one, str)]
    facts = {"faults": json.dumps(faults), "documents": str(len(rows))}
    schema = pa.schema({"name": pa.string(), "sentences": pa.list_(pa.string())}, facts)
    with whole_file(file) as temporary, pa.ipc.new_file(str(temporary), schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return file


def _trained(files: Sequence[Path], settings: dict[str, Any]) -> str:
    import pyarrow.compute as pc

    tables = [mapped(file).read_all() for file in files]
    characters = sum(
        pc.sum(pc.utf8_length(pc.list_flatten(table["sentences"]))).as_py() or 0 for table in tables
    )
    share = SAMPLE / max(1, characters)

    def sentences() -> Iterator[str]:
        for table in tables:
            for name, own in zip(table["name"], table["sentences"], strict=True):
                if share >= 1 or is_in_share(name.as_py(), share, settings["seed"]):
                    yield from own.as_py()

    return str(
        train_tokenizer(sentences, settings["vocab_size"], settings["lowercase"]).to_str(
            pretty=True
        )
    )


def python_corpus(
    cache: Path, vocab_size: int, lengths: Sequence[int], say: Callable[[str], None]
) -> Path:
    """Return the corpus of Python's language reference in a cache, prepared there at first use."""
    facts = json.dumps([FORMAT, vocab_size, list(lengths), platform.python_version()])
    folder = cache / f"python-text-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # several processes may call this function at the same time
        if not (folder / MANIFEST).exists():
            say(f"preparing the text that Python carries, in {folder}")
            # of about 70 documents
            prepare([PYTHON], folder, vocab_size=vocab_size, lengths=lengths, held_out=0.05)
    return folder


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
