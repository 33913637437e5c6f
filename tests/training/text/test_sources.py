"""Files become documents, and work units that depend on nothing else; what is damaged is named with its offset."""

import bz2
import gzip
import lzma
import os

import pytest

from dumps import dump, write_dump
from torch_thor.training import UserError
from torch_thor.training.text import sources
from torch_thor.training.text.sources import find_sources, python_documents, units_of

PROSE = (
    "The first paragraph has more than five words,\nand a line break.\n\nHeading\n\nThe second one has so many too.\n"
)
FOUND = ("The first paragraph has more than five words, and a line break.", "The second one has so many too.")


def documents(*given):
    return [document for unit in units_of(find_sources(list(map(str, given)))) for document in unit.documents]


def faults(*given):
    return [fault for unit in units_of(find_sources(list(map(str, given)))) for fault in unit.faults]


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_files_are_read(tmp_path, suffix, pack):
    file = tmp_path / f"book.txt{suffix}"
    file.write_bytes(pack(PROSE.encode()))
    (document,) = documents(file)
    assert (document.name, document.paragraphs) == (file.name, FOUND)


def test_a_large_file_is_cut_at_blank_lines(tmp_path):
    file = tmp_path / "book.txt"
    paragraphs = [f"Paragraph number {n} of a book has these words." for n in range(10_000)]
    file.write_text("\n\n".join(paragraphs))  # half a million characters
    found = documents(file)
    assert len(found) > 5
    assert len({one.name for one in found}) == len(found)
    assert [text for one in found for text in one.paragraphs] == paragraphs


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.html", "skipped.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<p>{PROSE}</p>")
    names = [source.name for source in find_sources([str(tmp_path)])]
    assert names == [f"{tmp_path.name}/{name}" for name in ("a.md", "b.txt", "sub/c.html")]


