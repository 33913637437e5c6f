"""Figures from the command's side: measured once, gone on with, drawn again without training, refused when in doubt."""

import io
import math
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console
from small_bert import use_small_recipe

from torch_thor.bench import describe_device
from torch_thor.bench.figures import FIGURES, Options, catalogue, make_figures, measuring, paper, read
from torch_thor.bench.figures.batch_sizes import scaled
from torch_thor.bench.figures.measuring import ProcessorClock, to_columns
from torch_thor.bench.figures.raw import plain
from torch_thor.curvature import Decision, RefreshEvent
from torch_thor.training import Metric, Point, Record, Score, UserError

pytestmark = pytest.mark.slow  # every figure is measured, with trainings of its own
QUICK = Options(data="digits", epochs=1, seeds=(0,))
NETWORK = """
import torch

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
    return model, (torch.randn(16, 40), torch.randint(3, (16,)))
"""


def make(name, out, options=QUICK, **more):
    console = Console(file=io.StringIO(), width=200)
    make_figures(name, out, console, options, device="cpu", **more)
    return console.file.getvalue()


def whole(out, name):
    with Image.open(out / f"{name}.png") as picture:
        picture.load()
    return read(out / f"{name}.json", name), (out / f"{name}.md").read_text()


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    """All figures, measured and really drawn: (folder, what was said, the options)."""
    home, out = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("figures")
    (home / "network.py").write_text(NETWORK)
    options = Options(data="digits", epochs=1, seeds=(0,), batch_sizes=(256,), model=f"{home}/network.py:build")
    with pytest.MonkeyPatch.context() as patch:
        use_small_recipe(home, patch)
        return out, make("all", out, options), options


@pytest.fixture
def curves(every):
    return every[0]


@pytest.fixture
def untrained(monkeypatch):
    def refuse(*words, **more):
        raise AssertionError("trained, though all was there")

    monkeypatch.setattr(measuring, "trained", refuse)


def test_all_makes_each(every):
    out, said, options = every
    wanted = {
        "curves": [{"setting": name, "seed": 0} for name in ("momentum", "thor", "thor_stop", "thor_nt")],
        "fisher-norm": [{"seed": 0}],
        "split-dim": [{"model": options.model}],
        "batch-sizes": [{"optimizer": name, "batch_size": 256, "seed": 0} for name in ("momentum", "thor")],
        "bert": [{"optimizer": name, "seed": 0} for name in ("lamb", "thor", "thor-muon")],
    }
    assert set(wanted) == set(FIGURES)
    assert {path.name for path in out.glob("[!.]*")} == {
        f"{name}.{end}" for name in wanted for end in ("json", "png", "md")
    }
    for name, jobs in wanted.items():
        raw, text = whole(out, name)
        assert [run["job"] for run in raw.runs] == jobs
        assert text == FIGURES[name].table(raw) + "\n"
        assert text in said
        with Image.open(out / f"{name}.png") as picture:
            assert min(picture.size) >= 300
            assert len(set(picture.convert("L").tobytes())) > 10  # lines and letters, not a blank page
        if name != "split-dim":  # which trains nothing
            recipe = raw.settings["recipe"]
            data = "python-text" if name == "bert" else "digits"
            assert (recipe["epochs"], recipe["data"]["name"]) == (1, data)
    ends = [said.index(f"{out / name}.json, .png and .md") for name in FIGURES]
    assert ends == sorted(ends)  # one after the other


def test_curves_keep_every_point(curves):
    raw, text = whole(curves, "curves")
    assert [run["job"]["setting"] for run in raw.runs] == ["momentum", "thor", "thor_stop", "thor_nt"]
    for run in raw.runs:
        assert run["steps_per_epoch"] == 22
        assert {len(column) for column in run["steps"].values()} == {22}
        assert len(run["processor_seconds"]) == 22
        assert run["evaluations"]["step"] == [22]
    kinds = {run["job"]["setting"]: set(run["refreshes"]["decision"]) for run in raw.runs}
    assert kinds["momentum"] == set()
    assert kinds["thor_nt"] == {"update"}
    assert raw.machine["threads"] == 1  # the recipe's
    assert raw.settings["recipe"]["optimizers"]["sgd"]["lr"] == 0.1
    for word in ("momentum", "thor_stop", "Theirs, not ours", "66.7", "117", paper.PAPER):
        assert word in text


def test_drawn_again_without_training(curves, untrained):
    before = (curves / "curves.json").read_bytes()
    (curves / "curves.png").unlink()
    assert "drawn again, nothing measured" in make("curves", curves)
    whole(curves, "curves")
    (curves / "curves.png").unlink()
    make("curves", curves, Options(), redraw=True)
    whole(curves, "curves")
    assert (curves / "curves.json").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "more", "said"),
    [
        (Options(data="digits", epochs=2, seeds=(0,)), {}, r"other settings \(recipe.epochs: 1 -> 2\)"),
        (QUICK, {"redraw": True}, "--redraw draws what was measured: leave out --data"),
        (Options(), {"redraw": True, "overwrite": True}, "exclude each other"),
        (Options(batch_sizes=(8,)), {}, "--batch-sizes means nothing to curves: it is for batch-sizes"),
        (Options(model="resnet18"), {}, "--model means nothing to curves: it is for split-dim"),
    ],
    ids=["epochs", "redraw_with_options", "redraw_and_overwrite", "not_its_option", "not_its_model"],
)
def test_refused_before_anything_is_touched(curves, untrained, options, more, said):
    before = {path: path.read_bytes() for path in curves.iterdir()}
    with pytest.raises(UserError, match=said):
        make("curves", curves, options, **more)
    assert {path: path.read_bytes() for path in curves.iterdir()} == before


