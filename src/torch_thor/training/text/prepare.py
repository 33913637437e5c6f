"""`torch-thor prepare`: converts text to a corpus to train a masked language model.

Processes of `datasets` read the documents of the sources, as sentences, to a cache inside the
folder of the corpus. Then a tokenizer is trained and the documents are encoded. A preparation can
be stopped at any time, and the same command continues it: what was read stays.
"""

import importlib.metadata
import json
import math
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unicodedata import normalize

import datasets
import pyarrow as pa
import pyarrow.compute as pc
from filelock import FileLock
from rich.console import Console
from rich.progress import track

from torch_thor.errors import UserError, require
from torch_thor.files import REMAINS, locked, sha256, write_text, writing
from torch_thor.training.data.listing import LeftOut
from torch_thor.training.text.corpus import (
    FORMAT,
    HELD_OUT,
    MANIFEST,
    TOKENIZER,
    TRAIN,
    open_manifest,
    write_documents,
)
from torch_thor.training.text.sources import FEATURES, FORMS, PYTHON, documents, find_sources
from torch_thor.training.text.wordpiece import load_tokenizer, train_tokenizer
from torch_thor.training.workers import check_temporary_folder, end_children_with_me

SAMPLE = 200_000_000  # the approximate number of characters that a tokenizer is trained on, at most
# the characters of other scripts, as a share of bytes, from which on a text is of any script
_OTHER_SCRIPTS = 0.01
_CACHE, _LOCK = ".preparing", ".lock"  # names in the folder of a corpus
_SHOWN = 20  # faults that are printed
_LIBRARIES = ("torch-thor", "datasets", "pyarrow", "tokenizers", "sentencex", "beautifulsoup4")


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
    form: str | None = None,
    tokenizer: Path | None = None,
    workers: int = 1,
    max_faults: float = 0.01,
    console: Console | None = None,
) -> dict[str, Any]:
    """Prepare a corpus, or continue an unfinished preparation.

    Args:
        sources: Files of text, folders of such files, names of data sets of the hub, or `python`.
        out: The folder to write the corpus to.
        vocab_size: Number of word pieces of a tokenizer that is trained.
        lowercase: Whether text is converted to lower case and accents are removed.
        lengths: The lengths of the examples, in tokens.
        held_out: The fraction of the documents that are held out from training.
        seed: The seed for the choice of these documents.
        language: The language code that selects the rules for splitting sentences; without rules
            for it, sentences end at full stops.
        form: What the files contain, a key of `sources.FORMS`. With `None`, they tell it.
        tokenizer: A `tokenizer.json` or `vocab.txt`. With `None`, a tokenizer is trained.
        workers: The number of processes, which does not change the corpus.
        max_faults: The largest fraction of the documents that may be unreadable.
        console: Where progress and the result are printed; `None` prints nothing.

    Returns:
        The manifest of the corpus.

    Raises:
        UserError: If a value is out of range, a source is missing or has changed since the
            preparation was started, too many documents are unreadable, there are fewer than two,
            the corpus cannot be written, or another process is preparing it.
    """
    unequal = 0 < len(lengths) == len(set(lengths)) and min(lengths) >= 16
    for holds, rule in (
        (workers >= 1, f"--workers {workers} must be 1 or more"),
        (vocab_size >= 100, f"--vocab-size {vocab_size} must be 100 or more"),
        (0 < held_out < 1, f"--held-out {held_out} must lie between 0 and 1: it is a share"),
        (0 <= max_faults <= 1, f"--max-faults {max_faults} must lie in [0, 1]: it is a share"),
        (form in {None, *FORMS}, f"--format {form} must be one of {', '.join(FORMS)}"),
        (
            unequal,
            f"--seq-len {','.join(map(str, lengths))} must be different lengths of 16 tokens or "
            "more",
        ),
    ):
        require(holds, rule)
    left = LeftOut()
    given = tokenizer and load_tokenizer(tokenizer, lowercase)
    found = find_sources(sources, form, left)
    if min(workers, len(found)) > 1:
        check_temporary_folder("give --workers 1")
    settings = {
        "format": FORMAT, "vocab_size": vocab_size, "lowercase": lowercase,
        "lengths": list(lengths), "held_out": held_out, "seed": seed, "language": language,
        "tokenizer": tokenizer and sha256(tokenizer), "sources": found,
    }  # fmt: skip
    require(not out.exists() or out.is_dir(), f"--out {out} is a file: give a folder")
    names = {file.name for file in out.iterdir()} if out.exists() else set()
    require(
        bool(names & {MANIFEST, _CACHE})
        or all(name.startswith((_LOCK, REMAINS)) for name in names),
        f"--out {out} is not empty and holds no corpus: give another folder",
    )
    remedy = (
        "if another process prepares it, wait, else make room or mend its permissions; then give "
        "the same command again: it goes on"
    )
    with writing(out, remedy), ExitStack() as stack:
        out.mkdir(parents=True, exist_ok=True)
        stack.callback(locked(out / _LOCK).release)
        return _prepare(
            out, settings, given, workers, max_faults, left, console or Console(quiet=True)
        )


