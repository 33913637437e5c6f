"""Preparing a corpus: the same files whoever works on it and however often it is stopped; faults are counted."""

import json
import os
import re
import signal
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pytest
from filelock import FileLock
from rich.console import Console

from command_line import command, succeed
from dumps import dump, plain, small_units, write_dump
from sums import sha256
from torch_thor.training import UserError
from torch_thor.training.text import Manifest, Preparation, Settings, load_tokenizer, prepare, preparing, stages

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SETTINGS = Settings(vocab_size=300, lengths=(32, 128), held_out=0.1)


@pytest.fixture
def wiki(tmp_path, monkeypatch):
    small_units(monkeypatch)
    return write_dump(tmp_path / "wiki.xml.bz2", dump(80))


def run(out, *given, settings=SETTINGS, **options):
    said = StringIO()
    manifest = prepare(Preparation(tuple(map(str, given)), out, settings, **options), Console(file=said, width=400))
    return manifest, said.getvalue()


def read_table(path):
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def checksums(folder):
    return {file.name: sha256(file) for file in folder.iterdir() if file.name != "begun.json"}


def test_a_corpus_holds_every_article_once_and_says_so(wiki, tmp_path):
    manifest, said = run(tmp_path / "corpus", wiki)
    train, held_out = (sum(s.documents for s in manifest.side(side)) for side in ("train", "held-out"))
    assert train + held_out == 80
    assert 1 <= held_out <= 20
    assert f"train: {train} documents" in said
    number = r"[0-9.]+( [kM])?"
    for stage, unit in (("cleaning", "bytes"), ("tokenizer", "characters"), ("encoding", "tokens")):
        assert re.search(rf"^{stage}: .*\b{number} {unit} \({number}/s\).*, in [0-9.]+ s$", said, re.MULTILINE)
    assert said.count(" 80 documents (") >= 2  # cleaned and encoded
    assert Manifest.read(tmp_path / "corpus") == manifest
    manifest.check_files(tmp_path / "corpus")
    assert manifest.faults == []
    assert sorted(manifest.versions) == sorted(("torch-thor", "python", *preparing._LIBRARIES))
    names = {file.name for file in (tmp_path / "corpus").iterdir()}
    assert names == {
        "begun.json",
        "manifest.json",
        "tokenizer.json",
        *(n for s in manifest.shards for n in s.checksums),
    }


def test_tokens_are_those_of_the_sentences_in_their_order(wiki, tmp_path):
    manifest, _ = run(tmp_path / "corpus", wiki)
    tokenizer = load_tokenizer(tmp_path / "corpus" / "tokenizer.json")
    found = []
    for shard in manifest.shards:
        table = read_table(tmp_path / "corpus" / f"{shard.name}.arrow")
        assert len(table) == shard.documents
        found += [tokenizer.decode(tokens.as_py()) for tokens in table["tokens"]]
    wanted = [plain(n) for n in range(80)]
    again = [tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) for text in wanted]
    assert sorted(found) == sorted(again)
    assert all(piece not in text for text in found for piece in SPECIAL)


def test_examples_cover_every_sentence_and_only_the_last_of_a_document_is_short(wiki, tmp_path):
    manifest, _ = run(tmp_path / "corpus", wiki)
    for shard in manifest.shards:
        ends = read_table(tmp_path / "corpus" / f"{shard.name}.arrow")["ends"].to_pylist()
        for length in (32, 128):
            rows = read_table(tmp_path / "corpus" / f"{shard.name}.{length}.arrow").to_pylist()
            assert len(rows) == shard.examples[length]
            covered = {(row["document"], n) for row in rows for n in range(row["first"], row["last"])}
            assert covered == {(d, n) for d, own in enumerate(ends) for n in range(len(own))}
            for row in rows:
                own = [0, *ends[row["document"]]]
                assert own[row["last"]] - own[row["first"]] >= length - 3 or row["last"] == len(own) - 1


