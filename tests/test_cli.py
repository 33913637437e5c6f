"""The command line as a user meets it: results, errors of one line, and the first minute."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

import torch_thor
from command_line import assert_refused, contents, lines
from torch_thor import printing
from torch_thor.errors import print_message
from torch_thor.training.recipes import load_recipe

QUICK = ["train", "digits", "epochs=1", "optimizer=sgd", "device=cpu"]


def test_help_is_one_screen_and_imports_no_application():
    code = """
import sys
from torch_thor import *
extras = {"torchvision", "sklearn", "pydantic", "typer", "rich", "matplotlib", "safetensors"}
assert not extras & sys.modules.keys()
sys.argv[1:] = ["--help"]
from torch_thor.cli import main
try:
    main()
finally:
    assert not {"pydantic", "matplotlib", "torch_thor.training.run"} & sys.modules.keys()
"""
    words, environment = [sys.executable, "-c", code], {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") <= 25


@pytest.mark.parametrize(
    "command", ["train", "eval", "prepare", "export", "split-dim", "plan", "keys"]
)
def test_every_command_has_help(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"torch-thor {command} " in out
    assert run(command, "--nonsense")[0] == 2


def test_the_version_and_lists_of_recipes_and_keys(run):
    assert run("--version") == (0, f"torch-thor {torch_thor.__version__}\n", "")
    code, out, _ = run("train", "--list")
    assert code == 0
    assert "characters" in {line.split()[0] for line in out.splitlines()}
    for part, said in {
        None: "keep_best = true", "training": "ema_decay = null", "data": "max_broken = ",
        "schedule": "horizon_epochs = null", "thor": "trace_thresholds = [0.01, 0.0]",
    }.items():  # fmt: skip
        code, out, _ = run("keys", *([part] if part else []))
        assert code == 0
        assert said in out
    assert_refused(run("keys", "sceduhle"), "there is no part sceduhle (did you mean schedule?)")


@pytest.mark.pictures
def test_the_first_minute(run, tmp_path, monkeypatch):
    """What a person sees, and what is in the folder; a second run has its own."""
    words = ["steps=8", "eval_interval=4", "checkpoint_interval=4", "device=cpu"]
    code, out, err = run("train", *words)
    assert (code, err) == (0, "")
    shown = [line for line in out.splitlines() if line[0] not in "┏┃┡└"]
    assert shown[0].startswith("characters: char-transformer (")
    assert ", 8 steps with each of thor-muon, adamw, muon, on cpu, processes=1" in shown[0]
    # ThorMuon leads the table
    assert "thor-muon" in next(line for line in out.splitlines() if line[0] == "┃").split("┃")[2]
    assert shown[-2] == "Curves, metrics, recipe and checkpoints are in runs/characters"
    assert "next: optimizer = torch_thor.ThorMuon(model) in your own loop; " in shown[-1]
    folder = tmp_path / "runs" / "characters"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert load_recipe(str(folder / "recipe.yaml")) == load_recipe("characters", words)
    for result in json.loads((folder / "summary.json").read_text()):
        name = result["optimizer"]
        assert [line["step"] for line in lines(folder, name, "step")] == list(range(1, 9))
        assert [line["step"] for line in lines(folder, name, "eval")] == [4, 8]
        assert result["loss"] == lines(folder, name, "eval")[-1]["loss"]
        assert any((folder / name / "tensorboard").iterdir())
    refused = run("train", "characters", "steps=2", "optimizer=adamw", "device=cpu")
    assert_refused(refused, "runs/characters contains a run already: continue it with --resume")


def test_a_target_and_averages(run, tmp_path):
    words = "optimizer=thor epochs=3 log_interval=20 eval_interval=30 stop_at=0.2 ema_decay=0.5"
    words = [*words.split(), "device=cpu", "--out", "mine"]
    assert run("train", "digits", *words)[::2] == (0, "")
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())[0]
    assert summary["ended_at_target"]
    assert summary["targets"]["0.2"]["steps"] == 30
    code, out, _ = run("eval", "mine", "--json")
    assert code == 0
    plain, averaged = json.loads(out)
    assert [score["averaged"] for score in (plain, averaged)] == [False, True]
    assert plain["images"] == averaged["images"] == 359
    assert (plain["step"], Path(plain["path"]).name) == (30, "step-00000030")
    for name in ("loss", "top1", "top5"):
        assert (plain[name], averaged[name]) == (summary[name], summary[f"averaged_{name}"])
    code, out, _ = run("eval", "mine/thor/checkpoints/best")
    assert (code, f"{averaged['top1']:.2%}" in out) == (0, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "digit"], "did you mean digits?"),
        (["train", "epoch=3"], "did you mean epochs?"),
        (["train", "optimizer=sdg"], "optimizer[0]=sdg should be"),
        (["train", "digits", "batch_size=5000"], "batch_size=5000 is larger"),
        (["train", "device=gpu7"], "device=gpu7"),
        (["train", "digits", "--resume"], "no run in runs/digits to resume"),
        ([*QUICK, "data.root=$NOT_THERE_AT_ALL", "data.name=image-folder"], "NOT_THERE_AT_ALL"),
        ([*QUICK, "--out", "file/run"], "file/run: Not a directory: check the path"),
        (["eval", "nowhere"], "nowhere contains no checkpoint: give a run folder"),
        (["plan", "resnet18", "--devices", "8,0"], "--devices 8,0: must be whole numbers of at"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(run, tmp_path, words, said):
    (tmp_path / "file").touch()
    assert_refused(run(*words), said)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_run_in_a_folder_continues_with_its_settings(run, tmp_path):
    run(*QUICK, "checkpoint_interval=8", "lr=0.03", "--out", "mine")
    metrics = tmp_path / "mine" / "sgd" / "metrics.jsonl"
    before, told = metrics.read_bytes(), lines(tmp_path / "mine", "sgd")
    code, out, _ = run("train", "--resume", "--out", "mine")  # finished: it is reported again
    assert code == 0
    assert "final accuracy" in out
    assert metrics.read_bytes() == before
    files = contents(tmp_path / "mine")
    for words, said in {
        (): "contains a run already",
        ("--resume", "lr=0.5"): "optimizers.sgd.lr: 0.03 -> 0.5",
        ("--overwrite", "batch_size=5000"): "batch_size=5000",
    }.items():
        assert_refused(run("train", "digits", "optimizer=sgd", *words, "--out", "mine"), said)
    assert contents(tmp_path / "mine") == files
    weights = sorted((tmp_path / "mine/sgd/checkpoints").glob("step-*"))[-1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert_refused(run("eval", weights.parent), "model.safetensors does not match its checksum")
    code, out, err = run("eval", "mine")  # the run as a whole falls back, and says so
    assert (code, "an older checkpoint is used" in err) == (0, True)
    code, out, _ = run("train", "--resume", "--out", "mine")
    assert (code, "continues from step 16 of 22" in out) == (0, True)
    assert lines(tmp_path / "mine", "sgd") == told
    code, _, _ = run(*QUICK, "seed=5", "--out", "mine", "--overwrite")
    assert code == 0
    assert yaml.safe_load((tmp_path / "mine/recipe.yaml").read_text())["seed"] == 5


def test_a_stopped_run_continues(run, monkeypatch):
    take = torch.optim.SGD.step
    monkeypatch.setattr(
        torch.optim.SGD, "step", lambda me: os.kill(os.getpid(), signal.SIGINT) or take(me)
    )
    code, _, err = run(*QUICK)
    assert code == 130
    assert re.fullmatch(r"torch-thor: stopped at step \d, checkpoint written; .* --resume\s", err)
    monkeypatch.setattr(torch.optim.SGD, "step", take)
    code, out, _ = run(*QUICK, "--resume")
    assert (code, "continues from step" in out) == (0, True)


def test_a_missing_extra_is_one_line_with_its_command(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch_thor.commands", raising=False)
    monkeypatch.delattr(torch_thor, "commands", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert_refused(run("keys"), "typer is missing", "pip install 'torch-thor[train]'")


def test_names_in_messages_and_tables_are_plain_text(capsys):
    print_message("epochs=0: must be 1 or more\nlr=\x1b[31m: is no number")
    assert capsys.readouterr().err.splitlines() == [
        "torch-thor: epochs=0: must be 1 or more",
        "torch-thor: lr=\\x1b[31m: is no number",
    ]
    console = Console(width=60, record=True, force_terminal=True)
    rows = [["sgd", "1.5"], ["[red]thor\x1b[0m", "22.25"]]
    console.print(printing.columns("Title", ["name", "number"], rows, left=1))
    text = console.export_text()
    assert "│ [red]thor\\x1b[0m │  22.25 │" in text
    assert f"│ {'sgd'.ljust(16)} │    1.5 │" in text
