"""A recipe from the command line to its report: the tasks beside classification, and nothing done twice."""

import io
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from command_line import checkpoints, lines, succeed
from torch_thor.training import load_recipe, recipe_names, run_recipe
from torch_thor.training.checkpoints import RunFolder
from torch_thor.training.data import characters
from torch_thor.training.tasks import Autoencoder, CharLM

SILENT = Console(file=io.StringIO())


@pytest.fixture
def printed(run):
    """Call the command line in an empty folder, to a good end; gives what it printed."""

    def call(*words):
        code, out, err = run(*words)
        assert code == 0, err
        return out

    return call


@pytest.fixture
def little(monkeypatch):
    """The tasks on a little of their data: six steps an epoch of 16 samples."""
    whole, (train, held_out) = Autoencoder.open, characters()

    def some_images(recipe, *given):
        task = whole(recipe, *given)
        return Autoencoder(task.train[:100], task.held_out[:50], recipe)

    monkeypatch.setattr(Autoencoder, "open", some_images)
    monkeypatch.setattr(CharLM, "open", lambda recipe, *_: CharLM(train[:6_400], held_out[:1500], recipe))


def test_a_thread_trains_as_the_main_thread_does(tmp_path):
    recipe = load_recipe("digits", ["steps=6", "batch_size=32", "threads=1", "device=cpu"])

    def run(name):
        return run_recipe(recipe, RunFolder(tmp_path / name), SILENT)

    run("main")
    with ThreadPoolExecutor(1) as pool:
        assert [summary.name for summary in pool.submit(run, "thread").result()] == ["thor", "sgd"]
    for name in ("thor", "sgd"):
        assert lines(tmp_path / "main", name) == lines(tmp_path / "thread", name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "metrics", "unit"),
    [("autoencoder", ["loss", "squared_error"], "images"), ("char-lm", ["loss", "perplexity"], "characters")],
)
def test_tasks_train_resume_and_report(printed, little, tmp_path, recipe, metrics, unit):
    words = ("train", recipe, "batch_size=16", "eval_interval=3", "checkpoint_interval=3", "keep_checkpoints=9")
    words += ("schedule.kind=constant", "optimizers.thor.update_interval=5", "accumulation=2", "ema_decay=0.5")
    out = printed(*words, "epochs=2", "--out", "whole")
    primary = load_recipe(recipe).optimizer and (metrics[0] if recipe == "char-lm" else metrics[1])
    for name in ("thor", "sgd"):
        assert checkpoints(tmp_path / "whole", name) == [3, 6, 9, 12]
        evaluations = lines(tmp_path / "whole", name, "eval")
        assert [one["step"] for one in evaluations] == [3, 6, 9, 12]
        assert all(one[key] > 0 and one[f"averaged_{key}"] > 0 for one in evaluations for key in metrics)
        assert {(one["primary"], one["higher_is_better"]) for one in evaluations} == {(primary, False)}
        assert evaluations[-1][primary] < evaluations[0][primary]
        best = min(evaluations, key=lambda one: one[f"averaged_{primary}"])
        assert [p.name for p in (tmp_path / f"whole/{name}/checkpoints/best").iterdir()] == [f"step-{best['step']:08d}"]
        board = EventAccumulator(str(tmp_path / f"whole/{name}/tensorboard"))
        board.Reload()
        tags = set(board.Tags()["scalars"])
        assert {f"test/{metrics[1]}", f"averaged/{metrics[1]}", "train/loss", f"train/{unit}_per_second"} <= tags
    assert f"{unit} per second, ordinary steps" in out
    assert f"{unit}/s" in printed("train", recipe, *words[2:], "log_interval=3", "epochs=1", "--out", "half")
    shutil.rmtree(tmp_path / "half/thor/checkpoints/step-00000006")
    printed("train", recipe, *words[2:], "epochs=2", "--out", "half", "--resume")
    for name in ("thor", "sgd"):
        own, whole = (lines(tmp_path / folder, name) for folder in ("half", "whole"))
        assert own == whole
    summary = json.loads((tmp_path / "whole/summary.json").read_text())[0]
    assert summary[primary] == lines(tmp_path / "whole", "thor", "eval")[-1][primary]
    told = json.loads(printed("eval", "whole", "--json"))
    assert [(one["optimizer"], one["averaged"]) for one in told] == [
        ("thor", False), ("thor", True), ("sgd", False), ("sgd", True),
    ]  # fmt: skip
    assert told[0][primary] == pytest.approx(summary[primary], rel=1e-6)
    assert told[0][unit] > 0