def test_a_corpus_begun_by_a_version_with_other_examples_is_refused(wiki, tmp_path):
    run(tmp_path / "corpus", wiki)
    begun = tmp_path / "corpus" / "begun.json"
    values = json.loads(begun.read_text())
    begun.write_text(json.dumps({**values, "format": 1}))
    with pytest.raises(UserError, match="begun by a version of torch-thor that writes other examples: give another"):
        run(tmp_path / "corpus", wiki)


def test_the_number_of_processes_changes_nothing(wiki, tmp_path):
    run(tmp_path / "one", wiki)
    run(tmp_path / "three", wiki, workers=3)
    assert checksums(tmp_path / "one") == checksums(tmp_path / "three")


@pytest.mark.parametrize("stage", ["clean_unit", "train_tokenizer", "encode_unit"])
@pytest.mark.parametrize("after", [0, 2])
def test_a_preparation_that_was_stopped_goes_on(wiki, tmp_path, monkeypatch, stage, after):
    run(tmp_path / "whole", wiki)
    calls = []
    real = {name: getattr(stages, name) for name in ("clean_unit", "train_tokenizer", "encode_unit")}

    def counted(name, limit):
        def work(*arguments):
            calls.append(name)
            if limit is not None and calls.count(name) > limit:
                raise KeyboardInterrupt
            return real[name](*arguments)

        return work

    for name in real:
        monkeypatch.setattr(
            stages, name, counted(name, (0 if name == "train_tokenizer" else after) if name == stage else None)
        )
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", wiki)
    done = list(calls)
    calls.clear()
    for name in real:
        monkeypatch.setattr(stages, name, counted(name, None))
    run(tmp_path / "stopped", wiki)
    assert checksums(tmp_path / "stopped") == checksums(tmp_path / "whole")
    units = done.count("clean_unit") + calls.count("clean_unit") - (stage == "clean_unit")
    assert units > 4
    assert calls.count("encode_unit") + done.count("encode_unit") - (stage == "encode_unit") == units  # nothing twice


# The command, which kills itself when so many units of a stage are finished; its processes import this file too.
KILLED = """
import os, signal, sys
from torch_thor.cli import main
from torch_thor.training.text import sources, stages

sources.UNIT = 20_000
if __name__ == "__main__":
    stage, after, *sys.argv[1:] = sys.argv[1:]
    results = stages.results

    def watched(work, jobs, workers):
        for number, found in enumerate(results(work, jobs, workers)):
            yield found
            if (work.__name__, str(number)) == (stage, after):
                os.kill(os.getpid(), signal.SIGKILL)

    stages.results = watched
    main()
"""


@pytest.mark.slow
def test_a_killed_process_leaves_what_goes_on_and_no_process(wiki, tmp_path):
    """The real command with processes of its own, killed in two stages."""
    script, given = (
        tmp_path / "killed.py",
        ("prepare", wiki, "--vocab-size", "300", "--seq-len", "32", "--held-out", "0.1", "--out"),
    )
    script.write_text(KILLED)
    succeed(tmp_path, "none", "0", *given, "whole", script=script)
    for stage in ("clean_unit", "encode_unit"):
        # its output ends when the last of its processes has ended
        code, _, _ = command(tmp_path, stage, "1", *given, "killed", "--workers", "2", script=script)
        assert code == -signal.SIGKILL
        assert not (tmp_path / "killed" / "manifest.json").exists()
    succeed(tmp_path, "none", "0", *given, "killed", script=script)
    assert checksums(tmp_path / "killed") == checksums(tmp_path / "whole")


def test_a_finished_corpus_is_left_alone_unless_it_is_damaged(wiki, tmp_path):
    out = tmp_path / "corpus"
    manifest, _ = run(out, wiki)
    before = {file: file.stat().st_mtime_ns for file in out.iterdir()}
    again, said = run(out, wiki)
    assert again == manifest
    assert "finished already" in said
    assert {file: file.stat().st_mtime_ns for file in out.iterdir()} == before
    shard = out / f"{manifest.shards[0].name}.arrow"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match="was cut short or changed"):
        run(out, wiki)


