"""Preparing a corpus: the same files whoever works on it and however often it is stopped; faults
are counted.
"""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import trainers

from articles import plain, small_units, write_articles
from command_line import assert_ends, descendants, wait_for
from torch_thor.errors import UserError
from torch_thor.training.text import prepare, wordpiece
from torch_thor.training.text.corpus import open_manifest, spans
from torch_thor.training.text.wordpiece import (
    SPECIAL,
    load_tokenizer,
    new_tokenizer,
    train_tokenizer,
)

SETTINGS = {"vocab_size": 300, "lengths": [32, 128], "held_out": 0.1}
FILES = ("train.arrow", "held-out.arrow", "tokenizer.json")


@pytest.fixture
def wiki(tmp_path, monkeypatch):
    small_units(monkeypatch)
    return write_articles(tmp_path / "wiki", 80)


def run(out, *given, **options):
    said = StringIO()
    console = Console(file=said, width=400)
    return prepare.prepare(
        list(map(str, given)), out, **{**SETTINGS, **options, "console": console}
    ), said.getvalue()


def rows(folder, side="train.arrow"):
    with pa.memory_map(str(folder / side)) as source:
        return pa.ipc.open_file(source).read_all().to_pylist()


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES}


@pytest.fixture
def corpus(wiki, tmp_path):
    run(tmp_path / "corpus", wiki)
    return tmp_path / "corpus"


def test_a_corpus_holds_every_sentence_of_every_article_once_in_order(wiki, tmp_path):
    manifest, said = run(tmp_path / "corpus", wiki)
    tokenizer = load_tokenizer(tmp_path / "corpus" / "tokenizer.json")
    found = {side: rows(tmp_path / "corpus", side) for side in FILES[:2]}
    texts = [tokenizer.decode(row["tokens"]) for own in found.values() for row in own]
    wanted = [
        tokenizer.decode(tokenizer.encode(plain(n), add_special_tokens=False).ids)
        for n in range(80)
    ]
    assert sorted(texts) == sorted(wanted)
    assert all(piece not in text for text in texts for piece in SPECIAL)
    assert 1 <= len(found["held-out.arrow"]) <= 20
    for side, own in found.items():
        counts = manifest["totals"][side]
        assert (
            f"{side}: {len(own)} documents, {counts['sentences']} sentences, {counts['tokens']} "
            "tokens, " in said
        )
        assert counts["examples of 32"] == sum(len(row["32"]) for row in own)
        for row in own:
            assert all(
                [tuple(one) for one in row[str(n)]] == spans(row["ends"], n)
                for n in SETTINGS["lengths"]
            )
    assert open_manifest(tmp_path / "corpus") == manifest
    assert manifest["faults"] == []
    names = {file.name for file in (tmp_path / "corpus").iterdir()}
    assert names - {".lock"} == {"manifest.json", *FILES}


def test_the_number_of_processes_changes_nothing(wiki, corpus, tmp_path):
    run(tmp_path / "two", wiki, workers=2)
    assert contents(tmp_path / "two") == contents(corpus)
    assert (tmp_path / "two" / "manifest.json").read_bytes() == (
        corpus / "manifest.json"
    ).read_bytes()


