"""Files and folders that are complete or absent, whatever happens while they are written."""

import errno
import os
import stat
import subprocess
import sys

import pytest
from filelock import Timeout

from torch_thor import files
from torch_thor.errors import UserError
from torch_thor.files import (
    REMAINS,
    check_place,
    locked,
    whole_file,
    whole_folder,
    write_text,
    writing,
)


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


def test_each_writer_of_a_shared_file_has_a_name_of_its_own(tmp_path):
    path = tmp_path / "a.json"
    with whole_file(path, shared=True) as first:
        with whole_file(path, shared=True) as second:
            assert first != second
            first.write_text("1")
            second.write_text("2")
        assert contents(tmp_path)["a.json"] == "2"
    assert contents(tmp_path) == {"a.json": "1"}


def test_a_folder_is_replaced_as_a_whole_over_the_remains_of_a_killed_writer(tmp_path):
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


def test_an_error_leaves_the_folder_that_was_there(tmp_path):
    folder = tmp_path / "folder"
    with whole_folder(folder) as temporary:
        write_text(temporary / "a", "old")
    with pytest.raises(OSError, match="No space left"), whole_folder(folder) as temporary:  # noqa: PT012
        write_text(temporary / "a", "half")
        full()
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert contents(folder) == {"a": "old"}


def test_an_error_of_the_disk_is_one_line(tmp_path):
    said = r"a.txt cannot be written \(No space left on device\): free some disk space"
    with pytest.raises(UserError, match=said), writing(tmp_path / "a.txt"):
        full()
    check_place(tmp_path / "new/deep")
    (tmp_path / "file").write_text("")
    for place in ("file", "file/new/deep"):
        with pytest.raises(
            UserError,
            match=rf"--to {tmp_path / place}: .*file is a file.*: choose another folder with",
        ):
            check_place(tmp_path / place, "--to")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


# ---- what not every file system offers -----------------------------------------------------------


def refusing(number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


@pytest.fixture
def told(monkeypatch, capsys):
    """The lines on stderr; nothing was told before."""
    monkeypatch.setattr(files, "_told", set())
    return lambda: capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF])
def test_folders_that_cannot_be_flushed_are_told_once(tmp_path, monkeypatch, told, number):
    real = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refusing(number)()
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    for content in ("one", "two"):
        with whole_folder(tmp_path / "folder") as temporary:
            write_text(temporary / "a", content)
    assert contents(tmp_path / "folder") == {"a": "two"}
    [line] = told()
    assert line.startswith("torch-thor: this file system cannot flush folders to the disk (")


def test_a_file_that_cannot_be_flushed_is_an_error(tmp_path, monkeypatch):
    """Its numbers may be lost, which the next error of the disk would not tell."""
    monkeypatch.setattr(os, "fsync", refusing(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        write_text(tmp_path / "a", "lost")
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP])
def test_a_lock_without_flock_is_a_file_that_names_the_process(tmp_path, monkeypatch, told, number):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", refusing(number))
    lock = locked(tmp_path / ".lock")
    with pytest.raises(Timeout):
        locked(tmp_path / ".lock")
    lock.release()
    locked(tmp_path / ".lock").release()
    # a process that was killed leaves its file behind
    code = (
        "import errno, fcntl, os, sys; from pathlib import Path\n"
        "def flock(*_): raise OSError(int(sys.argv[2]), 'no locks')\n"
        "fcntl.flock = flock\n"
        "from torch_thor.files import locked\n"
        "lock = locked(Path(sys.argv[1])); os._exit(0)"
    )
    command = [sys.executable, "-c", code, tmp_path / ".lock", str(number)]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / ".lock").exists()
    locked(tmp_path / ".lock").release()
    assert len(told()) == 1


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some disk space, then continue with --resume"),
        (errno.EDQUOT, "free some disk space, then continue with --resume"),
        (errno.EACCES, "check the path, its permissions and its disk, then continue with"),
        (errno.EIO, "check the path, its permissions and its disk, then continue with"),
    ],
)
def test_disk_space_is_the_remedy_for_a_full_disk_alone(tmp_path, number, remedy):
    with pytest.raises(UserError, match=remedy), writing(tmp_path / "a"):
        refusing(number)()
