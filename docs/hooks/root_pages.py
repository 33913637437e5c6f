"""What the site has beside docs/: README.md and other texts, so that nothing is told twice.

README.md is the first part of the home page, in the place of what docs/index.md has between
`<!-- README.md -->` and `<!-- end -->`; CONTRIBUTING.md and CHANGELOG.md are pages of their own.
Links in all pages are those of GitHub, relative to the file in the repository. Here those to
another page of the site are made to lead there, and one to a file that the site does not have
becomes the name of the file. The colours of code are those of Pygments.
"""

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent.parent
PAGES = {
    "README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md",
}  # fmt: skip
OWN = re.compile(r"<!-- README\.md -->.*?<!-- end -->", re.DOTALL)
# a link or an image; code, where brackets mean something else, comes first
LINK = re.compile(
    r"(?P<code>^```.*?^```|^(?: {4}[^\n]*\n)+|`[^`\n]*`)"
    r"|(?P<start>!?\[(?P<text>[^\[\]]*)\]\()(?P<target>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the pages that have no file in docs/, and the colours of code.

    Args:
        files: The files of the site.
        config: The configuration of the site.

    Returns:
        The files, with these.
    """
    from mkdocs.structure.files import File
    from pygments.formatters import HtmlFormatter

    colours = HtmlFormatter(style="default").get_style_defs(".highlight")
    files.append(File.generated(config, "assets/highlighting.css", content=colours))
    for source, page in PAGES.items():
        if page != "index.md":
            files.append(File.generated(config, page, content=for_site(source)))
    return files


def on_page_markdown(markdown: str, /, *, page: "Page", **_: object) -> str:
    """Put README.md into the home page, and make links lead to pages of the site.

    Args:
        markdown: The text of a page.
        page: Which page it is.

    Returns:
        The text for the site.
    """
    path = page.file.src_uri
    if path in PAGES.values() and path != "index.md":
        return markdown
    text = with_links(markdown, f"docs/{path}", path)
    return OWN.sub(lambda _: for_site("README.md"), text) if path == "index.md" else text


def for_site(source: str) -> str:
    """Read a text of the repository.

    Args:
        source: Its path.

    Returns:
        Its text with the links of the site.
    """
    return with_links((ROOT / source).read_text(encoding="utf-8"), source, PAGES[source])


def with_links(text: str, source: str, page: str) -> str:
    """Replace links between files of the repository by links between pages.

    Args:
        text: A text in Markdown.
        source: The file that it is from, relative to the repository.
        page: The page that it is in, relative to the site.

    Returns:
        The text with the links of the site.
    """

    def replaced(match: re.Match[str]) -> str:
        path, mark, anchor = (match["target"] or "").partition("#")
        if match["code"] or not path or ":" in path:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        place = PAGES.get(target) or target.removeprefix("docs/")
        if target not in PAGES and place == target:
            return f"{match['text']} (`{target}`)"
        there = posixpath.relpath(place, posixpath.dirname(page) or ".")
        return f"{match['start']}{there}{mark}{anchor})"

    return LINK.sub(replaced, text)