@pytest.mark.parametrize(
    ("stage", "after"),
    [("documents", 0), ("_count", 0), ("train_tokenizer", 0), ("write_documents", 1)],
)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, OSError(errno.ENOSPC, "No space left on device")]
)
def test_a_preparation_that_was_stopped_goes_on(
    wiki, corpus, tmp_path, monkeypatch, stage, after, error
):
    out, calls, really = tmp_path / "stopped", [], getattr(prepare, stage)

    def stopped(*arguments, **options):
        calls.append(stage)
        if len(calls) > after:
            (out / ".writing-train.arrow").write_bytes(b"half")
            raise error
        return really(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(prepare, stage, stopped)
        with pytest.raises(
            KeyboardInterrupt if error is KeyboardInterrupt else UserError,
            match=r"No space left.*(make|check)|^$",
        ):
            run(out, wiki)
    assert not {"manifest.json", "held-out.arrow"} & {file.name for file in out.iterdir()}
    finished = {file: file.stat().st_mtime_ns for file in (out / ".preparing").rglob("*.arrow")}
    assert bool(finished) == (stage != "documents")
    monkeypatch.setattr(prepare.shutil, "rmtree", lambda *_, **__: None)  # their files stay
    run(out, wiki)
    assert {file: file.stat().st_mtime_ns for file in finished} == finished
    assert contents(out) == contents(corpus)


# The function in a process of its own, whose workers import this file too.
SCRIPT = """
import sys
from pathlib import Path
from torch_thor.training.text import corpus, prepare

corpus.UNIT = 10_000
if __name__ == "__main__":
    options = dict(vocab_size=300, lengths=[32, 128], held_out=0.1, workers=2)
    prepare.prepare([sys.argv[1]], Path(sys.argv[2]), **options)
"""


@pytest.mark.slow
def test_a_killed_preparation_leaves_what_goes_on_and_no_process(wiki, corpus, tmp_path):
    script, out = tmp_path / "script.py", tmp_path / "killed"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, script, wiki, out], stderr=subprocess.PIPE, start_new_session=True
    )
    wait_for(process, lambda: any((out / ".preparing").rglob("*.arrow")), "file of documents")
    workers = descendants(process.pid)
    assert len(workers) >= 2
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    for worker in workers:
        assert_ends(worker, timeout=60)
    assert not (out / "manifest.json").exists()
    run(out, wiki)
    assert contents(out) == contents(corpus)


def test_a_finished_corpus_is_left_alone_unless_it_is_damaged(wiki, corpus):
    before = contents(corpus)
    _, said = run(corpus, wiki)
    assert "is finished already, and whole; nothing was done" in said
    assert contents(corpus) == before
    (corpus / "train.arrow").write_bytes(before["train.arrow"][:-8])
    with pytest.raises(
        UserError,
        match=r"train\.arrow was cut short or changed.* delete its folder, then prepare",
    ):
        run(corpus, wiki)


def test_what_is_left_out_is_counted_by_reason(wiki, tmp_path):
    text = tmp_path / "texts"
    text.mkdir()
    (text / "latin.txt").write_bytes("caf\u00e9 ".encode("latin-1") * 100)
    (text / "._latin.txt").write_bytes(b"\0\5\x16\7")
    (text / "photo.jpg").write_bytes(b"")
    manifest, said = run(tmp_path / "corpus", wiki, text, max_faults=0.05)
    (fault,) = manifest["faults"]
    assert fault.startswith("texts/latin.txt, byte 3 of its file: it is not UTF-8")
    assert f"unreadable: {fault}" in said
    counts = (2, 1, 1, 1)
    assert tuple(manifest["left out"].values()) == counts
    assert (
        "left out: 2 documents without prose, 1 unreadable, 1 files of other kinds, 1 hidden or "
        "made by programs\nthe corpus is in" in said
    )
    assert said.startswith(
        "read: 4 files of JSON, an object with a text a line; 1 files of text with "
    )
    with pytest.raises(
        UserError, match=r"1 of 83 documents cannot be read, and --max-faults 0\.01 allows 0"
    ):
        run(tmp_path / "strict", wiki, text)
    run(tmp_path / "strict", wiki, text, max_faults=0.05)
    assert contents(tmp_path / "strict") == contents(tmp_path / "corpus")


