"""The command line as a user meets it: results, one-line errors with exit code 2, and Ctrl-C."""

import gzip
import importlib.metadata
import importlib.util
import json
import re
import struct
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import signalled_script
from command_line import assert_refused, checkpoints, command, contents
from fake_times import fake_times
from torch_thor import __version__, cli
from torch_thor.cli import EXTRAS

QUICK = ["train", "digits", "epochs=1", "optimizer=sgd", "device=cpu"]


def test_version(run):
    assert run("--version") == (0, f"torch-thor {__version__}\n", "")


def test_list_names_the_recipes(run):
    code, out, _ = run("train", "--list")
    assert code == 0
    assert "digits" in out
    assert "fashion-mnist" in out
    # and the keys, as the documentation and the messages about unknown ones say
    for key in ("ema_decay", "max_broken", "horizon_epochs", "clip_factor", "trace_thresholds"):
        assert f"│ {key} " in out


@pytest.mark.parametrize(("words", "said"), [(["train"], "--resume"), (["eval"], "RUN_OR_CHECKPOINT"), ([], "train")])
def test_help(run, words, said):
    code, out, _ = run(*words, "--help")
    assert code == 0
    assert said in out


@pytest.mark.pictures
def test_train_compares_and_writes_everything(run, tmp_path):
    code, out, err = run("train", "epochs=2", "targets=[0.3,1.0]")
    assert (code, err) == (0, "")
    for said in (
        "thor",
        "sgd",
        "30.0%",
        "not reached",
        "final accuracy, top-1",
        "median refresh step",
        "What thor refreshed",
        "runs/digits",
    ):
        assert said in out
    folder = tmp_path / "runs" / "digits"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["epochs"] == 2
    summary = json.loads((folder / "summary.json").read_text())
    assert [one["optimizer"] for one in summary] == ["thor", "sgd"]
    for one in summary:
        lines = [json.loads(line) for line in (folder / one["optimizer"] / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, 45))
        assert [line["step"] for line in lines if line["kind"] == "eval"] == [22, 44]
        assert any((folder / one["optimizer"] / "tensorboard").iterdir())
        assert len(list((folder / one["optimizer"] / "checkpoints").glob("step-*"))) == 2
    thor = (folder / "thor" / "metrics.jsonl").read_text().splitlines()
    refreshes = [line["step"] for line in map(json.loads, thor) if line.get("refresh")]
    assert refreshes[0] == 1
    assert summary[0]["refreshed"]
    assert summary[0]["refresh_step_seconds"] > 0
    assert summary[1]["refresh_step_seconds"] is None


def test_what_is_said_and_kept_while_it_runs(run, tmp_path):
    words = ["optimizer=thor", "epochs=3", "log_interval=20", "eval_interval=30", "stop_at=0.3", "ema_decay=0.5"]
    code, out, err = run("train", *words, "--profile", "--out", "mine")
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if line.startswith("thor: step ")]
    assert [line.split()[2] for line in lines] == ["20", "30"]
    assert ", of the averaged weights " in lines[1]
    for said in ("epoch 0.9091, loss ", " images/s, step ", "ms, refresh step ", "refreshes 1, stopped layers 0 of 4"):
        assert said in lines[0]
    assert "1 of 6 with a refresh" in out  # step 21
    assert "ended at 30.0%" in out
    folder = tmp_path / "mine" / "thor"
    assert [path.name for path in (folder / "profile").iterdir()] == ["steps-00000021-00000026.json"]
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
        "best",
        "step-00000022",
        "step-00000030",
    ]
    summary = json.loads((tmp_path / "mine" / "summary.json").read_text())[0]
    assert summary["ended_at_target"]
    assert summary["best"]["top1"] >= 0.3
    assert summary["targets"]["0.3"]["steps"] == 30
    for path in ("best", "best/step-00000030", "."):
        code, out, _ = run("eval", folder / "checkpoints" / path)
        assert code == 0
        assert f"{summary['best']['top1']:.2%}" in out


def test_threads_are_the_recipes_while_it_trains(run, monkeypatch):
    seen = []
    really = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda me: seen.append(torch.get_num_threads()) or really(me))
    before = torch.get_num_threads()
    assert run(*QUICK, "threads=2")[0] == 0
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


