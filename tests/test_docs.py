"""The Python fragments of README and documentation run as pasted, each in a fresh namespace.

A fragment that needs other processes, files or a long time has the comment
``<!-- not run: REASON -->`` before it. It is compiled, and the names that it imports are looked up.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

import torch_thor

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FILE = re.compile(r"\b(?:benchmarks|examples|recipes|tests|src)/[\w/]+\.\w+")
FRAGMENT = re.compile(
    r"(?:<!-- not run: (?P<reason>.*?) -->\n)?^```py(?:thon)?\n(?P<code>.*?)^```",
    re.DOTALL | re.MULTILINE,
)
NOTEBOOK = ROOT / "docs" / "tutorial" / "five-minutes.ipynb"
TEXTS = [*PAGES, NOTEBOOK, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


def fragments():
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FRAGMENT.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            where = f"{page.relative_to(ROOT)}:{line}"
            # with the blank lines, an error has the line number of the page
            found.append(
                pytest.param(where, "\n" * (line - 1) + match["code"], match["reason"], id=where)
            )
    return found


@pytest.mark.parametrize(("where", "code", "reason"), fragments())
def test_a_fragment_runs_by_itself(where, code, reason, monkeypatch, tmp_path):
    program = compile(code, where, "exec")
    if reason:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(ast.unparse(node), {})
        return
    monkeypatch.chdir(tmp_path)
    registered = torch_thor.curvature.kinds.registry.KINDS  # kinds of fragments go afterwards
    monkeypatch.setattr(registered, "classes", dict(registered.classes))
    torch.manual_seed(0)
    exec(program, {"__name__": "__main__"})


def test_the_coverage_table_is_what_the_program_prints(capsys):
    page = (ROOT / "docs" / "tutorial" / "your-own-loop.md").read_text()
    codes = [match["code"] for match in FRAGMENT.finditer(page)]
    program = next(code for code in codes if "load_digits" in code)
    exec(program.partition("for epoch in")[0], {})
    table = capsys.readouterr().out.partition("\n)\n")[2].strip()
    assert "0.weight" in table
    assert table in page


def test_the_files_that_pages_name_are_there():
    named = {(page.name, name) for page in TEXTS for name in FILE.findall(page.read_text())}
    assert len(named) > 10
    assert [name for name in named if not (ROOT / name[1]).exists()] == []


def test_the_navigation_lists_every_page():
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    listed = re.findall(
        r"^ +- .*: (\S+\.md)(?:  # (generated))?$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    assert {page for page, generated in listed if not generated} == pages


def without_code(text):
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(text):
    """The anchors of the headings of a text, as GitHub makes them."""
    blocks = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", blocks, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)|`", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def test_each_link_leads_to_a_file_and_heading_on_github():
    checked = 0
    for page in TEXTS:
        targets = re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text()))
        for target in [target for target in targets if ":" not in target]:
            checked += 1
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.relative_to(ROOT)}: {target} leads nowhere"
            if anchor:
                there = headings(file.read_text())
                assert anchor in there, f"{page.relative_to(ROOT)}: {target} is no heading there"
    assert checked > 50


@pytest.mark.slow
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="the extra docs, which .ci/run installs, has it")
    # not --quiet, with which mkdocs counts no warning
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path: path.read_text() for path in tmp_path.rglob("*.html")}
    for path, page in pages.items():
        loaded = re.findall(r"<(?:script|img|link|source)[^>]+(?:src|href)=\"([^\"]+)\"", page)
        assert [target for target in loaded if "//" in target] == [], path
    home = pages[tmp_path / "index.html"]
    assert home.count("<h1") == 1
    assert ">The pages<" in home
    reference = pages[tmp_path / "reference" / "api" / "index.html"]
    assert "generated:" not in reference
    for part in ("<code>thor-muon</code>", "torch-thor train", "<code>row_splits</code>"):
        assert part in reference, part


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == ("torch-thor", torch_thor.__version__)
    assert citation["references"][0]["doi"] in (ROOT / "README.md").read_text()
