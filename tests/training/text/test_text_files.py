"""Paragraphs of text and of HTML, where a large file is cut, and what is left out of a file with damaged bytes."""

import gzip
import random

import pytest

from torch_thor.training.text import Document, text_files
from torch_thor.training.text.text_files import documents_of, html_paragraphs, paragraphs_of

PROSE = (
    "The first paragraph has more than five words,\nand a line break.\n\nHeading\n\nThe second one has so many too.\n"
)


def test_paragraphs_of_text_and_html():
    assert paragraphs_of(PROSE) == (
        "The first paragraph has more than five words, and a line break.",
        "The second one has so many too.",
    )
    markup = (
        "<html><nav><p>Go to the next page of this book</p></nav><p>The first <b>paragraph</b> has more\n than five "
        "words.¶</p><pre>code that has more than five words</pre><ul><li><p>An item of a list with a paragraph.</p>"
        "</li></ul><table><tr><td><p>A cell of a table with words</p></td></tr></table><p>Too short</p></html>"
    )
    assert html_paragraphs(markup) == (
        "The first paragraph has more than five words.",
        "An item of a list with a paragraph.",
    )


SAID = [f"Paragraph number {n} has a café and these words." for n in range(8000)]  # 360 kB
BAD = b"\xff"


def read(path, data):
    path.write_bytes(data)
    found = list(documents_of(text_files.ByteStream(path), path.name))
    documents = [one for one in found if isinstance(one, Document)]
    return [text for one in documents for text in one.paragraphs], [one for one in found if one not in documents]


@pytest.mark.parametrize("bom", [b"", "\ufeff".encode()], ids=["no mark", "byte order mark"])
@pytest.mark.parametrize("ending", ["\n\n", "\r\n\r\n"], ids=["lf", "crlf"])
def test_only_a_paragraph_that_is_not_utf8_is_left_out(tmp_path, bom, ending):
    said = SAID * 4  # more than a chunk
    encoded = [text.encode() for text in said]
    broken = sorted(random.Random(0).sample(range(len(said)), 9))
    for n in broken:
        place = random.Random(n).randrange(20)
        encoded[n] = encoded[n][:place] + BAD + encoded[n][place:] + BAD
    data = bom + ending.encode().join(encoded)
    texts, faults = read(tmp_path / "book.txt", data)
    assert texts == [text for n, text in enumerate(said) if n not in broken]
    assert [fault.offset for fault in faults] == [n for n, byte in enumerate(data) if byte == BAD[0]][::2]
    assert {fault.reason for fault in faults} == {
        "it is not UTF-8, a paragraph is left out: convert it with iconv -t utf-8"
    }


def test_a_character_that_is_cut_at_the_end_of_a_file_is_named_where_it_begins(tmp_path):
    data = "\n\n".join([*SAID[:3], "This paragraph ends with a café"]).encode()[:-1]
    texts, (fault,) = read(tmp_path / "book.txt", data)
    assert texts == SAID[:3]
    assert fault.offset == len(data) - 1


def test_of_a_long_paragraph_only_the_damaged_line_is_left_out(tmp_path):
    lines = [text.encode() for text in SAID]
    lines[5000] += BAD
    texts, (fault,) = read(tmp_path / "book.txt", b"\n".join(lines))
    assert fault.offset == len(b"\n".join(lines[:5001])) - 1
    assert " ".join(texts) == " ".join(text for n, text in enumerate(SAID) if n != 5000)
    assert any(text.endswith(SAID[4999]) for text in texts)  # it is not one paragraph with the line after the damage


def test_the_number_of_faults_of_a_file_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "NAMED_PARAGRAPHS", 10)
    data = b"\n\n".join(text.encode("latin-1") for text in SAID)
    texts, faults = read(tmp_path / "book.txt", data)
    assert texts == []
    assert len(faults) == 10 + len(data) // text_files.LARGEST_DOCUMENT + 1  # one for each document
    assert sum(int(fault.reason.split()[4]) for fault in faults[10:]) == len(SAID) - 10


def test_text_in_utf16_is_refused_as_a_whole(tmp_path):
    with pytest.raises(UnicodeDecodeError) as caught:
        read(tmp_path / "book.txt", SAID[0].encode("utf-16"))
    assert caught.value.start == 0


def test_the_text_before_damaged_compressed_data_is_kept(tmp_path):
    path = tmp_path / "book.txt.gz"
    data = gzip.compress("\n\n".join(SAID[:100]).encode())
    path.write_bytes(data[:-20])
    documents = documents_of(text_files.ByteStream(path), path.name)
    texts = list(next(documents).paragraphs)
    assert 20 < len(texts) < 100
    assert texts == SAID[: len(texts)]
    with pytest.raises(EOFError):
        next(documents)


@pytest.mark.parametrize("separator", ["\n", " "], ids=["at line ends", "at spaces"])
def test_text_without_blank_lines_is_cut_where_a_part_ends(tmp_path, separator):
    """The parts are lines with spaces in them, or words."""
    parts = SAID * 5 if separator == "\n" else [f"{'abcdefgh'[: n % 7 + 1]}{n}" for n in range(200_000)]
    (tmp_path / "book.txt").write_text(separator.join(parts))
    found = [text for _, _, text in text_files._divided(text_files.ByteStream(tmp_path / "book.txt"), "book")]
    assert len(found) > 10
    assert "".join(found) == separator.join(parts)
    assert [part for text in found for part in text.strip().split(separator)] == parts
    assert len(found[0]) <= text_files.LARGEST_DOCUMENT


def test_a_word_without_an_end_is_cut(tmp_path):
    (tmp_path / "book.txt").write_text("x" * (3 << 20))
    found = [text for _, _, text in text_files._divided(text_files.ByteStream(tmp_path / "book.txt"), "book")]
    assert len(found[0]) == text_files.LARGEST_DOCUMENT
    assert "".join(found) == "x" * (3 << 20)


def test_html_keeps_the_paragraphs_that_are_utf8(tmp_path):
    markup = "\ufeff<html>\n<p>{}</p><pre>x\n</pre>\r\n <p title='\xe9'>{}</p><h1>{}</h1><dd>{}</dd></html>"
    data = markup.format(SAID[0], "A damaged @ paragraph of more words", "heading @", SAID[1]).encode()
    data = data.replace(b"@", BAD)
    texts, (fault,) = read(tmp_path / "page.html", data)
    assert texts == SAID[:2]
    assert fault.offset == data.index(BAD)


def test_a_large_html_file_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "LARGEST_HTML", 1 << 14)
    page = f"<p>{SAID[0]}</p>".encode()
    assert read(tmp_path / "page.html", page * 100) == ([SAID[0]] * 100, [])
    texts, (fault,) = read(tmp_path / "page.html", page * 1000)
    assert texts == []
    assert (fault.source, fault.offset) == ("page.html", 0)
    assert "too much for an HTML file" in fault.reason
