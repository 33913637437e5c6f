"""What comes from outside: secrets, text that does nothing on a terminal, YAML without end, full disks, Ctrl-C."""

import errno
import json
import os

import pytest
import yaml

from command_line import assert_refused, finish, start
from torch_thor.training import parse_recipe, printing, recipe_yaml

QUICK = ["train", "digits", "epochs=1", "optimizer=sgd", "batch_size=479", "device=cpu", "keep_best=false"]
SECRET = "hunter2-of-the-environment"


def test_what_the_environment_says_is_not_stored(run, tmp_path, monkeypatch):
    monkeypatch.setenv("A_SECRET", SECRET)
    monkeypatch.setenv("A_RATE", "0.0625")
    words = ["data.root=${oc.env:A_SECRET}/data", "lr=${oc.env:A_RATE}", "log_interval=${oc.decode:'7'}"]
    assert run(*QUICK, *words, "--out", "run")[0] == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []
    stored = [path for path in files if path.name == "recipe.yaml"]
    assert len(stored) >= 2  # the run's and the checkpoints'
    for path in stored:
        recipe = yaml.safe_load(path.read_text())
        assert recipe["data"]["root"] == "${oc.env:A_SECRET}/data"
        assert recipe["optimizers"]["sgd"]["lr"] == "${oc.env:A_RATE}"
        assert recipe["log_interval"] == "${oc.decode:'7'}"
    monkeypatch.setenv("A_SECRET", "elsewhere")  # changes no step
    assert run("train", "--resume", "--out", "run")[0] == 0
    assert run("eval", "run")[0] == 0
    metrics = (tmp_path / "run/sgd/metrics.jsonl").read_text().splitlines()
    assert json.loads(metrics[0])["lr"] == 0.0625

    monkeypatch.setenv("A_RATE", "0.5")
    for command in (["train", "--resume", "--out", "run"], ["eval", "run"]):
        assert_refused(run(*command), "began with another value of optimizers.sgd.lr=${oc.env:A_RATE}")
    # the value itself may be given, too
    assert run("train", "--resume", "--out", "run", "lr=0.0625")[0] == 0
    assert yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["optimizers"]["sgd"]["lr"] == 0.0625
    assert_refused(run("train", "--resume", "--out", "run", "lr=0.5"), "optimizers.sgd.lr: 0.0625 -> 0.5")


def test_a_variable_that_is_gone_is_one_line(run, monkeypatch):
    monkeypatch.setenv("A_SECRET", SECRET)
    assert run(*QUICK, "data.root=${oc.env:A_SECRET}", "--out", "run")[0] == 0
    monkeypatch.delenv("A_SECRET")
    assert_refused(run("train", "--resume", "--out", "run"), "data.root", "A_SECRET")


def test_a_difference_names_the_variable_and_not_its_value(run, monkeypatch):
    monkeypatch.setenv("A_SECRET", SECRET)
    assert run(*QUICK, "name=${oc.env:A_SECRET}", "--out", "run")[0] == 0
    assert run(*QUICK, "name=${oc.env:A_SECRET}", "seed=3", "--resume", "--out", "run")[2].count(SECRET) == 0


def test_texts_come_back_as_they_were_written(monkeypatch):
    monkeypatch.setenv("EPOCHS", "7")
    text = "epochs: ${oc.decode:${oc.env:EPOCHS}}\nabout: \\${none}\ntargets: [0.5, '${.0}']\nseed: ${epochs}\n"
    recipe = parse_recipe(text, "mine", [])
    assert (recipe.epochs, recipe.about, recipe.targets, recipe.seed) == (7, "${none}", (0.5, 0.5), 7)
    again = parse_recipe(recipe_yaml(recipe), "mine", [])
    assert again == recipe
    assert again.written == recipe.written
    changed = parse_recipe(recipe_yaml(recipe), "mine", ["epochs=9"])
    assert changed.seed == 9
    assert set(changed.written) == {"about", "targets", "seed"}


NASTY = "runs[/bold][red]\x1b]0;title\x07\x1b[31m:smile:\u202egnp"


