"""What several examples read: small images and sentences, and a random tiny encoder."""

import pytest
import torch
from PIL import Image
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

GOOD, BAD = ("good", "fine", "great"), ("bad", "poor", "dull")
NEUTRAL = ("a", "the", "film", "plot")
IMAGES = {"train": 16, "test": 4, "val": 4}  # of each class
COLOURS = {"red": 0, "green": 1, "blue": 2, "yellow": (0, 1), "pink": (0, 2), "cyan": (1, 2)}


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """Folders of noisy images of 32 x 32 pixels; a class is a colour."""
    folder, generator = tmp_path_factory.mktemp("images"), torch.Generator().manual_seed(0)
    for part, count in IMAGES.items():
        for name, channel in COLOURS.items():
            (folder / part / name).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(100, (32, 32, 3), generator=generator)
                pixels[..., channel] += 120
                Image.fromarray(pixels.byte().numpy()).save(folder / part / name / f"{i}.png")
    return folder


@pytest.fixture(scope="session")
def sentences(tmp_path_factory):
    """train.tsv and dev.tsv: one word decides."""
    folder, generator = tmp_path_factory.mktemp("sentences"), torch.Generator().manual_seed(0)
    for part, count in (("train", 64), ("dev", 16)):
        lines = []
        for i in range(count):
            words = [NEUTRAL[j] for j in torch.randint(4, (i % 4,), generator=generator)]
            words.append((BAD, GOOD)[i % 2][i % 3])
            lines.append(f"{' '.join(words)}\t{i % 2}\n")
        (folder / f"{part}.tsv").write_text("".join(lines))
    return folder


@pytest.fixture(scope="session")
def encoder(tmp_path_factory):
    """A folder with the tokenizer and the random weights of a tiny BERT."""
    folder = tmp_path_factory.mktemp("encoder")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *GOOD, *BAD, *NEUTRAL]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder
