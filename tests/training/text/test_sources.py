"""Files become units that depend on nothing else; of what is damaged, its place is named and the
rest is read.
"""

import bz2
import gzip
import lzma
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dumps import END, HEADER, article, dump, page, write_dump
from torch_thor.errors import UserError
from torch_thor.training.text import documents, sources
from torch_thor.training.text.documents import Document, Piece, read
from torch_thor.training.text.sources import find_sources, units
from torch_thor.training.text.wikitext import clean

PROSE = (
    "The first paragraph has more than five words,\nand a line break.\n\nHeading\n\nThe second one "
    "has so many too.\n"
)
FOUND = [
    "The first paragraph has more than five words, and a line break.",
    "The second one has so many too.",
]
ONE, TWO = (f"The {word} paragraph has more than five words." for word in ("first", "second"))
SAID = [f"Paragraph number {n} has a café and these words." for n in range(8000)]  # 360 kB
BAD = b"\xff"
PACKED = [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]


def units_of(*given):
    return list(units(find_sources(list(map(str, given))), lambda path: path.open("rb")))


def found(*given):
    """The documents of sources that have prose, and the faults."""
    every = units_of(*given)
    read_ = [read(piece) for unit in every for piece in unit.pieces]
    faults = [fault for unit in every for fault in unit.faults] + [
        one for one in read_ if isinstance(one, str)
    ]
    return [one for one in read_ if isinstance(one, Document) and one.paragraphs], faults


def place(fault):
    """The offset that a fault names."""
    return int(fault.split(", byte ")[1].split()[0])


def texts_of(path, data):
    path.write_bytes(data)
    documents_, faults = found(path)
    return [text for one in documents_ for text in one.paragraphs], faults


def test_compressed_files_are_read(tmp_path):
    for suffix, pack in PACKED:
        file = tmp_path / f"book.txt{suffix}"
        file.write_bytes(pack(PROSE.encode()))
        assert found(file) == ([(file.name, FOUND)], [])


MARKUP = (
    "\ufeff<html><nav><p>Go to the next page of this book</p></nav><p>The first <b>paragraph</b> "
    "has more\n than five words.¶</p><pre>code that has more than five words</pre><ul><li><p>An "
    "item of a list with a paragraph.</p></li></ul><table><tr><td><p>A cell of a table with "
    "words</p></td></tr></table><p>Too short</p><dd>A description that has five words.</dd></html>"
).encode()


def test_the_paragraphs_of_html(tmp_path, monkeypatch):
    texts = [ONE, "An item of a list with a paragraph.", "A description that has five words."]
    assert texts_of(tmp_path / "page.html", MARKUP) == (texts, [])
    for damage, said in (
        (MARKUP.replace(b"Too", BAD), "convert it with iconv"),
        (MARKUP * 60, "more than 0 MB of HTM"),
    ):
        monkeypatch.setattr(documents, "LARGEST_HTML", 1 << 14)
        texts, (fault,) = texts_of(tmp_path / "page.html", damage)
        assert texts == []
        assert said in fault
        assert place(fault) == max(0, damage.find(BAD))


