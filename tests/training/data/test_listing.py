"""What is no data is told by one rule, and counted."""

from pathlib import Path

import pytest

from torch_thor.training.data.listing import LeftOut, is_made_by_a_program


@pytest.mark.parametrize(
    "name",
    [
        ".DS_Store", ".ipynb_checkpoints", ".thumbnails", "._photo.jpg", ".git", "@eaDir",
        "__MACOSX", "Thumbs.db", "thumbs.DB", "desktop.ini", "Icon\r", "lost+found",
        "$RECYCLE.BIN",
    ],
)  # fmt: skip
def test_names_that_programs_give(name):
    assert is_made_by_a_program(name)


@pytest.mark.parametrize(
    "name", ["photo.jpg", "_photo.jpg", "thumbnails", "Thumbs", "eaDir", "macosx", "a.", "@home"]
)
def test_names_that_users_give(name):
    assert not is_made_by_a_program(name)


def test_a_line_counts_what_is_left_out_and_names_the_commonest_kinds():
    left, said = LeftOut(), []
    left.tell("data", "images", said.append)
    assert said == []
    names = ["._a.jpg", "b.jpg", "._c.jpg", "Icon\r"]
    assert [name for name in names if left.keeps(name)] == ["b.jpg"]
    left.tell(Path("data"), "images", said.append)
    for name in ("a.txt", "b.TXT", "README", "c.d.csv", "e.x", "f.y"):
        left.other(name)
    left.tell("data", "images", said.append)
    made = "data: left out of its files and folders: 3 hidden or made by programs (._* 2, Icon 1)"
    assert said == [
        made,
        f"{made}, 6 that are no images (.txt 2, without a suffix 1, .csv 1, .x 1, ...)",
    ]
