"""Files and folders are complete or absent, whatever happens while they are written."""

import pytest

from torch_thor.files import REMAINS, whole_file, whole_folder, write_text


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "a.txt") as temporary:  # noqa: PT012
        temporary.write_text("half")
        raise ZeroDivisionError
    assert contents(tmp_path) == {"a.txt": "old"}
    with whole_file(tmp_path / "a.txt") as temporary:
        assert temporary.suffix == ".txt"  # by which libraries choose the format
        temporary.write_text("né")
        assert contents(tmp_path)["a.txt"] == "old"
    assert contents(tmp_path) == {"a.txt": "né"}


def test_a_folder_is_replaced_as_a_whole_or_stays(tmp_path):
    """A killed writer may have left remains."""
    folder = tmp_path / "folder"
    for content in ("old", "new"):
        remains = tmp_path / f"{REMAINS}folder"
        remains.mkdir()
        write_text(remains / "half", "of another")
        with whole_folder(folder) as temporary:
            write_text(temporary / content, content)
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]
        assert contents(folder) == {content: content}
    with pytest.raises(ZeroDivisionError), whole_folder(folder) as temporary:  # noqa: PT012
        write_text(temporary / "a", "half")
        raise ZeroDivisionError
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert contents(folder) == {"new": "new"}