def test_interrupted_measurement_goes_on_with_what_is_missing(curves, tmp_path, monkeypatch):
    trained = []

    def train(run, observers):
        trained.append(run)
        if len(trained) == 3:
            raise KeyboardInterrupt
        return train_whole(run, observers)

    train_whole = measuring.trained
    monkeypatch.setattr(measuring, "trained", train)
    (tmp_path / "curves.png").write_bytes(b"a picture of other data")
    with pytest.raises(KeyboardInterrupt):
        make("curves", tmp_path, overwrite=True)
    assert len(read(tmp_path / "curves.json", "curves").runs) == 2
    assert not (tmp_path / "curves.png").exists()
    with pytest.raises(UserError, match="lacks 2 of 4 runs"):
        make("curves", tmp_path, Options(), redraw=True)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(catalogue, "describe_device", lambda device: {**describe_device(device), "torch": "1.0"})
        with pytest.raises(UserError, match=r"another machine or with other versions \(torch: .* -> 1.0\)"):
            make("curves", tmp_path)
    make("curves", tmp_path)
    assert len(trained) == 5
    losses = [[run["steps"]["loss"] for run in whole(out, "curves")[0].runs] for out in (tmp_path, curves)]
    assert losses[0] == losses[1]


def test_runs_of_more_seeds_are_added_to_those_that_are_there(tmp_path, monkeypatch):
    trained = []

    def train(run, observers):
        trained.append(run.recipe.seed)
        return train_whole(run, observers)

    train_whole = measuring.trained
    monkeypatch.setattr(measuring, "trained", train)

    def sizes(*seeds):
        make("batch-sizes", tmp_path, Options(data="digits", epochs=1, batch_sizes=(512,), seeds=seeds))
        raw, text = whole(tmp_path, "batch-sizes")
        assert raw.settings["seeds"] == list(seeds)
        return [run["job"]["seed"] for run in raw.runs], text

    assert sizes(3)[0] == [3, 3]
    both, with_both = sizes(3, 1)
    assert (both, trained) == ([3, 3, 1, 1], [3, 3, 1, 1])
    one, with_one = sizes(1)
    assert (one, trained) == (both, [3, 3, 1, 1])  # kept, and not drawn
    assert ("±" in with_both, "±" in with_one) == (True, False)
    make("batch-sizes", tmp_path, Options(), redraw=True)
    assert whole(tmp_path, "batch-sizes")[1] == with_one


def test_overwrite_measures_anew(tmp_path):
    (tmp_path / "batch-sizes.json").write_text("no raw data")
    options = Options(data="digits", epochs=1, batch_sizes=(256, 512), seeds=(0, 1))
    with pytest.raises(UserError, match="cannot be read"):
        make("batch-sizes", tmp_path, options)
    make("batch-sizes", tmp_path, options, overwrite=True)
    raw, text = whole(tmp_path, "batch-sizes")
    assert [run["job"]["batch_size"] for run in raw.runs] == [512, 512, 256, 256] * 2
    assert [run["steps_per_epoch"] for run in raw.runs] == [2, 2, 5, 5] * 2
    assert [round(run["steps"]["lr"][0], 4) for run in raw.runs[:4]] == [0.2828, 0.0566, 0.2, 0.04]
    assert "| 512 | thor | 0.0566 | 2 |" in text
    assert "4096" in text  # theirs


def test_a_batch_larger_than_the_data_is_refused_at_once(tmp_path):
    with pytest.raises(UserError, match="batch_size=2048 is larger than the training set"):
        make("batch-sizes", tmp_path, Options(data="digits", epochs=1, batch_sizes=(64, 2048)))
    assert list(tmp_path.glob("[!.]*")) == []  # but for the lock


def test_divergence_is_a_row_of_the_table(tmp_path):
    recipe = tmp_path / "wild.yaml"
    recipe.write_text(
        "{data: {name: digits}, model: small-cnn, batch_size: 64, epochs: 1, threads: 1, targets: [0.1],"
        " optimizers: {sgd: {lr: 1.0e+30}, thor: {lr: 0.02, damping: 0.1, update_interval: 20}}}"
    )
    make("batch-sizes", tmp_path, Options(data=str(recipe), batch_sizes=(128,)))
    raw, text = whole(tmp_path, "batch-sizes")
    assert raw.run(optimizer="momentum", batch_size=128, seed=0)["failure"].startswith("the loss became")
    assert raw.run(optimizer="thor", batch_size=128, seed=0)["failure"] is None
    assert "| 128 | momentum | 1.41e+30 |" in text
    assert "the loss became" in text
    with pytest.raises(UserError, match="the loss became"):
        make("curves", tmp_path, Options(data=str(recipe)))