def test_eval_prints_what_training_measured(run, tmp_path):
    run(*QUICK)
    final = json.loads((tmp_path / "runs/digits/summary.json").read_text())[0]
    for path in ("runs/digits", "runs/digits/sgd/checkpoints/step-00000022"):
        code, out, err = run("eval", path)
        assert (code, err) == (0, "")
        assert f"{final['top1']:.2%}" in out
        assert f"{final['top5']:.2%}" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "digit"], "did you mean digits?"),
        (["train", "epoch=3"], "did you mean epochs?"),
        (["train", "digits", "fashion-mnist"], "more than one recipe"),
        (["train", "optimizer=sdg"], "optimizer=sdg is not an optimizer"),
        (["train", "optimizer=thor", "damping=0"], "damping"),
        (["train", "fashion-mnist", "data.root=nowhere", "data.download=false"], "Fashion-MNIST is not in nowhere"),
        (["train", "batch_size=5000"], "batch_size=5000 is larger"),
        (["train", "device=gpu7"], "device=gpu7"),
        (["train", "--resume"], "no run in runs/digits to resume"),
        (["eval", "nowhere"], "nowhere does not exist"),
        (["eval", "."], "holds no"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing_behind(run, tmp_path, words, said):
    assert_refused(run(*words), said if said != "holds no" else "neither a run folder nor a checkpoint")
    assert list(tmp_path.iterdir()) == []


def test_usage_errors_exit_with_two_as_well(run):
    assert run("train", "--nonsense")[0] == 2
    assert run("trian")[0] == 2


@pytest.fixture
def finished(run, tmp_path):
    run(*QUICK, "checkpoint_interval=8", "--out", "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (QUICK, "contains a run already"),
        (["train", "fashion-mnist", "data.download=false"], "belongs to recipe digits, not fashion-mnist"),
        (["train", "fashion-mnist", "--resume"], "belongs to recipe digits"),
        (["train", "fashion-mnist", "--overwrite"], "belongs to recipe digits"),
        (["train", "digits", "--resume", "lr=0.5"], "optimizers.sgd.lr: "),
        (["train", "--resume", "seed=1"], "seed: 0 -> 1"),
        (["train", "--resume", "--overwrite"], "exclude each other"),
        ([*QUICK, "--overwrite", "batch_size=5000"], "batch_size=5000"),
        ([*QUICK, "--overwrite", "device=gpu7"], "device=gpu7"),
    ],
)
def test_a_run_that_is_there_is_not_touched(run, finished, words, said):
    before = contents(finished)
    assert_refused(run(*words, "--out", "mine"), said)
    assert contents(finished) == before


def test_a_folder_that_is_no_run_is_not_touched(run, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("precious")
    for extra in ([], ["--resume"], ["--overwrite"]):
        assert_refused(run(*QUICK, "--out", "thesis", *extra), "not a run folder")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]


def test_overwrite_starts_again_and_leaves_other_files_alone(run, finished):
    (finished / "notes.txt").write_text("mine")
    code, _, _ = run(*QUICK, "seed=5", "--out", "mine", "--overwrite")
    assert code == 0
    assert (finished / "notes.txt").read_text() == "mine"
    assert yaml.safe_load((finished / "recipe.yaml").read_text())["seed"] == 5
    assert [path.name for path in (finished / "sgd" / "checkpoints").glob("step-*")] == ["step-00000022"]


def test_resuming_a_finished_run_reports_it_again(run, finished):
    before = (finished / "sgd" / "metrics.jsonl").read_bytes()
    code, out, _ = run("train", "--resume", "--out", "mine")
    assert code == 0
    assert "final accuracy" in out
    assert (finished / "sgd" / "metrics.jsonl").read_bytes() == before


def test_a_truncated_checkpoint(run, finished):
    newest = sorted((finished / "sgd" / "checkpoints").glob("step-*"))[-1]
    weights = newest / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    before = contents(finished)
    assert_refused(run("eval", newest), "is damaged: model.safetensors")
    assert contents(finished) == before
    code, out, err = run("eval", "mine")  # the run as a whole falls back, and says so
    assert code == 0
    assert "16" in out
    assert "falling back" in err
    code, out, _ = run("train", "--resume", "--out", "mine")
    assert code == 0
    assert "falling back" in out
    assert "continues from step 16 of 22" in out
    assert run("eval", newest)[0] == 0


