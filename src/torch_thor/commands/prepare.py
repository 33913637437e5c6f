"""The command `prepare`."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_thor.training.errors import UserError

HELP = """Prepare text for masked-language-model training.

SOURCE is a Wikipedia dump (`*-pages-articles*.xml.bz2`), a text or HTML file (which may be compressed: .gz, .bz2, .xz),
a folder of such files, or `python`, which stands for the documentation that is part of Python. Writes a tokenizer,
shards of token ids and a manifest. If the preparation is stopped, the same command continues it.

Examples:

- `torch-thor prepare enwiki-latest-pages-articles.xml.bz2 --out corpora/wikipedia --workers 16`

- `torch-thor prepare /usr/share/doc/anarchism/html --out corpora/anarchism --vocab-size 8192 --seq-len 128`
"""


def prepare(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Wikipedia dumps, text files, folders, or python.")
    ],
    out: Annotated[Path, typer.Option("--out", help="The folder of the prepared corpus.")],
    vocab_size: Annotated[int, typer.Option("--vocab-size", help="Size of the vocabulary to train.")] = 30522,
    seq_len: Annotated[
        str, typer.Option("--seq-len", help="Tokens per example: one length, or several with commas.")
    ] = "128,512",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer", help="A tokenizer.json or vocab.txt to use (default: train a tokenizer).", show_default=False
        ),
    ] = None,
    cased: Annotated[bool, typer.Option("--cased", help="Keep upper case and accents.")] = False,
    held_out: Annotated[
        float, typer.Option("--held-out", help="Fraction of the documents that is kept for evaluation.")
    ] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the choice of these documents.")] = 0,
    language: Annotated[str, typer.Option("--language", help="Language code, for the rules of sentence ends.")] = "en",
    workers: Annotated[
        int | None,
        typer.Option("--workers", help="Number of processes (default: one per core).", show_default=False),
    ] = None,
    max_faults: Annotated[
        float, typer.Option("--max-faults", help="Largest fraction of documents that may be unreadable.")
    ] = 0.01,
) -> None:
    """Prepare text for masked-language-model training.

    Args:
        sources: Wikipedia dumps, text files, folders, or `python`.
        out: The folder of the prepared corpus.
        vocab_size: Size of the vocabulary to train.
        seq_len: Tokens per example, one or more lengths separated by commas.
        tokenizer: A tokenizer to use instead of training one.
        cased: Whether to keep upper case and accents.
        held_out: Fraction of the documents that is kept for evaluation.
        seed: Seed of the choice of these documents.
        language: Language code, for the rules of sentence ends.
        workers: Number of processes; `None` stands for one per core.
        max_faults: Largest fraction of documents that may be unreadable.
    """
    from torch_thor.training.text.manifest import Settings
    from torch_thor.training.text.preparing import Preparation
    from torch_thor.training.text.preparing import prepare as prepare_corpus

    settings = Settings(
        vocab_size=vocab_size,
        lowercase=not cased,
        lengths=_lengths(seq_len),
        held_out=held_out,
        seed=seed,
        language=language,
    )
    wanted = Preparation(tuple(sources), out, settings, tokenizer, workers or os.cpu_count() or 1, max_faults)
    prepare_corpus(wanted, Console())


def _lengths(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as error:
        raise UserError(f"--seq-len {text} must be whole numbers separated by commas, such as 128,512") from error
