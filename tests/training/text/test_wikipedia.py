"""Wikipedia dumps: the same pages however the bytes arrive, a fault for what is broken, paragraphs and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dumps import END, HEADER, article, dump, page
from torch_thor.training.text import Document, Fault, wikipedia
from torch_thor.training.text.wikipedia import PageCutter, articles
from torch_thor.training.text.wikitext import clean

ONE, TWO = (f"The {word} paragraph has more than five words." for word in ("first", "second"))


def cut(data, sizes=(1 << 20,)):
    cutter, pages, position = PageCutter("dump"), [], 0
    while position < len(data):
        size = sizes[len(pages) % len(sizes)]
        pages += cutter.feed(data[position : position + size])
        position += size
    cutter.finish()
    return cutter, pages


def test_the_last_revision_of_a_page_counts():
    first, last = (page("Page", text, number=n) for n, text in enumerate((ONE, TWO)))
    revision = first[first.index("<revision>") : first.index("</page>")]
    both = last.replace("<revision>", f"{revision}<revision>", 1)
    (raw,) = PageCutter("dump").feed((HEADER + both).encode())
    (document,) = articles("dump", HEADER.encode(), [raw])
    assert document.paragraphs == (TWO,)


def test_articles_are_found_and_other_pages_left_out():
    cutter, pages = cut(dump(10))
    assert not cutter.faults
    assert len(pages) == 13
    found = list(articles("dump", cutter.header, pages))
    assert [document.name for document in found] == [f"Article {n}" for n in range(10)]
    assert all(document.paragraphs == clean(article(n)) for n, document in enumerate(found))


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_pages_do_not_depend_on_how_the_bytes_arrive(sizes):
    data = dump(4)
    assert cut(data, sizes)[1] == cut(data)[1]
    assert not cut(data, sizes)[0].faults


def test_a_dump_on_one_line_has_the_same_articles():
    lines, line = dump(6), dump(6, between="")
    assert b"\n<page>" in lines
    assert b"\n<page>" not in line
    found = [list(articles("dump", c.header, p)) for c, p in (cut(lines), cut(line))]
    assert found[0] == found[1]
    assert len(found[0]) == 6


def test_offsets_are_those_of_the_file():
    data = dump(5)
    assert [data[one.offset :].startswith(one.xml) for one in cut(data)[1]] == [True] * 8


@pytest.mark.parametrize(
    ("damage", "reason", "articles_left"),
    [
        (lambda d: d[: d.rindex(b"<page>") + 40], "ends inside a page", 5),
        (lambda d: d[: -len(END)], "without </mediawiki>", 6),
        (lambda d: d.replace(b"</page>", b"", 2).replace(b"<page>", b"<page>", 1), "begins inside another one", 4),
        (lambda d: d.replace(b"<page>", b"", 1), "ends that has not begun", 5),
    ],
    ids=["inside a page", "at the end", "pages without end", "page without begin"],
)
def test_what_is_cut_short_is_a_fault_and_the_rest_is_read(damage, reason, articles_left):
    data = damage(dump(6))
    cutter, pages = cut(data)
    assert any(reason in fault.reason for fault in cutter.faults)
    assert all(0 <= fault.offset <= len(data) for fault in cutter.faults)
    found = [one for one in articles("dump", cutter.header or HEADER.encode(), pages) if isinstance(one, Document)]
    assert len(found) == articles_left


def test_a_broken_page_costs_only_itself():
    broken = page("Broken", "text").replace("</title>", "</titel>")
    latin = page("Latin", "caf\u00e9 with many words and one letter that is no UTF-8").encode("latin-1")
    whole = page("Whole", "a sentence that has more than five words").encode()
    data = HEADER.encode() + broken.encode() + latin + whole + END.encode()
    cutter, pages = cut(data)
    first, second, third = articles("dump", cutter.header, pages)
    assert isinstance(first, Fault)
    assert "cannot be parsed" in first.reason
    assert first.offset == data.index(b"<page>")
    assert isinstance(second, Fault)
    assert second.offset == data.index(latin)
    assert third.name == "Whole"


def test_memory_is_bounded_where_a_page_has_no_end(monkeypatch):
    monkeypatch.setattr(wikipedia, "LARGEST_PAGE", 10_000)
    cutter = PageCutter("dump")
    for _ in range(100):
        list(cutter.feed(b"x" * 1000))
        assert len(cutter._rest) <= 11_000
    assert "without the end of a page" in cutter.faults[0].reason
    data = dump(2)
    assert len(list(cutter.feed(data[data.index(b"<page>") :]))) == 5


@pytest.mark.parametrize(
    ("template", "is_left_out"),
    [
        ("{{disambiguation}}", True),
        ("{{Human name disambiguation}}", True),
        ("{{Template:Disambig}}", True),
        ("{{Begriffsklärung}}", True),
        ("{{Numberdis}}", True),
        ("{{disambiguation needed|date=May 2020}}", False),
        ("{{cite web|title=disambiguation}}", False),
    ],
)
def test_disambiguation_pages_are_known_by_their_templates(template, is_left_out):
    text = f"The cat{template} is a small animal that many people keep."
    (raw,) = PageCutter("dump").feed((HEADER + page("Cat", text)).encode())
    assert (list(articles("dump", HEADER.encode(), [raw])) == []) is is_left_out