def test_text_that_is_no_utf8_is_named_with_its_offset(tmp_path):
    good = PROSE.encode() * 20_000  # more than a chunk
    (tmp_path / "latin.txt").write_bytes(good + "caf\u00e9".encode("latin-1") + good)
    (tmp_path / "whole.txt").write_text(PROSE)
    (fault,) = faults(tmp_path)
    assert fault.source.endswith("latin.txt")
    assert fault.offset == len(good) + 3
    assert "UTF-8" in fault.reason
    found = documents(tmp_path)
    assert found[-1].name.endswith("whole.txt")
    assert sum(len(one.paragraphs) for one in found[:-1]) == 2 * 20_000  # all but the one in the middle


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_text_that_is_cut_short_is_a_fault(tmp_path, pack):
    suffix = {gzip.compress: ".gz", bz2.compress: ".bz2", lzma.compress: ".xz"}[pack]
    data = pack(PROSE.encode() * 20_000)
    (tmp_path / f"book.txt{suffix}").write_bytes(data[: len(data) // 2])
    (fault,) = faults(tmp_path)
    assert "end here or are damaged" in fault.reason


STREAMS = [("bz2", bz2.compress), ("xz", lzma.compress), ("gz", gzip.compress)]


def in_streams(data, pack, size=20_000):
    return [pack(data[start : start + size]) for start in range(0, len(data), size)]


@pytest.mark.parametrize(("suffix", "pack"), STREAMS)
def test_a_dump_of_many_streams_is_read_as_one(tmp_path, suffix, pack):
    streams = in_streams(dump(60), pack)
    assert len(streams) > 3
    (tmp_path / f"wiki.xml.{suffix}").write_bytes(b"".join(streams) + bytes(8))
    (unit,) = units_of(find_sources([str(tmp_path)]))
    assert len(unit.pages) == 63
    assert unit.faults == []


@pytest.mark.parametrize(("suffix", "pack"), STREAMS)
@pytest.mark.parametrize("damage", ["cut", "changed", "changed at its beginning"])
def test_the_streams_before_a_damaged_one_are_read_and_it_is_named(tmp_path, suffix, pack, damage):
    data = dump(100)
    streams = in_streams(data, pack)
    broken = bytearray(streams[2])
    if damage == "cut":
        contents = b"".join(streams[:2]) + broken[: len(broken) // 2]
    else:
        place = 1 if damage == "changed at its beginning" else len(broken) // 2
        broken[place : place + 20] = bytes(one ^ 0xFF for one in broken[place : place + 20])
        contents = b"".join([*streams[:2], broken, *streams[3:]])
    (tmp_path / f"wiki.xml.{suffix}").write_bytes(contents)
    (unit,) = units_of(find_sources([str(tmp_path)]))
    (fault,) = unit.faults
    assert "end here or are damaged" in fault.reason
    assert fault.offset >= 40_000  # a decompressor may write much of a damaged block before it compares checksums
    assert fault.offset == 40_000 or damage != "changed at its beginning"
    assert [data[page.offset :].startswith(page.xml) for page in unit.pages[:20]] == [True] * 20


def test_a_dump_that_is_cut_short_gives_the_pages_before(tmp_path):
    data = bz2.compress(dump(3000))
    (tmp_path / "wiki.xml.bz2").write_bytes(data[: len(data) * 3 // 4])
    units = list(units_of(find_sources([str(tmp_path)])))
    (fault,) = (fault for unit in units for fault in unit.faults)
    assert "end here or are damaged" in fault.reason
    assert fault.offset > 0
    assert 1000 < sum(len(unit.pages) for unit in units) < 3003


def test_units_hold_a_bounded_share_of_a_dump_and_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "UNIT", 10_000)
    file = write_dump(tmp_path / "wiki.xml.bz2", dump(60))
    units = list(units_of(find_sources([str(file)])))
    assert [unit.number for unit in units] == list(range(len(units)))
    assert len(units) > 5
    assert all(sum(len(page.xml) for page in unit.pages) < 13_000 for unit in units)
    assert sum(len(unit.pages) for unit in units) == 63
    assert units[-1].read == file.stat().st_size
    assert all(unit.header.startswith(b"<mediawiki") for unit in units)


def test_small_files_share_a_unit_and_dumps_do_not(tmp_path):
    for n in range(5):
        (tmp_path / f"{n}.txt").write_text(PROSE)
    write_dump(tmp_path / "wiki.xml", dump(3))
    units = list(units_of(find_sources([str(tmp_path)])))
    assert [(len(unit.documents), len(unit.pages)) for unit in units] == [(5, 0), (0, 6)]
    assert units[-1].read == sum(file.stat().st_size for file in tmp_path.iterdir())


def test_python_carries_a_text():
    found = list(python_documents())
    assert len(found) > 50
    assert sum(len(one.paragraphs) for one in found) > 1000


def test_an_xml_file_without_pages_is_named(tmp_path):
    (tmp_path / "feed.xml").write_text("<rss></rss>")
    (fault,) = faults(tmp_path)
    assert "is it a Wikipedia dump?" in fault.reason


def test_names_tell_sources_apart_and_do_not_say_where_they_lie(tmp_path, monkeypatch):
    for folder in ("a/html", "b/html"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "index.html").write_text(f"<p>{PROSE}</p>")
    (tmp_path / "index.html").write_text(f"<p>{PROSE}</p>")
    monkeypatch.chdir(tmp_path)
    assert [source.name for source in find_sources(["a/html", "python"])] == ["html/index.html", "python"]
    names = ["a/html/index.html", "b/html/index.html"]
    assert [source.name for source in find_sources(["a/html", "b/html"])] == names
    monkeypatch.chdir(tmp_path / "a")
    assert [source.name for source in find_sources(["html", "../b/html"])] == names
    assert find_sources(["html/index.html", "../index.html"])[0].name == "html/index.html"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere.txt"], "nowhere.txt does not exist"),
        (["photo.jpg"], "of no known kind"),
        (["empty"], "holds no file ending in"),
        (["book.txt", "book.txt"], "given twice"),
        (["other", "other/book.txt"], "given twice"),
    ],
)
def test_bad_sources_are_refused_in_one_line(tmp_path, monkeypatch, given, message):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "other"):
        (tmp_path / folder).mkdir()
    for file in ("photo.jpg", "book.txt", "other/book.txt"):
        (tmp_path / file).write_text(PROSE)
    with pytest.raises(UserError, match=message):
        find_sources(given)


def test_the_name_of_a_link_says_what_kind_of_file_it_is(tmp_path):
    """Caches of files by content keep them under names without a suffix."""
    blob = write_dump(tmp_path / "b10b", dump(3))
    (tmp_path / "wiki.xml").symlink_to(blob)
    (source,) = find_sources([str(tmp_path / "wiki.xml")])
    assert (source.name, source.is_dump) == ("wiki.xml", True)
    (unit,) = units_of([source])
    assert len(unit.pages) == 6  # three articles, and a page of each kind that is left out
    (tmp_path / "other.xml").symlink_to(blob)
    with pytest.raises(UserError, match="given twice"):
        find_sources([str(tmp_path / "wiki.xml"), str(tmp_path / "other.xml")])


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, monkeypatch):
    file = tmp_path / "book.txt"
    file.write_text(PROSE)
    (source,) = find_sources([str(file)])

    def refuse(self):
        raise PermissionError(13, "Permission denied", str(file))
        yield

    monkeypatch.setattr(sources.ByteStream, "__iter__", refuse)
    (fault,) = [fault for unit in units_of([source]) for fault in unit.faults]
    assert fault.reason == "it cannot be read (Permission denied)"


