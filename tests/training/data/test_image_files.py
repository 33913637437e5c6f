"""What may lie in a folder and is no ordinary file: it is never opened, and no link leads round in a circle."""

import errno
import os
import socket
from pathlib import Path

import pytest

from torch_thor.training import UserError
from torch_thor.training.data import BrokenImageError, list_images, open_evaluation_folder, open_folders
from torch_thor.training.data import image_files as files

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")


def pipe(path):
    os.mkfifo(path)


def listening(path, monkeypatch):
    monkeypatch.chdir(path.parent)  # a socket's address has room for about 100 letters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)


def endless(path):
    path.symlink_to("/dev/zero")


def terminal(path):
    path.symlink_to("/dev/tty")


def link_to_a_pipe(path):
    os.mkfifo(path.with_suffix(".pipe"))
    path.symlink_to(path.with_suffix(".pipe"))


def circle(path):
    path.symlink_to(path.name)


def nowhere(path):
    path.symlink_to("nowhere")


def disk(path):
    with path.open("wb") as file:
        file.truncate(2**40)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (pipe, "a named pipe, no file"),
        (listening, "a socket, no file"),
        (endless, "a device, no file"),
        (terminal, "a device, no file"),
        (link_to_a_pipe, "a named pipe, no file"),
        (circle, os.strerror(errno.ELOOP)),
        (nowhere, "No such file or directory"),
        (disk, "1099.5 GB are too many for an image"),
    ],
)
def test_what_is_no_file_is_a_broken_image_and_never_opened(tree, make, reason, monkeypatch):
    path = tree / "train/digit/digit_3.JPEG"
    path.unlink()
    make(path, monkeypatch) if make is listening else make(path)
    source = list_images(tree / "train")
    assert len(source.labels) == 18  # listed by its name, as ever
    [number] = [index for index in range(18) if source.where(index) == str(path)]
    monkeypatch.setattr("builtins.open", lambda *_, **__: pytest.fail("opened"))
    monkeypatch.setattr("io.open", lambda *_, **__: pytest.fail("opened"))  # pathlib's
    monkeypatch.setattr("os.open", lambda *_, **__: pytest.fail("opened"))
    with pytest.raises(BrokenImageError) as caught:
        source.load(number)
    assert str(caught.value) == reason


def test_too_many_open_files_are_no_fault_of_the_image(tree, monkeypatch):
    def refuse(self):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"china_0.JPEG cannot be opened \(Too many open files\): .* \(ulimit -n\)"):
        list_images(tree / "train").load(0)


def refused(root, match):
    with pytest.raises(UserError, match=match) as caught:
        open_folders(root, say=pytest.fail)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("target", [".", "..", "../..", "../../train/digit", "/"])
def test_a_link_to_a_folder_around_it_is_an_error(tree, target):
    link = tree / "train/digit/more"
    link.symlink_to(target, target_is_directory=True)
    refused(tree, r"train/digit/more.* is a link to .*, which holds it: .* remove the link")


def test_a_class_that_is_a_link_to_its_split_is_an_error(tree):
    for part in ("train", "val"):
        (tree / part / "zebra").symlink_to(".", target_is_directory=True)
    refused(tree, "train/zebra is a link to .*train, which holds it")


def test_two_links_in_a_circle_are_an_error(tree):
    # os.walk follows each of them again in every folder that it comes to: 2^40 folders
    for name in ("first", "second"):
        (tree / "train/digit" / name).symlink_to("..", target_is_directory=True)
    refused(tree, "which holds it")


def test_links_that_lead_elsewhere_are_followed(tree, tmp_path):
    (tree / "val/china").rename(tmp_path / "elsewhere")
    (tree / "val/china").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere/more").symlink_to(tree / "val/flower", target_is_directory=True)
    source = list_images(tree / "val")
    assert source.labels.tolist() == [0] * 6 + [1] * 3 + [2] * 3
    assert source.name(3) == "china/more/flower_6.JPEG"
    assert source.load(3).shape[0] == 3


def test_a_circle_in_the_place_of_a_class_is_no_class(tree):
    (tree / "train/loop").symlink_to("loop")
    assert "loop" not in list_images(tree / "train").classes


@pytest.mark.parametrize("place", ["train", "train/digit", "train/digit/more"])
def test_a_folder_that_cannot_be_listed_is_an_error(tree, monkeypatch, place):
    # simulated: to the root user, as whom tests may run, every folder is readable
    (tree / "train/digit/more").mkdir()
    closed = tree / place

    def closing(function):
        def call(path="."):
            if Path(path) == closed:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return function(path)

        return call

    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, closing(getattr(os, name)))
    refused(tree, rf"{place} cannot be listed \(Permission denied\): .* make it readable")
    if place == "train":
        with pytest.raises(UserError, match="train cannot be listed"):
            open_evaluation_folder(tree, say=pytest.fail)


def test_what_an_image_is_its_content_says(tree):
    source = list_images(tree / "train")
    number = next(index for index in range(18) if source.name(index) == "digit/digit_1.png")
    image = source.load(number)
    (tree / "train/digit/digit_1.png").rename(tree / "train/digit/digit_1.jpg")
    again = list_images(tree / "train")
    assert again.name(number) == "digit/digit_1.jpg"
    assert (again.load(number) == image).all()


def test_only_known_endings_are_listed(tree):
    for name in ("notes.txt", "thumbs.db", "picture.gif"):
        (tree / "train/digit" / name).write_text("")
    os.mkfifo(tree / "train/digit/control")
    assert len(files.list_files(tree / "train/digit")) == 6
