"""`torch-thor prepare`: from dumps and text files to a corpus that a masked language model is trained on.

Three stages. *Clean*: work units of the sources become documents, cut into sentences. *Tokenizer*: trained on a sample,
or taken over. *Encode*: documents become shards of token ids. Each file is written whole, a unit is finished when its
report is there, and the corpus when its manifest is; so preparing can be stopped at any moment and goes on with what is
missing. Units do not depend on the number of processes, and no more of them are in memory than processes need.
"""

import importlib.metadata
import json
import multiprocessing
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from torch_thor import __version__
from torch_thor.training.checksums import sha256
from torch_thor.training.errors import UserError, require
from torch_thor.training.output_files import check_place, write_whole
from torch_thor.training.printing import printer
from torch_thor.training.text.arrow_files import REMEDY
from torch_thor.training.text.cleaning import CleanReport, clean_unit, sentences_of, stored_report
from torch_thor.training.text.encoding import HELD_OUT, TRAIN, ShardReport, encode_unit
from torch_thor.training.text.manifest import MANIFEST, TOKENIZER, Manifest, Settings, totals
from torch_thor.training.text.sources import Source, find_sources, units_of
from torch_thor.training.text.wordpiece import SAMPLE, load_tokenizer, train_tokenizer

Pool = ProcessPoolExecutor | None  # None: this process works alone

_BEGUN, _CLEAN, _ENCODED = "begun.json", "clean", "encoded"
_LIBRARIES = ("pyarrow", "tokenizers", "sentencex", "mwxml", "mwparserfromhell", "beautifulsoup4")
_SHOWN_FAULTS = 20
_ENOUGH = 1000  # documents after which a share of faults says something


@dataclass(frozen=True)
class Preparation:
    """What the user asks for.

    Args:
        given: Sources, as :func:`torch_thor.training.text.sources.find_sources` takes them.
        out: Where the corpus goes.
        settings: What decides its contents.
        tokenizer: A `tokenizer.json` or `vocab.txt`; `None`: it is trained.
        workers: Processes.
        most_faults: Share of documents that may be unreadable.
    """

    given: tuple[str, ...]
    out: Path
    settings: Settings
    tokenizer: Path | None = None
    workers: int = 1
    most_faults: float = 0.01


def prepare(wanted: Preparation, console: Console) -> Manifest:
    """Prepare a corpus, or go on with one.

    Args:
        wanted: What the user asks for.
        console: Shows progress and the result.

    Returns:
        The corpus's manifest.

    Raises:
        UserError: If a value is out of range, a source is missing or has changed since the preparation was begun, too
            much of the sources is unreadable, or the corpus is empty.
    """
    _check(wanted)
    sources, out, say = find_sources(wanted.given), wanted.out, printer(console)
    settings = wanted.settings
    if wanted.tokenizer is not None:
        load_tokenizer(wanted.tokenizer, settings.lowercase)
        settings = replace(settings, tokenizer=sha256(wanted.tokenizer))
    check_place(out)
    _begin(out, sources, settings)
    if (out / MANIFEST).exists():
        manifest = Manifest.read(out)
        manifest.check_files(out)
        _tidy(out)
        say(f"{out} is finished already, and whole; nothing was done")
        return manifest
    with nullcontext() if wanted.workers == 1 else _pool(wanted.workers) as pool, _progress(console) as progress:
        reports = _clean(wanted, settings, sources, pool, progress)
        faults = [str(fault) for report in reports for fault in report.faults]
        for fault in faults[:_SHOWN_FAULTS]:
            say(f"left out: {fault}")
        if len(faults) > _SHOWN_FAULTS:
            say(f"left out: {len(faults) - _SHOWN_FAULTS} more, all listed in {MANIFEST}")
        _check_faults(reports, wanted.most_faults)
        require(
            any(report.documents for report in reports),
            "the sources have no prose: paragraphs of five words or more, separated by blank lines (or <p> in HTML)",
        )
        vocab_size = _tokenizer(wanted, settings, reports, progress)
        shards = _encode(wanted, settings, reports, pool, progress)
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


def _begin(out: Path, sources: list[Source], settings: Settings) -> None:
    """Note what the corpus is made from, or compare with what was noted when it was begun."""
    options, files = settings.plain(), [source.plain() for source in sources]
    file = out / _BEGUN
    if file.exists():
        before = json.loads(file.read_text(encoding="utf-8"))
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
        return
    require(
        not out.exists() or not any(out.iterdir()),
        f"--out {out} is not empty and holds no corpus: give another folder",
    )
    (out / _CLEAN).mkdir(parents=True, exist_ok=True)
    (out / _ENCODED).mkdir(exist_ok=True)
    write_whole(file, json.dumps({"settings": options, "sources": files}, indent=1), REMEDY)


