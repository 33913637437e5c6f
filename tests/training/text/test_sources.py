"""The form of a file is found from what it contains; of what is damaged, the rest is read."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
import zipfile
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from articles import row
from torch_thor.errors import UserError
from torch_thor.training.data.listing import LeftOut
from torch_thor.training.text import sources
from torch_thor.training.text.sources import find_sources, pieces

PROSE = (
    "The first paragraph has more than five words,\nand a line break.\n\nHeading\n\nThe second one "
    "has so many too.\n"
)
FOUND = [
    "The first paragraph has more than five words, and a line break.",
    "The second one has so many too.",
]
ONE = FOUND[1]
SAID = [f"Paragraph number {n} has a café and these words." for n in range(8000)]  # 360 kB
PACKED = [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
# as WikiExtractor writes them: escaped, a paragraph a line, the title first
ELEMENT = (
    '<doc id="{0}" url="https://x?curid={0}" title="A "title" {0}">\nA "title" {0}\n\n'
    "AT&amp;T is a firm that has words.\nHeading.\nThe second paragraph has so many too.\n\n"
    "</doc>\n"
)
ARTICLE = ["AT&T is a firm that has words.", "The second paragraph has so many too."]


def find(*given, form=None, left=None):
    return find_sources(list(map(str, given)), form, left or LeftOut())


def found(*given, form=None):
    """The documents that have prose, as (draw, sentences), and the faults."""
    read = list(sources.documents(find(*given, form=form), "en", 0, any_script=False))
    return [(one["draw"], one["text"].split("\n")) for one in read if one["text"]], [
        one["fault"] for one in read if one["fault"]
    ]


def draw(name, seed=0):
    """The number below 1 that decides what a document is used for."""
    digest = hashlib.blake2b(f"{seed}\n{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def texts_of(path, data, **options):
    path.write_bytes(data)
    read, faults = found(path, **options)
    return [text for _, sentences in read for text in sentences], faults


def table(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_the_form_is_found_from_the_content(tmp_path):
    rows = [row(n) for n in range(2)]
    lines = "".join(json.dumps(one) + "\n" for one in rows).encode()
    bert = "The words of one sentence.\nAnd those of another!\n"
    for name, data, form in (
        ("a.txt", PROSE.encode(), "text"),
        ("b.txt", f"{bert}\n{bert}\n".encode(), "bert"),
        ("c.txt", f"{bert}\nA paragraph.\n\nAnd one more\n".encode(), "text"),
        ("d.html", b"<p>", "html"),
        ("wiki_00", lines, "jsonl"),
        ("wiki_01.txt", lines, "jsonl"),
        ("wiki_02", ELEMENT.format(1).encode(), "doc"),
        ("wiki_03.bz2", bz2.compress(ELEMENT.format(1).encode()), "doc"),
        ("e.json", lines, "jsonl"),
        ("empty.txt", b"", "text"),
        ("empty.jsonl", b"", "jsonl"),
        ("damaged.gz.txt.gz", b"no gzip", "text"),
    ):
        (tmp_path / name).write_bytes(data)
        (source,) = find(tmp_path / name)
        assert source["form"] == form, name
        assert find(tmp_path / name, form="html")[0]["form"] == "html"
    table(tmp_path / "train-00000", rows)
    (tmp_path / "LICENSE").write_text(PROSE)
    left = LeftOut()
    forms = {source["name"].split("/")[-1]: source["form"] for source in find(tmp_path, left=left)}
    assert forms["train-00000"] == "parquet"
    assert len(forms) == 13
    assert left.others == {"without a suffix": 1}


def test_articles_are_the_same_in_all_their_forms(tmp_path):
    rows = [row(n) for n in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n\n" for one in rows))
    read, faults = found(tmp_path / "a.jsonl")
    assert read == found(table(tmp_path / "a.parquet", rows))[0]
    assert [one for one, _ in read] == [draw(f"Article {n} {n}") for n in range(3)]
    assert [len(sentences) for _, sentences in read] == [15] * 3
    assert not faults
    elements = "".join(map(ELEMENT.format, range(3)))
    of_elements, faults = found_in(tmp_path / "wiki_00", elements)
    assert of_elements == [(draw(f'A "title" {n} {n}'), ARTICLE) for n in range(3)]
    assert not faults
    body = "\n".join(["AT&amp;T is a firm that has words.", "Heading.", ARTICLE[1]])
    line = {"id": "1", "revid": "3", "url": "u", "title": 'A "title" 1', "text": body}
    assert found_in(tmp_path / "wiki_01", json.dumps(line))[0] == of_elements[1:2]


def test_bytes_in_a_table_are_text_if_they_are_utf8(tmp_path):
    rows = [row(n) for n in range(3)]
    binary = [{**one, "text": one["text"].encode(), "picture": b"\xff\x00"} for one in rows]
    read, faults = found(table(tmp_path / "a.parquet", binary))
    assert read == found(table(tmp_path / "b.parquet", rows))[0]
    assert not faults
    binary[1]["text"] += "\u00e9".encode("latin-1")
    size = len(binary[1]["text"])
    other, faults = found(table(tmp_path / "a.parquet", binary))
    assert other == [read[0], read[2]]
    said = f'a.parquet#2: its text is {{"bytes that are not UTF-8": {size}}}: give text in UTF-8'
    assert faults == [said]


def found_in(path, text):
    path.write_text(text)
    return found(path)


def test_the_format_of_bert_keeps_its_lines_and_documents(tmp_path):
    documents = [[f"Mr. {n} went.", "He ate!"] for n in range(200)]
    text = "\r\n \r\n\n".join("\r\n".join(one) for one in documents)
    read, faults = found_in(tmp_path / "corpus.txt", f"\n{text}\n\n")
    assert [sentences for _, sentences in read] == documents
    assert {one for one, _ in read} == {draw(f"corpus.txt#{n}") for n in range(1, 201)}
    assert not faults
    lines = "".join(f"Sentence {n} of one document.\n" for n in range(50_000))
    (tmp_path / "long.txt").write_text(lines)
    assert find(tmp_path / "long.txt")[0]["form"] == "text"
    read, _ = found(tmp_path / "long.txt", form="bert")
    assert len(read) >= 10
    assert "\n".join(line for _, own in read for line in own) == lines.strip()


def test_the_articles_of_wikitext_are_documents(tmp_path):
    """As published: a line a paragraph, spaces around all words, titles and headings between =."""
    article = " \n = Title {0} = \n \n One paragraph of {0} that has words . \n"
    article += " \n = = A heading of it = = \n \n Another of {0} that has words . \n"
    (tmp_path / "wiki.train.tokens").write_text("".join(article.format(n) for n in range(3)))
    assert find(tmp_path)[0]["form"] == "wikitext"
    read, faults = found(tmp_path)
    assert [own for _, own in read] == [
        [f"One paragraph of {n} that has words .", f"Another of {n} that has words ."]
        for n in range(3)
    ]
    assert not faults


def test_compressed_files_are_read(tmp_path):
    for suffix, pack in [*PACKED, (".dz", gzip.compress)]:
        assert texts_of(tmp_path / f"book.txt{suffix}", pack(PROSE.encode())) == (FOUND, [])


ENDS = pytest.mark.parametrize(
    "end", ["\n", "\r\n", "\r", "\r\r\n"], ids=["lf", "crlf", "cr", "crcrlf"]
)
WIKITEXT = " \n = Title {0} = \n \n One paragraph of {0} that has more than these words . \n"
BERT = "Mr. {0} went.\nHe ate!\n\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"], ids=["lf", "crlf", "cr", "crcrlf"])
def test_lines_end_as_on_any_system(tmp_path, end):
    for form, each in {
        "doc": ELEMENT,
        "wikitext": WIKITEXT,
        "bert": BERT,
        "text": f"{PROSE}\n",
    }.items():
        text = "".join(each.format(n) for n in range(3)).replace("\n", end)
        (tmp_path / f"{form}.txt").write_bytes(text.encode())
        read, faults = found(tmp_path / f"{form}.txt")
        assert find(tmp_path / f"{form}.txt")[0]["form"] == form
        assert not faults
        assert [own for _, own in read] == {
            "doc": [ARTICLE] * 3,
            "wikitext": [
                [f"One paragraph of {n} that has more than these words ."] for n in range(3)
            ],
            "bert": [[f"Mr. {n} went.", "He ate!"] for n in range(3)],
            "text": [FOUND * 3],
        }[form]
    lines = json.dumps({"text": PROSE.replace("\n", end)})
    assert [own for _, own in found_in(tmp_path / "a.jsonl", lines)[0]] == [FOUND]


@pytest.mark.parametrize("space", [" ", "\t", "\f", "\u00a0", "\u3000", "\u00a0 \u3000"])
def test_blank_lines_may_have_spaces_of_any_kind(tmp_path, space):
    def texts(name, text):
        return [
            own for _, own in found_in(tmp_path / name, text.replace("\n\n", f"\n{space}\n"))[0]
        ]

    assert texts("a.txt", PROSE) == [FOUND]
    assert texts("b.txt", BERT.format(0) + BERT.format(1)) == [
        [f"Mr. {n} went.", "He ate!"] for n in range(2)
    ]
    assert find(tmp_path / "b.txt")[0]["form"] == "bert"


@pytest.mark.filterwarnings("ignore::bs4.XMLParsedAsHTMLWarning")  # pytest drops the filters
def test_html_is_known_by_its_beginning(tmp_path):
    for begin in ("<html>", "\n<!DOCTYPE html><html>", '<?xml version="1.0"?>\n<!doctype HTML>'):
        text = f"{begin}<body><p>{FOUND[0]}</p><pre>five words that are no prose</pre>"
        assert texts_of(tmp_path / "page.txt", text.encode()) == ([FOUND[0]], []), begin


def test_names_of_files_mean_nothing_but_their_endings(tmp_path):
    for name in ("File::Spec.pod", "memory::a.txt", "a[1]*?.txt", "~.txt", "B.TXT.GZ"):
        data = gzip.compress(PROSE.encode()) if name.endswith("GZ") else PROSE.encode()
        assert texts_of(tmp_path / name, data) == (FOUND, []), name


MARKUP = (
    "\ufeff<html><nav><p>Go to the next page of this book</p></nav><p>The first <b>paragraph</b> "
    "has more\n than five words.¶</p><pre>code that has more than five words</pre><ul><li><p>An "
    "item of a list with a paragraph.</p></li></ul><table><tr><td><p>A cell of a table with "
    "words</p></td></tr></table><p>Too short</p><dd>A description that has five words.</dd></html>"
).encode()


def test_the_paragraphs_of_html(tmp_path):
    texts = [
        "The first paragraph has more than five words.",
        "An item of a list with a paragraph.",
        "A description that has five words.",
    ]
    assert texts_of(tmp_path / "page.html", MARKUP) == (texts, [])
    texts, (fault,) = texts_of(tmp_path / "page.html", MARKUP.replace(b"Too", b"\xff"))
    assert texts == []
    assert f"byte {MARKUP.index(b'Too')} of its file: it is not UTF-8" in fault
    assert fault.endswith("convert it with iconv -t utf-8")


@pytest.mark.parametrize("ending", ["\n\n", "\r\n\r\n"], ids=["lf", "crlf"])
def test_a_large_file_is_cut_at_blank_lines_and_damaged_parts_are_left_out(tmp_path, ending):
    said = SAID * 4  # more than a chunk
    data = "\ufeff".encode() + ending.join(said).encode()
    assert texts_of(tmp_path / "book.txt", data) == (said, [])
    parts = found(tmp_path / "book.txt")[0]
    assert len({one for one, _ in parts}) == len(parts) > 5
    at = len(data) // 2
    texts, (fault,) = texts_of(tmp_path / "book.txt", data[:at] + b"\xff" + data[at:])
    assert f"byte {at} of its file" in fault
    assert said[: len(texts) // 3] == texts[: len(texts) // 3]
    assert 0 < sum(map(len, said)) - sum(map(len, texts)) < 70_000


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "latin-1"])
def test_text_in_other_encodings_is_refused(tmp_path, encoding):
    texts, (fault,) = texts_of(tmp_path / "book.txt", f"{PROSE}\u00e9".encode(encoding))
    assert texts == []
    assert "it is not UTF-8" in fault


@pytest.mark.parametrize("separator", ["\n", " "], ids=["at line ends", "at spaces"])
def test_text_without_blank_lines_is_cut_where_a_part_ends(tmp_path, separator):
    parts = (
        SAID * 5 if separator == "\n" else [f"{'abcdefgh'[: n % 7 + 1]}{n}" for n in range(200_000)]
    )
    (tmp_path / "book.txt").write_text(separator.join(parts))
    (source,) = find(tmp_path / "book.txt", form="text")
    data = [part.decode() for _, _, part in pieces(source)]
    assert len(data) > 10
    assert "".join(data) == separator.join(parts)
    assert [part for text in data for part in text.strip().split(separator)] == parts


@pytest.mark.parametrize(("suffix", "pack"), PACKED[1:])
def test_what_comes_before_damage_is_kept(tmp_path, suffix, pack):
    said = SAID * 8  # more than a block of bzip2
    data = pack("\n\n".join(said).encode())
    texts, (fault,) = texts_of(tmp_path / f"book.txt{suffix}", data[: len(data) // 2])
    assert "its data end or are damaged from here on" in fault
    assert 0 < len(texts) < len(said)
    assert texts[:-1] == said[: len(texts) - 1]


def test_broken_rows_and_elements_cost_only_themselves(tmp_path):
    good = json.dumps({"text": ONE})
    lines = [good, "{no JSON", json.dumps({"text": 3}), "[]", '{"text": null}', good, good[:20]]
    texts, faults = texts_of(tmp_path / "a.jsonl", "\n".join(lines).encode())
    assert texts == [ONE] * 2
    assert [fault.split(":")[0] for fault in faults] == [f"a.jsonl#{n}" for n in (2, 3, 4, 7)]
    assert texts_of(tmp_path / "b.jsonl", b'{"id": 1, "sentence": "x"}')[1] == [
        "b.jsonl: it is no object with a text, but has id, sentence"
    ]
    elements = [ELEMENT.format(n) for n in range(4)]
    elements[1] = elements[1].replace("</doc>", "")
    elements[3] = elements[3][:80]
    read, faults = found_in(tmp_path / "wiki_00", "".join(elements))
    assert read == [(draw('A "title" 0 0'), ARTICLE)]
    assert [fault.split(": ")[1] for fault in faults] == ["it is no whole <doc> element"] * 2
    file = table(tmp_path / "c.parquet", [row(n) for n in range(3)])
    file.write_bytes(file.read_bytes()[:-9])
    assert "its data end or are damaged" in found(file)[1][0]


def test_python_carries_a_text():
    read, faults = found("python")
    assert len(read) > 50
    assert sum(len(sentences) for _, sentences in read) > 1000
    assert not faults


def test_files_are_named_by_where_they_lie_in_what_is_given(tmp_path, monkeypatch):
    for name in ("texts/b.txt", "texts/a.md", "texts/sub/c.html", "other/texts/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(PROSE)
    names = ["texts/a.md", "texts/b.txt", "texts/sub/c.html", "python"]
    assert [source["name"] for source in find(tmp_path / "texts", "python")] == names
    monkeypatch.chdir(tmp_path / "other")
    assert [source["name"] for source in find("../texts", "python")] == names
    # folders of one name, as documentation has them, are told apart by those above them
    both = [f"{tmp_path.name}/{name}" for name in names[:3]] + ["other/texts/b.txt"]
    assert [source["name"] for source in find("../texts", "texts")] == both
    with pytest.raises(UserError, match=r"b.txt is given twice, the first time as .*b.txt: leave"):
        find("texts", ".", "../texts")


def test_what_is_no_text_is_left_out_and_counted(tmp_path):
    for name in (
        "texts/a.txt", "texts/._a.txt", "texts/.git/b.txt", "texts/__MACOSX/a.txt",
        "texts/.cache/c.html", "texts/photo.jpg", "texts/@eaDir/a.txt", "texts/sub/Thumbs.db",
        "texts/feed.xml",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(PROSE)
    os.mkfifo(tmp_path / "texts" / "pipe.txt")
    left = LeftOut()
    assert [source["name"] for source in find(tmp_path / "texts", left=left)] == ["texts/a.txt"]
    assert left.made.total() == 6
    assert left.others == {".jpg": 1, ".xml": 1, ".txt": 1}
    # what the user names is taken
    hidden = [tmp_path / f"texts/{name}" for name in (".git/b.txt", ".cache")]
    assert [source["name"] for source in find(*hidden)] == ["b.txt", ".cache/c.html"]


def test_bad_sources_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "other", "nothing", "circle"):
        (tmp_path / folder).mkdir()
    for file in ("photo.jpg", "book.txt", "other/book.txt"):
        (tmp_path / file).write_text(PROSE)
    (tmp_path / "nothing" / "book.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "circle" / "again").symlink_to(tmp_path)
    (tmp_path / "wiki.xml.bz2").write_bytes(bz2.compress(b'<mediawiki xmlns="x">\n<page>'))
    with zipfile.ZipFile(tmp_path / "two.zip", "w") as archive:
        for name in ("a.jsonl", "b.jsonl"):
            archive.writestr(name, json.dumps(row(0)))
    for given, message in (
        (["two.zip"], "two.zip is an archive of files: unpack it, and give its folder"),
        ([], "no source: name text files"),
        (["nowhere.txt"], "nowhere.txt does not exist"),
        (["other/nowhere"], "other/nowhere does not exist"),
        (["photo.jpg"], r"photo.jpg is and holds no file of a known kind: .* \.txt, .* --format"),
        (["empty"], "empty is and holds no file"),
        (["book.txt", "book.txt"], "given twice"),
        (["other", "other/book.txt"], "given twice"),
        (["python", "python"], "given twice"),
        (["nothing"], r"book\.txt is a link to nothing"),
        (["circle"], "again is a link to a folder that contains it"),
        (
            ["wiki.xml.bz2"],
            r"raw dump of a wiki: .*wikimedia/wikipedia.*; wikiextractor wiki.xml.bz2 --json",
        ),
    ):
        with pytest.raises(UserError, match=message):
            find(*given)


def test_a_data_set_of_the_hub_is_read_as_a_stream(monkeypatch):
    asked = []

    def load(*place, **options):
        asked.append((place, options))
        yield row(0)
        if place[1:] == ("cut",):
            raise OSError("the connection was lost")
        yield row(1)

    monkeypatch.setattr(sources, "HfApi", None)
    with pytest.raises(UserError, match=r"some/set:en is no file here, .* where there is a netw"):
        found("some/set:en")
    known = SimpleNamespace(dataset_info=lambda name, timeout: asked.append(name))
    monkeypatch.setattr(sources, "HfApi", lambda: known)
    monkeypatch.setattr(sources.datasets, "load_dataset", load)
    read, _ = found("some/set:en")
    assert [one for one, _ in read] == [draw("Article 0 0"), draw("Article 1 1")]
    assert asked == ["some/set", (("some/set", "en"), {"split": "train", "streaming": True})]
    message = r"some/set:cut is no file here, .*the connection was lost.*where there is a network"
    with pytest.raises(UserError, match=message):
        found("some/set:cut")
