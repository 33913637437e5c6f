"""What a recipe says of text: how long examples are, and how they are masked."""

from dataclasses import dataclass

from torch_thor.training.errors import require

SHORTEST = 16  # tokens of an example


@dataclass(frozen=True, kw_only=True)
class TextSpec:
    """Examples of a masked language model.

    Args:
        length: Tokens of an example, special ones included; a corpus is prepared for certain lengths (`--seq-len`). A
            phase may train on examples of another length; evaluations always have this one.
        masked: Share of the tokens that are predicted. Of these 80 % are replaced by [MASK], 10 % by any word piece.
        whole_words: Whether all word pieces of a word are masked together.
        next_sentence: Whether BERT is trained on pairs of sentence runs, and predicts whether the second follows the
            first; without, on single runs and their masked tokens alone. A network of a configuration file never is.
        vocab_size: Word pieces that are trained for python-text; a corpus has its own.
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
