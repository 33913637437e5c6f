"""Wikipedia dumps: the same pages however the bytes arrive, a fault for what is broken, paragraphs and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dumps import END, HEADER, article, dump, page
from torch_thor.training.text import Document, Fault, wikipedia
from torch_thor.training.text.wikipedia import PageCutter, articles, clean

WIKITEXT = """{{Short description|x}}
'''Anarchism''' is a [[political philosophy]]<ref name=a>Foo, ''Bar''</ref> that is sceptical of all
justifications for [[authority|authorities]] ( , ) and seeks to abolish institutions &amp; hierarchy.<!-- hidden -->

== History ==
[[File:foo.jpg|thumb|A caption with [[links]] and five words or more]]
Some text here that goes on {{cite web|a=b}} , and on<br>for a while at [http://a.b the site] in <math>x</math> peace.
* one item of a list that has many words
# another item of a list that has many words
: an indented line that has many words in it
{| class="wikitable"
|-
| a cell of a table with many words || cell 2 of a table with many words
|}
Too few words.
[[Category:Things that have many words in names]]
[[fr:Une page avec beaucoup de mots]]
<gallery>
File:a.jpg|a picture with a caption of many words
</gallery>
"""


def cut(data, sizes=(1 << 20,)):
    cutter, pages, position = PageCutter("dump"), [], 0
    while position < len(data):
        size = sizes[len(pages) % len(sizes)]
        pages += cutter.feed(data[position : position + size])
        position += size
    cutter.finish()
    return cutter, pages


def test_paragraphs_are_left_and_nothing_else():
    assert clean(WIKITEXT) == (
        "Anarchism is a political philosophy that is sceptical of all justifications for authorities and "
        "seeks to abolish institutions & hierarchy.",
        "Some text here that goes on, and on for a while at the site in peace.",
    )


PIECES = (
    "''", "'''", "[[", "]]", "|", "{{", "}}", "{|", "|}", "|-", "\n", "\n* ", "\n:", "\n|| ", "! ", "\n== ", "== \n",
    "<ref>", "</ref>", "<ref name=a />", "<br>", "<!--", "-->", "&amp;", "&#39;", "[http://a.b ", "]", "{{{", "}}}",
    "=", "<div class={{x}}>", "</div>", "<nowiki>", "</nowiki>", "<math>", "</math>", "<table>", "<tr>", "<td>",
    "</td>", "</table>", "<li>", "<span>", "</span>", "File:", "some words ", "many other words that go on ",
)  # fmt: skip


ONE, TWO, THREE = (f"The {word} paragraph has more than five words." for word in ("first", "second", "third"))


@pytest.mark.parametrize(
    ("between", "is_one"),
    [
        ("\n", True),
        (" \n", True),
        ("\n<!-- a comment of\n\ntwo lines --> <!-- and another -->\n", True),
        ("<ref>\n\nA book.</ref>\n", True),
        ("\n\n", False),
        ("\n \t\n", False),
        ("\n== History ==\n", False),
        ("\n* an item\n", False),
        ("\n: an indented line\n", False),
        ("\n a line of code\n", False),
        ("\n----\n", False),
        ("\n{|\n| a cell\n|}\n", False),
        ("\n{{A box}}\n", False),
        ("\n[[File:a.jpg|thumb|A picture]]\n", False),
        ("<p></p>", False),
        ("<div class=a></div>", False),
    ],
)
def test_what_separates_paragraphs(between, is_one):
    assert clean(f"{ONE}{between}{TWO}") == ((f"{ONE} {TWO}",) if is_one else (ONE, TWO))


def test_a_line_that_begins_with_a_space_is_a_paragraph_of_its_own():
    assert clean(f"{ONE}\n {TWO}\n{THREE}") == (ONE, TWO, THREE)
    assert clean(f"{{{{Infobox}}}} {ONE}\n{TWO}") == (f"{ONE} {TWO}",)


@pytest.mark.parametrize(
    ("link", "shown"),
    [
        ("[[:de:Stadt|the city]]", "the city"),
        ("[[:de:Stadt]]", "de:Stadt"),
        ("[[:Category:Cities (Texas)|]]", "Cities"),
        ("[[Paris, Texas|]]", "Paris"),
        ("[[Paris (city)|]]", "Paris"),
        ("[[Paris]]", "Paris"),
        ("[[Paris|''the'' city]]", "the city"),
        ("[[Star Trek: Voyager]]", "Star Trek: Voyager"),
        ("[[de:Stadt]]", ""),
        ("[[File:a.jpg|thumb|A picture]]", ""),
        ("[[Category:Cities]]", ""),
    ],
)
def test_links_show_their_text(link, shown):
    (text,) = clean(f"People like to visit {link} in the summer.")
    assert text == f"People like to visit {shown} in the summer.".replace("  ", " ")


@pytest.mark.parametrize("switch", ["__NOTOC__", "__NO_EDIT_SECTION__", "__KEIN_INHALTSVERZEICHNIS__", "__ОГЛ__"])
def test_behaviour_switches_are_no_text(switch):
    assert clean(f"{switch}{ONE}\n{switch}\n{switch} {TWO}") == (ONE, TWO)
    assert clean("The method __init__ of a class is called first.") != clean("The method of a class is called first.")


@pytest.mark.parametrize(
    ("text", "left"),
    [
        (f"{ONE} It has {{{{convert|5|km of road and more words.\nAnd more words.\n\n{TWO}", (ONE, TWO)),
        (
            f"{{{{Infobox of many words here\n| name = a name of many words\n\n| b = five words or more here\n\n{TWO}",
            (TWO,),
        ),
        (f"{ONE}\n{{| class=x and more words here\n|-\n| a cell of many words in it\nand more\n\n{TWO}", (ONE, TWO)),
        (f"{{|\n|-\n\n! a heading of many words in it\n\n| a cell of many words in it\n\n{TWO}", (TWO,)),
        (f"{ONE}\n\n!Kung is a language of many words.", (ONE, "!Kung is a language of many words.")),
    ],
    ids=["in a sentence", "a box", "a table", "a table with blank lines", "no table"],
)
def test_templates_and_tables_without_an_end_are_no_text(text, left):
    assert clean(text) == left


def test_the_last_revision_of_a_page_counts():
    first, last = (page("Page", text, number=n) for n, text in enumerate((ONE, TWO)))
    revision = first[first.index("<revision>") : first.index("</page>")]
    both = last.replace("<revision>", f"{revision}<revision>", 1)
    (raw,) = PageCutter("dump").feed((HEADER + both).encode())
    (document,) = articles("dump", HEADER.encode(), [raw])
    assert document.paragraphs == (TWO,)


@given(st.lists(st.sampled_from(PIECES), max_size=25))
def test_what_is_dropped_before_the_tree_is_built_would_not_have_been_text(pieces):
    text = "".join(pieces) + " one two three four five six seven"
    quick = clean(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wikipedia, "_without_markup", lambda tokens: tokens)
        assert clean(text) == quick


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


def test_a_character_that_is_none_is_replaced():
    (paragraph,) = clean("An entity &#xD800; stands in for a character that is none.")
    assert paragraph == "An entity? stands in for a character that is none."


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
