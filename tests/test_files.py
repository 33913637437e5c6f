"""Files and folders that are complete or absent, whatever happens while they are written."""

import errno
import os

import pytest

from torch_thor.files import REMAINS, whole_file, whole_folder, write_text


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_is_replaced_as_a_whole(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with whole_file(tmp_path / "a.txt") as temporary:
        assert temporary.suffix == ".txt"  # by which libraries choose the format
        temporary.write_text("né")
        assert contents(tmp_path)["a.txt"] == "old"
    assert contents(tmp_path) == {"a.txt": "né"}


@pytest.mark.parametrize("moment", ["block", "fsync", "rename"])
def test_an_error_leaves_the_file_that_was_there(tmp_path, monkeypatch, moment):
    write_text(tmp_path / "a.txt", "old")
    if moment == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif moment == "rename":
        monkeypatch.setattr(type(tmp_path), "rename", full)
    with pytest.raises(OSError, match="No space left"), whole_file(tmp_path / "a.txt") as temporary:  # noqa: PT012
        temporary.write_text("half")
        if moment == "block":
            full()
    assert contents(tmp_path) == {"a.txt": "old"}


def test_a_folder_is_replaced_as_a_whole_or_stays(tmp_path):
    """Over the remains of a killed writer; where an error comes, it is as it was."""
    folder = tmp_path / "folder"
    for content in ("old", "new"):
        remains = tmp_path / f"{REMAINS}folder"
        remains.mkdir()
        write_text(remains / "half", "of another")
        with whole_folder(folder) as temporary:
            assert list(temporary.iterdir()) == []
            write_text(temporary / content, content)
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
        assert contents(folder) == {content: content}
    with pytest.raises(OSError, match="No space left"), whole_folder(folder) as temporary:  # noqa: PT012
        write_text(temporary / "a", "half")
        full()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert contents(folder) == {"new": "new"}
