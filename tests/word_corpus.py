"""A small corpus of a few words, in a different order in each document."""

from torch_thor.training.text.prepare import prepare

WORDS = [
    "river", "mountain", "council", "station", "century", "village", "player", "engine", "theory",
    "music", "island", "water", "school", "army",
]  # fmt: skip
PIECES = ["the", "a", ".", *WORDS]  # a vocabulary for these texts; no word has more than one piece


def write_texts(folder, documents=12):
    """Write the documents to a new folder."""
    folder.mkdir()
    for n in range(documents):
        words = WORDS[n:] + WORDS[:n]
        text = f"The {' '.join(words)}.\n\nA {' '.join(reversed(words))}.\n"
        (folder / f"{n}.txt").write_text(text)
    return folder


def write_corpus(folder, texts, *, pieces=None, tokenizer=None):
    """Prepare a corpus, with a vocabulary of these word pieces or with a given tokenizer."""
    if pieces is not None:
        tokenizer = folder.parent / f"{folder.name}.txt"
        tokenizer.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]))
    options = {"vocab_size": 100, "lengths": [16], "held_out": 0.3, "tokenizer": tokenizer}
    return prepare([str(texts)], folder, **options)
