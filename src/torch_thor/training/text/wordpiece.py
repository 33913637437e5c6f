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
# The share of a text from which on a character has pieces of its own, two for most characters; all
# together have at most two thirds of the vocabulary. Words with other characters are unknown.
OFTEN = 1e-6
# Accents of Latin, Greek and Cyrillic letters, and what chooses between shapes of a character. BERT
# strips all marks, and so the vowels of Hindi, the tones of Thai and the voicing of Japanese.
_ACCENTS = Regex("[\u0300-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\ufe00-\ufe0f]")


def normalizer(lowercase: bool) -> Any:
    """Return what normalises text in any script, for training and for encoding."""
    accents = [normalizers.NFD(), normalizers.Replace(_ACCENTS, ""), normalizers.Lowercase()]
    kept = [normalizers.BertNormalizer(lowercase=False), *(accents if lowercase else [])]
    return normalizers.Sequence([*kept, normalizers.NFC()])


def new_tokenizer(normal: Any, vocabulary: dict[str, int] | None = None) -> Any:
    """Create a `tokenizers.Tokenizer` of word pieces; without a vocabulary it is untrained."""
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normal
    # longer words, as in scripts without spaces, would be unknown
    cut = pre_tokenizers.Split(Regex(".{1,100}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), cut])
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def train_tokenizer(
    sentences: Callable[[], Iterable[str]], vocab_size: int, lowercase: bool
) -> Any:
    """Train a tokenizer, the same for any sentence order; a small text may give fewer pieces."""
    tokenizer = new_tokenizer(normalizer(lowercase))
    normal = tokenizer.normalizer.normalize_str
    characters = Counter(chain.from_iterable(map(normal, sentences())))
    del characters[" "]
    often = sum(count >= OFTEN * characters.total() for count in characters.values())
    # The most frequent characters are taken, in the order of their codes.
    by_count = sorted(characters, key=lambda character: (-characters[character], character))
    alphabet = sorted(by_count[: min(often, vocab_size // 3)])
    # The library assigns ids to single-character pieces in the order of a hash table, which differs
    # between runs, and it breaks ties between merges by these ids. Pieces that are passed as
    # special tokens have fixed ids. Ideographs, which are words of their own, continue none.
    inside = [f"{CONTINUES}{character}" for character in alphabet if normal(character) == character]
    # the library would choose an alphabet of its own among characters that are equally frequent
    others = str.maketrans(dict.fromkeys(characters.keys() - {*alphabet}, " "))
    tokenizer.train_from_iterator(
        (normal(sentence).translate(others) for sentence in sentences()),
        trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            special_tokens=[*SPECIAL, *alphabet, *inside],
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    return new_tokenizer(tokenizer.normalizer, tokenizer.get_vocab())


def load_tokenizer(path: Path, lowercase: bool = True) -> Any:
    """Load a `tokenizer.json`, or a `vocab.txt` (a word piece a line), which takes `lowercase`."""
    try:
        if path.suffix == ".txt":
            normal = normalizers.BertNormalizer(lowercase=lowercase)
            tokenizer = new_tokenizer(normal, models.WordPiece.read_file(str(path)))
        else:
            tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception objects
        raise UserError(
            f"{path} cannot be read ({first_line(error)}): give a tokenizer.json or vocab.txt"
        ) from error
    tokenizer.no_truncation()  # files of published models may have both switched on
    tokenizer.no_padding()
    missing = [piece for piece in SPECIAL if tokenizer.token_to_id(piece) is None]
    require(not missing, f"{path} has no {', '.join(missing)}: BERT needs {', '.join(SPECIAL)}")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{CLASS} $A {SEPARATOR}",
        pair=f"{CLASS} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
        special_tokens=[(piece, tokenizer.token_to_id(piece)) for piece in (CLASS, SEPARATOR)],
    )
    return tokenizer
