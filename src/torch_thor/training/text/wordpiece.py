"""WordPiece tokenizers as BERT has them: trained on a corpus, or given as `tokenizer.json` or `vocab.txt`.

The training is that of the library `tokenizers`, which merges the most frequent pairs as BPE does (Google never
published its own).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_thor.training.errors import require

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLASS, SEPARATOR, MASK)
CONTINUES = "##"  # before a piece that does not begin a word
ALPHABET = 1000  # characters that have a piece of their own; a word with any other is unknown
OCCURRENCES = 20_000_000  # of words, that the trainer reads
LONGEST_WORD = 100


def new_tokenizer(lowercase: bool, vocabulary: dict[str, int] | None = None) -> Any:
    """Make a tokenizer with BERT's normaliser and pre-tokeniser.

    Args:
        lowercase: Whether case and accents are dropped.
        vocabulary: Its word pieces; `None`: to be trained.

    Returns:
        A `tokenizers.Tokenizer`.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=LONGEST_WORD))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def train_tokenizer(
    words: Iterable[tuple[str, int]], characters: Mapping[str, int], vocab_size: int, lowercase: bool
) -> Any:
    """Train a tokenizer; the same counts give the same one.

    Args:
        words: Words, as the normaliser and the pre-tokeniser leave them, and how often each occurs.
        characters: How often each character occurs.
        vocab_size: Word pieces to have at the end, the five special ones among them; fewer where the text has fewer.
        lowercase: Whether case and accents are dropped.

    Returns:
        A `tokenizers.Tokenizer`.
    """
    from tokenizers import pre_tokenizers, trainers

    alphabet = sorted(sorted(characters, key=lambda one: (-characters[one], one))[:ALPHABET])
    known = set(alphabet)
    counts = [(word, count) for word, count in words if known.issuperset(word)]  # the others will be unknown
    # The library numbers pieces of one character in the order of a hash table, which another run has otherwise, and
    # breaks ties between merges by their numbers. Given as special pieces they have fixed numbers.
    fixed = [*SPECIAL, *alphabet, *(f"{CONTINUES}{one}" for one in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=fixed, limit_alphabet=len(alphabet), show_progress=False
    )
    trained = new_tokenizer(lowercase)
    trained.normalizer, trained.pre_tokenizer = None, pre_tokenizers.WhitespaceSplit()  # done already
    trained.train_from_iterator(_repeated(counts), trainer)
    return complete(new_tokenizer(lowercase, trained.get_vocab()))


def _repeated(counts: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Write each word as often as it occurs, for the library counts words itself; all in proportion if that is long."""
    share = min(1.0, OCCURRENCES / max(1, sum(count for _, count in counts)))
    for word, count in counts:
        rest = max(1, round(share * count))
        while rest > 0:
            yield " ".join([word] * min(rest, 1000))
            rest -= 1000


def load_tokenizer(path: Path, lowercase: bool = True) -> Any:
    """Load a tokenizer.

    Args:
        path: A `tokenizer.json` of the library `tokenizers`, or a `vocab.txt` with one word piece per line.
        lowercase: For a `vocab.txt`: whether case and accents are dropped.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        UserError: If the file cannot be read, or lacks a special word piece.
    """
    from tokenizers import Tokenizer

    require(path.is_file(), f"--tokenizer {path}: there is no such file; give a tokenizer.json or a vocab.txt")
    if path.suffix == ".txt":
        lines = path.read_text(encoding="utf-8").splitlines()
        return complete(new_tokenizer(lowercase, {piece: number for number, piece in enumerate(lines)}), path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        require(
            False,
            f"--tokenizer {path} cannot be read ({str(error).splitlines()[0]}): give a tokenizer.json or vocab.txt",
        )
        raise
    return complete(tokenizer, path)


def complete(tokenizer: Any, path: Path | None = None) -> Any:
    """Check the special word pieces, and have pairs of sentences encoded as BERT does.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, changed in place.
        path: Where it was read, for messages.

    Returns:
        The tokenizer.

    Raises:
        UserError: If a special word piece is missing.
    """
    from tokenizers import processors

    missing = [piece for piece in SPECIAL if tokenizer.token_to_id(piece) is None]
    require(not missing, f"--tokenizer {path} has no {', '.join(missing)}: BERT needs {', '.join(SPECIAL)}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLASS} $A {SEPARATOR}",
        pair=f"{CLASS} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
        special_tokens=[(piece, tokenizer.token_to_id(piece)) for piece in (CLASS, SEPARATOR)],
    )
    return tokenizer