@pytest.mark.slow
def test_stopped_by_signals_then_resumed_equals_never_stopped(run, tmp_path):
    words = ["train", "digits", "optimizer=thor", "batch_size=32", "epochs=1", "checkpoint_interval=20", "lr=1e-4"]
    for name, step, more in (("SIGINT", 7, []), ("SIGTERM", 24, ["--resume"])):
        given = (name, step, "0", *words, *more, "--out", "stopped")
        code, _, err = command(tmp_path, *given, script=signalled_script.__file__)
        assert code == 130
        assert "continue with: torch-thor train digits --resume --out stopped" in err
        assert "Traceback" not in err
        assert checkpoints(tmp_path / "stopped", "thor")[-1] == step
    assert run("train", "digits", "--resume", "--out", "stopped")[0] == 0
    assert run(*words, "--out", "whole")[0] == 0
    name = "thor/checkpoints/step-00000044"
    resumed, whole = (load_file(tmp_path / folder / name / "model.safetensors") for folder in ("stopped", "whole"))
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def test_fashion_mnist_trains_from_a_folder_of_its_files(run, tmp_path):
    (tmp_path / "raw").mkdir()
    for part, count in (("train", 40), ("t10k", 10)):
        labels = bytes(index % 10 for index in range(count))
        images = b"".join(bytes([20 * label]) * 784 for label in labels)
        for kind, head, body in (
            ("images-idx3", struct.pack(">HBB3I", 0, 8, 3, count, 28, 28), images),
            ("labels-idx1", struct.pack(">HBBI", 0, 8, 1, count), labels),
        ):
            (tmp_path / "raw" / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + body))
    code, out, err = run("train", "fashion-mnist", "data.root=raw", "batch_size=20", "epochs=2", "optimizer=muon")
    assert (code, err) == (0, "")
    assert "muon: step 4 of 4" in out
    assert run("eval", "runs/fashion-mnist")[0] == 0


def test_a_recipe_may_ask_for_the_split_dimension_to_be_measured(run):
    words = ["train", "digits", "optimizer=thor", "epochs=1", "split_dim=auto"]
    code, out, _ = run(*words)
    assert code == 0
    assert re.search(r"thor: split_dim=\d+ was measured for this network and device", " ".join(out.split()))
    code, _, err = run(*words[:-1], "split_dim=automatic", "--out", "other")
    assert (code, err.count("\n")) == (2, 1)
    assert "split_dim" in err


MINE = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))

def with_batch():
    return nn.Linear(20, 2), (torch.randn(9, 20), torch.zeros(9, dtype=torch.long))

def with_loss():
    return nn.Linear(20, 2), torch.randn(9, 20), lambda output: output.square().sum()

def words():
    return "a model"

def broken():
    raise KeyError("weights")
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


@pytest.mark.pictures
def test_split_dim_prints_tables_and_writes_figure_and_numbers(run, mine):
    code, out, err = run("split-dim", "mine.py:net", "--batch", 4, "--pixels", 24, "--device", "cpu", "--out", "mine")
    assert (code, err) == (0, "")
    numbers = json.loads((mine / "mine" / "split_dim.json").read_text())
    assert numbers["candidates"] == [1, 16, 32]
    assert numbers["split_dim"] in numbers["candidates"]
    assert (numbers["batch"], numbers["pixels"], numbers["seed"]) == (4, 24, 0)
    assert list(numbers["losses"]) == ["0", "4"]
    for said in ("photographs in scikit-learn", "<- chosen", f"split_dim={numbers['split_dim']}", "p_1 / p_s", "mine"):
        assert said in out
    index = numbers["candidates"].index(numbers["split_dim"])
    assert f"{numbers['losses']['0']['A'][index]:.1%}" in out
    assert (mine / "mine" / "split_dim.png").read_bytes().startswith(b"\x89PNG")
    before = contents(mine / "mine")
    assert_refused(run("split-dim", "mine.py:net", "--out", "mine"), "--overwrite")
    assert contents(mine / "mine") == before
    assert run("split-dim", "mine.py:with_batch", "--out", "mine", "--overwrite")[0] == 0
    assert json.loads((mine / "mine" / "split_dim.json").read_text())["batch"] is None


@pytest.mark.parametrize("function", ["with_batch", "with_loss"])
def test_split_dim_takes_a_batch_and_a_loss_of_ones_own(run, mine, function):
    code, out, _ = run("split-dim", f"mine.py:{function}", "--device", "cpu")
    assert code == 0
    assert f"the batch that mine.py:{function} returned" in out
    assert list(json.loads((mine / f"runs/split-dim-mine.py-{function}/split_dim.json").read_text())["losses"]) == [""]