def test_what_cannot_be_read_is_named_and_counted(wiki, tmp_path):
    text = tmp_path / "latin.txt"
    text.write_bytes("caf\u00e9 ".encode("latin-1") * 100)
    manifest, said = run(tmp_path / "corpus", wiki, text, most_faults=0.05)
    (fault,) = manifest.faults
    assert fault.startswith("latin.txt, byte 3 of its uncompressed contents: it is not UTF-8")
    assert f"left out: {fault}" in said
    with pytest.raises(UserError, match=r"1 of 81 documents cannot be read, and --max-faults 0\.01 allows 0"):
        run(tmp_path / "strict", wiki, text)
    assert list((tmp_path / "strict" / "clean").glob("*.arrow"))  # what was finished stays
    run(tmp_path / "strict", wiki, text, most_faults=0.05)
    assert checksums(tmp_path / "strict") == checksums(tmp_path / "corpus")


def test_a_tokenizer_may_be_given(wiki, tmp_path):
    run(tmp_path / "first", wiki)
    tokenizer = tmp_path / "first" / "tokenizer.json"
    pieces = load_tokenizer(tokenizer).get_vocab()
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(sorted(pieces, key=pieces.get)))
    by_json, _ = run(tmp_path / "json", wiki, tokenizer=tokenizer)
    by_text, _ = run(tmp_path / "text", wiki, tokenizer=vocabulary)
    assert [s.checksums for s in by_json.shards] == [s.checksums for s in by_text.shards]
    assert [s.checksums for s in by_json.shards] == [s.checksums for s in Manifest.read(tmp_path / "first").shards]
    vocabulary.write_text("river\nwater\n")
    with pytest.raises(UserError, match=r"has no \[PAD\], \[UNK\]"):
        run(tmp_path / "none", wiki, tokenizer=vocabulary)
    assert not (tmp_path / "none").exists()


def test_a_given_tokenizer_reads_whole_texts_whatever_its_file_says(wiki, tmp_path):
    """Files of published models may truncate and pad, and register [SEP] as a special token."""
    run(tmp_path / "first", wiki)
    text = tmp_path / "about.txt"
    text.write_text("The word [SEP] stands between the two segments of a pair, and [MASK] hides a word from it.")
    wanted, _ = run(tmp_path / "wanted", wiki, text, tokenizer=tmp_path / "first" / "tokenizer.json")
    tokenizer = load_tokenizer(tmp_path / "first" / "tokenizer.json")
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=32)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(tmp_path / "published.json"))
    found, _ = run(tmp_path / "found", wiki, text, tokenizer=tmp_path / "published.json")
    assert [shard.checksums for shard in found.shards] == [shard.checksums for shard in wanted.shards]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([*SPECIAL, "a", "b", "a"], "has 'a' in lines 6 and 8"),
        ([*SPECIAL[1:], "a"], r"has no \[PAD\]"),
        (["caf\xe9"], "is not UTF-8 \\(byte 3\\)"),
    ],
)
def test_a_vocabulary_with_a_fault_is_one_line(tmp_path, lines, message):
    file = tmp_path / "vocab.txt"
    file.write_bytes("\n".join(lines).encode("latin-1"))
    with pytest.raises(UserError, match=message):
        load_tokenizer(file)


def test_lines_of_a_vocabulary_end_with_line_breaks_only(tmp_path):
    file = tmp_path / "vocab.txt"
    file.write_bytes("\r\n".join(["\ufeff[PAD]", *SPECIAL[1:], "a\u2028", "b", ""]).encode())
    assert load_tokenizer(file).get_vocab() == {name: n for n, name in enumerate([*SPECIAL, "a\u2028", "b"])}


def test_ids_with_gaps_are_refused(wiki, tmp_path):
    run(tmp_path / "first", wiki)
    plain = json.loads((tmp_path / "first" / "tokenizer.json").read_text())
    last = max(plain["model"]["vocab"], key=plain["model"]["vocab"].get)
    plain["model"]["vocab"][last] += 7
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(plain))
    with pytest.raises(UserError, match="has 167 word pieces with ids up to 173: the ids must be 0 to 166"):
        load_tokenizer(file)


