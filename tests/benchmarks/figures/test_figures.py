"""What figures show: tables of results that are made by hand, and each figure measured in small."""

import pytest
import torch
from PIL import Image

from benchmarks.figures import (
    FIGURES,
    batch_sizes,
    bert,
    curves,
    fisher_norm,
    split_dim,
    training,
    why_curvature,
)

RECIPE = """
task: masked-lm
model: bert-tiny
data: {name: python-text, workers: {count: 0}, text: {length: 128, vocab_size: 300}}
steps: 4
batch_size: 2
eval_interval: 2
optimizers: {thor: {lr: 0.1}, thor-muon: {lr: 0.05}, lamb: {lr: 0.001}}
"""
NETWORK = """
import torch

def build():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
    return model, (torch.randn(16, 40), torch.randint(3, (16,)))
"""


def result(setting, seed, values, **own):
    """A run of eight steps, evaluated after each second one."""
    found = [
        {"step": 2 * i + 2, "seconds": 0.5 * (i + 1), "value": value}
        for i, value in enumerate(values)
    ]
    same = {
        "steps": 8,
        "steps_per_epoch": 4,
        "seconds": 2.5,
        "step_ms": 3.0,
        "refresh_step_ms": None,
        "failure": None,
    }
    same |= {"metric": "accuracy", "higher": True, "refresh_steps": 0, "refreshed": 0, "due": 0}
    job = {"setting": setting, "seed": seed, "device": "cpu"}
    return {"job": job, "value": values[-1], "evaluations": found, **same, **own}


def cells(text):
    """The cells of a table by the first one of each line."""
    return {row[0]: row[1:] for line in text.splitlines() if (row := line.strip("| ").split(" | "))}


def test_settings_against_the_first_one():
    own = {"refresh_steps": 3, "refresh_step_ms": 10.0, "refreshed": 5, "due": 6}
    rows = [
        *(result("momentum", 0, [0.25, 0.5]), result("momentum", 1, [0.125, 0.25])),
        # at once, at the end
        *(result("thor", 0, [0.5, 0.75], **own), result("thor", 1, [0.125, 0.25], **own)),
        # never; at once, lost again
        *(result("unbounded", 0, [0.25, 0.375]), result("unbounded", 1, [0.25, 0.125])),
        result("wild", 0, [0.5], failure="the loss became nan: lower lr", value=None),
        result("wild", 1, [0.25], step_ms=5.0),
    ]
    found = cells(curves.comparison(rows, {"thor": "66.7"}, "Theirs."))
    ours = ["0.38 ± 0.12 (0.5000, 0.2500)", "1.00 (1.00, 1.00)", "1 (1, 1)", "-"]
    assert found["momentum"] == [*ours, "2.5 (2.5, 2.5)", "3, none", "0, 0", "0 of 0"]
    ours = [
        "0.50 ± 0.25 (0.7500, 0.2500)",
        "0.75 ± 0.25 (0.50, 1.00)",
        "0.75 ± 0.25 (0.5, 1)",
        "66.7",
    ]
    assert found["thor"] == [*ours, "2.5 (2.5, 2.5)", "3, 10", "3, 3", "10 of 12"]
    assert found["unbounded"][1:3] == ["never, 0.50", "never, 0.5"]
    assert (found["wild"][0], found["wild"][5]) == ("diverged after 8 steps", "4, none")


def test_a_loss_reaches_its_target_from_above():
    row = result("lamb", 0, [3.0, 2.0, 2.5], higher=False)
    # None: that of a run that diverged
    hits = [training.reach(row, target) for target in (3.5, 2.25, 1.0, None)]
    assert [hit and hit["step"] for hit in hits] == [2, 4, None, None]


