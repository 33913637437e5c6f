"""The Python fragments of README and documentation run as pasted, each alone in a fresh namespace.

A fragment that needs other processes, files or a long time has the comment
``<!-- not run: REASON -->`` before it. It is compiled, and the names that it imports are looked up.
"""

import ast
import importlib
import re
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


def fragments():
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FRAGMENT.finditer(text):
            line = text.count("\n", 0, match.start("code")) + 1
            where = f"{page.relative_to(ROOT)}:{line}"
            # the blank lines make line numbers in errors those of the page
            found.append(
                pytest.param(where, "\n" * (line - 1) + match["code"], match["reason"], id=where)
            )
    return found


@pytest.mark.parametrize(("where", "code", "reason"), fragments())
def test_a_fragment_runs_alone(where, code, reason, monkeypatch, tmp_path):
    program = compile(code, where, "exec")
    if reason:
        look_up_imports(code)
        return
    monkeypatch.chdir(tmp_path)
    registered = torch_thor.curvature.kinds.registry.KINDS  # without those of fragments afterwards
    monkeypatch.setattr(registered, "classes", dict(registered.classes))
    torch.manual_seed(0)
    exec(program, {"__name__": "__main__"})


def look_up_imports(code):
    """Import what the statements of `code` import."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for name in node.names:
                importlib.import_module(name.name)
        elif isinstance(node, ast.ImportFrom):
            exec(ast.unparse(node), {})


def test_what_is_not_run_is_still_checked():
    look_up_imports("import torch\nfrom torch_thor import THOR")
    with pytest.raises(ImportError, match="AbsentName"):
        look_up_imports("def f():\n    from torch_thor import AbsentName")
    with pytest.raises(ModuleNotFoundError):
        look_up_imports("import torch.absent")


def test_a_reason_belongs_to_the_fragment_that_follows_it():
    page = "<!-- not run: slow -->\n```python\na\n```\n\ntext\n\n```python\nb\n```\n"
    assert [(match["reason"], match["code"]) for match in FRAGMENT.finditer(page)] == [
        ("slow", "a\n"),
        (None, "b\n"),
    ]
    reasons = sum(page.read_text().count("<!-- not run:") for page in PAGES)
    assert reasons == sum(fragment.values[2] is not None for fragment in fragments())


def test_the_coverage_table_is_that_of_the_program(capsys):
    page = (ROOT / "docs" / "tutorial" / "your-own-loop.md").read_text()
    program = next(
        match["code"] for match in FRAGMENT.finditer(page) if "load_digits" in match["code"]
    )
    exec(program.partition("for epoch in")[0], {})
    table = capsys.readouterr().out.partition("\n)\n")[2].strip()
    assert "0.weight" in table
    assert table in page


def test_the_files_that_pages_name_are_there():
    pages = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
    named = {(page.name, name) for page in pages for name in FILE.findall(page.read_text())}
    assert len(named) > 10
    assert {one for one in named if not (ROOT / one[1]).exists()} == set()


def test_the_navigation_lists_every_page():
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}
    listed = re.findall(
        r"^ +- .*: (\S+\.md)(?:  # (generated))?$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE
    )
    assert {page for page, generated in listed if not generated} == pages


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["title"], citation["version"]) == ("torch-thor", torch_thor.__version__)
    assert citation["references"][0]["doi"] in (ROOT / "README.md").read_text()
