"""What comes from outside: text that does nothing on a terminal, files that are no recipes,
read-only disks, Ctrl-C.
"""

import errno
import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from command_line import assert_refused, finish, start
from torch_thor import printing

QUICK = [
    "train",
    "digits",
    "epochs=1",
    "optimizer=sgd",
    "batch_size=479",
    "device=cpu",
    "keep_best=false",
]
SECRET = "hunter2-of-the-environment"


def test_what_the_environment_says_is_not_stored(run, tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", SECRET)
    assert run(*QUICK, "data.root=$A_SECRET/data", "--out", "run")[0] == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    stored = [path for path in files if path.name == "recipe.yaml"]
    assert len(stored) >= 2  # the run's and the checkpoints'
    # the place is absolute, so that the run finds its data from any folder
    place = f"root: {tmp_path}/$A_SECRET/data"
    assert all(place in path.read_text() for path in stored), stored[0].read_text()


NASTY = "runs[/bold][red]\x1b]0;title\x07\x1b[31m:smile:\u202egnp"


@pytest.mark.parametrize(
    "text", ["a\nb", "\x1b[2J", "\x9b2J", "\udc80", "\u202e", "\x7f", "\u2028"]
)
def test_what_is_no_print_is_shown_as_an_escape(text):
    shown = printing.visible(f"before {text} after é λ 漢")
    assert shown.isprintable()
    assert shown.startswith("before ")
    assert shown.endswith(" after é λ 漢")
    assert "\\" in shown


def test_names_of_files_do_nothing_on_the_terminal(run, tmp_path):
    shown = printing.visible(NASTY)
    code, out, err = run(*QUICK, "--out", NASTY)
    assert (code, err) == (0, "")
    assert f"checkpoints are in {shown}" in out
    weights = next((tmp_path / NASTY).glob("sgd/checkpoints/*/model.safetensors"))
    weights.write_bytes(b"")
    _, _, err = run("eval", NASTY)
    assert f"checkpoint {shown}/sgd" in err
    for words in (
        QUICK,
        ["eval", NASTY],
        ["train", f"{NASTY}.yaml"],
        ["split-dim", f"{NASTY}.py:net"],
    ):
        _, out, err = run(*words, *(["--out", NASTY] if words is QUICK else []))
        assert shown in err
        assert "\x1b" not in out + err


def test_a_fault_with_several_lines_is_a_line_each(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    printing.print_message("epochs=0: must be 1 or more\nlr=\x1b[31m: is no number")
    assert capsys.readouterr().err == (
        "torch-thor, rank 3: epochs=0: must be 1 or more\ntorch-thor, rank 3: lr=\\x1b[31m: is no "
        "number\n"
    )


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{below}'] * 10)}]\n"
    for below, name in zip("abcdefghi", "bcdefghij", strict=True)
)
FILES = {
    "bomb.yaml": (BOMB.encode(), "an alias, *a"),
    "deep.yaml": (b"[" * 50_000, "nested in more than 20 levels"),
    "latin.yaml": ("about: é".encode("latin-1"), "latin.yaml is not UTF-8 (line 1, byte 7)"),
    "large.yaml": (b"about: " + b"x" * 2_000_000, "has more than 1000000 characters"),
    "open.yaml": (b"about: [a", "is not YAML"),
    "keys.yaml": (b"optimizers: {3: {lr: 1}}", "optimizers"),
    "empty.yaml": (b"", "has no keys"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_file_that_cannot_be_used_is_one_line(run, tmp_path, name):
    content, said = FILES[name]
    (tmp_path / name).write_bytes(content)
    assert_refused(run("train", name), said)
    assert [path.name for path in tmp_path.iterdir()] == [name]


MINE = (
    "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5))\n"
)


@pytest.mark.parametrize("words", [QUICK, ["split-dim", "mine.py:net", "--pixels", "4"]])
@pytest.mark.parametrize("told", ["before", "when it writes"])
def test_a_disk_that_is_read_only_is_one_line(run, tmp_path, monkeypatch, words, told):
    (tmp_path / "mine.py").write_text(MINE)

    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "runs")

    how = ("access", lambda path, mode: False) if told == "before" else ("mkdir", refuse)
    monkeypatch.setattr(os, *how)
    assert_refused(run(*words), "choose another folder with --out")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["train", "--resume", "--out", "run"], ["eval", "run"]])
