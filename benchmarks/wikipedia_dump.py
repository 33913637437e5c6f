"""Synthetic Wikipedia dumps of any size for measurements: the structure of real dumps with artificial words.

Words follow a Zipf-Mandelbrot law over three million forms, so a larger dump has more distinct words, as real text
has (the tail of this law is heavier than that of English). Frequent words are short. Article lengths are log-normal.
An article has an infobox, links, references with citation templates, headings, lists, tables, pictures and categories;
about half of its characters are prose.
"""

import bz2
import itertools
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

FORMS = 3_000_000
EXPONENT, SHIFT = 1.07, 2.7  # of the law: p(rank) ~ (rank + SHIFT) ** -EXPONENT
MEDIAN_ARTICLE, SPREAD, LARGEST_ARTICLE = 3_000, 1.1, 2_000_000  # characters; Wikipedia's own limit is 2 MB
PAGES_A_STREAM = 100  # of the multi-stream files that Wikipedia offers
HEADER = (
    '<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="en">\n<siteinfo>\n'
    "<sitename>Wikipedia</sitename><dbname>enwiki</dbname><base>b</base><generator>g</generator>"
    '<case>first-letter</case><namespaces><namespace key="0" case="first-letter" />'
    '<namespace key="14" case="first-letter">Category</namespace></namespaces>\n</siteinfo>\n'
)
_SYLLABLES = tuple(
    begin + vowel + end
    for begin in ("", "b", "c", "d", "f", "g", "l", "m", "n", "p", "r", "s", "st", "t", "th", "v", "w")
    for vowel in "aeiou"
    for end in ("", "n", "r", "s")
    if begin or end
)


class Author:
    """Writes wikitext.

    Args:
        seed: Decides every word.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        weights = (np.arange(1, FORMS + 1) + SHIFT) ** -EXPONENT
        self._below = np.cumsum(weights / weights.sum())
        self._words = map(word, self._ranks())

    def article(self) -> str:
        """Write the next article.

        Returns:
            Wikitext.
        """
        wanted = min(LARGEST_ARTICLE, MEDIAN_ARTICLE * float(np.exp(SPREAD * self._random.standard_normal())))
        title = self.text(2)
        parts = [
            f"{{{{Short description|{self.text(6)}}}}}\n{{{{Infobox {self.text(1)}\n| name = {title}\n"
            f"| image = {self.text(1)}.jpg\n| caption = {self.text(7)}\n| area = {{{{convert|12|km2}}}}\n}}}}\n"
            f"'''{title}''' {self.paragraph()}\n"
        ]
        size = len(parts[0])
        while size < wanted:
            parts.append(self._section())
            size += len(parts[-1])
        parts.append(f"\n== References ==\n{{{{reflist|30em}}}}\n\n[[Category:{self.text(3)}]]\n")
        return "".join(parts)

    def paragraph(self) -> str:
        """Write a paragraph of wikitext.

        Returns:
            One line of one to seven sentences.
        """
        return " ".join(self._sentence() for _ in range(int(self._random.integers(1, 8))))

    def text(self, count: int) -> str:
        """Draw words.

        Args:
            count: How many.

        Returns:
            The words, separated by spaces.
        """
        return " ".join(itertools.islice(self._words, count))

    def _section(self) -> str:
        parts = [f"\n== {self.text(2)} ==\n"]
        kind = self._random.random()
        if kind < 0.2:
            parts += [f"* [[{self.text(2)}]], {self.text(5)}\n" for _ in range(int(self._random.integers(3, 12)))]
        elif kind < 0.35:
            rows = "".join(f"|-\n| {self.text(2)} || {self.text(1)} || 12\n" for _ in range(6))
            parts.append(f'{{| class="wikitable"\n! {self.text(1)} !! {self.text(1)} !! {self.text(1)}\n{rows}|}}\n')
        elif kind < 0.5:
            parts.append(f"[[File:{self.text(1)}.jpg|thumb|{self.text(4)} [[{self.text(1)}]] {self.text(4)}]]\n")
        parts += [f"{self.paragraph()}\n\n" for _ in range(int(self._random.integers(1, 5)))]
        return "".join(parts)

    def _sentence(self) -> str:
        draw = self._random.random(4)
        words = self.text(6 + int(18 * draw[0]))
        line = words[0].upper() + words[1:]
        if draw[1] < 0.5:
            line += f", [[{self.text(2)}]] {self.text(3)} [[{self.text(1)}|{self.text(2)}]]"
        if draw[2] < 0.15:
            line += f", {{{{lang|fr|{self.text(2)}}}}} ''{self.text(2)}'' &ndash; {self.text(3)}"
        line += "."
        if draw[3] < 0.4:
            line += (
                f"<ref>{{{{cite web |url=https://example.org/{self.text(1)} |title={self.text(6)} |last={self.text(1)} "
                f"|first={self.text(1)} |date=12 May 2019 |publisher={self.text(2)}}}}}</ref>"
            )
        return line

    def _ranks(self) -> Iterator[int]:
        while True:
            yield from np.searchsorted(self._below, self._random.random(1 << 16)).tolist()


def word(rank: int) -> str:
    """Make a word, as long as its rank is large.

    Args:
        rank: From 0.

    Returns:
        One to three syllables; another word for another rank, but for few.
    """
    found = ""
    while rank >= 0:
        rank, syllable = divmod(rank, len(_SYLLABLES))
        found += _SYLLABLES[syllable]
        rank -= 1
    return found


def pages(size: int, seed: int = 0) -> Iterator[bytes]:
    """Write the pages of a dump.

    Args:
        size: Bytes of all pages together, uncompressed, at least.
        seed: Decides every word.

    Yields:
        Pages.
    """
    author, written, number = Author(seed), 0, 0
    while written < size:
        number += 1
        title, text = f"{author.text(2)} {number}", author.article()
        page = (
            f"<page>\n<title>{title}</title>\n<ns>0</ns>\n<id>{number}</id>\n<revision>\n<id>{number}</id>\n"
            f"<timestamp>2026-01-01T00:00:00Z</timestamp>\n<contributor><username>{author.text(1)}</username>"
            f"<id>{number}</id></contributor>\n<model>wikitext</model>\n<format>text/x-wiki</format>\n"
            f'<text bytes="{len(text)}" xml:space="preserve">{escape(text)}</text>\n'
            "<sha1>x</sha1>\n</revision>\n</page>\n"
        ).encode()
        written += len(page)
        yield page


def write_dump(path: Path, size: int, seed: int = 0) -> int:
    """Write a dump as Wikipedia's multi-stream files are: one bz2 stream after another.

    Args:
        path: The file, `*.xml.bz2`.
        size: Bytes of its pages, uncompressed, at least.
        seed: Decides every word.

    Returns:
        Bytes, uncompressed.
    """
    written, rest = 0, pages(size, seed)
    with path.open("wb") as file:
        for data in itertools.chain([HEADER.encode()], _streams(rest), [b"</mediawiki>\n"]):
            written += len(data)
            file.write(bz2.compress(data))
    return written


def _streams(rest: Iterator[bytes]) -> Iterator[bytes]:
    while data := b"".join(itertools.islice(rest, PAGES_A_STREAM)):
        yield data
