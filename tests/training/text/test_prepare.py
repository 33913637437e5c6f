"""Preparing a corpus: what is read of each format, and the same files however they are made."""

import bz2
import gzip
import json
import lzma
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import trainers

from articles import paragraphs, plain, write_articles
from torch_thor.errors import UserError
from torch_thor.training.text import corpus as corpora
from torch_thor.training.text import prepare, wordpiece
from torch_thor.training.text.corpus import HELD_OUT, TRAIN, spans
from torch_thor.training.text.wordpiece import SPECIAL, load_tokenizer, train_tokenizer

SETTINGS = {"vocab_size": 300, "lengths": [32, 128], "held_out": 0.1}
FILES = (TRAIN, HELD_OUT, "tokenizer.json")


@pytest.fixture
def wiki(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "ROWS", 7)  # so that a few articles are several batches of rows
    return write_articles(tmp_path / "wiki", 80)


@pytest.fixture
def corpus(wiki, tmp_path):
    run(tmp_path / "corpus", wiki)
    return tmp_path / "corpus"


def run(out, *given, **options):
    said = StringIO()
    console = Console(file=said, width=400)
    words = {**SETTINGS, **options, "console": console}
    return prepare.prepare(list(map(str, given)), out, **words), said.getvalue()


def rows(folder, side=TRAIN):
    with pa.memory_map(str(folder / side)) as source:
        return pa.ipc.open_file(source).read_all().to_pylist()


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


def test_a_corpus_holds_every_sentence_of_every_article_once_in_order(wiki, tmp_path):
    manifest, said = run(tmp_path / "corpus", wiki)
    tokenizer = load_tokenizer(tmp_path / "corpus" / "tokenizer.json")
    found = {side: rows(tmp_path / "corpus", side) for side in (TRAIN, HELD_OUT)}
    texts = [tokenizer.decode(row["tokens"]) for own in found.values() for row in own]
    wanted = [tokenizer.encode(plain(n), add_special_tokens=False).ids for n in range(80)]
    assert sorted(texts) == sorted(map(tokenizer.decode, wanted))
    assert 1 <= len(found[HELD_OUT]) <= 20
    for side, own in found.items():
        counts = manifest["totals"][side]
        assert f"{side}: {len(own)} documents, {counts['tokens']} tokens, " in said
        assert counts["examples of 32"] == sum(len(row["32"]) for row in own)
        for row in own:
            for n in SETTINGS["lengths"]:
                assert [tuple(one) for one in row[str(n)]] == spans(row["ends"], n)
    names = {file.name for file in (tmp_path / "corpus").iterdir()}
    assert names == {"manifest.json", *FILES}


def test_neither_the_number_of_processes_nor_a_stop_changes_anything(
    wiki, corpus, tmp_path, monkeypatch
):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "write_documents", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "two", wiki)
    assert not (tmp_path / "two").exists()
    run(tmp_path / "two", wiki, workers=2)
    assert contents(tmp_path / "two") == contents(corpus)


