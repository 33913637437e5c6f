"""Processes that work for another one can talk to it, or are refused before they start."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from torch_thor.errors import UserError
from torch_thor.training.workers import check_temporary_folder

LISTENING = "from multiprocessing.connection import Listener; Listener(family='AF_UNIX').close()"


@pytest.mark.parametrize("length", [75, 76])
def test_the_longest_folder_in_which_processes_can_talk(monkeypatch, length):
    with tempfile.TemporaryDirectory(dir="/tmp") as top:
        folder = Path(top, "é" + "t" * (length - len(top) - 3))  # two bytes, after a slash
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", LISTENING],
            env={**os.environ, "TMPDIR": str(folder)},
            capture_output=True,
            text=True,
        )
        assert ("AF_UNIX path too long" in done.stderr) == (length == 76)
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        if length == 75:
            check_temporary_folder("use none")
            return
        with pytest.raises(UserError) as caught:
            check_temporary_folder("use none")
        assert str(caught.value) == (
            f"TMPDIR={folder} has 76 bytes, and the sockets of worker processes allow it 75: set "
            "TMPDIR to a shorter path, or use none"
        )
