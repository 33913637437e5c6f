"""What holds for every example: a page long, on the public API, tested, and listed in the docs."""

import ast
import importlib
import re
from pathlib import Path

import pytest

import torch_thor

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
DOCUMENTED = ("torch_thor.schedules", "torch_thor.trainers.hugging_face")


def test_all_are_here():
    named = {path.stem for path in EXAMPLES}
    tested = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert len(named) == 7
    assert tested == named | {"pages"}
    page = (ROOT / "docs" / "how-to" / "examples.md").read_text()
    assert set(re.findall(r"^\| `examples/(\w+).py`", page, re.MULTILINE)) == named


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_one_page_on_the_public_api(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 165
    assert re.search(rf"^    (python|torchrun .*) examples/{path.name}", text, re.MULTILINE)
    assert "\nData: " in text or " Data: " in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("torch_thor"):
            names = {alias.name for alias in node.names}
            if node.module in DOCUMENTED:
                assert names <= vars(importlib.import_module(node.module)).keys()
            else:
                assert node.module == "torch_thor"
                assert names <= {*torch_thor.__all__}