def test_a_tokenizer_may_be_given_whatever_its_file_says_beside_its_pieces(wiki, corpus, tmp_path):
    """Files of published models may truncate and pad, and register [SEP] as a special token."""
    text = tmp_path / "about.txt"
    text.write_text("The word [SEP] stands between two segments, and [MASK] hides a word from it.")
    tokenizer = load_tokenizer(corpus / "tokenizer.json")
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (tmp_path / "vocab.txt").write_text("\n".join(piece for piece, _ in pieces))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=32)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(tmp_path / "published.json"))
    found = []
    for file in (corpus / "tokenizer.json", tmp_path / "vocab.txt", tmp_path / "published.json"):
        run(tmp_path / file.stem, wiki, text, tokenizer=file)
        found.append([rows(tmp_path / file.stem, side) for side in (TRAIN, HELD_OUT)])
    assert found[0] == found[1] == found[2]
    own = [row["tokens"] for row in rows(corpus)]
    assert [row["tokens"] for row in found[0][0] if row["tokens"] in own] == own


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [32, 8]}, "--seq-len 8 must be 16 tokens or more"),
        ({"held_out": 1.0}, r"--held-out 1\.0 must lie between 0 and 1"),
        ({"form": "xml"}, "--format xml must be one of text, bert, jsonl, parquet"),
        ({"tokenizer": Path("nowhere.json")}, "nowhere.json cannot be read .*: give a tokenizer"),
        ({"tokenizer": Path("vocab.txt")}, r"vocab.txt has no \[PAD\], \[UNK\].*: BERT needs"),
        ({"sources": ["nowhere"]}, "nowhere does not exist"),
        ({"sources": ["vocab.txt", "empty"]}, r"empty: no file ends in \.txt, .* --format"),
        ({"out": Path("empty")}, "--out empty exists: give another folder"),
    ],
)
def test_a_mistake_is_told_before_anything_is_read(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text("a\nb")
    Path("empty").mkdir()
    with pytest.raises(UserError, match=message):
        prepare.prepare(**{"sources": ["python"], "out": Path("out"), **change})
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("texts", "number"),
    [(["Too short."], 0), (["Two documents that are the same text.", "Too short."] * 2, 1)],
)
def test_a_corpus_that_is_too_small_is_refused_before_a_tokenizer_is_trained(
    tmp_path, monkeypatch, texts, number
):
    monkeypatch.setattr(prepare, "train_tokenizer", None)
    (tmp_path / "small.jsonl").write_text("\n".join(json.dumps({"text": one}) for one in texts))
    with pytest.raises(UserError, match=rf"^{number} different documents have prose.* two or more"):
        run(tmp_path / "small", tmp_path / "small.jsonl")


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_two_documents_are_one_of_each_split(tmp_path, share):
    lines = "Here are the words of a sentence.\nAnd of another one.\n"
    (tmp_path / "two.txt").write_text(f"{lines}\n{lines.upper()}")
    manifest, _ = run(tmp_path / "corpus", tmp_path / "two.txt", held_out=share, form="bert")
    assert [side["documents"] for side in manifest["totals"].values()] == [1, 1]


PROSE = "The first one has more than\nfive words. It ends.\n\nHeading\n\nThe second has so, too.\n"
FOUND = ["The first one has more than five words.", "It ends.", "The second has so, too."]


def read(path, *more, form=None):
    """The documents of sources: lists of sentences."""
    forms = prepare._find(list(map(str, (path, *more))), form)
    language = None if form == "bert" else "en"
    texts = [text for file, kind in forms.items() for text in prepare._texts(file, kind)]
    documents = (prepare._divide(text, language)["text"] for text in texts)
    return [sentences.split("\n") for sentences in documents if sentences]


@pytest.mark.parametrize(
    ("suffix", "pack"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)],
)
def test_the_formats(tmp_path, suffix, pack):
    for text in (PROSE, PROSE.replace("\n", "\r\n")):
        line = json.dumps({"id": 1, "text": text})
        for name, content, documents in (
            ("a.txt", f"\ufeff{text}", [FOUND]),
            ("b.jsonl", f"{line}\n\n{line}", [FOUND, FOUND]),
        ):
            (tmp_path / f"{name}{suffix}").write_bytes(pack(content.encode()))
            assert read(tmp_path / f"{name}{suffix}") == documents


def test_bert_has_a_sentence_a_line_and_a_blank_line_after_a_document(tmp_path):
    documents = [[f"Mr. {n} went.", "He ate!"] for n in range(200)]
    text = "\r\n \r\n\n".join("\r\n".join(one) for one in documents)
    (tmp_path / "corpus").write_text(f"\n{text}\n\n")
    assert read(tmp_path / "corpus", form="bert") == documents


def test_a_table_has_a_document_a_row_whose_lines_are_paragraphs_without_blank_ones(tmp_path):
    texts = [*(" \n".join(paragraphs(n)) for n in range(3)), None, PROSE]
    for own in (texts, [text and text.encode() for text in texts]):
        pq.write_table(pa.table({"id": list(range(5)), "text": own}), tmp_path / "a.parquet")
        found = read(tmp_path / "a.parquet")
        assert [len(sentences) for sentences in found] == [15, 15, 15, 3]
        assert " ".join(found[0]) == plain(0)


