"""Forked processes of the tests behave as fresh ones do."""

import signal

import pytest

import warm
from command_line import command, finish, start, wait_for

pytestmark = pytest.mark.skipif(not warm.AVAILABLE, reason="processes are fresh here anyway")

TELLING = """
import atexit, multiprocessing, os, signal, sys
atexit.register(print, "at exit")
print(__name__, sys.argv[1:], os.getcwd(), os.environ["A_WORD"], os.environ.get("RANK"))
daemon = multiprocessing.current_process().daemon
print(multiprocessing.get_start_method(), daemon, os.getpid() == os.getpgrp())
default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
print(default, signal.getsignal(signal.SIGTERM), sys.path[0])
print("no letters for \\udc80", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_forked_process_is_like_a_fresh_one(tmp_path, monkeypatch, code):
    monkeypatch.setenv("A_WORD", "of the environment")
    (tmp_path / "telling.py").write_text(TELLING)
    forked, fresh = (
        command(tmp_path, code, "two", script=tmp_path / "telling.py", cold=cold) for cold in (0, 1)
    )
    assert forked == fresh
    assert forked[0] == code
    assert "at exit" in forked[1]


def test_a_signal_ends_it_and_one_that_hangs_is_killed_and_reported(tmp_path):
    waits = "import pathlib, time\npathlib.Path('here').touch()\ntime.sleep(3600)"
    (tmp_path / "waits.py").write_text(waits)
    process = start(tmp_path, script=tmp_path / "waits.py")
    wait_for(process, (tmp_path / "here").exists, "file")
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert finish(process) == (-signal.SIGKILL, "", "")
    process = start(tmp_path, script=tmp_path / "waits.py")
    with pytest.raises(AssertionError, match="hung for 1 s and was killed"):
        finish(process, timeout=1)
    assert process.returncode == -signal.SIGKILL


def test_ranks_have_torchruns_environment_and_one_that_fails_is_the_result(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    text = f"import os, sys\nprint(*(os.environ[name] for name in {names}))\n"
    text += "sys.exit(os.environ['RANK'] == '1')"
    (tmp_path / "rank.py").write_text(text)
    code, out, _ = command(tmp_path, script=tmp_path / "rank.py", ranks=2)
    assert (code, sorted(out.splitlines())) == (1, ["0 0 2 2 127.0.0.1", "1 1 2 2 127.0.0.1"])
