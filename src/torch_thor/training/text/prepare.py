"""`torch-thor prepare`: converts text to a corpus to train a masked language model.

The documents of the sources are read to a cache of `datasets`, whose processes divide them into
sentences. Then a tokenizer is trained, and the documents are encoded. The folder of the corpus
appears when all of it is written.
"""

import hashlib
import json
import math
import platform
import pydoc_data.topics
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow.compute as pc
import pyarrow.parquet as pq
from filelock import FileLock
from rich.console import Console
from rich.progress import track
from sentencex import segment

from torch_thor.errors import UserError, first_line, require
from torch_thor.files import sha256, whole_folder, write_text
from torch_thor.training.text.corpus import (
    FORMAT,
    HELD_OUT,
    MANIFEST,
    TOKENIZER,
    TRAIN,
    write_documents,
)
from torch_thor.training.text.wordpiece import load_tokenizer, train_tokenizer

PYTHON = "python"  # given instead of a path: the language reference that every Python contains
FORMS = ("text", "bert", "jsonl", "parquet")
_FORM_OF = {
    **dict.fromkeys((".txt", ".text", ".md"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    ".parquet": "parquet",
}
PART = 1 << 16  # number of characters after which a text is cut at the next blank line
SAMPLE = 200_000_000  # the approximate number of characters that a tokenizer is trained on, at most
LEAST_WORDS = 5  # a paragraph with fewer is assumed to be a caption, a heading or an item of a list
_BLANK = re.compile(r"\n\s*\n")
# Thai, Lao, Tibetan, Burmese, Khmer, Chinese and Japanese have no spaces between words.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u9fff\U00020000-\U0003ffff]"
)
_FULL_STOP = re.compile("[.!?。！？]")
_ROWS = datasets.Features({
    "text": datasets.Value("large_string"),
    "draw": datasets.Value("float64"),  # of [0, 1): decides what a document is used for
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
    console: Console | None = None,
) -> dict[str, Any]:
    """Prepare a corpus.

    Args:
        sources: Files of text, folders of such files, or `python`.
        out: The folder of the corpus, which must not exist yet.
        vocab_size: Number of word pieces of a tokenizer that is trained.
        lowercase: Whether text is converted to lower case and accents are removed.
        lengths: The lengths of the examples, in tokens.
        held_out: The fraction of the documents that are held out from training.
        seed: The seed for the choice of these documents.
        language: The language code that selects the rules for splitting sentences; without rules
            for it, sentences end at full stops.
        form: What all files contain, one of `FORMS`. With `None`, their endings tell it.
        tokenizer: A `tokenizer.json` or `vocab.txt`. With `None`, a tokenizer is trained.
        workers: The number of processes, which does not change the corpus.
        console: Where progress and the result are printed; `None` prints nothing.

    Returns:
        The manifest of the corpus.

    Raises:
        UserError: If a value is out of range, a source is missing or cannot be read, or there are
            fewer than two different documents.
    """
    require(0 < held_out < 1, f"--held-out {held_out} must lie between 0 and 1: it is a share")
    require(form in {None, *FORMS}, f"--format {form} must be one of {', '.join(FORMS)}")
    require(min(lengths) >= 16, f"--seq-len {min(lengths)} must be 16 tokens or more")
    require(not out.exists(), f"--out {out} exists: give another folder")
    console = console or Console(quiet=True)
    given = tokenizer and load_tokenizer(tokenizer, lowercase)
    forms = _find(sources, form)
    console.out(f"reading {len(forms)} files")
    with whole_folder(out) as folder:
        with console.status("reading, then training a tokenizer"):
            divided = None if form == "bert" else language  # each of its lines is a sentence
            read = _read(folder / "read", forms, divided, seed, workers)
            encoder = given or _train(read, vocab_size, lowercase)
        write_text(folder / TOKENIZER, encoder.to_str(pretty=True))
        # at least one document is held out, and at least one is not
        lowest, highest = pc.min_max(read.data.column("draw")).as_py().values()
        bound = min(max(held_out, math.nextafter(lowest, 1)), highest)
        totals = {}
        for side in (TRAIN, HELD_OUT):
            rows = track(read, f"encoding {side}", len(read), console=console)
            texts = (row["text"] for row in rows if (row["draw"] < bound) == (side == HELD_OUT))
            totals[side] = write_documents(folder / side, texts, encoder, lengths)
            counts = (f"{number} {name}" for name, number in totals[side].items())
            console.out(f"{side}: {', '.join(counts)}")
        manifest = {
            "format": FORMAT,
            "sources": list(forms),
            "vocab_size": vocab_size,
            "lowercase": lowercase,
            "lengths": list(lengths),
            "held_out": held_out,
            "seed": seed,
            "language": language,
            "totals": totals,
            "sha256": {name: sha256(folder / name) for name in (TOKENIZER, TRAIN, HELD_OUT)},
        }
        write_text(folder / MANIFEST, json.dumps(manifest, indent=1))
        shutil.rmtree(folder / "read")
    console.out(f"the corpus is in {out}")
    return manifest


def _find(sources: Sequence[str], form: str | None) -> dict[str, str]:
    """Return what the files of the sources contain, by path, in the order of the sources."""
    forms: dict[str, str] = {}
    for source in sources:
        top = Path(source)
        require(
            source == PYTHON or top.exists(),
            f"{source} does not exist: give a text file, a folder of files, or {PYTHON}",
        )
        inside = sorted(top.rglob("*")) if top.is_dir() else [top]
        visible = (
            path
            for path in inside
            if path.is_file() and not any(part[0] == "." for part in path.relative_to(top).parts)
        )
        found = {str(path.absolute()): kind for path in visible if (kind := form or _form_of(path))}
        require(
            source == PYTHON or found != {},
            f"{source}: no file ends in {', '.join(_FORM_OF)}, perhaps compressed: "
            f"say with --format what it is ({', '.join(FORMS)})",
        )
        forms |= {PYTHON: PYTHON} if source == PYTHON else found
    return forms


def _form_of(path: Path) -> str | None:
    """Return what a file contains, by its ending before a compression's."""
    forms = (_FORM_OF.get(ending.lower()) for ending in reversed(path.suffixes))
    return next(filter(None, forms), None)


def _read(
    folder: Path, forms: dict[str, str], language: str | None, seed: int, workers: int
) -> datasets.Dataset:
    """Read the documents that have prose to a cache, as rows of `_ROWS`, a sentence a line."""
    datasets.disable_progress_bars()
    try:
        read = datasets.Dataset.from_generator(
            _documents, _ROWS, str(folder), gen_kwargs={"forms": forms, "seed": seed}
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise error.__cause__ or error from None
    return read.map(
        _divide,
        input_columns="text",
        fn_kwargs={"language": language},
        num_proc=workers if workers > 1 else None,
    )


def _documents(forms: dict[str, str], seed: int) -> Iterator[dict[str, Any]]:
    """Yield the documents that have prose; those of equal text have equal draws."""
    draws = set[float]()
    for file, form in forms.items():
        texts = ((text, text) for text in _texts(file, form))
        for identity, text in _topics() if file == PYTHON else texts:
            digest = hashlib.blake2b(f"{seed}\n{identity}".encode(), digest_size=8).hexdigest()
            draw = int(digest, 16) / 2.0**64
            if form == "bert" or any(_prose(text)):
                draws.add(draw)
                yield {"text": text, "draw": draw}
    require(
        len(draws) > 1,
        f"{len(draws)} different documents have prose, and a corpus needs two or more, to train on "
        "and to hold out: give more text or several files; --format bert if blank lines divide "
        "documents (prose is paragraphs of five words or more)",
    )


def _texts(file: str, form: str) -> Iterator[str]:
    """Yield the texts of the documents of a file."""
    part, size, number = list[str](), 0, 0
    try:
        for number, record in enumerate(_records(file, form), 1):  # noqa: B007
            if form == "parquet":
                yield _with_paragraphs(record)
            elif form == "jsonl":
                yield _with_paragraphs(json.loads(record)["text"] if record.strip() else "")
            else:
                line = record.decode("utf-8-sig")
                if size > 16 * PART or (line.isspace() and size > (0 if form == "bert" else PART)):
                    yield "".join(part)
                    part, size = [], 0
                part.append(line)
                size += len(line.strip())
    except Exception as error:  # each kind of file has errors of its own
        raise UserError(
            f"{file} cannot be read at line {number} ({first_line(error)}): give text in UTF-8, "
            'with --format jsonl an object with a "text" a line'
        ) from error
    if size:
        yield "".join(part)


def _records(file: str, form: str) -> Iterator[Any]:
    """Yield the lines of a file, uncompressed, or the texts of a table."""
    if form == "parquet":
        for batch in pq.ParquetFile(file).iter_batches(256, columns=["text"]):
            yield from batch["text"].cast("large_string").to_pylist()
    else:
        with fsspec.open(file, compression="infer") as lines:
            yield from lines


def _with_paragraphs(text: str | None) -> str:
    """Let blank lines divide paragraphs; in tables each line is a paragraph if no line is blank."""
    return text if text and _BLANK.search(text) else (text or "").replace("\n", "\n\n")


def _topics() -> Iterator[tuple[str, str]]:
    """Yield the names and texts of Python's topics; a paragraph is in the first that has it."""
    seen = set[str]()
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        paragraphs = [paragraph for paragraph in _prose(text) if paragraph not in seen]
        seen.update(paragraphs)
        yield f"{PYTHON}:{topic}", "\n\n".join(paragraphs)


def _divide(text: str, language: str | None) -> dict[str, str]:
    """Divide a document into sentences, one a line; without a language its lines are sentences."""
    parts = (segment(language, paragraph) for paragraph in _prose(text))
    lines = chain.from_iterable(parts) if language else text.split("\n")
    return {"text": "\n".join(filter(None, map(str.strip, lines)))}


def _prose(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, without those of fewer than five words."""
    for block in _BLANK.split(text):
        # two characters of a script without spaces count as a word; without full stops, too, lines
        # are paragraphs
        has_ends = _FULL_STOP.search(block) or not _UNSPACED.search(block)
        for paragraph in [block] if has_ends else block.split("\n"):
            words = paragraph.split()
            if len(words) >= LEAST_WORDS or len(_UNSPACED.findall(paragraph)) >= 2 * LEAST_WORDS:
                yield " ".join(words)


def _train(read: datasets.Dataset, vocab_size: int, lowercase: bool) -> Any:
    """Train a tokenizer on all documents, or on some of a large corpus."""
    characters = pc.sum(pc.utf8_length(read.data.column("text"))).as_py()

    def sentences() -> Iterator[str]:
        for row in read:
            if row["draw"] * characters < SAMPLE:
                yield from row["text"].split("\n")

    return train_tokenizer(sentences, vocab_size, lowercase)


def python_corpus(
    cache: Path, vocab_size: int, lengths: Sequence[int], say: Callable[[str], None]
) -> Path:
    """Return the corpus of Python's language reference in a cache, prepared there at first use."""
    settings = f"{FORMAT}-{vocab_size}-{'-'.join(map(str, lengths))}"
    folder = cache / f"python-text-{settings}-{platform.python_version()}"
    with FileLock(f"{folder}.lock"):  # several processes may call this function at the same time
        if not folder.exists():
            say(f"preparing the text that Python carries, in {folder}")
            # There are about 70 documents, so a larger share than usual is held out.
            prepare([PYTHON], folder, vocab_size=vocab_size, lengths=lengths, held_out=0.05)
    return folder
