"""Files become units that depend on nothing else; of what is damaged, its place is named and the rest is read."""

import bz2
import gzip
import lzma
import os
import random

import pytest

from dumps import dump, write_dump
from torch_thor.training.errors import UserError
from torch_thor.training.text import documents, sources
from torch_thor.training.text.documents import Document, read
from torch_thor.training.text.sources import find_sources, units

PROSE = (
    "The first paragraph has more than five words,\nand a line break.\n\nHeading\n\nThe second one has so many too.\n"
)
FOUND = ["The first paragraph has more than five words, and a line break.", "The second one has so many too."]
SAID = [f"Paragraph number {n} has a café and these words." for n in range(8000)]  # 360 kB
BAD = b"\xff"
PACKED = [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]


def units_of(*given):
    return list(units(find_sources(list(map(str, given))), lambda path: path.open("rb")))


def found(*given):
    """The documents of sources, and the faults."""
    every = units_of(*given)
    read_ = [one for unit in every for piece in unit.pieces for one in read(piece)]
    faults = [fault for unit in every for fault in unit.faults]
    return [one for one in read_ if isinstance(one, Document)], faults + [one for one in read_ if isinstance(one, str)]


def place(fault):
    """The offset that a fault names."""
    return int(fault.split(", byte ")[1].split()[0])


def texts_of(path, data):
    path.write_bytes(data)
    documents_, faults = found(path)
    return [text for one in documents_ for text in one.paragraphs], faults


@pytest.mark.parametrize(("suffix", "pack"), PACKED)
def test_compressed_files_are_read(tmp_path, suffix, pack):
    file = tmp_path / f"book.txt{suffix}"
    file.write_bytes(pack(PROSE.encode()))
    assert found(file) == ([(file.name, FOUND)], [])


def test_the_paragraphs_of_html(tmp_path):
    markup = (
        "\ufeff<html><nav><p>Go to the next page of this book</p></nav><p>The first <b>paragraph</b> has more\n than "
        "five words.¶</p><pre>code that has more than five words</pre><ul><li><p>An item of a list with a paragraph."
        "</p></li></ul><table><tr><td><p>A cell of a table with words</p></td></tr></table><p>Too short</p>"
        "<p>A damaged @ paragraph of more words</p><dd>A description that has five words.</dd></html>"
    ).encode()
    texts, (fault,) = texts_of(tmp_path / "page.html", markup.replace(b"@", BAD))
    first = "The first paragraph has more than five words."
    assert texts == [first, "An item of a list with a paragraph.", "A description that has five words."]
    assert place(fault) == markup.index(b"@")
    assert "1 of its paragraphs left out: convert it with iconv" in fault


def test_a_large_html_file_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LARGEST_HTML", 1 << 14)
    page = f"<p>{SAID[0]}</p>".encode()
    assert texts_of(tmp_path / "page.html", page * 100) == ([SAID[0]] * 100, [])
    texts, (fault,) = texts_of(tmp_path / "page.html", page * 1000)
    assert texts == []
    assert "too much for an HTML file" in fault


@pytest.mark.parametrize("ending", ["\n\n", "\r\n\r\n"], ids=["lf", "crlf"])
def test_a_large_file_is_cut_at_blank_lines_and_only_damaged_lines_are_left_out(tmp_path, ending):
    said = SAID * 4  # more than a chunk
    encoded = [text.encode() for text in said]
    broken = sorted(random.Random(0).sample(range(len(said)), 9))
    for n in broken:
        cut = random.Random(n).randrange(20)
        encoded[n] = encoded[n][:cut] + BAD + encoded[n][cut:] + BAD
    data = "\ufeff".encode() + ending.encode().join(encoded)
    texts, faults = texts_of(tmp_path / "book.txt", data)
    assert texts == [text for n, text in enumerate(said) if n not in broken]
    bytes_ = [n for n, byte in enumerate(data) if byte == BAD[0]]
    assert {place(fault) for fault in faults} <= set(bytes_)
    assert min(map(place, faults)) == bytes_[0]
    assert sum(int(fault.split("UTF-8, ")[1].split()[0]) for fault in faults) == len(broken)
    names = [one.name for one in found(tmp_path / "book.txt")[0]]
    assert len(set(names)) == len(names) > 5


def test_what_is_before_and_after_a_damaged_line_is_not_one_paragraph(tmp_path):
    texts, _ = texts_of(tmp_path / "book.txt", f"{SAID[0]}\n".encode() + BAD + f"\n{SAID[1]}".encode())
    assert texts == SAID[:2]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_text_in_utf16_is_refused(tmp_path, encoding):
    texts, (fault,) = texts_of(tmp_path / "book.txt", PROSE.encode(encoding))
    assert texts == []
    assert "it is not UTF-8" in fault


@pytest.mark.parametrize("separator", ["\n", " "], ids=["at line ends", "at spaces"])
def test_text_without_blank_lines_is_cut_where_a_part_ends(tmp_path, separator):
    parts = SAID * 5 if separator == "\n" else [f"{'abcdefgh'[: n % 7 + 1]}{n}" for n in range(200_000)]
    (tmp_path / "book.txt").write_text(separator.join(parts))
    pieces = [piece.data.decode() for unit in units_of(tmp_path / "book.txt") for piece in unit.pieces]
    assert len(pieces) > 10
    assert "".join(pieces) == separator.join(parts)
    assert [part for text in pieces for part in text.strip().split(separator)] == parts