def test_fisher_norm_keeps_every_norm(every):
    raw, text = whole(every[0], "fisher-norm")
    (run,) = raw.runs
    assert run["norms"]["step"] == [1, 3, 5, 7, 9, 11, 14, 17, 20]  # 2 + 0.1 · step, rounded down
    assert len(run["norms"]["norm"]) == 9
    assert set(run["refreshes"]["decision"]) == {"update"}
    assert raw.settings["recipe"]["optimizers"]["thor"]["split_dim"] is None
    assert "| conv1 |" in text
    assert "9 refreshes, 2 steps at first, 3 at last" in text


def test_split_dim_times_the_model_that_is_given(every):
    out, _, options = every
    raw, text = whole(out, "split-dim")
    assert raw.runs[0]["candidates"] == [1, 16, 32, 40]
    assert f"split_dim={raw.runs[0]['split_dim']}" in text
    assert "cross at 106" in text
    assert "drawn again" in make("split-dim", out, Options(model=options.model))


def test_bert_keeps_every_point(every):
    raw, text = whole(every[0], "bert")
    for run in raw.runs:
        assert run["steps"]["step"] == [1, 2, 3, 4]
        assert run["evaluations"]["step"] == [2, 4]
        assert f"| {run['job']['optimizer']} | {run['evaluations']['mlm_accuracy'][-1]:.4f} |" in text


def test_all_refuses_before_the_first(tmp_path, untrained):
    with pytest.raises(UserError, match="--pixels 0"):
        make("all", tmp_path / "out", Options(data="digits", pixels=0))
    assert not (tmp_path / "out").exists()


def test_the_rule_of_the_batch_sizes():
    recipe = {
        "batch_size": 128,
        "eval_interval": 78,
        "optimizers": {"sgd": {"lr": 0.2}, "thor": {"lr": 0.05, "update_interval": 20}},
    }
    assert scaled(recipe, "sgd", 512) == {"batch_size": 512, "lr": 0.4, "eval_interval": 20}
    assert scaled(recipe, "thor", 32) == {"batch_size": 32, "lr": 0.025, "eval_interval": 312, "update_interval": 80}
    tiny = scaled({**recipe, "eval_interval": None}, "thor", 128 * 100)
    assert tiny == {"batch_size": 12800, "lr": 0.5, "update_interval": 1}


def test_a_growing_interval_cannot_be_scaled(tmp_path):
    recipe = tmp_path / "growing.yaml"
    interval = "{kind: geometric, first: 2, last: 5, factor: 1.5}"
    recipe.write_text(f"{{data: {{name: digits}}, optimizers: {{thor: {{update_interval: {interval}}}}}}}")
    with pytest.raises(UserError, match="cannot be scaled with the batch"):
        make("batch-sizes", tmp_path / "out", Options(data=str(recipe)))


def test_columns_have_every_point():
    metrics = [Metric("loss", "", "", False), Metric("top1", "", "", True, primary=True)]
    run = SimpleNamespace(task=SimpleNamespace(metrics=metrics))
    events = (
        RefreshEvent("head", 0, Decision.UPDATE, math.inf, 3.5),
        RefreshEvent("conv", 0, Decision.KEEP, 0.125, 2.0),
    )
    record, empty = Record(), plain(to_columns(run, Record()))
    record.points = [Point(1, 2.5, 0.1, None, 0.5, 0.5, 0.0, 8, skipped=False, refresh=True, events=events)]
    record.scores = [Score(1, 0.5, {"loss": 2.0, "top1": 0.5})]
    columns = plain(to_columns(run, record))
    assert {kind: list(of) for kind, of in columns.items()} == {kind: list(of) for kind, of in empty.items()}
    assert not any(values for of in empty.values() for values in of.values())
    assert columns["steps"]["loss"] == [2.5]
    assert columns["refreshes"] == {
        "step": [1, 1], "layer": ["head", "conv"], "decision": ["update", "keep"], "trace_change": [None, 0.125],
        "trace": [3.5, 2.0],
    }  # fmt: skip
    assert columns["evaluations"] == {
        "step": [1], "seconds": [0.5], "loss": [2.0], "top1": [0.5], "averaged_loss": [None], "averaged_top1": [None],
        "primary": ["top1"], "higher_is_better": [True],
    }  # fmt: skip


def test_processor_time_leaves_out_what_is_no_step(monkeypatch):
    times = iter((10, 11, 15, 17))
    monkeypatch.setattr(measuring.time, "process_time", lambda: next(times))
    clock = ProcessorClock()
    clock.step(None, None)
    clock.end_of_step(None)
    clock.step(None, None)
    assert clock.seconds == [1, 3]


def test_one_process_measures(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    with pytest.raises(UserError, match="leave out torchrun"):
        make("curves", tmp_path)
