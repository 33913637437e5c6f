"""BERT's WordPiece tokenizers, trained on a corpus or loaded from a `tokenizer.json` or `vocab.txt`.

The library `tokenizers` trains them. It merges the most frequent pairs, as in BPE, because Google never published its
own training algorithm.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_thor.training.errors import UserError, require

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
SPECIAL = (PAD, UNKNOWN, CLASS, SEPARATOR, MASK)
CONTINUES = "##"  # the prefix of a piece that does not begin a word
# The largest number of characters with pieces of their own: ALPHABET, but in small vocabularies one in 16 pieces or
# 128, whichever is larger. Each takes two pieces, one of which begins with ##, so that the rare characters of a large
# text would otherwise take most of a small vocabulary. Words with other characters are unknown.
ALPHABET, SMALL_ALPHABET, ALPHABET_SHARE = 1000, 128, 1 / 16
OCCURRENCES = 20_000_000  # the approximate limit of the word occurrences that the trainer reads
LONGEST_WORD = 100  # characters


def new_tokenizer(lowercase: bool, vocabulary: dict[str, int] | None = None) -> Any:
    """Create a tokenizer with BERT's normaliser and pre-tokeniser.

    Args:
        lowercase: Whether text is converted to lower case and accents are removed.
        vocabulary: The id of each word piece. With `None`, the tokenizer is untrained.

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
    """Train a tokenizer. The same counts always result in the same tokenizer.

    Args:
        words: The words after normalisation and pre-tokenisation, and the number of occurrences of each.
        characters: The number of occurrences of each character.
        vocab_size: The size of the vocabulary, including the five special word pieces. Small texts may result in fewer.
        lowercase: Whether text is converted to lower case and accents are removed.

    Returns:
        A `tokenizers.Tokenizer`.
    """
    from tokenizers import pre_tokenizers, trainers

    most = min(ALPHABET, max(SMALL_ALPHABET, int(ALPHABET_SHARE * vocab_size)))
    alphabet = sorted(sorted(characters, key=lambda one: (-characters[one], one))[:most])
    known = set(alphabet)
    counts = [(word, count) for word, count in words if known.issuperset(word)]  # other words are unknown
    # The library assigns ids to single-character pieces in the order of a hash table, which differs between runs, and
    # it breaks ties between merges by these ids. Pieces that are passed as special tokens have fixed ids.
    fixed = [*SPECIAL, *alphabet, *(f"{CONTINUES}{one}" for one in alphabet)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=fixed, limit_alphabet=len(alphabet), show_progress=False
    )
    trained = new_tokenizer(lowercase)
    # the words are already normalised and separated
    trained.normalizer, trained.pre_tokenizer = None, pre_tokenizers.WhitespaceSplit()
    trained.train_from_iterator(_repeated(counts), trainer)
    return complete(new_tokenizer(lowercase, trained.get_vocab()))


def _repeated(counts: Sequence[tuple[str, int]]) -> Iterator[str]:
    """Repeat each word by its count, as the library counts words itself. Large counts are reduced in proportion."""
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
        lowercase: Whether text is converted to lower case and accents are removed. Only used with a `vocab.txt`.

    Returns:
        A `tokenizers.Tokenizer`.

    Raises:
        UserError: If the file cannot be read, or a special word piece is missing.
    """
    from tokenizers import Tokenizer

    require(path.is_file(), f"--tokenizer {path}: there is no such file; give a tokenizer.json or a vocab.txt")
    if path.suffix == ".txt":
        return complete(new_tokenizer(lowercase, _listed_pieces(path)), path)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception objects
        require(
            False,
            f"--tokenizer {path} cannot be read ({str(error).splitlines()[0]}): give a tokenizer.json or vocab.txt",
        )
        raise
    return complete(tokenizer, path)


def _listed_pieces(path: Path) -> dict[str, int]:
    """Read a `vocab.txt`: the id of a word piece is the number of its line, counted from 0."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would split at other characters too
    except UnicodeDecodeError as error:
        raise UserError(
            f"--tokenizer {path} is not UTF-8 (byte {error.start}): convert it with iconv -t utf-8"
        ) from error
    pieces = [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]
    found: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        require(
            piece not in found,
            f"--tokenizer {path} has {piece!r} in lines {found.get(piece, 0) + 1} and {number + 1}: each line must be "
            f"another word piece",
        )
        found[piece] = number
    return found


def complete(tokenizer: Any, path: Path | None = None) -> Any:
    """Check the word pieces, and configure the tokenizer to encode whole texts and sentence pairs as in BERT.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, which is modified in place.
        path: The file from which the tokenizer was loaded, for error messages.

    Returns:
        The tokenizer.

    Raises:
        UserError: If a special word piece is missing, or the ids are not 0, 1, 2, … without gaps.
    """
    from tokenizers import processors

    tokenizer.no_truncation()  # files of published models may have both switched on
    tokenizer.no_padding()
    ids = sorted(tokenizer.get_vocab().values())
    require(
        ids == list(range(len(ids))),
        f"--tokenizer {path} has {len(ids)} word pieces with ids up to {max(ids, default=0)}: the ids must be 0 to "
        f"{len(ids) - 1}, each once",
    )
    missing = [piece for piece in SPECIAL if tokenizer.token_to_id(piece) is None]
    require(not missing, f"--tokenizer {path} has no {', '.join(missing)}: BERT needs {', '.join(SPECIAL)}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLASS} $A {SEPARATOR}",
        pair=f"{CLASS} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
        special_tokens=[(piece, tokenizer.token_to_id(piece)) for piece in (CLASS, SEPARATOR)],
    )
    return tokenizer
