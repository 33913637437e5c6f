"""The command line as a user meets it: results, errors of one line, and the first minute."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml

import torch_thor
from command_line import assert_refused, contents, lines
from torch_thor import __version__
from torch_thor.cli import EXTRAS
from torch_thor.training.recipes import load_recipe

QUICK = ["train", "digits", "epochs=1", "optimizer=sgd", "device=cpu"]


def test_help_is_one_screen_and_imports_no_application():
    code = """
import sys
sys.argv[1:] = ["--help"]
from torch_thor.cli import main
try:
    main()
finally:
    slow = {"pydantic", "matplotlib", "torch_thor.training.run"}
    assert not slow & sys.modules.keys()
"""
    words, environment = [sys.executable, "-c", code], {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") <= 25
    for name in ("train", "eval", "prepare", "export", "split-dim", "plan", "keys"):
        assert f"│ {name} " in done.stdout


def test_every_command_has_help(run):
    assert run("--version") == (0, f"torch-thor {__version__}\n", "")
    for word, said in {
        "train": "--resume", "eval": "RUN_OR_CHECKPOINT", "prepare": "--vocab-size",
        "export": "--averaged", "split-dim": "--pixels", "plan": "--devices", "keys": "PART",
    }.items():  # fmt: skip
        code, out, _ = run(word, "--help")
        assert (code, said in out) == (0, True)
    for words in (("train", "--nonsense"), ("trian",)):
        assert run(*words)[0] == 2


def test_recipes_and_keys_are_one_line_each(run):
    code, out, _ = run("train", "--list")
    assert code == 0
    assert out.count("\n") <= 22
    names = [line.split()[0] for line in out.splitlines()]
    assert names == sorted(names)
    assert {"characters", "digits"} <= {*names}
    for part, said in {
        None: "keep_best = true", "training": "ema_decay = null", "data": "max_broken = ",
        "schedule": "horizon_epochs = null", "thor": "trace_thresholds = [0.01, 0.0]",
    }.items():  # fmt: skip
        code, out, _ = run("keys", *([part] if part else []))
        assert code == 0
        assert out.count("\n") <= 40
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
    settings = ", 8 steps with each of thor-muon, adamw, muon, on cpu, processes=1, threads=1"
    assert settings in shown[0]
    assert len([line for line in shown if "│" in line]) == 7
    for name in ("thor-muon", "adamw", "muon"):
        assert any(line.startswith(f"{name} writes: ") for line in shown)
    # it leads
    assert "thor-muon" in next(line for line in out.splitlines() if line[0] == "┃").split("┃")[2]
    assert shown[-2] == "Curves, metrics, recipe and checkpoints are in runs/characters"
    assert shown[-1].startswith("next: optimizer = torch_thor.ThorMuon(model) in your own loop; ")
    # of what fits the run, by a command that works
    assert "your own text: torch-thor prepare FOLDER --out corpus, then " in shown[-1]
    load_recipe("bert-mini", ["data.root=corpus"])
    assert shown[-1].endswith("torch-thor train bert-mini data.root=corpus")
    folder = tmp_path / "runs" / "characters"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    stored = (folder / "recipe.yaml").read_text()
    assert stored.count("\n") <= 25
    assert load_recipe(str(folder / "recipe.yaml")) == load_recipe("characters", words)
    for one in json.loads((folder / "summary.json").read_text()):
        name = one["optimizer"]
        assert [line["step"] for line in lines(folder, name, "step")] == list(range(1, 9))
        assert [line["step"] for line in lines(folder, name, "eval")] == [4, 8]
        assert one["loss"] == lines(folder, name, "eval")[-1]["loss"]
        assert (one["refresh_step_seconds"] is None) == (name != "thor-muon")
        assert any((folder / name / "tensorboard").iterdir())
    refused = run("train", "characters", "steps=2", "optimizer=adamw", "device=cpu")
    assert_refused(refused, "runs/characters contains a run already: continue it with --resume")


def test_a_target_and_averages(run, tmp_path):
    words = "optimizer=thor epochs=3 log_interval=20 eval_interval=30 stop_at=0.2 ema_decay=0.5"
    words = [*words.split(), "device=cpu", "--out", "mine"]
    code, out, err = run("train", "digits", *words)
    assert (code, err) == (0, "")
    said = [line for line in out.splitlines() if line.startswith("thor: step ")]
    assert [line.split()[2] for line in said] == ["20", "30"]
    assert ", averaged weights: " in said[1]
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())[0]
    assert summary["ended_at_target"]
    assert summary["targets"]["0.2"]["steps"] == 30
    code, out, _ = run("eval", "mine", "--json")
    assert code == 0
    plain, averaged = json.loads(out)
    assert [one["averaged"] for one in (plain, averaged)] == [False, True]
    assert plain["images"] == averaged["images"] == 359
    assert (plain["step"], Path(plain["path"]).name) == (30, "step-00000030")
    for name in ("loss", "top1", "top5"):
        assert (plain[name], averaged[name]) == (summary[name], summary[f"averaged_{name}"])
    code, out, _ = run("eval", "mine/thor/checkpoints/best")
    assert code == 0
    assert f"{averaged['top1']:.2%}" in out
    assert "thor, averaged weights" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "digit"], "did you mean digits?"),
        (["train", "epoch=3"], "did you mean epochs?"),
        (["train", "digits", "fashion-mnist"], "more than one recipe"),
        (["train", "optimizer=sdg"], "optimizer[0]=sdg should be"),
        (["train", "digits", "optimizer=thor", "damping=0"], "damping"),
        (["train", "digits", "batch_size=5000"], "batch_size=5000 is larger"),
        (["train", "device=gpu7"], "device=gpu7"),
        (["train", "digits", "--resume"], "no run in runs/digits to resume"),
        (["train", "digits", "--resume", "--overwrite"], "exclude each other"),
        ([*QUICK, "data.root=$NOT_THERE_AT_ALL", "data.name=image-folder"], "NOT_THERE_AT_ALL"),
        ([*QUICK, "--out", "file/run"], "file/run: Not a directory: check the path"),
        (["eval", "nowhere"], "nowhere contains no checkpoint: give a run folder"),
        (["prepare", "python", "--out", "x", "--seq-len", "128;512"], "must be whole numbers"),
        (["plan", "resnet18", "--devices", "8,0"], "--devices 8,0: must be whole numbers of at"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(run, tmp_path, words, said):
    (tmp_path / "file").touch()
    assert_refused(run(*words), said)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_all_faults_of_a_recipe_are_told_at_once(run, tmp_path):
    code, out, err = run("train", "digits", "epochs=-1", "batch_size=two", "lr=0", "modell=x")
    assert (code, out) == (2, "")
    said = err.splitlines()
    assert all(line.startswith("torch-thor: ") for line in said)
    for key in ("epochs=-1", "batch_size=two", "lr=0", "did you mean model?"):
        assert sum(key in line for line in said) >= 1, key
    assert list(tmp_path.iterdir()) == []


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
    metrics.write_bytes(before[:-200])
    assert_refused(run("train", "--resume", "--out", "mine"), "put the whole file back")
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


def test_a_recipe_may_ask_for_the_split_dimension_to_be_measured(run):
    code, out, _ = run("train", "digits", "optimizer=thor", "epochs=1", "split_dim=auto")
    assert code == 0
    assert re.search(r"thor: split_dim=\d+ was measured for this network", " ".join(out.split()))


def test_the_extras_are_those_of_the_project():
    """The modules that the command line knows belong to the requirements of each extra."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    owners = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        names = [re.match(r"[\w-]+", one)[0] for one in project["optional-dependencies"][extra]]
        wanted = sorted(name.lower() for name in names if name != project["name"])
        assert sorted(name.lower() for module in modules for name in owners[module]) == wanted


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [
        (["keys"], "typer", "train"),
        (["prepare", "python", "--out", "out"], "tokenizers", "text"),
        (QUICK, "sklearn.datasets", None),
    ],
)
def test_a_missing_module_is_one_line_if_an_extra_installs_it(
    run, monkeypatch, words, module, extra
):
    """Another one is told as Python tells it."""
    monkeypatch.delitem(sys.modules, "torch_thor.commands", raising=False)
    monkeypatch.delattr(torch_thor, "commands", raising=False)
    # they import what they need as they are imported, which another test may have done
    for loaded in [name for name in sys.modules if name.startswith("torch_thor.training.text.")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    if extra is not None:
        assert_refused(run(*words), f"{module} is missing", f"pip install 'torch-thor[{extra}]'")
    else:
        with pytest.raises(ModuleNotFoundError, match=module):
            run(*words)