def test_epochs_to_the_targets_at_each_batch_size():
    recipe = {"targets": [0.5, 0.9], "optimizers": {"sgd": {"lr": 0.2}}}  # no run reaches 0.9
    rows = [result("momentum", 0, values) for values in ([0.25, 0.5], [0.5, 0.75])]
    for row, size in zip(rows, (512, 128), strict=True):
        row["job"] |= {"batch_size": size, "recipe": recipe}
    found = cells(batch_sizes.table(rows))
    assert found["128"] == ["momentum", "0.2", "8", "0.7500", "0.50", "2.5"]
    assert found["512"] == ["momentum", "0.2", "8", "0.5000", "1.00", "2.5"]


def test_the_rule_of_the_batch_sizes():
    # batch_size=128, lr=0.2 and 0.05, update_interval=20
    recipe = ("fashion-mnist", ["eval_interval=78"])
    assert batch_sizes.scaled(recipe, "sgd", 512) == [
        "batch_size=512",
        "lr=0.4",
        "eval_interval=20",
    ]
    assert batch_sizes.scaled(recipe, "thor", 32) == [
        "batch_size=32", "lr=0.025", "eval_interval=312", "update_interval=80",
        "trace_thresholds=thor_nt",
    ]  # fmt: skip
    assert batch_sizes.scaled(recipe, "thor", 12800)[2:4] == [
        "eval_interval=1",
        "update_interval=1",
    ]


def test_the_changes_of_norms_over_seeds():
    norms = [[1.0], [4.0], [2.0], [2.5], [2.0]]
    steps, distances = [1, 10, 40, 60, 100], [[None], [0.5], [0.25], [0.75], [0.1]]
    rows = [
        {
            "job": {"seed": seed},
            "steps": 100,
            "norms": {
                "layers": ["a"],
                "step": steps,
                "norm": [[factor * norm] for (norm,) in norms[:3]] + norms[3:],
                "distance": distances,
            },
        }
        for seed, factor in ((0, 1.0), (3, 2.0))
    ]
    rows[1]["norms"]["norm"][0] = [1.0]
    assert fisher_norm.changes(rows[0], 0) == (4.0, 1.25, 0.375)
    said = "the seeds 0, 3: 4.0 to 8.0 in the first tenth, 1.2 to 1.2 in the last half; 38% to 38%."
    assert said in fisher_norm.over_seeds(rows)


def test_the_whole_fisher_matrix_is_that_of_its_definition():
    model, x, _ = why_curvature.network(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(3, 4, dtype=torch.float64)), x[:5, 20:23]
    expected = torch.zeros(16, 16, dtype=torch.float64)
    for image in x:
        probabilities = model(image).softmax(0).detach()
        for label, p in enumerate(probabilities):
            model.zero_grad()
            model(image).log_softmax(0)[label].backward()
            own = torch.cat([one.grad.flatten() for one in model.parameters()])
            expected += p * torch.outer(own, own) / len(x)
    torch.testing.assert_close(why_curvature.fisher(model, x), expected)
    # (F + λI) times the natural gradient is the gradient
    before = torch.cat([one.grad.flatten() for one in model.parameters()])
    why_curvature.precondition_(list(model.parameters()), expected, 0.1)
    after = torch.cat([one.grad.flatten() for one in model.parameters()])
    torch.testing.assert_close(expected @ after + 0.1 * after, before)


def test_what_an_inversion_costs():
    assert why_curvature.cubes("Kronecker factors", 40) == 64**3 + 3 * 10**3
    assert why_curvature.refreshes(3) == 3  # steps 0, 1 and 2
    assert why_curvature.cubes("blocks of 32", 3) == 2 * 32**3 + 3 * 10**3
    assert why_curvature.cubes("gradient descent", 40) == 0


def test_times_of_steps(monkeypatch):
    times = iter((10, 11, 15, 17))
    monkeypatch.setattr(training.time, "process_time", lambda: next(times))
    clock = training.Clock(processor=True)
    clock.step(None, None)
    clock.end_of_step(None)
    clock.step(None, None)
    assert clock.seconds == [1, 3]  # without what is no step
    own = training.step_times([0.5, 0.75, 1.25, 2.25], [True, False, False, True])
    assert own == {"refresh_steps": 2, "step_ms": 375.0, "refresh_step_ms": 750.0}
    assert training.step_times([0.5], [False]) == {
        "refresh_steps": 0,
        "step_ms": 500.0,
        "refresh_step_ms": None,
    }