def test_split_dim_takes_images_of_ones_own(run, mine):
    from PIL import Image

    (mine / "photos" / "deep").mkdir(parents=True)
    Image.new("RGB", (40, 30), "red").save(mine / "photos" / "one.png")
    Image.new("L", (30, 40), 100).save(mine / "photos" / "deep" / "two.JPG", format="JPEG")
    words = ["split-dim", "mine.py:net", "--data", "photos", "--pixels", 16, "--device", "cpu"]
    code, out, _ = run(*words, "--batch", 2)
    assert code == 0
    assert "crops of 2 images of photos" in out
    assert_refused(
        run(*words, "--batch", 3, "--out", "b"), "contains 2 images, fewer than --batch 3: give a smaller --batch"
    )
    (mine / "photos" / "three.png").write_text("no image")
    assert_refused(run(*words, "--batch", 3, "--out", "b"), "three.png cannot be read")


@pytest.mark.parametrize(("name", "layer"), [("squeezenet1_1", "classifier.1"), ("timm:resnet10t", "fc")])
def test_split_dim_takes_names(run, tmp_path, name, layer):
    if name.startswith("timm:"):
        pytest.importorskip("timm")
    words = ["split-dim", name, "--batch", 2, "--pixels", 64, "--device", "cpu", "--out", "out"]
    with fake_times(lambda sizes, split_dims, **_: tuple(map(float, split_dims))):
        assert run(*words)[0] == 0
    assert layer in json.loads((tmp_path / "out" / "split_dim.json").read_text())["losses"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["resnet5"], "did you mean resnet50?"),
        (["mine.py:nothing"], "mine.py:nothing failed: AttributeError"),
        (["mine.py:broken"], "mine.py:broken failed: KeyError"),
        (["mine.py:words"], "mine.py:words returned an object of type str: return a model"),
        (["yours.py:net"], "yours.py does not exist"),
        (["mine.py:net", "--pixels", "1"], "could not be measured"),
        (["mine.py:net", "--batch", "0"], "--batch 0"),
        (["mine.py:net", "--data", "nowhere"], "--data nowhere is not a folder"),
        (["mine.py:net", "--device", "gpu7"], "device=gpu7"),
    ],
)
def test_split_dim_mistakes_are_one_line_and_leave_nothing_behind(run, mine, words, said):
    assert_refused(run("split-dim", *words), said)
    assert [path.name for path in mine.iterdir() if path.name != "__pycache__"] == ["mine.py"]


def test_a_name_that_timm_may_know_without_timm(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # as where it is not installed
    assert_refused(
        run("split-dim", "convnextv2_atto"), "which may have it, is not installed", "pip install 'torch-thor[timm]'"
    )


def test_the_extras_are_those_of_the_project():
    """The modules that the command line knows belong to the requirements of each extra, one to each."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    owners = importlib.metadata.packages_distributions()
    for extra, modules in EXTRAS.items():
        names = [re.match(r"[\w-]+", one)[0] for one in project["optional-dependencies"][extra]]
        wanted = sorted(name.lower() for name in names if name != project["name"])
        assert sorted(name.lower() for module in modules for name in owners[module]) == wanted


@pytest.mark.parametrize(("module", "extra"), [("typer", "train"), ("typer.core", None)])
def test_a_module_that_is_missing_at_the_start(monkeypatch, module, extra):
    """Another one than those that an extra installs is told as Python tells it."""
    monkeypatch.setitem(sys.modules, module, None)  # as where it is not installed
    spec = importlib.util.spec_from_file_location("started_again", cli.__file__)
    with pytest.raises(ModuleNotFoundError if extra is None else SystemExit) as error:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    if extra is not None:
        assert f"{module} is missing" in str(error.value)
        assert f"pip install 'torch-thor[{extra}]'" in str(error.value)


@pytest.mark.parametrize(
    ("words", "module", "extra"),
    [(["prepare", "python", "--out", "out"], "tokenizers", "text"), (QUICK, "sklearn.datasets", None)],
)
def test_a_module_that_is_missing_in_a_command(run, monkeypatch, words, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    if extra is not None:
        assert_refused(run(*words), f"{module} is missing", f"pip install 'torch-thor[{extra}]'")
    else:
        with pytest.raises(ModuleNotFoundError, match=module):
            run(*words)