@pytest.mark.parametrize(("suffix", "pack"), PACKED[1:])
def test_what_comes_before_damage_is_kept(tmp_path, suffix, pack):
    said = SAID * 8  # more than a block of bzip2
    text = pack("\n\n".join(said).encode())
    texts, (fault,) = texts_of(tmp_path / f"book.txt{suffix}", text[: len(text) // 2])
    assert "end here or are damaged" in fault
    assert 0 < len(texts) < len(said)
    assert texts[:-1] == said[: len(texts) - 1]
    data = dump(100)
    streams = [pack(data[start : start + 20_000]) for start in range(0, len(data), 20_000)]  # as large dumps have many
    file = tmp_path / f"wiki.xml{suffix}"
    file.write_bytes(b"".join(streams))
    whole, faults = found(file)
    assert (len(whole), faults) == (100, [])
    broken = bytearray(streams[2])
    for spoiled in ("cut", "changed", "changed at its beginning"):
        middle = 0 if "beginning" in spoiled else len(broken) // 2
        changed = broken[:middle] + bytes(one ^ 0xFF for one in broken[middle : middle + 20]) + broken[middle + 20 :]
        rest = [broken[:middle]] if spoiled == "cut" else [changed, *streams[3:]]
        file.write_bytes(b"".join([*streams[:2], *rest]))
        some, faults = found(file)
        assert some == whole[: len(some)]
        assert 20 < len(some) < 80
        # of a stream with a damaged beginning, Python's library sees the end of the file; that of the dump is missing
        assert any("end here or are damaged" in one or "cut short" in one for one in faults)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path):
    (tmp_path / "book.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "circle.txt").symlink_to(tmp_path / "circle.txt")
    _, (first, second) = found(tmp_path)
    assert "book.txt, byte 0 of its uncompressed contents: it cannot be read (No such file or directory)" in first
    assert "it cannot be read (Too many levels of symbolic links)" in second


def test_units_hold_a_bounded_share_of_the_sources_and_all_of_them(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "UNIT", 10_000)
    file = write_dump(tmp_path / "wiki.xml.bz2", dump(60))
    (tmp_path / "book.txt").write_text(PROSE)
    every = units_of(tmp_path / "book.txt", file)
    assert [unit.number for unit in every] == list(range(len(every)))
    assert len(every) > 5
    assert all(sum(len(piece.data) for piece in unit.pieces) < 13_000 for unit in every)
    assert sum(len(unit.pieces) for unit in every) == 1 + 63


def test_python_carries_a_text():
    texts, faults = found("python")
    assert len(texts) > 50
    assert sum(len(one.paragraphs) for one in texts) > 1000
    assert not faults


def test_names_do_not_say_where_the_sources_lie(tmp_path, monkeypatch):
    for name in ("texts/b.txt", "texts/a.md", "texts/sub/c.html", "texts/skipped.jpg", "other/texts/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(PROSE)
    names = ["texts/a.md", "texts/b.txt", "texts/sub/c.html", "python"]
    assert [source.name for source in find_sources([str(tmp_path / "texts"), "python"])] == names
    monkeypatch.chdir(tmp_path / "other")
    assert [source.name for source in find_sources(["../texts", "python"])] == names
    with pytest.raises(UserError, match=r"two sources have the name texts/b.txt: rename one, or name the folder that"):
        find_sources(["../texts", "texts"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no source: name a Wikipedia dump"),
        (["nowhere.txt"], "nowhere.txt does not exist"),
        (["photo.jpg"], "of no known kind"),
        (["empty"], "holds no file ending in"),
        (["book.txt", "book.txt"], "given twice"),
        (["other", "other/book.txt"], "given twice"),
        (["python", "python"], "given twice"),
        (["pipes"], r"pipe\.txt is not a regular file .*: move it out of the folder"),
    ],
)
def test_bad_sources_are_refused_in_one_line(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "other", "pipes"):
        (tmp_path / folder).mkdir()
    for file in ("photo.jpg", "book.txt", "other/book.txt"):
        (tmp_path / file).write_text(PROSE)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipes" / "pipe.txt").symlink_to(tmp_path / "pipe")
    with pytest.raises(UserError, match=message):
        find_sources(given)


def test_links_are_followed_and_each_file_is_read_once(tmp_path):
    for name in ("texts/b/one.txt", "elsewhere/two.txt", "elsewhere/sub/three.txt", "texts/four.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(PROSE)
    texts = tmp_path / "texts"
    for link, target in (
        ("b/circle", texts),
        ("c", tmp_path / "elsewhere"),
        ("d", texts / "b"),
        ("x.txt", texts / "four.txt"),
    ):
        (texts / link).symlink_to(target)
    names = [source.name for source in find_sources([str(texts)])]
    assert names == [f"texts/{name}" for name in ("b/one.txt", "c/sub/three.txt", "c/two.txt", "four.txt")]
    blob = write_dump(tmp_path / "b10b", dump(3))  # caches of files by content keep them under names without a suffix
    (tmp_path / "wiki.xml").symlink_to(blob)
    assert len(found(tmp_path / "wiki.xml")[0]) == 3


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "texts" / "secret").mkdir(parents=True)
    really = os.scandir

    def scan(path):
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(UserError, match=r"texts/secret cannot be listed \(Permission denied\)"):
        find_sources([str(tmp_path / "texts")])