@pytest.mark.parametrize("text", ["a\nb", "\x1b[2J", "\x9b2J", "\udc80", "\u202e", "\x7f", "\u2028"])
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
    metrics = tmp_path / NASTY / "sgd" / "metrics.jsonl"
    metrics.write_text("")
    code, out, err = run("train", "--resume", "--out", NASTY)
    assert code == 0
    assert f"{shown}/sgd/metrics.jsonl is truncated" in out
    weights = next((tmp_path / NASTY).glob("sgd/checkpoints/*/model.safetensors"))
    weights.write_bytes(b"")
    _, _, err = run("eval", NASTY)
    assert f"checkpoint {shown}/sgd" in err
    for words in (QUICK, ["eval"], ["train", f"{NASTY}.yaml"], ["split-dim", f"{NASTY}.py:net"], ["figures", NASTY]):
        more = ["--out", NASTY] if words is QUICK else [NASTY] if words == ["eval"] else []
        _, out, err = run(*words, *more)
        assert shown in err
        assert "\x1b" not in out + err


MINE = "from torch import nn\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(48, 5))\n"


def test_split_dim_takes_a_file_of_any_name(run, tmp_path):
    name = "$x_[red]"  # neither markup nor a formula
    (tmp_path / f"{name}.py").write_text(MINE)
    code, out, err = run("split-dim", f"{name}.py:net", "--pixels", "4", "--batch", "2", "--device", "cpu")
    assert (code, err) == (0, "")
    assert f"{name}.py:net on cpu" in out
    assert f"Figure and numbers are in runs/split-dim-{name}.py-net" in out


BOMB = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{below}'] * 10)}]\n" for below, name in zip("abcdefghi", "bcdefghij", strict=True)
)
FILES = {
    "bomb.yaml": (BOMB.encode(), "more than 100000 values when its aliases are expanded"),
    "endless.yaml": (b"targets: &a [*a]", "nested too deeply"),
    "deep.yaml": (b"[" * 50_000, "nested too deeply"),
    "latin.yaml": ("about: é".encode("latin-1"), "latin.yaml is not UTF-8 (byte 7)"),
    "large.yaml": (b"about: " + b"x" * 2_000_000, "has more than 1000000 bytes"),
    "date.yaml": (b"about: 2020-13-45", "is not YAML"),
    "keys.yaml": (b"optimizers: {3: {lr: 1}}", "optimizers.3: no such optimizer"),
    "empty.yaml": (b"", "has no keys"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_recipe_file_that_cannot_be_used_is_one_line(run, tmp_path, name):
    content, said = FILES[name]
    (tmp_path / name).write_bytes(content)
    for words in (["train", name], ["figures", "curves", "--data", name]):
        assert_refused(run(*words), said)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"seed={2**70}"], f"seed={2**70} must lie in [0, {2**63 - 1}]"),
        ([f"threads={2**70}"], "threads="),
        ([f"classes={2**70}"], "classes="),
        (["seed=&a [*a]"], "nested too deeply"),
        (["seed=${oc.env:NOT_THERE_AT_ALL}"], "NOT_THERE_AT_ALL"),
        (["seed=${"], "seed=${"),
        (["--out", "file/run"], "file is a file"),
        (["--out", "file"], "not a run folder"),
    ],
)
def test_words_that_cannot_be_used_are_one_line(run, tmp_path, words, said):
    (tmp_path / "file").write_text("")
    assert_refused(run(*QUICK, *words), said)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "words", [QUICK, ["figures", "curves", "--data", "digits"], ["split-dim", "mine.py:net", "--pixels", "4"]]
)
@pytest.mark.parametrize("told", ["before", "when it writes"])
def test_a_disk_that_is_read_only_is_one_line(run, tmp_path, monkeypatch, words, told):
    (tmp_path / "mine.py").write_text(MINE)

    def refuse(*args, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "runs")

    if told == "before":
        monkeypatch.setattr(os, "access", lambda path, mode: False)
    else:
        monkeypatch.setattr(os, "mkdir", refuse)
    assert_refused(run(*words), "choose another folder with --out")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("words", [["train", "--resume", "--out", "run"], ["eval", "run"]])
def test_a_folder_that_cannot_be_listed_is_one_line(run, tmp_path, monkeypatch, words):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").mkdir()

    def refuse(path, *args):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
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
    assert err == "torch-thor: stopped by Ctrl-C; a run that has a checkpoint can be continued with --resume\n"
    assert [path.name for path in tmp_path.iterdir()] == ["interrupted.py"]
