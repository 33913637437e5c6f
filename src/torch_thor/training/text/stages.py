"""The three stages of preparing a corpus. Each stage skips the work that is already finished.

*Clean* converts the work units of the sources to documents that are divided into sentences. *Tokenizer* trains a
tokenizer on a sample of the documents, or copies a given one. *Encode* converts the documents to shards of token ids.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress, TaskID

from torch_thor.training.errors import require
from torch_thor.training.output_files import write_whole
from torch_thor.training.text.arrow_files import REMEDY
from torch_thor.training.text.cleaning import CleanReport, clean_unit, stored_report
from torch_thor.training.text.encoding import ShardReport, encode_unit
from torch_thor.training.text.manifest import TOKENIZER, Settings
from torch_thor.training.text.processes import Job, results
from torch_thor.training.text.sources import Source, units_of
from torch_thor.training.text.word_counts import MOST_WORDS, WordCounts, count_unit, most_frequent
from torch_thor.training.text.wordpiece import load_tokenizer, train_tokenizer

BEGUN, CLEAN, ENCODED = "begun.json", "clean", "encoded"  # names in the folder of an unfinished corpus
SAMPLE = 10**9  # the approximate number of characters that a tokenizer is trained on, at most
_ENOUGH = 1000  # number of documents from which the fraction of faults is meaningful


@dataclass(frozen=True)
class Work:
    """The context that all stages share.

    Args:
        out: The folder of the corpus.
        settings: The settings that determine the contents of the corpus.
        workers: The number of worker processes.
        progress: The progress display, with one bar for each stage.
        say: A function that prints a line; it is called with the result of each stage.
    """

    out: Path
    settings: Settings
    workers: int
    progress: Progress
    say: Callable[[str], None]

    def bar(self, stage: str, total: int) -> "Bar":
        """Add the progress bar of a stage.

        Args:
            stage: The name of the stage.
            total: The value at which the bar is full.

        Returns:
            The bar.
        """
        total = max(1, total)
        return Bar(self, stage, total, self.progress.add_task(stage, total=total, figures=""))


@dataclass
class Bar:
    """The progress bar of a stage. The amounts and rates do not include the work of an earlier, interrupted run.

    Args:
        work: The context of the stages.
        stage: The name of the stage.
        total: The value at which the bar is full.
        task: The identifier of the bar in the progress display.
        started: The time at which the stage started, in seconds of the monotonic clock.
        done: The amount of work done in this run, by unit of measurement.
    """

    work: Work
    stage: str
    total: int
    task: TaskID
    started: float = field(default_factory=time.monotonic)
    done: dict[str, float] = field(default_factory=dict)

    def advance(self, completed: int, done: dict[str, float]) -> None:
        """Update the bar.

        Args:
            completed: The new value of the bar.
            done: The amount of work done since the last call, by unit of measurement.
        """
        for unit, amount in done.items():
            self.done[unit] = self.done.get(unit, 0) + amount
        self.work.progress.update(self.task, completed=completed, figures=self._figures())

    def end(self) -> None:
        """Fill the bar, and print the amount of work done in this run."""
        self.work.progress.update(self.task, completed=self.total)
        if any(self.done.values()):
            self.work.say(f"{self.stage}: {self._figures()}, in {time.monotonic() - self.started:.1f} s")

    def _figures(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-3)
        return ", ".join(f"{_short(n)} {unit} ({_short(n / seconds)}/s)" for unit, n in self.done.items())


def _short(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.3g}"


def clean(work: Work, sources: list[Source], most_faults: float) -> list[CleanReport]:
    """Clean the units that are not cleaned yet.

    Args:
        work: The context of the stages.
        sources: The sources.
        most_faults: The largest fraction of the documents that may be unreadable.

    Returns:
        The report of each unit, in the order of the units.

    Raises:
        UserError: If too many documents are unreadable.
    """
    folder, settings = work.out / CLEAN, work.settings
    bar = work.bar("cleaning", sum(source.size for source in sources))

    def jobs() -> Iterator[Job]:
        for unit in units_of(sources):
            done = stored_report(folder, unit.number)
            arguments = (unit, folder, settings.language, settings.held_out, settings.seed)
            yield Job((unit.read, unit.size if done is None else 0), arguments, done)

    reports: list[CleanReport] = []
    faults = documents = 0
    for (read, size), report in results(clean_unit, jobs(), work.workers):
        reports.append(report)
        faults, documents = faults + len(report.faults), documents + report.documents
        bar.advance(read, {"bytes": size, "documents": report.documents if size else 0})
        if documents > _ENOUGH and faults > most_faults * (faults + documents):
            break
    check_faults(reports, most_faults)
    bar.end()
    return reports


def check_faults(reports: Sequence[CleanReport], most: float) -> None:
    """Check that not too many documents of the sources are unreadable.

    Args:
        reports: The report of each unit.
        most: The largest fraction of the documents that may be unreadable.

    Raises:
        UserError: If the fraction is larger.
    """
    faults = [fault for report in reports for fault in report.faults]
    total = len(faults) + sum(report.documents for report in reports)
    first = faults[0] if faults else ""
    require(
        len(faults) <= most * total,
        f"{len(faults)} of {total} documents cannot be read, and --max-faults {most} allows {int(most * total)}; the "
        f"first: {first}. Mend the sources and give another --out, or raise --max-faults",
    )


def tokenizer(work: Work, given: Path | None, reports: Sequence[CleanReport]) -> int:
    """Train the tokenizer, or copy the given one, unless the corpus already has its tokenizer.

    Args:
        work: The context of the stages.
        given: A `tokenizer.json` or `vocab.txt`. With `None`, a tokenizer is trained.
        reports: The reports of the cleaned units.

    Returns:
        The size of the tokenizer's vocabulary.
    """
    file, settings = work.out / TOKENIZER, work.settings
    if not file.exists():
        bar = work.bar("tokenizer", len(reports) + 1)
        if given is not None:
            text = load_tokenizer(given, settings.lowercase).to_str(pretty=True)
        else:
            arguments = (*_count(work, reports, bar), settings.vocab_size, settings.lowercase)
            ((_, text),) = results(_trained, [Job(None, arguments)], work.workers)
        write_whole(file, text, REMEDY)
        bar.end()
    return int(load_tokenizer(file).get_vocab_size())


def _count(work: Work, reports: Sequence[CleanReport], bar: Bar) -> tuple[list[tuple[str, int]], Counter[str]]:
    """Count the words and the characters of the sample on which the tokenizer is trained."""
    share, settings = SAMPLE / max(1, sum(report.characters for report in reports)), work.settings
    jobs = (
        Job((number, report), (work.out / CLEAN, number, share, settings.seed, settings.lowercase))
        for number, report in enumerate(reports)
    )
    counts = WordCounts()
    for (number, report), found in results(count_unit, jobs, work.workers):
        counts.add(found)
        bar.advance(number + 1, {"characters": min(1, share) * report.characters})
    return most_frequent(counts.words, MOST_WORDS), counts.characters


def _trained(words: list[tuple[str, int]], characters: Counter[str], vocab_size: int, lowercase: bool) -> str:
    """Train the tokenizer. It runs in a worker process if there are any, as the library releases hardly any memory."""
    return str(train_tokenizer(words, characters, vocab_size, lowercase).to_str(pretty=True))


def encode(work: Work, units: int) -> list[ShardReport]:
    """Encode the units that are not encoded yet.

    Args:
        work: The context of the stages.
        units: The number of units.

    Returns:
        The shards of all units, in the order of the units.
    """
    out, bar = work.out, work.bar("encoding", units)

    def jobs() -> Iterator[Job]:
        for number in range(units):
            file = out / ENCODED / f"{number:06d}.json"
            done = _stored_shards(file) if file.exists() else None
            yield Job(
                (number, file, done is None),
                (number, out / CLEAN, out, out / TOKENIZER, work.settings.lengths),
                done,
            )

    shards: list[ShardReport] = []
    for (number, file, new), found in results(encode_unit, jobs(), work.workers):
        if new:
            write_whole(file, json.dumps([vars(shard) for shard in found]), REMEDY)
        shards += found
        bar.advance(
            number + 1,
            {
                "documents": new * sum(shard.documents for shard in found),
                "tokens": new * sum(shard.tokens for shard in found),
            },
        )
    bar.end()
    return shards


def _stored_shards(file: Path) -> list[ShardReport]:
    values = json.loads(file.read_text(encoding="utf-8"))
    return [ShardReport(**{**one, "examples": {int(key): n for key, n in one["examples"].items()}}) for one in values]
