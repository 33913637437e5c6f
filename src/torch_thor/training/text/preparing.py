"""`torch-thor prepare`: converts dumps and text files to a corpus for training a masked language model.

The stages are in :mod:`torch_thor.training.text.stages`. Files are written atomically. A work unit is finished when its
report exists, and the corpus is finished when its manifest exists. A preparation can therefore be stopped at any time,
and then continues with the missing units. The division into units does not depend on the number of processes. Only the
units that the processes are working on are in memory.
"""

import importlib.metadata
import json
import platform
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from torch_thor import __version__
from torch_thor.training.checksums import sha256
from torch_thor.training.errors import require
from torch_thor.training.lock import LOCK_FILE, Lock, is_foreign
from torch_thor.training.output_files import check_place, write_whole, writing
from torch_thor.training.printing import printer
from torch_thor.training.text import stages
from torch_thor.training.text.arrow_files import REMEDY
from torch_thor.training.text.encoding import HELD_OUT, TRAIN
from torch_thor.training.text.languages import check_language
from torch_thor.training.text.manifest import FORMAT, MANIFEST, TOKENIZER, Manifest, Settings, totals
from torch_thor.training.text.sources import Source, find_sources
from torch_thor.training.text.stages import BEGUN, CLEAN, ENCODED
from torch_thor.training.text.wordpiece import load_tokenizer

_LIBRARIES = ("pyarrow", "tokenizers", "sentencex", "mwxml", "mwparserfromhell", "beautifulsoup4")
_SHOWN_FAULTS = 20


@dataclass(frozen=True)
class Preparation:
    """The options of a preparation.

    Args:
        given: The sources, in the form that :func:`torch_thor.training.text.sources.find_sources` accepts.
        out: The folder to write the corpus to.
        settings: The settings that determine the contents of the corpus.
        tokenizer: A `tokenizer.json` or `vocab.txt`. With `None`, a tokenizer is trained.
        workers: The number of processes.
        most_faults: The largest fraction of the documents that may be unreadable.
    """

    given: tuple[str, ...]
    out: Path
    settings: Settings
    tokenizer: Path | None = None
    workers: int = 1
    most_faults: float = 0.01


def prepare(wanted: Preparation, console: Console) -> Manifest:
    """Prepare a corpus, or continue an unfinished preparation.

    Args:
        wanted: The options of the preparation.
        console: The console for the progress display and the result.

    Returns:
        The manifest of the corpus.

    Raises:
        UserError: If a value is out of range, a source is missing or has changed since the preparation was started, too
            many documents are unreadable, the corpus is empty, or another process is preparing it.
    """
    _check(wanted)
    check_language(wanted.settings.language, printer(console))
    sources, out, settings = find_sources(wanted.given), wanted.out, wanted.settings
    if wanted.tokenizer is not None:
        load_tokenizer(wanted.tokenizer, settings.lowercase)
        settings = replace(settings, tokenizer=sha256(wanted.tokenizer))
    check_place(out)
    _check_folder(out, sources, settings)  # before anything is written to the folder
    with writing(out, REMEDY):
        out.mkdir(parents=True, exist_ok=True)
    with Lock(out / LOCK_FILE, f"--out {out}", "wait for it, end it, or give another --out", remove=True) as lock:
        lock.take()
        return _prepare(replace(wanted, settings=settings), sources, console)