def test_other_options_are_other_jobs():
    def jobs(**options):
        return curves.jobs({"data": "digits", **options}, "cpu")

    assert jobs(epochs=1) != jobs(epochs=2)
    assert [job for job in jobs(seeds=(3, 0)) if job["seed"] == 0] == jobs()
    assert jobs(seeds=(3, 0))[0]["recipe"]["seed"] == 3
    assert curves.jobs({}, "cpu")[0]["recipe"]["epochs"] == 1  # quick
    assert curves.jobs({"epochs": 3}, "cpu")[0]["recipe"]["epochs"] == 3
    assert jobs()[0]["recipe"]["epochs"] == 20  # those of the recipe


def test_a_training_that_diverges_is_a_result():
    recipe = ("digits", ["epochs=1", "lr=1e30", "batch_size=128"])
    (job,) = training.jobs_of(recipe, {}, "cpu", [({"setting": "momentum"}, "sgd", ())])
    row = {"job": job, **training.measured(job)}
    assert (row["value"], row["steps"]) == (None, len(row["losses"]))
    assert row["failure"].startswith("the loss became")


@pytest.mark.pictures
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("bert", "why-curvature") else [])
        for name in FIGURES
    ],
)
def test_each_figure_in_small(name, tmp_path, monkeypatch):
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "small.yaml").write_text(RECIPE)
    monkeypatch.setattr(bert, "RECIPE", str(tmp_path / "small.yaml"))
    monkeypatch.setattr(bert, "QUICK", ())
    monkeypatch.setattr(why_curvature, "IMAGES", 20)
    monkeypatch.setenv("HOME", str(tmp_path))  # where prepared text is kept
    figure = FIGURES[name]
    options = {
        "data": "digits",
        "epochs": 1,
        "batch_sizes": (512,),
        "model": f"{tmp_path}/network.py:build",
    }
    taken = {
        key: value for key, value in options.items() if key in figure.TAKES and figure is not bert
    }
    rows = [{"job": job, **figure.run(dict(job))} for job in figure.jobs(taken, "cpu")]
    text = figure.table(rows)
    figure.draw(rows, tmp_path / "picture.png")
    with Image.open(tmp_path / "picture.png") as picture:
        assert len(set(picture.convert("L").tobytes())) > 10  # lines and letters, not a blank page
    if figure is split_dim:
        assert rows[0]["candidates"] == (1, 16, 32, 40)
        assert f"split_dim={rows[0]['split_dim']} (theirs" in text
        assert f"| **{rows[0]['split_dim']}** |" in text
    elif figure is fisher_norm:
        # 2 + 0.1 · step, rounded down
        assert rows[0]["norms"]["step"] == [1, 3, 5, 7, 9, 11, 14, 17, 20]
        assert "9 refreshes, 2 steps at first, 3 at last. Over all layers and the seeds 0: " in text
    elif figure is why_curvature:
        assert [line.split(" | ")[0] for line in text.splitlines()[2:7]] == [
            f"| {setting}" for setting in why_curvature.SETTINGS
        ]
        assert "| 1 | 438,976,000 |" in text  # 760³ for the whole matrix
    else:
        assert all(
            f"| {row['job']['setting']} | " in text and f"{row['value']:.4f}" in text
            for row in rows
        )
        assert "Theirs, not ours" in text
    if figure is bert:
        assert [row["job"]["setting"] for row in rows] == [
            "lamb",
            "adamw",
            "thor",
            "thor, unbounded",
            "thor-muon",
        ]
        assert {row["job"]["recipe"]["optimizer"][0] for row in rows} == {
            "lamb",
            "adamw",
            "thor",
            "thor-muon",
        }