def _prepare(
    out: Path,
    settings: dict[str, Any],
    given: Any,
    workers: int,
    max_faults: float,
    left: LeftOut,
    console: Console,
) -> dict[str, Any]:
    if (out / MANIFEST).exists():
        manifest = open_manifest(out)
        changed = [key for key in settings if manifest.get(key) != settings[key]]
        require(
            not changed,
            f"{out} was prepared with other {', '.join(changed)}: give the same as in its "
            f"{MANIFEST}, or another --out",
        )
        console.out(f"{out} is finished already, and whole; nothing was done")
        return manifest
    forms = Counter(
        FORMS.get(source["form"], [source["form"]])[0] for source in settings["sources"]
    )
    console.out(f"read: {'; '.join(f'{number} files of {name}' for name, number in forms.items())}")
    with console.status("reading, then training a tokenizer"):
        read = _read(out / _CACHE, settings, workers, any_script=False)
        others, size = (pc.sum(read.data.column(key)).as_py() for key in ("others", "size"))
        if any_script := others > _OTHER_SCRIPTS * size:
            read = _read(out / _CACHE, settings, workers, any_script=True)
        counted = _count(read, max_faults)
        tokenizer = given or train_tokenizer(
            lambda: (
                sentence
                for row in _rows(read)
                if row["text"] and row["draw"] * counted["characters"] < SAMPLE
                for sentence in normalize("NFC", row["text"]).split("\n")
            ),
            settings["vocab_size"],
            settings["lowercase"],
            any_script=any_script,
        )
        write_text(out / TOKENIZER, tokenizer.to_str(pretty=True))
    # at least one document is held out, and at least one is not
    bound = min(max(settings["held_out"], math.nextafter(counted["min"], 1)), counted["max"])
    totals = {}
    for side in (TRAIN, HELD_OUT):
        rows = track(_rows(read), f"encoding {side}", len(read), console=console)
        documents = (
            (row["text"] if ((row["draw"] or 0) < bound) == (side == HELD_OUT) else "", row["size"])
            for row in rows
        )
        totals[side] = write_documents(out / side, documents, tokenizer, settings["lengths"])
        console.out(
            f"{side}: {', '.join(f'{number} {name}' for name, number in totals[side].items())}"
        )
    left_out = {
        "documents without prose": len(read) - counted["documents"] - len(counted["faults"]),
        "unreadable": len(counted["faults"]),
        "files of other kinds": left.others.total(),
        "hidden or made by programs": left.made.total(),
    }
    manifest = {
        **settings,
        "totals": totals,
        "other scripts": any_script,
        "left out": left_out,
        "faults": counted["faults"],
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "sha256": {name: sha256(out / name) for name in (TOKENIZER, TRAIN, HELD_OUT)},
    }
    # the corpus is finished when it exists
    write_text(out / MANIFEST, json.dumps(manifest, indent=1))
    size = sum(file.stat().st_size for file in (out / _CACHE).rglob("*") if file.is_file())
    shutil.rmtree(out / _CACHE, ignore_errors=True)
    console.out(
        *(f"unreadable: {fault}" for fault in counted["faults"][:_SHOWN]),
        f"left out: {', '.join(f'{number} {name}' for name, number in left_out.items())}",
        f"the corpus is in {out}; its cache, of {size / 1e6:.0f} MB, is removed",
        sep="\n",
    )
    return manifest