def test_names_of_files_need_not_be_utf8(wiki, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.txt")).write_text("A paragraph that has more than five words.")
    out = tmp_path / "corpus"
    run(out, wiki, folder, settings=replace(SETTINGS, held_out=0.2))
    names = json.loads((out / "manifest.json").read_text())["sources"]
    assert "texts/caf\\udce9.txt" in [source["name"] for source in names]


def test_a_preparation_that_was_killed_before_its_first_file_goes_on(wiki, tmp_path):
    out = tmp_path / "corpus"
    out.mkdir()
    (out / ".writing-begun.json").write_text("{")
    run(out, wiki)
    with pytest.raises(UserError, match="is not empty and holds no corpus"):
        run(tmp_path, wiki)


def test_a_folder_that_another_process_writes_to_is_refused(wiki, tmp_path):
    out = tmp_path / "corpus"
    out.mkdir()
    with FileLock(out / ".lock"):
        (out / ".lock").write_text(f"process {os.getpid()} on a machine\n")
        message = (
            rf"--out .*corpus is in use by process {os.getpid()} on .*: wait for it, end it, or give another --out"
        )
        with pytest.raises(UserError, match=message):
            run(out, wiki)
        assert [file.name for file in out.iterdir()] == [".lock"]
    run(out, wiki)  # what a killed process has left is no obstacle
    assert not (out / ".lock").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 301}, "was begun with vocab_size=300, now it is 301"),
        ({"seed": 1}, "was begun with seed=0, now it is 1"),
        ({"lengths": (8,)}, "--seq-len 8 must be 16 or more"),
        ({"lengths": (32, 32)}, "names a length twice"),
        ({"vocab_size": 5}, "--vocab-size 5 must be 100 or more"),
        ({"held_out": 0.0}, "--held-out 0.0 must lie between 0 and 1"),
        ({"language": "english"}, "--language english is not a language code in lower case, such as en"),
        ({"language": "en_US"}, "--language en_US is not a language code"),
    ],
)
def test_bad_settings_are_one_line_and_change_nothing(wiki, tmp_path, change, message):
    out = tmp_path / "corpus"
    run(out, wiki)
    before = checksums(out)
    with pytest.raises(UserError, match=message):
        run(out, wiki, settings=Settings(**{**vars(SETTINGS), **change}))
    assert checksums(out) == before


@pytest.mark.parametrize(("language", "has_rules"), [("en", True), ("de", True), ("xx", False), ("zh-hans", False)])
def test_a_language_without_rules_of_its_own_is_named(wiki, tmp_path, language, has_rules):
    _, said = run(tmp_path / "corpus", wiki, settings=replace(SETTINGS, language=language))
    assert (f"--language {language}: sentencex has no rules of its own for it" in said) is not has_rules


def test_changed_sources_and_other_folders_are_refused(wiki, tmp_path):
    out = tmp_path / "corpus"
    run(out, wiki)
    write_dump(wiki, dump(81))
    with pytest.raises(UserError, match="was begun with other sources"):
        run(out, wiki)
    with pytest.raises(UserError, match="is not empty and holds no corpus"):
        run(tmp_path, wiki)


def test_a_corpus_without_prose_or_without_a_held_out_part_is_refused(tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("Too short.")
    with pytest.raises(UserError, match="the sources have no prose"):
        run(tmp_path / "none", short)
    short.write_text("One paragraph that has more than five words.")
    with pytest.raises(UserError, match="no document is in the held-out part"):
        run(tmp_path / "one", short)


def test_a_manifest_that_was_changed_is_refused(wiki, tmp_path):
    run(tmp_path / "corpus", wiki)
    file = tmp_path / "corpus" / "manifest.json"
    values = json.loads(file.read_text())
    values["vocab_size"] += 1
    file.write_text(json.dumps(values))
    with pytest.raises(UserError, match="was cut short or changed"):
        Manifest.read(tmp_path / "corpus")
    with pytest.raises(UserError, match="is no prepared corpus"):
        Manifest.read(tmp_path)
