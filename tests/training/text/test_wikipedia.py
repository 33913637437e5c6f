"""Wikipedia dumps: the same pages however the bytes arrive, a fault for what is broken, articles and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dumps import END, HEADER, article, dump, page
from torch_thor.training.text import wikipedia
from torch_thor.training.text.documents import Piece, read
from torch_thor.training.text.wikitext import clean

ONE, TWO = (f"The {word} paragraph has more than five words." for word in ("first", "second"))


def cut(data, sizes=(1 << 20,)):
    """The pages of a dump that arrives in chunks of these sizes, and the faults, both with their offsets."""
    chunks, position = [], 0
    while position < len(data):
        chunks.append(data[position : position + sizes[len(chunks) % len(sizes)]])
        position += len(chunks[-1])
    found = list(wikipedia.pages(chunks))
    return [one for one in found if isinstance(one[1], bytes)], [one for one in found if isinstance(one[1], str)]


def articles(pages):
    return [found for offset, xml in pages for found in read(Piece("page", "dump", "", offset, xml))]


def one(text, **options):
    return articles([(0, page("Cat", text, **options).encode())])


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5))
def test_pages_are_those_of_the_file_however_the_bytes_arrive(sizes):
    data = dump(4)
    pages, faults = cut(data, sizes)
    assert len(pages) == 7
    assert pages == cut(data)[0]
    assert not faults
    assert all(data[offset:].startswith(xml) for offset, xml in pages)


@pytest.mark.parametrize("between", ["\n", ""], ids=["lines", "one line"])
def test_articles_are_found_and_other_pages_left_out(between):
    pages, _ = cut(dump(10, between=between))
    assert len(pages) == 13
    assert articles(pages) == [(f"Article {n}", clean(article(n))) for n in range(10)]


def test_the_last_revision_of_a_page_counts():
    first, last = (page("Page", text, number=n) for n, text in enumerate((ONE, TWO)))
    revision = first[first.index("<revision>") : first.index("</page>")]
    both = last.replace("<revision>", f"{revision}<revision>", 1)
    assert articles([(0, both.encode())]) == [("Page", [TWO])]
    assert articles([(0, both.replace("wikitext", "css").encode())]) == []


@pytest.mark.parametrize(
    ("damage", "reason", "left"),
    [
        (lambda d: d[: d.rindex(b"<page>") + 40], "cut short", 5),
        (lambda d: d[: -len(END)], "without </mediawiki>", 6),
        (lambda d: d.replace(b"</page>", b"", 2), "3 times <page> before </page>", 4),
        (lambda d: d.replace(b"<page>", b"", 1), "0 times <page> before </page>", 5),
        (lambda d: b"<rss></rss>", "is it a Wikipedia dump?", 0),
    ],
    ids=["inside a page", "at the end", "pages without end", "page without begin", "no dump"],
)
def test_what_is_cut_short_is_a_fault_and_the_rest_is_read(damage, reason, left):
    data = damage(dump(6))
    pages, ((offset, found),) = cut(data)
    assert reason in found
    assert 0 <= offset <= len(data)
    assert [isinstance(one, wikipedia.Document) for one in articles(pages)] == [True] * left


def test_a_broken_page_costs_only_itself():
    broken = page("Broken", "text").replace("</title>", "</titel>")
    latin = page("Latin", "caf\u00e9 with many words and one letter that is no UTF-8").encode("latin-1")
    old = page("Old", ONE).replace("<ns>0</ns>", "")
    data = HEADER.encode() + broken.encode() + latin + old.encode() + page("Whole", ONE).encode() + END.encode()
    *faults, whole = articles(cut(data)[0])
    assert whole == ("Whole", [ONE])
    places = (data.index(b"<page>"), data.index(latin), data.index(old.encode()))
    for fault, offset in zip(faults, places, strict=True):
        assert fault.startswith(f"dump, byte {offset} of its uncompressed contents: a page cannot be parsed")
    assert "no <ns>" in faults[2]


def test_memory_is_bounded_where_a_page_has_no_end(monkeypatch):
    monkeypatch.setattr(wikipedia, "LARGEST_PAGE", 10_000)
    data = dump(2)
    data = data[data.index(b"<page>") :]
    found = list(wikipedia.pages([*[b"x" * 1000] * 100, data]))
    assert [reason for _, reason in found[:9]] == ["more than 0 MB without the end of a page"] * 9
    assert [(b"x" * 100_000 + data)[offset:].startswith(xml) for offset, xml in found[9:]] == [True] * 5


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
    assert (one(f"The cat{template} is a small animal that many people keep.") == []) is is_left_out