def _read(
    cache: Path, settings: dict[str, Any], workers: int, *, any_script: bool
) -> datasets.Dataset:
    """Read the documents of all sources to a cache, unless they are there."""
    datasets.disable_progress_bars()
    end_children_with_me()
    for remains in cache.rglob("*.incomplete"):
        shutil.rmtree(remains)
    try:
        return datasets.Dataset.from_generator(
            documents,
            FEATURES,
            str(cache),
            gen_kwargs={key: settings[key] for key in ("sources", "language", "seed")}
            | {"any_script": any_script},
            num_proc=min(workers, len(settings["sources"])),
            # With other settings the reading begins anew.
            fingerprint=datasets.fingerprint.Hasher.hash((settings, any_script)),
            writer_batch_size=64,
        )
    # EOFError: the process that the workers report to has died; typer would call it Ctrl-C
    except (datasets.exceptions.DatasetGenerationError, RuntimeError, EOFError) as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        # Nothing but the text of its traceback is left of a worker's error.
        told = str(error.__cause__ or error) or type(error).__name__
        reason = next((line for line in told.splitlines() if "Error: " in line), told)
        raise UserError(
            f"reading has ended early ({reason}): if nothing else is named, make room on the disk "
            "or use fewer --workers, which need less memory, then give the same command again"
        ) from error


def _count(read: datasets.Dataset, max_faults: float) -> dict[str, Any]:
    """Count what was read, and refuse it if there is no corpus in it."""
    faults = read.data.column("fault").drop_null().to_pylist()
    require(
        len(faults) <= max_faults * len(read),
        f"{len(faults)} of {len(read)} documents cannot be read, and --max-faults {max_faults} "
        f"allows {int(max_faults * len(read))}; the first: {''.join(faults[:1])}. Mend the "
        "sources, or raise --max-faults",
    )
    counted = {
        "faults": faults,
        "documents": pc.count(read.data.column("draw")).as_py(),
        "characters": pc.sum(read.data.column("characters")).as_py() or 0,
        **pc.min_max(read.data.column("draw")).as_py(),
    }
    require(
        counted["min"] != counted["max"],  # both are None if there is none
        f"{counted['documents']} of {len(read)} documents have prose ({counted['characters']} "
        "characters), and a corpus needs two or more, to train on and to hold out: give more text "
        "or several files; --format bert if blank lines divide documents (prose is paragraphs of "
        "five words or more, between blank lines or in <p>)",
    )
    return counted


def _rows(read: datasets.Dataset) -> Iterator[dict[str, Any]]:
    """Read rows one batch at a time, because what is mapped into memory counts as used."""
    for file in read.cache_files:
        with pa.OSFile(file["filename"]) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                yield from batch.to_pylist()


def python_corpus(
    cache: Path, vocab_size: int, lengths: Sequence[int], say: Callable[[str], None]
) -> Path:
    """Return the corpus of Python's language reference in a cache, prepared there at first use."""
    facts = ("python-text", FORMAT, vocab_size, *lengths, platform.python_version())
    folder = cache / "-".join(map(str, facts))
    with FileLock(f"{folder}.lock"):  # several processes may call this function at the same time
        if not (folder / MANIFEST).exists():
            say(f"preparing the text that Python carries, in {folder}")
            # There are about 70 documents, so a larger share than usual is held out.
            prepare([PYTHON], folder, vocab_size=vocab_size, lengths=lengths, held_out=0.05)
    return folder