def _prepare(wanted: Preparation, sources: list[Source], console: Console) -> Manifest:
    """Prepare or continue a corpus whose folder this process has locked."""
    out, settings, say = wanted.out, wanted.settings, printer(console)
    if not _check_folder(out, sources, settings):
        files = [source.plain() for source in sources]
        begun = {"format": FORMAT, "settings": settings.plain(), "sources": files}
        write_whole(out / BEGUN, json.dumps(begun, indent=1), REMEDY)
    if (out / MANIFEST).exists():
        manifest = Manifest.read(out)
        manifest.check_files(out)
        _tidy(out)
        say(f"{out} is finished already, and whole; nothing was done")
        return manifest
    for name in (CLEAN, ENCODED):
        (out / name).mkdir(exist_ok=True)
    with _progress(console) as progress:
        work = stages.Work(out, settings, wanted.workers, progress, say)
        reports = stages.clean(work, sources, wanted.most_faults)
        faults = [str(fault) for report in reports for fault in report.faults]
        for fault in faults[:_SHOWN_FAULTS]:
            say(f"left out: {fault}")
        if len(faults) > _SHOWN_FAULTS:
            say(f"left out: {len(faults) - _SHOWN_FAULTS} more, all listed in {MANIFEST}")
        require(
            any(report.documents for report in reports),
            "the sources have no prose: paragraphs of five words or more, separated by blank lines (or <p> in HTML)",
        )
        vocab_size = stages.tokenizer(work, wanted.tokenizer, reports)
        shards = stages.encode(work, len(reports))
    manifest = Manifest(
        settings,
        [source.plain() for source in sources],
        vocab_size,
        sha256(out / TOKENIZER),
        shards,
        faults,
        _versions(),
    )
    _check_sides(manifest)
    manifest.write(out)
    _tidy(out)
    for side, counts in totals(shards).items():
        say(f"{side}: {counts['documents']} documents, {counts['sentences']} sentences, {counts['tokens']} tokens")
    say(f"vocabulary: {vocab_size} word pieces; the corpus is in {out}")
    return manifest


def _check(wanted: Preparation) -> None:
    settings = wanted.settings
    require(bool(wanted.given), "no source: name a Wikipedia dump, text files or folders, or python")
    require(wanted.workers >= 1, f"--workers {wanted.workers} must be 1 or more")
    require(settings.vocab_size >= 100, f"--vocab-size {settings.vocab_size} must be 100 or more")
    require(0 < settings.held_out < 1, f"--held-out {settings.held_out} must lie between 0 and 1: it is a share")
    require(0 <= wanted.most_faults <= 1, f"--max-faults {wanted.most_faults} must lie in [0, 1]: it is a share")
    require(bool(settings.lengths), "--seq-len is empty: give a length, such as 128")
    for length in settings.lengths:
        require(length >= 16, f"--seq-len {length} must be 16 or more")
    require(len(set(settings.lengths)) == len(settings.lengths), "--seq-len names a length twice")


def _check_folder(out: Path, sources: list[Source], settings: Settings) -> bool:
    """Return whether the folder holds a corpus, finished or not, and check that it has these settings and sources."""
    options, files = settings.plain(), [source.plain() for source in sources]
    file = out / BEGUN
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
        require(
            before.get("format") == FORMAT,
            f"{out} was begun by a version of torch-thor that writes other examples: give another --out",
        )
        for key, value in options.items():
            other = before["settings"].get(key)
            require(
                other == value,
                f"{out} was begun with {key}={other}, now it is {value}: give the same, or another --out",
            )
        require(
            before["sources"] == files,
            f"{out} was begun with other sources, or they have changed since: give another --out",
        )
    else:
        require(
            not out.exists() or not any(map(is_foreign, out.iterdir())),
            f"--out {out} is not empty and holds no corpus: give another folder",
        )
    return file.exists()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _check_sides(manifest: Manifest) -> None:
    for side in (TRAIN, HELD_OUT):
        require(
            any(shard.tokens for shard in manifest.side(side)),
            f"no document is in the {side} part: with --held-out {manifest.settings.held_out} the corpus is too small; "
            f"change --held-out or give more text, and another --out",
        )


def _tidy(out: Path) -> None:
    """Delete the files that are needed only while a corpus is unfinished."""
    for name in (CLEAN, ENCODED):
        shutil.rmtree(out / name, ignore_errors=True)


def _versions() -> dict[str, str]:
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"torch-thor": __version__, "python": platform.python_version(), **libraries}
