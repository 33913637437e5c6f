"""A small Wikipedia dump, made up, with all that a real one has."""

import bz2
import random
from xml.sax.saxutils import escape

from torch_thor.training.text import sources

HEADER = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">'
    "<siteinfo>"
    "<sitename>Wikipedia</sitename><dbname>enwiki</dbname><base>b</base><generator>g</generator>"
    '<case>first-letter</case><namespaces><namespace key="0" case="first-letter" />'
    '<namespace key="14" case="first-letter">Category</namespace>'
    "</namespaces></siteinfo>"
)
END = "</mediawiki>"
WORDS = [
    "river", "mountain", "council", "station", "century", "village", "player", "engine", "theory",
    "music", "island",
    "water", "school", "army", "history", "language", "church", "football", "government", "album",
    "species",
    "railway", "district", "university", "bridge", "castle",
]  # fmt: skip


def small_units(patch):
    """Make work units so small that a small dump has several."""
    patch.setattr(sources, "UNIT", 20_000)


def page(title, text, *, namespace=0, redirect=None, number=1):
    target = "" if redirect is None else f'<redirect title="{escape(redirect)}" />'
    return (
        f"<page><title>{escape(title)}</title><ns>{namespace}</ns><id>{number}</id>{target}"
        f"<revision><id>{number}</id><timestamp>2026-01-01T00:00:00Z</timestamp>"
        f"<contributor><username>u</username><id>3</id></contributor>"
        f"<model>wikitext</model><format>text/x-wiki</format>"
        f'<text bytes="{len(text)}" xml:space="preserve">'
        f"{escape(text)}</text><sha1>x</sha1></revision></page>"
    )


def paragraphs(number, sentences=12):
    """The content of an article, a function of its number: three times (link, word in bold type,
    sentences).
    """
    draw = random.Random(number)
    for _ in range(3):
        said = [
            " ".join(draw.choices(WORDS, k=9)).capitalize() + "." for _ in range(sentences // 3)
        ]
        yield draw.choice(WORDS), draw.choice(WORDS), " ".join(said)


def plain(number):
    """The text of an article without markup."""
    return " ".join(f"The {link} of {bold}. {said}" for link, bold, said in paragraphs(number))


def article(number, sentences=12):
    """Wikitext of an article."""
    lines = [
        f"The [[{link}]] of '''{bold}'''. {said}<ref>A book</ref>"
        for link, bold, said in paragraphs(number, sentences)
    ]
    return (
        "{{Infobox|a=b}}\n"
        + "\n\n== Heading ==\n* item of a list\n".join(lines)
        + "\n[[Category:Things]]\n"
    )


def dump(articles=30, *, between="\n"):
    pages = [page(f"Article {n}", article(n), number=n) for n in range(articles)]
    pages.insert(3, page("Elsewhere", "#REDIRECT [[Article 1]]", redirect="Article 1", number=900))
    pages.insert(
        5,
        page(
            "Category:Things",
            "Things of this category are many and of all kinds.",
            namespace=14,
            number=901,
        ),
    )
    pages.insert(
        7,
        page(
            "River (disambiguation)",
            "River may refer to many things.\n{{disambiguation}}",
            number=902,
        ),
    )
    return between.join([HEADER, *pages, END]).encode()


def write_dump(path, data):
    path.write_bytes(bz2.compress(data) if path.suffix == ".bz2" else data)
    return path