def test_a_tokenizer_may_be_given_whatever_its_file_says_beside_its_pieces(wiki, corpus, tmp_path):
    """Files of published models may truncate and pad, and register [SEP] as a special token."""
    text = tmp_path / "about.txt"
    text.write_text(
        "The word [SEP] stands between the two segments of a pair, and [MASK] hides a word from it."
    )
    tokenizer = load_tokenizer(corpus / "tokenizer.json")
    (tmp_path / "vocab.txt").write_text(
        "\n".join(sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get))
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=32)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(tmp_path / "published.json"))
    found = []
    for file in (corpus / "tokenizer.json", tmp_path / "vocab.txt", tmp_path / "published.json"):
        run(tmp_path / file.stem, wiki, text, tokenizer=file)
        found.append([rows(tmp_path / file.stem, side) for side in FILES[:2]])
    assert found[0] == found[1] == found[2]
    own = [row["tokens"] for row in rows(corpus)]
    assert [row["tokens"] for row in found[0][0] if row["tokens"] in own] == own


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [*SPECIAL, "a", "b", "a"],
            "has 7 different word pieces with ids up to 7: the ids must be 0 to 6, each once",
        ),
        ([*SPECIAL[1:], "a"], r"has no \[PAD\]: BERT needs"),
        (["caf\xe9"], "cannot be read .*: give a tokenizer.json or vocab.txt"),
    ],
)
def test_a_vocabulary_with_a_fault_is_refused(wiki, tmp_path, lines, message):
    (tmp_path / "vocab.txt").write_bytes("\n".join(lines).encode("latin-1"))
    with pytest.raises(UserError, match=rf"vocab\.txt {message}"):
        run(tmp_path / "none", wiki, tokenizer=tmp_path / "vocab.txt")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 99}, "--vocab-size 99 must be 100 or more"),
        ({"lengths": [8]}, "--seq-len 8 must be different lengths of 16 tokens or more"),
        ({"lengths": []}, "--seq-len"),
        ({"lengths": [32, 32]}, "--seq-len 32,32"),
        ({"held_out": 1.0}, r"--held-out 1\.0 must lie between 0 and 1"),
        ({"max_faults": 2}, r"--max-faults 2 must lie in \[0, 1\]"),
        ({"workers": 0}, "--workers 0 must be 1 or more"),
        ({"form": "xml"}, "--format xml must be one of text, bert, html, doc, jsonl, parquet"),
        (
            {"tokenizer": Path("nowhere.json")},
            r"--tokenizer nowhere.json cannot be read \(No such file.*: give a tokenizer",
        ),
    ],
)
def test_bad_settings_are_refused_before_a_folder_is_made(wiki, tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path / "none", wiki, **change)
    assert not (tmp_path / "none").exists()


def test_processes_that_cannot_talk_are_refused_and_their_death_is_told(
    wiki, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", "/" + 75 * "t")
        with pytest.raises(UserError, match=r"TMPDIR=/t+ has 76 bytes, .* or give --workers 1"):
            run(tmp_path / "none", wiki, workers=2)
        assert not (tmp_path / "none").exists()
        run(tmp_path / "one", wiki, workers=1)

    def died(*_, **__):
        raise EOFError

    monkeypatch.setattr(prepare.datasets.Dataset, "from_generator", died)
    with pytest.raises(UserError, match=r"has ended early \(EOFError\): .* fewer --workers"):
        run(tmp_path / "two", wiki, workers=2)


def test_a_corpus_keeps_its_settings_and_sources(wiki, corpus, tmp_path):
    before = {file.name: file.read_bytes() for file in corpus.iterdir()}
    for change in (
        {"seed": 1},
        {"lowercase": False},
        {"lengths": [32]},
        {"tokenizer": corpus / "tokenizer.json"},
    ):
        with pytest.raises(
            UserError, match=f"was prepared with other {next(iter(change))}: give the same"
        ):
            run(corpus, wiki, **change)
    write_articles(wiki, 81)
    with pytest.raises(UserError, match="was prepared with other sources"):
        run(corpus, wiki)
    with pytest.raises(UserError, match="is not empty and holds no corpus"):
        run(tmp_path, wiki)
    with pytest.raises(UserError, match="is a file: give a folder"):
        run(wiki / "wiki_00", wiki)
    with FileLock(corpus / ".lock"), pytest.raises(UserError, match="another process prepares it"):
        run(corpus, wiki)
    assert {file.name: file.read_bytes() for file in corpus.iterdir()} == before


def test_a_corpus_that_is_too_small_is_refused_before_a_tokenizer_is_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "train_tokenizer", None)
    short = tmp_path / "short.txt"
    for text, number in (("Too short.", 0), ("One paragraph that has more than five words.", 1)):
        short.write_text(text)
        with pytest.raises(UserError, match=rf"^{number} of 1 documents have prose .* two or more"):
            run(tmp_path / "small", short)
        names = {file.name for file in (tmp_path / "small").iterdir()}
        assert names <= {".lock", ".preparing"}