def _pool(workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """End this process when the one that started it has gone: a pool's processes would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        console=console,
    )


def _clean(
    wanted: Preparation, settings: Settings, sources: list[Source], pool: Pool, progress: Progress
) -> list[CleanReport]:
    """Clean the units that are not finished."""
    folder = wanted.out / _CLEAN
    bar = progress.add_task("cleaning", total=max(1, sum(source.size for source in sources)), figures="")
    reports: dict[int, CleanReport] = {}
    started, count = time.monotonic(), 0
    reached: dict[int, int] = {}

    def jobs() -> Iterator[tuple[int, tuple[Any, ...]]]:
        nonlocal count
        for unit in units_of(sources):
            count, reached[unit.number] = unit.number + 1, unit.read
            done = stored_report(folder, unit.number)
            if done is not None:
                reports[unit.number] = done
                continue
            yield unit.number, (unit, folder, settings.language, settings.held_out, settings.seed)

    for number, report in _results(pool, clean_unit, jobs(), wanted.workers):
        reports[number] = report
        documents = sum(one.documents for one in reports.values())
        rate = documents / max(time.monotonic() - started, 1e-3)
        read = max(value for key, value in reached.items() if key in reports)
        progress.update(bar, completed=read, figures=f"{read / 1e6:.0f} MB, {documents} documents, {rate:.0f}/s")
        if documents > _ENOUGH:
            _check_faults(list(reports.values()), wanted.most_faults)
    _full(progress, bar)
    return [reports[number] for number in range(count)]


def _tokenizer(wanted: Preparation, settings: Settings, reports: list[CleanReport], progress: Progress) -> int:
    """Train the tokenizer, or take over the one that was given; returns the size of its vocabulary."""
    file = wanted.out / TOKENIZER
    if not file.exists():
        bar = progress.add_task("tokenizer", total=None, figures="")
        if wanted.tokenizer is not None:
            tokenizer = load_tokenizer(wanted.tokenizer, settings.lowercase)
        else:
            share = SAMPLE / max(1, sum(report.characters for report in reports))

            def sample() -> Iterator[str]:
                for number in range(len(reports)):
                    yield from sentences_of(wanted.out / _CLEAN, number, share, settings.seed)

            tokenizer = train_tokenizer(sample, settings.vocab_size, settings.lowercase)
        write_whole(file, tokenizer.to_str(pretty=True), REMEDY)
        progress.update(bar, total=1)
        _full(progress, bar)
    return int(load_tokenizer(file).get_vocab_size())


def _encode(
    wanted: Preparation,
    settings: Settings,
    reports: list[CleanReport],
    pool: Pool,
    progress: Progress,
) -> list[ShardReport]:
    """Encode the units that are not finished."""
    out = wanted.out
    bar = progress.add_task("encoding", total=max(1, len(reports)), figures="")
    shards: dict[int, list[ShardReport]] = {}
    started, tokens = time.monotonic(), 0

    def jobs() -> Iterator[tuple[int, tuple[Any, ...]]]:
        for number in range(len(reports)):
            file = _shards_file(out, number)
            if file.exists():
                shards[number] = _stored_shards(file)
            else:
                yield number, (number, out / _CLEAN, out, out / TOKENIZER, settings.lengths)

    for number, found in _results(pool, encode_unit, jobs(), wanted.workers):
        write_whole(_shards_file(out, number), json.dumps([vars(shard) for shard in found]), REMEDY)
        shards[number] = found
        tokens += sum(shard.tokens for shard in found)
        rate = tokens / max(time.monotonic() - started, 1e-3)
        progress.update(bar, completed=len(shards), figures=f"{tokens} tokens, {rate:.0f}/s")
    _full(progress, bar)
    return [shard for number in range(len(reports)) for shard in shards[number]]


def _shards_file(out: Path, number: int) -> Path:
    return out / _ENCODED / f"{number:06d}.json"


def _stored_shards(file: Path) -> list[ShardReport]:
    values = json.loads(file.read_text(encoding="utf-8"))
    return [ShardReport(**{**one, "examples": {int(key): n for key, n in one["examples"].items()}}) for one in values]


def _full(progress: Progress, bar: TaskID) -> None:
    progress.update(bar, completed=progress.tasks[bar].total)


def _results(
    pool: Pool, work: Callable[..., Any], jobs: Iterable[tuple[int, tuple[Any, ...]]], workers: int
) -> Iterator[tuple[int, Any]]:
    """Run jobs in processes, few at a time, so that memory does not depend on how many there are; or here."""
    if pool is None:
        for number, arguments in jobs:
            yield number, work(*arguments)
        return
    running: dict[Future[Any], int] = {}
    waiting = iter(jobs)
    try:
        while True:
            while len(running) < workers + 1 and (job := next(waiting, None)) is not None:
                running[pool.submit(work, *job[1])] = job[0]
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()
    except BrokenProcessPool as error:
        raise UserError(
            "a process that prepares text was ended from outside (was memory short?): give the same command again, it "
            "goes on with what is missing; fewer --workers need less memory"
        ) from error
    finally:
        for future in running:
            future.cancel()


def _check_faults(reports: list[CleanReport], most: float) -> None:
    faults = [fault for report in reports for fault in report.faults]
    documents = sum(report.documents for report in reports)
    total = len(faults) + documents
    first = faults[0] if faults else ""
    require(
        len(faults) <= most * total,
        f"{len(faults)} of {total} documents cannot be read, and --max-faults {most} allows {int(most * total)}; the "
        f"first: {first}. Mend the sources and give another --out, or raise --max-faults",
    )


def _check_sides(manifest: Manifest) -> None:
    for side in (TRAIN, HELD_OUT):
        require(
            any(shard.tokens for shard in manifest.side(side)),
            f"no document is in the {side} part: with --held-out {manifest.settings.held_out} the corpus is too small; "
            f"change --held-out or give more text, and another --out",
        )


def _tidy(out: Path) -> None:
    """Delete what only unfinished corpora need."""
    for name in (_CLEAN, _ENCODED):
        shutil.rmtree(out / name, ignore_errors=True)


def _versions() -> dict[str, str]:
    libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"torch-thor": __version__, "python": platform.python_version(), **libraries}
