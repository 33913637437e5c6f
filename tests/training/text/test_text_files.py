"""Paragraphs of text and of HTML, and where a large file is cut."""

from torch_thor.training.text.text_files import html_paragraphs, paragraphs_of

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
