"""What is printed: plain text of others, which does nothing on a terminal, and tables."""

import pytest
from rich.console import Console

from torch_thor import printing
from torch_thor.errors import print_message, visible


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\udc80", "\u202e", "\x7f", "\u2028"])
def test_what_is_no_print_is_shown_as_an_escape(text):
    shown = visible(f"before {text} after é λ 漢")
    assert shown.isprintable()
    assert shown.startswith("before ")
    assert shown.endswith(" after é λ 漢")
    assert "\\" in shown


def test_a_fault_with_several_lines_is_a_line_each(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    print_message("epochs=0: must be 1 or more\nlr=\x1b[31m: is no number")
    assert capsys.readouterr().err.splitlines() == [
        "torch-thor, rank 3: epochs=0: must be 1 or more",
        "torch-thor, rank 3: lr=\\x1b[31m: is no number",
    ]


@pytest.mark.parametrize("left", [0, 1])
def test_tables_are_flush_right_but_for_their_first_columns(left):
    """And what others have written does nothing in them."""
    console = Console(width=60, record=True, force_terminal=True)
    rows = [["sgd", "1.5"], ["[red]thor\x1b[0m", "22.25"]]
    console.print(printing.columns("Title [bold]", ["name", "number"], rows, left=left))
    lines = console.export_text().splitlines()
    assert "Title [bold]" in lines[0]
    assert any("[red]thor\\x1b[0m │  22.25 │" in line for line in lines)
    name = "sgd".ljust(16) if left else "sgd".rjust(16)
    assert any(f"│ {name} │    1.5 │" in line for line in lines)