def test_links_in_a_folder_are_followed_and_each_file_is_read_once(tmp_path):
    for name in ("texts/b/one.txt", "elsewhere/two.txt", "elsewhere/sub/three.txt", "texts/four.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(PROSE)
    texts = tmp_path / "texts"
    (texts / "a").symlink_to(texts / "b")  # before it in the order of names
    (texts / "b" / "circle").symlink_to(texts)
    (texts / "c").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "circle").symlink_to(texts)
    (texts / "d").symlink_to(tmp_path / "elsewhere" / "sub")
    (texts / "again.txt").symlink_to(texts / "four.txt")
    (texts / "five.txt").symlink_to(texts / "nowhere.txt")
    (texts / "six.txt").symlink_to(texts / "six.txt")
    names = [source.name for source in find_sources([str(texts)])]
    found = ("b/one.txt", "c/sub/three.txt", "c/two.txt", "five.txt", "four.txt", "six.txt")
    assert names == [f"texts/{name}" for name in found]
    assert len(documents(texts)) == 4
    assert [(fault.source, fault.reason) for fault in faults(texts)] == [
        ("texts/five.txt", "it cannot be read (No such file or directory)"),
        ("texts/six.txt", "it cannot be read (Too many levels of symbolic links)"),
    ]


def test_a_link_out_of_a_folder_to_one_that_contains_it_is_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "up").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"texts/up is a link to .*, which contains .*texts: remove the link, or name"):
        find_sources([str(tmp_path / "texts")])


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_in_a_folder_is_refused(tmp_path, linked):
    pipe = tmp_path / ("pipe" if linked else "pipe.txt")
    os.mkfifo(pipe)
    if linked:
        (tmp_path / "pipe.txt").symlink_to(pipe)
    (tmp_path / "text.txt").write_text("Text.")
    with pytest.raises(UserError, match=r"pipe\.txt is not a regular file .*: move it out of the folder"):
        find_sources([str(tmp_path)])


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "texts" / "secret").mkdir(parents=True)
    (tmp_path / "texts" / "book.txt").write_text(PROSE)
    really = os.scandir

    def scan(path):
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)

    monkeypatch.setattr(os, "scandir", scan)
    with pytest.raises(UserError, match=r"texts/secret cannot be listed \(Permission denied\)"):
        find_sources([str(tmp_path / "texts")])
