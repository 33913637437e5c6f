"""The corpus of a recipe: what it cannot be used for is refused before a training begins."""

import pytest

from torch_thor.training import UserError, load_recipe
from torch_thor.training.tasks.text_batches import pair_maker
from word_corpus import PIECES, write_corpus, write_texts


def maker(folder, whole_words):
    words = ["data.name=corpus", f"data.root={folder}", "data.text.length=16", f"data.text.whole_words={whole_words}"]
    return pair_maker(load_recipe("bert-tiny", words), folder, "train", 16)


def test_whole_words_need_a_tokenizer_that_marks_them(tmp_path):
    texts = write_texts(tmp_path / "texts")
    write_corpus(tmp_path / "unmarked", texts, pieces=PIECES)
    write_corpus(tmp_path / "marked", texts, pieces=[*PIECES, "##s"])
    assert maker(tmp_path / "unmarked", False).masking.whole_words is False
    assert maker(tmp_path / "marked", True).masking.whole_words is True
    with pytest.raises(UserError, match=r"data\.text\.whole_words=true: the tokenizer of .*unmarked has no pieces"):
        maker(tmp_path / "unmarked", True)