@pytest.mark.parametrize("share", [1e-9, 1 - 1e-9])
def test_two_documents_are_one_of_each_split(tmp_path, share):
    lines = "Here are the words of a sentence.\nAnd of another one.\n"
    (tmp_path / "two.txt").write_text(f"{lines}\n{lines.upper()}")
    manifest, _ = run(tmp_path / "corpus", tmp_path / "two.txt", held_out=share)
    assert [side["documents"] for side in manifest["totals"].values()] == [1, 1]


def test_names_of_files_need_not_be_utf8(wiki, tmp_path):
    (tmp_path / "texts").mkdir()
    name = os.fsdecode(os.fsencode(tmp_path / "texts") + b"/caf\xe9.txt")
    Path(name).write_text("A paragraph that has more than five words.")
    manifest, _ = run(tmp_path / "corpus", wiki, tmp_path / "texts", held_out=0.2)
    assert "texts/caf\\udce9.txt" in [source["name"] for source in manifest["sources"]]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(16, 128))
def test_every_sentence_is_in_an_example_and_only_the_last_may_be_short(lengths, length):
    found = spans(np.cumsum(lengths).tolist(), length)
    assert sorted({n for first, last in found for n in range(first, last)}) == list(
        range(len(lengths))
    )
    assert sum(last - first for first, last in found) <= len(lengths) + 1
    for first, last in found[:-1]:
        assert sum(lengths[first:last]) >= length - 3
        assert last - first == 2 or sum(lengths[first : last - 1]) < length - 3
    assert len(lengths) == 1 or all(last - first > 1 for first, last in found)


def test_a_tokenizer_is_that_of_the_library_whatever_the_order_of_the_text():
    text = [plain(number) for number in range(30)]
    found = [
        train_tokenizer(lambda own=own: own, 150, True).get_vocab()
        for own in (text, text[::-1], text)
    ]
    by_text, alphabet = (
        new_tokenizer(True),
        sorted({one for line in text for one in line.lower()} - {" "}),
    )
    fixed = [*SPECIAL, *alphabet, *(f"##{one}" for one in alphabet)]
    by_text.train_from_iterator(
        text, trainers.WordPieceTrainer(vocab_size=150, special_tokens=fixed)
    )
    assert found == [by_text.get_vocab()] * 3


def test_rare_characters_leave_room_for_words_in_a_small_vocabulary():
    text = ["the " * 1000, "then " * 500, "this " * 400, *(chr(0x4E00 + n) for n in range(2000))]
    for vocab_size, letters in ((300, 128), (4096, 256), (30_522, 1000)):
        vocabulary = train_tokenizer(lambda: text, vocab_size, True).get_vocab()
        assert {"the", "then", "this"} <= set(vocabulary)
        assert sum(len(piece) == 1 for piece in vocabulary) == letters


def test_a_tokenizer_is_trained_on_a_share_of_a_large_text(wiki, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        prepare,
        "train_tokenizer",
        lambda text, *rest, **options: (
            seen.append(len("".join(text()))) or wordpiece.train_tokenizer(text, *rest, **options)
        ),
    )
    run(tmp_path / "whole", wiki)
    monkeypatch.setattr(prepare, "SAMPLE", seen[0] // 4)
    run(tmp_path / "part", wiki)
    assert 0.1 < seen[1] / seen[0] < 0.4