def test_a_target_ends_a_run_that_gets_below_it(printed, little, tmp_path):
    words = ("train", "autoencoder", "optimizer=sgd", "lr=0.001", "batch_size=16", "eval_interval=3", "epochs=3")
    printed(*words, "schedule.kind=constant", "--out", "whole")
    values = [line["squared_error"] for line in lines(tmp_path / "whole", "sgd", "eval")]
    assert values == sorted(values, reverse=True)
    out = printed(*words, "schedule.kind=constant", f"stop_at={values[2]}", "targets=[0.001]", "--out", "cut")
    assert [line["squared_error"] for line in lines(tmp_path / "cut", "sgd", "eval")] == values[:3]
    assert re.search(r"ended at squared error [\d.]+ +│ +yes", out)
    assert re.search(r"steps \(seconds\) to reach squared error 0.001 +│ +not reached", out)


LITTLE = """
from torch_thor.cli import main
from torch_thor.training.data import characters
from torch_thor.training.tasks import CharLM
train, held_out = characters()
CharLM.open = lambda recipe, *_: CharLM(train[:12_800], held_out[:1500], recipe)
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
# 6 steps each. A position embedding sees each position once per process, whatever the batch, so THOR's statistics
# of it depend on how a batch is divided, as they do with accumulation.
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("autoencoder", ("epochs=6", "batch_size=1024")),
        ("char-lm", ("epochs=1", "batch_size=32", "optimizers.thor.layers=-places")),
    ],
)
def test_two_processes_do_what_one_does(tmp_path, recipe, more):
    (tmp_path / "little.py").write_text(LITTLE)
    words = ("train", recipe, "eval_interval=3", "checkpoint_interval=100", "device=cpu", *more)
    words += ("optimizers.thor.update_interval=2",)
    words += ("optimizers.sgd.lr=0.01",)
    succeed(tmp_path, *words, "--out", "one", script=tmp_path / "little.py")
    succeed(tmp_path, *words, "--out", "two", script=tmp_path / "little.py", ranks=2)
    for name in ("thor", "sgd"):
        one, two = (lines(tmp_path / folder, name) for folder in ("one", "two"))
        for kind, keys in (("step", ("loss", "terms")), ("eval", ("loss",))):
            left, right = ([[p[key] for key in keys] for p in run if p["kind"] == kind] for run in (one, two))
            assert len(left) == len(right) > 1
            for a, b in zip(left, right, strict=True):
                assert a == pytest.approx(b, rel=2e-4)
        assert [(p["layer"], p["decision"]) for p in one if p["kind"] == "refresh"] == [
            (p["layer"], p["decision"]) for p in two if p["kind"] == "refresh"
        ]


# ---- nothing is done twice ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [Autoencoder, CharLM])
def test_a_network_is_built_for_each_optimizer_and_no_other(tmp_path, little, monkeypatch, task):
    built = []
    really = task.build_model
    monkeypatch.setattr(task, "build_model", lambda self: (built.append(1), really(self))[1])
    name = "char-lm" if task is CharLM else "autoencoder"
    run_recipe(load_recipe(name, ["epochs=1", "batch_size=16", "device=cpu"]), RunFolder(tmp_path / "run"), SILENT)
    assert len(built) == 2


def test_a_recipe_that_cannot_start_leaves_the_folder_alone(tmp_path):
    recipe = load_recipe("digits", ["optimizer=thor", "layers=-nothing", "device=cpu"])
    with pytest.raises(Exception, match="nothing"):
        run_recipe(recipe, RunFolder(tmp_path / "run"), SILENT)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_reading_recipes_imports_no_library_of_models_or_images():
    script = f"""
import sys
from torch_thor.training import Callback, Run, RunConfig, Task, UserError, load_recipe, override, train
from torch_thor.training.data import DataBundle, load_data
from torch_thor.training.models import build_model
from torch_thor.training.tasks import ImageClassification, MaskedLM
for name in {recipe_names()!r}:
    override(load_recipe(name), ["seed=3"])
load_recipe("digits", ["model=timm:vit_tiny_patch16_224"])
libraries = ("torchvision", "timm", "sklearn", "PIL", "transformers", "matplotlib", "tensorboard", "pyarrow")
print([name for name in libraries if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