@pytest.mark.parametrize(("blank", "least"), [("\n\n", 31), ("\n", 2)])
def test_a_long_text_is_several_documents(tmp_path, blank, least):
    said = [f"Paragraph number {n} has a café and these words." for n in range(50_000)]
    (tmp_path / "book.txt").write_text(blank.join(said))
    found = read(tmp_path / "book.txt")
    assert len(found) >= least
    assert [line for sentences in found for line in sentences] == said


def test_a_folder_stands_for_its_files_with_known_endings(tmp_path):
    for name in ("b.txt", "a.md", "sub/[1]*?.txt", ".git/b.txt", "sub/._a.txt", "photo.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name} is a file of text with words.")
    found = [text.split(" ")[0] for [text] in read(tmp_path, tmp_path / "b.txt")]
    assert found == ["a.md", "b.txt", "sub/[1]*?.txt"]
    assert len(read(tmp_path, form="text")) == 4  # photo.jpg too
    assert len(read(tmp_path / ".git")) == 1  # the user has named it


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"text\n\ncaf\xe9\n", r"a\.txt cannot be read at line 3 .*: give text in UTF-8"),
        ("a.jsonl", b'{"text": ""}\n{no JSON', r"a\.jsonl cannot be read at line 2 \(Expecting pr"),
        (
            "a.jsonl",
            b'{"title": 1}',
            r"a\.jsonl cannot be read at line 1 .* with a \"text\" a line",
        ),
        ("a.json", b'[{"text": "in an array"}]', r"a\.json cannot be read at line 1 "),
        ("a.txt.gz", gzip.compress(bytes(99), mtime=0)[:-9], r"a\.txt\.gz cannot be read"),
        ("a.parquet", b"PAR1", r"a\.parquet cannot be read"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_its_place(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path / "corpus", tmp_path / name)
    assert len(str(caught.value)) < 400
    assert not (tmp_path / "corpus").exists()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(16, 128))
def test_every_sentence_is_in_an_example_and_only_the_last_may_be_short(lengths, length):
    found = spans(np.cumsum(lengths).tolist(), length)
    assert {n for first, last in found for n in range(first, last)} == set(range(len(lengths)))
    assert sum(last - first for first, last in found) <= len(lengths) + 1
    for first, last in found[:-1]:
        assert sum(lengths[first:last]) >= length - 3
        assert last - first == 2 or sum(lengths[first : last - 1]) < length - 3
    assert len(lengths) == 1 or all(last - first > 1 for first, last in found)


def test_a_tokenizer_is_that_of_the_library_whatever_the_order_of_the_text():
    text = [plain(number) for number in range(30)]
    alphabet = sorted({one for line in text for one in line.lower()} - {" "})
    fixed = [*SPECIAL, *alphabet, *(f"##{one}" for one in alphabet)]
    by_text = wordpiece.new_tokenizer(wordpiece.normalizer(True))
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=fixed)
    by_text.train_from_iterator(text, trainer)
    for own in (text, text[::-1]):
        found = train_tokenizer(lambda own=own: own, 150, True)
        assert found.get_vocab() == by_text.get_vocab()


@pytest.mark.parametrize(("vocab_size", "letters"), [(300, 100), (30_522, 304)])
def test_rare_characters_leave_room_for_words(vocab_size, letters):
    often = [chr(0xAC00 + n) for n in range(300)]
    text = ["the " * 500_000, "then " * 500, *often * 3, *(chr(0x4E00 + n) for n in range(2000))]
    vocabulary = train_tokenizer(lambda: text, vocab_size, True).get_vocab()
    assert {"the", "then"} <= set(vocabulary)
    assert sum(len(piece) == 1 for piece in vocabulary) == letters


def test_a_tokenizer_is_trained_on_a_share_of_a_large_text(wiki, tmp_path, monkeypatch):
    seen = []

    def spied(text, *rest):
        seen.append(len("".join(text())))
        return wordpiece.train_tokenizer(text, *rest)

    monkeypatch.setattr(prepare, "train_tokenizer", spied)
    run(tmp_path / "whole", wiki)
    monkeypatch.setattr(prepare, "SAMPLE", seen[0] // 4)
    run(tmp_path / "part", wiki)
    assert 0.1 < seen[1] / seen[0] < 0.4
