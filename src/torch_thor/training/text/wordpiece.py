"""BERT's WordPiece tokenizers, trained on a corpus or loaded from `tokenizer.json` or `vocab.txt`.

The library `tokenizers` trains them. It merges the most frequent pairs, as in BPE, because Google
never published its own training algorithm.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from torch_thor.errors import UserError, first_line, require

PAD, UNKNOWN, CLASS, SEPARATOR, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CONTINUES = "##"  # the prefix of a piece that does not begin a word
# The largest number of characters with pieces of their own: ALPHABET, but in small vocabularies one
# in 16 pieces or 128, whichever is larger. Each takes two pieces, one of which begins with ##, so
# that the rare characters of a large text would otherwise take most of a small vocabulary. Words
# with other characters are unknown.
ALPHABET, SMALL_ALPHABET, ALPHABET_SHARE = 1000, 128, 1 / 16


# Accents of Latin, Greek and Cyrillic letters, and what chooses between shapes of a character. BERT
# strips all marks, and so the vowels of Hindi, the tones of Thai and the voicing of Japanese.
_ACCENTS = Regex("[\u0300-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\ufe00-\ufe0f]")
# characters of a word; longer ones, as in scripts without spaces, are cut before they are unknown
_LONGEST_WORD = 100
# the share of a text from which on a character has pieces if it has other scripts and there is room
_OFTEN = 1e-6


def new_tokenizer(
    lowercase: bool, vocabulary: dict[str, int] | None = None, *, any_script: bool = False
) -> Any:
    """Create a `tokenizers.Tokenizer` as BERT's or for any script; untrained without vocabulary."""
    tokenizer = Tokenizer(
        models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=_LONGEST_WORD)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase and not any_script)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if any_script:
        stripped = [normalizers.NFD(), normalizers.Replace(_ACCENTS, ""), normalizers.NFC()]
        steps = [*stripped, normalizers.Lowercase()] if lowercase else []
        tokenizer.normalizer = normalizers.Sequence([tokenizer.normalizer, *steps])
        cut = pre_tokenizers.Split(Regex(f".{{1,{_LONGEST_WORD}}}"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, cut])
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def train_tokenizer(
    sentences: Callable[[], Iterable[str]],
    vocab_size: int,
    lowercase: bool,
    *,
    any_script: bool = False,
) -> Any:
    """Train a tokenizer, the same for any sentence order; a small text may give fewer pieces."""
    tokenizer = new_tokenizer(lowercase, any_script=any_script)
    written = Counter(chain.from_iterable(sentences()))
    normal = {character: tokenizer.normalizer.normalize_str(character) for character in written}
    characters: Counter[str] = Counter()
    for character, count in written.items():
        characters.update(dict.fromkeys(normal[character].replace(" ", ""), count))
    # These are ideographs, which are words of their own.
    alone = {text.strip() for text in normal.values() if any_script and text.startswith(" ")}
    most = min(ALPHABET, max(SMALL_ALPHABET, int(ALPHABET_SHARE * vocab_size)))
    if any_script:
        often = sum(count >= _OFTEN * characters.total() for count in characters.values())
        most = max(most, min(often, vocab_size // 3))
    # The most frequent characters are taken, in the order of their codes.
    alphabet = sorted(
        sorted(characters, key=lambda character: (-characters[character], character))[:most]
    )
    # The library assigns ids to single-character pieces in the order of a hash table, which differs
    # between runs, and it breaks ties between merges by these ids. Pieces that are passed as
    # special tokens have fixed ids.
    fixed = [
        *SPECIAL,
        *alphabet,
        *(f"{CONTINUES}{character}" for character in alphabet if character not in alone),
    ]
    # the library would choose an alphabet of its own among characters that are equally frequent
    kept = {*alphabet, " "}
    others = str.maketrans(
        {character: " " for character, text in normal.items() if not kept.issuperset(text)}
    )
    tokenizer.train_from_iterator(
        (sentence.translate(others) for sentence in sentences()),
        trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=fixed,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    return _complete(new_tokenizer(lowercase, tokenizer.get_vocab(), any_script=any_script), "")


def load_tokenizer(path: Path, lowercase: bool = True) -> Any:
    """Load a `tokenizer.json`, or a `vocab.txt` (a word piece a line), which takes `lowercase`."""
    try:
        tokenizer = (
            new_tokenizer(lowercase, models.WordPiece.read_file(str(path)))
            if path.suffix == ".txt"
            else Tokenizer.from_file(str(path))
        )
    except Exception as error:  # the library raises plain Exception objects
        raise UserError(
            f"--tokenizer {path} cannot be read ({first_line(error)}): give a tokenizer.json or "
            "vocab.txt"
        ) from error
    return _complete(tokenizer, path)


def _complete(tokenizer: Any, path: Path | str) -> Any:
    tokenizer.no_truncation()  # files of published models may have both switched on
    tokenizer.no_padding()
    ids = sorted(tokenizer.get_vocab().values())
    require(
        ids == list(range(len(ids))),
        f"--tokenizer {path} has {len(ids)} different word pieces with ids up to "
        f"{max(ids, default=0)}: the ids must be 0 to {len(ids) - 1}, each once",
    )
    missing = [piece for piece in SPECIAL if tokenizer.token_to_id(piece) is None]
    require(
        not missing,
        f"--tokenizer {path} has no {', '.join(missing)}: BERT needs {', '.join(SPECIAL)}",
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLASS} $A {SEPARATOR}",
        pair=f"{CLASS} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
        special_tokens=[(piece, tokenizer.token_to_id(piece)) for piece in (CLASS, SEPARATOR)],
    )
    return tokenizer
