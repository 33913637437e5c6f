"""The settings of text in a recipe: the length of the examples and how they are masked."""

from dataclasses import dataclass

from torch_thor.training.errors import require

SHORTEST = 16  # tokens of an example


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """The examples of a masked language model.

    Args:
        length: Tokens per example, including special tokens. It must be one of the lengths that the corpus was prepared
            for (`--seq-len`). A phase may train on examples of another length; evaluations always use this one.
        masked: Fraction of the tokens that are predicted, in (0, 1). Of these, 80 % are replaced by [MASK], 10 % by a
            random word piece, and 10 % are kept.
        whole_words: Whether all word pieces of a word are masked together.
        next_sentence: Whether BERT is trained on pairs of text segments and also predicts whether the second segment
            follows the first. If false, it is trained on single segments and predicts masked tokens only, as a network
            of a configuration file always is.
        vocab_size: Number of word pieces of the tokenizer that is trained for python-text. A prepared corpus has its
            own tokenizer.
    """

    length: int = 128
    masked: float = 0.15
    whole_words: bool = False
    next_sentence: bool = True
    vocab_size: int = 4096

    def __post_init__(self) -> None:
        require(self.length >= SHORTEST, f"data.text.length={self.length} must be {SHORTEST} tokens or more")
        require(0 < self.masked < 1, f"data.text.masked={self.masked} must be a share between 0 and 1; 0.15 is usual")
        require(self.vocab_size >= 100, f"data.text.vocab_size={self.vocab_size} must be 100 or more")
