"""Wikitext: paragraphs are left, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_thor.training.text import wikitext


def clean(text):
    return tuple(wikitext.clean(text))


WIKITEXT = """{{Short description|x}}
'''Anarchism''' is a [[political philosophy]]<ref name=a>Foo, ''Bar''</ref> that is sceptical of all
justifications for [[authority|authorities]] ( , ) \
and seeks to abolish institutions &amp; hierarchy.<!-- hidden -->

== History ==
[[File:foo.jpg|thumb|A caption with [[links]] and five words or more]]
Some text here that goes on {{cite web|a=b}} , and on<br>for a while \
at [http://a.b the site] in <math>x</math> peace.
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


def test_paragraphs_are_left_and_nothing_else():
    assert clean(WIKITEXT) == (
        "Anarchism is a political philosophy that is sceptical of all justifications for "
        "authorities and seeks to abolish institutions & hierarchy.",
        "Some text here that goes on, and on for a while at the site in peace.",
    )


PIECES = (
    "''", "'''", "[[", "]]", "|", "{{", "}}", "{|", "|}", "|-", "\n", "\n* ", "\n:", "\n|| ", "! ",
    "\n== ", "== \n",
    "<ref>", "</ref>", "<ref name=a />", "<br>", "<!--", "-->", "&amp;", "&#39;", "[http://a.b ",
    "]", "{{{", "}}}",
    "=", "<div class={{x}}>", "</div>", "<nowiki>", "</nowiki>", "<math>", "</math>", "<table>",
    "<tr>", "<td>",
    "</td>", "</table>", "<li>", "<span>", "</span>", "File:", "some words ",
    "many other words that go on ",
)  # fmt: skip


ONE, TWO, THREE = (
    f"The {word} paragraph has more than five words." for word in ("first", "second", "third")
)


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


@pytest.mark.parametrize(
    "switch", ["__NOTOC__", "__NO_EDIT_SECTION__", "__KEIN_INHALTSVERZEICHNIS__", "__ОГЛ__"]
)
def test_behaviour_switches_are_no_text(switch):
    assert clean(f"{switch}{ONE}\n{switch}\n{switch} {TWO}") == (ONE, TWO)
    assert clean("The method __init__ of a class is called first.") != clean(
        "The method of a class is called first."
    )


def test_paragraphs_with_templates_and_tables_without_an_end_are_left_out():
    for text, left in (
        (
            f"{ONE} It has {{{{convert|5|km of road and more words.\nAnd more words.\n\n{TWO}",
            (TWO,),
        ),
        (
            f"{{{{Infobox of many words here\n| name = a name of many words\n\n| five words or "
            f"more here\n\n{TWO}",
            (TWO,),
        ),
        (
            f"{ONE}\n\n{{| class=x and more words here\n|-\n| a cell of many words in it\nand "
            f"more\n\n{TWO}",
            (ONE, TWO),
        ),
        (f"{{|\n|-\n\n| a cell of many words in it\n\n{TWO}", (TWO,)),
        (
            f"{ONE}\n\n!Kung is a language of many words.",
            (ONE, "!Kung is a language of many words."),
        ),
    ):
        assert clean(text) == left


@given(st.lists(st.sampled_from(PIECES), max_size=25))
def test_what_is_dropped_before_the_tree_is_built_would_not_have_been_text(pieces):
    text = "".join(pieces) + " one two three four five six seven"
    quick = clean(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wikitext, "_without_markup", lambda tokens: tokens)
        assert clean(text) == quick


def test_a_character_that_is_none_is_replaced():
    (paragraph,) = clean("An entity &#xD800; stands in for a character that is none.")
    assert paragraph == "An entity? stands in for a character that is none."


OPENED = (
    "<!--", "<ref>", "<REF name=x>", "<nowiki>", "<b>", "[http://a.b ", "[mailto:a ",
    "<ref name=xx ", "<br ",
    '<ref name="',
)  # fmt: skip


@pytest.mark.parametrize("opened", OPENED)
def test_pages_with_many_elements_without_an_end_are_refused(opened):
    some, many = (f"One two three four five six. {opened * number}" for number in (100, 600))
    assert clean(some)
    # it would take minutes, or never end
    with pytest.raises(ValueError, match=r"600 times .* without an end"):
        clean(many)


@pytest.mark.parametrize(
    "whole",
    [
        "<!-- x -->",
        "<ref name=x />",
        "<ref>x</ref>",
        "<br>",
        "<br />",
        "[[a]]",
        "[http://a b]",
        "1 < 2 ",
    ],
)
def test_pages_with_many_whole_elements_are_not(whole):
    for end in ("\n", " "):
        assert clean("One two three four five six. " + f"{whole} and{end}" * 600)