def test_a_folder_that_cannot_be_listed_is_one_line(run, tmp_path, monkeypatch, words):
    (tmp_path / "run" / "recipe.yaml").mkdir(parents=True)

    def refuse(path, *args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for name in ("listdir", "scandir"):
        monkeypatch.setattr(os, name, refuse)
    assert_refused(run(*words), "run")


INTERRUPTED = """
import os, signal, sys
from importlib.abc import MetaPathFinder

awaited = sys.argv.pop(1)

class CtrlC(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == awaited:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from torch_thor.cli import main
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs signals")
@pytest.mark.parametrize("importing", ["typer", "torch", "sklearn.datasets"])
def test_ctrl_c_in_the_first_seconds_is_one_line(tmp_path, importing):
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    process = start(tmp_path, importing, *QUICK, script=tmp_path / "interrupted.py", cold=True)
    code, out, err = finish(process)
    assert (code, out) == (130, "")
    remedy = "a run that has a checkpoint can be continued with --resume"
    assert err == f"torch-thor: stopped by Ctrl-C; {remedy}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["interrupted.py"]


# ---- output that ends ----------------------------------------------------------------------------


class Broken(io.StringIO):
    """A stream that takes so many texts, and then fails as the system says."""

    def __init__(self, takes, number):
        super().__init__()
        self.takes, self.number = takes, number

    def write(self, text):
        if self.takes == 0:
            raise OSError(self.number, os.strerror(self.number))
        self.takes -= 1
        return super().write(text)


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
def test_output_that_fails_ends_nothing_and_is_told_once(monkeypatch, number):
    out, err = Broken(2, number), io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    with printing.lasting_output():
        say = printing.printer(Console())
        for i in range(9):
            say(f"line {i}")
            print(f"print {i}", flush=True)
    assert out.getvalue().startswith("line 0")
    assert "line 8" not in out.getvalue()
    reason = os.strerror(number)
    assert err.getvalue() == (
        f"torch-thor: nothing more can be printed ({reason}): the run goes on without it\n"
    )
    assert sys.stdout is out


def test_a_text_that_cannot_be_encoded_is_no_end_of_the_output(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    with printing.lasting_output():
        with pytest.raises(UnicodeEncodeError):
            print("λ", flush=True)
        print("more", flush=True)
    assert out.buffer.getvalue() == b"more\n"


def test_nothing_is_told_where_stderr_fails_too(monkeypatch):
    monkeypatch.setattr("sys.stdout", Broken(0, errno.EIO))
    monkeypatch.setattr("sys.stderr", Broken(0, errno.EIO))
    with printing.lasting_output():
        print("a closed terminal", flush=True)
        print("a closed terminal", file=sys.stderr, flush=True)


@pytest.mark.slow
def test_a_reader_that_leaves_ends_no_training(tmp_path):
    words = [word for word in QUICK if word != "epochs=1"]
    run = start(tmp_path, *words, "epochs=30", "log_interval=1", "--out", "run", cold=True)
    run.stdout.readline()
    run.stdout.close()
    err = run.stderr.read()
    assert run.wait() == 0, err
    assert "nothing more can be printed (Broken pipe)" in err
    assert (tmp_path / "run/summary.json").exists()


@pytest.mark.slow
def test_closed_standard_streams_end_no_training(tmp_path):
    words = [sys.executable, "-m", "torch_thor", *QUICK, "--out", "run"]
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *words]
    assert subprocess.run(closed, cwd=tmp_path, check=False).returncode == 0
    assert (tmp_path / "run/summary.json").exists()


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