@pytest.mark.parametrize("ending", ["\n\n", "\r\n\r\n"], ids=["lf", "crlf"])
def test_a_large_file_is_cut_at_blank_lines_and_damaged_parts_are_left_out(tmp_path, ending):
    said = SAID * 4  # more than a chunk
    data = "\ufeff".encode() + ending.join(said).encode()
    assert texts_of(tmp_path / "book.txt", data) == (said, [])
    names = [one.name for one in found(tmp_path / "book.txt")[0]]
    assert len(set(names)) == len(names) > 5
    at = len(data) // 2
    texts, (fault,) = texts_of(tmp_path / "book.txt", data[:at] + BAD + data[at:])
    assert place(fault) == at
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
    pieces = [
        piece.data.decode() for unit in units_of(tmp_path / "book.txt") for piece in unit.pieces
    ]
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
    # as large dumps have many
    streams = [pack(data[start : start + 20_000]) for start in range(0, len(data), 20_000)]
    file = tmp_path / f"wiki.xml{suffix}"
    file.write_bytes(b"".join(streams))
    whole, faults = found(file)
    assert (len(whole), faults) == (100, [])
    broken = bytearray(streams[2])
    for middle, spoiled in ((len(broken) // 2, None), (len(broken) // 2, 20), (0, 20)):
        changed = bytes(one ^ 0xFF for one in broken[middle : middle + (spoiled or 0)])
        rest = (
            [broken[:middle]]
            if spoiled is None
            else [broken[:middle] + changed + broken[middle + 20 :], *streams[3:]]
        )
        file.write_bytes(b"".join([*streams[:2], *rest]))
        some, faults = found(file)
        assert some == whole[: len(some)]
        assert 20 < len(some) < 80
        # of a stream with a damaged beginning, Python's library sees the end of the file; that of
        # the dump is missing
        assert any("end here or are damaged" in one or "cut short" in one for one in faults)


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


def test_files_are_named_by_where_they_lie_in_what_is_given(tmp_path, monkeypatch):
    for name in (
        "texts/b.txt",
        "texts/a.md",
        "texts/sub/c.html",
        "texts/skipped.jpg",
        "other/texts/b.txt",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(PROSE)
    names = ["texts/a.md", "texts/b.txt", "texts/sub/c.html", "python"]
    assert [source.name for source in find_sources([str(tmp_path / "texts"), "python"])] == names
    monkeypatch.chdir(tmp_path / "other")
    assert [source.name for source in find_sources(["../texts", "python"])] == names
    # folders of one name, as documentation has them, are told apart by those above them
    top = tmp_path.name
    both = [f"{top}/{name}" for name in names[:3]] + ["other/texts/b.txt"]
    assert [source.name for source in find_sources(["../texts", "texts"])] == both
    with pytest.raises(
        UserError,
        match=r"texts/b.txt is given twice, the first time as .*texts/b.txt: leave one out",
    ):
        find_sources(["texts", ".", "../texts"])
    # caches of files by content keep them under names without a suffix
    blob = write_dump(tmp_path / "b10b", dump(3))
    (tmp_path / "wiki.xml").symlink_to(blob)
    assert len(found(tmp_path / "wiki.xml")[0]) == 3


def test_what_is_no_text_is_left_out_and_counted(tmp_path):
    for name in (
        "texts/a.txt", "texts/._a.txt", "texts/.git/b.txt", "texts/__MACOSX/a.txt",
        "texts/.cache/c.html", "texts/photo.jpg", "texts/@eaDir/a.txt", "texts/sub/Thumbs.db",
    ):  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(PROSE)
    (tmp_path / "texts/.git/link").symlink_to(tmp_path)  # a link to a folder, which is not entered
    said = []
    found_ = find_sources([str(tmp_path / "texts"), "python"], said.append)
    assert [source.name for source in found_] == ["texts/a.txt", "python"]
    (line,) = said
    assert line.startswith(
        f"{tmp_path}/texts: left out of its files and folders: 6 hidden or made by programs ("
    )
    assert line.endswith(", 1 that are no text (.jpg 1)")
    # what the user names is taken
    hidden = [str(tmp_path / f"texts/{name}") for name in (".git/b.txt", ".cache")]
    assert [source.name for source in find_sources(hidden)] == ["b.txt", ".cache/c.html"]


def test_bad_sources_are_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("empty", "other", "pipes", "nothing", "circle"):
        (tmp_path / folder).mkdir()
    for file in ("photo.jpg", "book.txt", "other/book.txt"):
        (tmp_path / file).write_text(PROSE)
    os.mkfifo(tmp_path / "pipes" / "pipe.txt")
    (tmp_path / "nothing" / "book.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "circle" / "again").symlink_to(tmp_path)
    for given_, message in (
        ([], "no source: name a Wikipedia dump"),
        (["nowhere.txt"], "nowhere.txt does not exist"),
        (
            ["photo.jpg"],
            "photo.jpg is and holds no file of a known kind: give a name that ends in .txt, ",
        ),
        (["empty"], "empty is and holds no file"),
        (["book.txt", "book.txt"], "given twice"),
        (["other", "other/book.txt"], "given twice"),
        (["python", "python"], "given twice"),
        (["pipes"], r"pipe\.txt is not a regular file.*: move it out of the folder"),
        (["nothing"], r"book\.txt is not a regular file, or a link to nothing"),
        (
            ["circle"],
            "circle/again is a link to a folder: name that folder too, and remove the link",
        ),
    ):
        with pytest.raises(UserError, match=message):
            find_sources(given_)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"other cannot be listed \(Permission denied\)"):
        find_sources(["other"])


# ---- dumps ---------------------------------------------------------------------------------------


def cut(data, sizes=(1 << 20,)):
    """The pages of a dump that arrives in chunks of these sizes, and the faults."""
    chunks, position = [], 0
    while position < len(data):
        chunks.append(data[position : position + sizes[len(chunks) % len(sizes)]])
        position += len(chunks[-1])
    found = list(sources._pages("dump", chunks))
    return [one for one in found if isinstance(one, Piece)], [
        one for one in found if isinstance(one, str)
    ]


def articles(pages):
    return [one for one in map(read, pages) if isinstance(one, str) or one.paragraphs]


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_pages_are_those_of_the_file_however_the_bytes_arrive(sizes):
    data = dump(4)
    pages, faults = cut(data, sizes)
    assert len(pages) == 7
    assert pages == cut(data)[0]
    assert not faults
    assert all(data[one.offset :].startswith(one.data) for one in pages)


def test_articles_are_found_and_other_pages_left_out():
    for between in ("\n", ""):
        pages, _ = cut(dump(10, between=between))
        assert len(pages) == 13
        assert articles(pages) == [(f"Article {n}", clean(article(n))) for n in range(10)]
    for template, is_article in (
        ("{{disambiguation}}", False),
        ("{{Human name disambiguation}}", False),
        ("{{Template:Disambig}}", False),
        ("{{Begriffsklärung}}", False),
        ("{{Numberdis}}", False),
        ("{{disambiguation needed|date=May 2020}}", True),
        ("{{cite web|title=disambiguation}}", True),
    ):
        text = page("Cat", f"The cat{template} is a small animal that many people keep.")
        assert bool(articles(cut(text.encode())[0])) == is_article


def test_the_last_revision_of_a_page_counts():
    first, last = (page("Page", text, number=n) for n, text in enumerate((ONE, TWO)))
    revision = first[first.index("<revision>") : first.index("</page>")]
    both = last.replace("<revision>", f"{revision}<revision>", 1)
    assert articles(cut(both.encode())[0]) == [("Page", [TWO])]
    assert articles(cut(both.replace("wikitext", "css").encode())[0]) == []


def test_what_is_cut_short_is_a_fault_and_the_rest_is_read():
    for damage, reason, left in (
        (lambda d: d[: d.rindex(b"<page>") + 40], "cut short", 5),
        (lambda d: d[: -len(END)], "without </mediawiki>", 6),
        (lambda d: d.replace(b"</page>", b"", 2), "3 times <page> before </page>", 4),
        (lambda d: d.replace(b"<page>", b"", 1), "0 times <page> before </page>", 5),
        (lambda d: b"<rss></rss>", "is it a Wikipedia dump?", 0),
    ):
        data = damage(dump(6))
        pages, (fault,) = cut(data)
        assert reason in fault
        assert 0 <= place(fault) <= len(data)
        assert [isinstance(one, Document) for one in articles(pages)] == [True] * left


def test_a_broken_page_costs_only_itself():
    broken = page("Broken", "text").replace("</title>", "</titel>")
    latin = page("Latin", "caf\u00e9 with many words and one letter that is no UTF-8").encode(
        "latin-1"
    )
    old = page("Old", ONE).replace("<ns>0</ns>", "")
    data = (
        HEADER.encode()
        + broken.encode()
        + latin
        + old.encode()
        + page("Whole", ONE).encode()
        + END.encode()
    )
    *faults, whole = articles(cut(data)[0])
    assert whole == ("Whole", [ONE])
    places = (data.index(b"<page>"), data.index(latin), data.index(old.encode()))
    for fault, offset in zip(faults, places, strict=True):
        assert fault.startswith(
            f"dump, byte {offset} of its uncompressed contents: it cannot be parsed"
        )
    assert "no <ns>" in faults[2]


def test_memory_is_bounded_where_a_page_has_no_end(monkeypatch):
    monkeypatch.setattr(sources, "LARGEST_PAGE", 10_000)
    data = dump(2)
    data = data[data.index(b"<page>") :]
    found = list(sources._pages("dump", [*[b"x" * 1000] * 100, data]))
    assert all("more than 0 MB without the end of a page" in fault for fault in found[:9])
    assert [(b"x" * 100_000 + data)[one.offset :].startswith(one.data) for one in found[9:]] == [
        True
    ] * 5
