"""Preparing a corpus: all formats and languages, and the same files for any number of workers."""

import bz2
import gzip
import json
import lzma
import unicodedata
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from articles import paragraphs, plain, write_articles
from torch_thor.errors import UserError
from torch_thor.training.text import corpus as corpora
from torch_thor.training.text import prepare
from torch_thor.training.text.corpus import HELD_OUT, TRAIN, spans
from torch_thor.training.text.wordpiece import SPECIAL, load_tokenizer, normalizer

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
                assert [tuple(span) for span in row[str(n)]] == spans(row["ends"], n)
    names = {file.name for file in (tmp_path / "corpus").iterdir()}
    assert names == {"manifest.json", *FILES}


def test_the_files_do_not_depend_on_processes_or_on_an_earlier_stop(
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


def test_a_tokenizer_may_be_given(wiki, corpus, tmp_path):
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
        ({"held_out": 1.0}, r"--held-out 1\.0 must lie between 0 and 1"),
        ({"tokenizer": Path("vocab.txt")}, r"vocab.txt has no \[PAD\], \[UNK\].*: BERT needs"),
        ({"sources": ["vocab.txt", "empty"]}, r"empty: no file ends in \.txt, .* --format"),
        ({"out": Path("empty")}, "--out empty exists: give another folder"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_read(tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(tmp_path)
    Path("vocab.txt").write_text("a\nb")
    Path("empty").mkdir()
    with pytest.raises(UserError, match=message):
        prepare.prepare(**{"sources": ["python"], "out": Path("out"), **change})
    assert not Path("out").exists()


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
def test_text_and_json_lines_may_be_compressed(tmp_path, suffix, pack):
    for text in (PROSE, PROSE.replace("\n", "\r\n")):
        line = json.dumps({"id": 1, "text": text})
        for name, content, documents in (
            ("a.txt", f"\ufeff{text}", [FOUND]),
            ("b.jsonl", f"{line}\n\n{line}", [FOUND, FOUND]),
        ):
            (tmp_path / f"{name}{suffix}").write_bytes(pack(content.encode()))
            assert read(tmp_path / f"{name}{suffix}") == documents


def test_the_format_of_bert_has_a_sentence_a_line_and_a_blank_line_after_a_document(tmp_path):
    documents = [[f"Mr. {n} went.", "He ate!"] for n in range(200)]
    text = "\r\n \r\n\n".join("\r\n".join(sentences) for sentences in documents)
    (tmp_path / "corpus").write_text(f"\n{text}\n\n")
    assert read(tmp_path / "corpus", form="bert") == documents


def test_a_table_has_a_document_a_row_whose_lines_are_paragraphs(tmp_path):
    texts = [*(" \n".join(paragraphs(n)) for n in range(3)), None, PROSE]
    for own in (texts, [text and text.encode() for text in texts]):
        pq.write_table(pa.table({"id": list(range(5)), "text": own}), tmp_path / "a.parquet")
        found = read(tmp_path / "a.parquet")
        assert [len(sentences) for sentences in found] == [15, 15, 15, 3]
        assert " ".join(found[0]) == plain(0)


def test_a_folder_stands_for_its_files_with_known_endings(tmp_path):
    for name in ("b.txt", "a.md", "sub/[1]*?.txt", ".git/b.txt", "photo.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name} is a file of text with words.")
    found = [text.split(" ")[0] for [text] in read(tmp_path, tmp_path / "b.txt")]
    assert found == ["a.md", "b.txt", "sub/[1]*?.txt"]
    assert len(read(tmp_path, form="text")) == 4  # photo.jpg too


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"text\n\ncaf\xe9\n", r"a\.txt cannot be read at line 3 .*: give text in UTF-8"),
        ("a.jsonl", b'{"text": ""}\n{no JSON', r"a\.jsonl cannot be read at line 2 \(Expecting pr"),
        ("a.jsonl", b'{"title": 1}', r"a\.jsonl cannot be read at line 1 .* with a \"text\" a l"),
        ("a.parquet", b"PAR1", r"a\.parquet cannot be read"),
    ],
)
def test_an_unreadable_file_is_named_with_the_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        run(tmp_path / "corpus", tmp_path / name)
    assert "\n" not in str(caught.value)
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


TEXTS = {
    "ja": "東京は日本の首都です。がぎぐげごの音はとても大切だと先生が言いました。",
    "th": "ประเทศไทยมีกรุงเทพมหานครเป็นเมืองหลวงที่ใหญ่ที่สุดและมีประชากรมากที่สุดของประเทศ" * 2,
    "ar": "القاهرة هي عاصمة جمهورية مصر العربية. يتكلم الناس فيها اللُّغَةَ العربية.",
    "vi": "Việt Nam là một quốc gia ở Đông Nam Á. Thủ đô của nước này là Hà Nội.",
}
TEXTS["en"] = "\n\n".join([*TEXTS.values(), "London is the capital of England, and is large."])


def letters(text):
    """The text without spaces, which tokenizers for BERT do not keep."""
    return "".join(unicodedata.normalize("NFC", text).split())


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("language", TEXTS)
def test_encoded_text_of_any_language_is_decoded(tmp_path, language, form):
    """Cased, so that accents stay; in decomposed Unicode (NFD, as of macOS) too."""
    text = unicodedata.normalize(form, TEXTS[language])
    for n, content in enumerate((text, f"{text}\n\n{text}")):
        (tmp_path / f"{n}.txt").write_text(content)
    out = tmp_path / "corpus"
    run(out, tmp_path, vocab_size=1000, lengths=[32], language=language, lowercase=False)
    tokenizer = load_tokenizer(out / "tokenizer.json")
    [row] = rows(out)
    assert letters(tokenizer.decode(row["tokens"])) in (letters(text), letters(text) * 2)
    assert tokenizer.token_to_id("[UNK]") not in row["tokens"]


def test_lines_end_sentences_where_there_are_neither_spaces_nor_full_stops(tmp_path):
    lines = ["กรุงเทพมหานครเป็นเมืองหลวงของประเทศ", "เชียงใหม่เป็นเมืองทางภาคเหนือของประเทศ"]
    for n, own in enumerate((lines, lines[::-1])):
        (tmp_path / f"{n}.txt").write_text("\n".join(own))
    manifest, _ = run(tmp_path / "corpus", tmp_path, lengths=[32])
    assert manifest["totals"][TRAIN]["sentences"] == 2


def test_accents_are_stripped_in_latin_greek_and_cyrillic_only():
    lower, cased = normalizer(True), normalizer(False)
    assert lower.normalize_str("Café Ǘ Ἀθήνᾳ ЙОЖ ÅNGSTRÖM") == "cafe u αθηνα иож angstrom"
    for text in ("がぎ", "हिन्दी", "ที่", "اللُّغَةَ", "நாய்", "한국어"):
        assert lower.normalize_str(text) == text
    assert cased.normalize_str(unicodedata.normalize("NFD", "Café がぎ")) == "Café がぎ"
