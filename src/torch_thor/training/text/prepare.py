"""`torch-thor prepare`: converts text to a corpus to train a masked language model.

The source text is read block by block; processes of `datasets` read its documents as sentences,
which are stored in a cache inside the folder of the corpus. Then a tokenizer is trained and the
documents are encoded. All files are written under other names first. A preparation can be stopped
at any time, and the same command continues it: finished blocks and a finished tokenizer stay.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import Progress

from torch_thor import __version__
from torch_thor.errors import UserError, first_line, require
from torch_thor.files import REMAINS, locked, sha256, whole_file, write_text, writing
from torch_thor.training.data.listing import LeftOut
from torch_thor.training.text.corpus import (
    FORMAT,
    HELD_OUT,
    MANIFEST,
    TOKENIZER,
    TRAIN,
    open_manifest,
    write_corpus,
)
from torch_thor.training.text.documents import read_document
from torch_thor.training.text.sources import (
    FORMS,
    PYTHON,
    Source,
    find_sources,
    has_other_scripts,
    pieces,
)
from torch_thor.training.text.wordpiece import load_tokenizer, train_tokenizer
from torch_thor.training.workers import end_children_with_me

SAMPLE = 200_000_000  # the approximate number of characters that a tokenizer is trained on, at most
UNIT = 1 << 22  # approximate number of bytes of source text whose documents are a batch of rows
UNITS = 8  # in a block, which is in memory
_BEGUN, _CACHE, _LOCK = "begun.json", "cache", ".lock"  # names in the folder of a corpus
_SHOWN = 20  # faults that are printed
_LIBRARIES = ("datasets", "pyarrow", "tokenizers", "sentencex", "beautifulsoup4")
_PIECE = pa.schema({
    "unit": pa.int64(), "form": pa.string(), "name": pa.string(), "offset": pa.int64(),
    "data": pa.large_binary(),
})  # fmt: skip
_DOCUMENT = datasets.Features({
    "unit": datasets.Value("int64"), "name": datasets.Value("string"),
    "sentences": datasets.List(datasets.Value("string")), "fault": datasets.Value("string"),
    "characters": datasets.Value("int64"),
})  # fmt: skip


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
    console = console or Console(file=StringIO())
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
    found = find_sources(sources, form, left)
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
    remedy = "make room or mend its permissions, then give the same command again: it goes on"
    with writing(out, remedy):
        out.mkdir(parents=True, exist_ok=True)
        try:
            lock = locked(out / _LOCK)
        except Timeout as error:
            raise UserError(
                f"--out {out}: another process prepares it: wait for it, or give another --out"
            ) from error
        try:
            return _prepare(found, out, settings, given, workers, max_faults, left, console)
        finally:
            lock.release()


def _prepare(
    sources: list[Source],
    out: Path,
    settings: dict[str, Any],
    given: str | None,
    workers: int,
    max_faults: float,
    left: LeftOut,
    console: Console,
) -> dict[str, Any]:
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    begun = {"format": FORMAT, **settings, "sources": [{**one._asdict()} for one in sources]}
    _begin(out / _BEGUN, begun)
    if (out / MANIFEST).exists():
        manifest = open_manifest(out)
        say(f"{out} is finished already, and whole; nothing was done")
        return manifest
    forms = Counter(FORMS.get(source.form, [source.form])[0] for source in sources)
    say(f"read: {'; '.join(f'{number} files of {name}' for name, number in forms.items())}")
    cache = out / _CACHE
    cache.mkdir(exist_ok=True)
    any_script = has_other_scripts(sources, cache)
    with Progress(console=console) as progress:
        reader = partial(read_document, language=settings["language"], any_script=any_script)
        files = _read(sources, cache, reader, workers, progress)
        # datasets switches it off for its processes, and leaves it off
        os.environ["TOKENIZERS_PARALLELISM"] = "true"
        counted = _count(files, settings["seed"])
        if fault := _shortage(counted, max_faults):
            shutil.rmtree(cache)  # so that other sources may be given
            (out / _BEGUN).unlink()
            raise UserError(fault)
        if not (out / TOKENIZER).exists():
            progress.add_task("tokenizer", total=None)
            write_text(out / TOKENIZER, given or _trained(files, counted, settings, any_script))
        progress.add_task("encoding", total=None)
        # at least one document is held out, and at least one is not
        bound = min(max(settings["held_out"] * 2.0**64, counted.lowest + 1), counted.highest)
        totals = write_corpus(
            (one for one in _documents(files) if one["sentences"]),
            out,
            settings["lengths"],
            lambda name: digest_of(name, settings["seed"]) < bound,
        )
    for side, numbers in totals.items():
        shown = (f"{numbers[key]} {key}" for key in ("documents", "sentences", "tokens"))
        say(f"{side}: {', '.join(shown)}")
    for fault in counted.faults[:_SHOWN]:
        say(f"unreadable: {fault}")
    left_out = {
        "documents without prose": counted.without_prose,
        "unreadable": len(counted.faults),
        "files of other kinds": left.others.total(),
        "hidden or made by programs": left.made.total(),
    }
    manifest = {
        **begun,
        "totals": totals,
        "other scripts": any_script,
        "left out": left_out,
        "faults": counted.faults,
        "versions": {"torch-thor": __version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _LIBRARIES},
        "sha256": {name: sha256(out / name) for name in (TOKENIZER, TRAIN, HELD_OUT)},
    }
    # the corpus is finished when it exists
    write_text(out / MANIFEST, json.dumps(manifest, indent=1))
    size = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    shutil.rmtree(cache, ignore_errors=True)
    say(f"left out: {', '.join(f'{number} {name}' for name, number in left_out.items())}")
    say(f"the corpus is in {out}; its cache, of {size / 1e6:.0f} MB, is removed")
    return manifest


def _begin(file: Path, begun: dict[str, Any]) -> None:
    """Write down what is prepared, unless something else has been begun."""
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else begun
    changed = [key for key in begun if before.get(key) != begun[key]]
    require(
        not changed,
        f"{file.parent} was begun with other {', '.join(changed)}: give the same as in its "
        f"{file.name}, or another --out",
    )
    write_text(file, json.dumps(begun, indent=1))


def _read(
    sources: list[Source],
    cache: Path,
    reader: Callable[[dict[str, Any]], dict[str, Any]],
    workers: int,
    progress: Progress,
) -> list[str]:
    """Read the documents of all sources as sentences; returns the files that have them."""
    datasets.disable_progress_bars()
    end_children_with_me()
    bar, files = progress.add_task("reading", total=None), []
    for number, block in enumerate(_blocks(sources, cache)):
        raw = cache / "block.arrow"
        table = pa.Table.from_pylist(block, _PIECE)
        with whole_file(raw) as temporary, pa.ipc.new_stream(str(temporary), _PIECE) as writer:
            writer.write_table(table)
        try:
            found = datasets.Dataset.from_file(str(raw)).map(
                reader,
                num_proc=min(workers, len(block)) if workers > 1 else None,
                remove_columns=["form", "offset", "data"],
                features=_DOCUMENT,
                cache_file_name=str(cache / f"{number:06d}.arrow"),
                load_from_cache_file=True,
                writer_batch_size=64,
                new_fingerprint=str(number),
            )
        except RuntimeError as error:
            raise UserError(
                f"a process that reads text has ended ({first_line(error)}; was memory short?): "
                "give the same command again, it goes on with what is missing; fewer --workers "
                "need less memory"
            ) from error
        files += [file["filename"] for file in found.cache_files]
        progress.update(bar, description=f"reading, block {number + 1}")
    return files


def _blocks(sources: list[Source], cache: Path) -> Iterator[list[dict[str, Any]]]:
    """Read the pieces of all sources, in blocks of so many units."""
    block, unit, size = list[dict[str, Any]](), 0, 0
    for piece in (piece for source in sources for piece in pieces(source, cache)):
        block.append(piece | {"unit": unit})
        size += len(piece["data"])
        if size >= UNIT:
            unit, size = unit + 1, 0
            if unit % UNITS == 0:
                yield block
                block = []
    if block:
        yield block


def _documents(files: Iterable[str], *columns: str) -> Iterator[dict[str, Any]]:
    """Read columns, or all, of the documents in files, of which one at a time is mapped."""
    for file in files:
        with pa.memory_map(file) as source, pa.ipc.open_stream(source) as batches:
            for batch in batches:
                yield from batch.select(columns or batch.schema.names).to_pylist()


@dataclass
class _Counted:
    faults: list[str] = field(default_factory=list)
    documents: int = 0
    without_prose: int = 0
    characters: int = 0
    lowest: int = 1 << 64  # of the digests of the documents' names
    highest: int = 0


def _count(files: Iterable[str], seed: int) -> _Counted:
    counted = _Counted()
    for document in _documents(files, "name", "fault", "characters"):
        if document["fault"] is not None:
            counted.faults.append(document["fault"])
        elif not document["characters"]:
            counted.without_prose += 1
        else:
            digest = digest_of(document["name"], seed)
            counted.documents += 1
            counted.characters += document["characters"]
            counted.lowest = min(counted.lowest, digest)
            counted.highest = max(counted.highest, digest)
    return counted


def _shortage(counted: _Counted, max_faults: float) -> str:
    """Return why there is no corpus of what was counted, if so."""
    read, faults = counted.documents + counted.without_prose, len(counted.faults)
    total = read + faults
    if faults > max_faults * total:
        return (
            f"{faults} of {total} documents cannot be read, and --max-faults {max_faults} allows "
            f"{int(max_faults * total)}; the first: {''.join(counted.faults[:1])}. Mend the "
            "sources, or raise --max-faults"
        )
    if counted.lowest < counted.highest:
        return ""
    return (
        f"{counted.documents} of {total} documents have prose ({counted.characters} characters), "
        "and a corpus needs two or more, to train on and to hold out: give more text or several "
        "files; --format bert if blank lines divide documents (prose is paragraphs of five words "
        "or more, between blank lines or in <p>)"
    )


def digest_of(name: str, seed: int) -> int:
    """Return the number below 2⁶⁴ that decides what a document is used for."""
    seeded = f"{seed}\n{name}".encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(seeded, digest_size=8).digest(), "big")


def _trained(
    files: Sequence[str], counted: _Counted, settings: dict[str, Any], any_script: bool
) -> str:
    share = SAMPLE / counted.characters

    def sentences() -> Iterator[str]:
        for one in _documents(files, "name", "sentences"):
            if share >= 1 or digest_of(one["name"], settings["seed"]) < share * 2.0**64:
                yield from one["sentences"]

    size, lowercase = settings["vocab_size"], settings["lowercase"]
    trained = train_tokenizer(sentences, size, lowercase, any_script=any_script)
    return str(trained.to_str(pretty=True))


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
