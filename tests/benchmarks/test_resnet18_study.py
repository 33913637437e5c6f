"""The study of THOR's own claim: network, data, trials, trainings, and what the table says."""

import itertools
import math
import pickle

import pytest
import torch
from torch import nn

from benchmarks import resnet18
from benchmarks.gpu_cifar10 import ORIGINAL
from benchmarks.runner import drawing, study
from benchmarks.runner.stores import Lines, key_of

SETTINGS = {
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "thor": {"optimizer": "thor", "lr": 0.05},
    "thor-paper": {"optimizer": "thor-paper", "lr": 0.01, "damping": 0.3},
    "thor-muon": {"optimizer": "thor-muon"},
}
BATCH = 4
COUNTED = (0, 1, 2)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The study in an empty folder with 40 images to train and 8 to test, of noise."""
    monkeypatch.chdir(tmp_path)
    folder = resnet18.DATA / ORIGINAL
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        pixels = torch.randint(256, (8, 3 * 32 * 32), generator=generator)
        batch = {"data": pixels.byte().numpy(), "labels": [3, 1, 4, 1, 5, 9, 2, 6]}
        (folder / name).write_bytes(pickle.dumps(batch))
    monkeypatch.setattr(resnet18, "BATCHES", (2, BATCH))
    monkeypatch.setattr(resnet18, "EPOCHS", 2)
    monkeypatch.setattr(resnet18, "TRIAL_EPOCHS", 1)
    monkeypatch.setattr(resnet18, "SPANS", 1)
    resnet18.data.cache_clear()
    yield
    resnet18.data.cache_clear()


# ---- network and data ----------------------------------------------------------------------------


def test_the_network_is_a_resnet18_of_an_eighth_of_the_width():
    """He et al.'s table 1: 18 layers, and three projections; 11.2 million weights at full width."""
    model = resnet18.resnet18()
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    filters = 3 * 8 + 4 * 8 * 8 + 8 * 16 + 3 * 16 * 16 + 16 * 32 + 3 * 32 * 32 + 32 * 64
    projections = 8 * 16 + 16 * 32 + 32 * 64
    norms = 2 * (5 * 8 + 5 * (16 + 32 + 64))
    counted = 9 * (filters + 3 * 64 * 64) + projections + norms + 650
    assert len(layers) == 18 + 3
    assert sum(p.numel() for p in model.parameters()) == counted == 176_402
    sides = []
    for module in model:
        module.register_forward_hook(lambda m, x, y: sides.append(tuple(y.shape[1:])))
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    expected = [(8, 32, 32), (16, 16, 16), (32, 8, 8), (64, 4, 4)]
    assert sides[2:11] == [expected[0], *(side for side in expected for _ in range(2))]


def test_an_image_is_moved_by_up_to_four_pixels_and_perhaps_mirrored():
    generator = torch.Generator().manual_seed(0)
    images = 1 + torch.rand(300, 2, 6, 6, generator=generator)
    seen = set()
    for image, new in zip(images, resnet18.augmented(images, generator), strict=True):
        padded = nn.functional.pad(image, (4, 4, 4, 4))
        fits = [
            (top, left, mirrored)
            for top, left, mirrored in itertools.product(range(9), range(9), (False, True))
            if torch.equal(
                new.flip(2) if mirrored else new, padded[:, top : top + 6, left : left + 6]
            )
        ]
        assert len(fits) == 1
        seen |= set(fits)
    assert all({one[i] for one in seen} == set(range(9)) for i in (0, 1))
    assert {one[2] for one in seen} == {False, True}


def test_no_image_that_trains_chooses(small):
    words, train, choosing, test = resnet18.data()
    assert words == "CIFAR-10"
    assert [len(labels) for _, labels in (train, choosing, test)] == [10, 4, 8]
    assert train[1].tolist() == [3, 5] * 5
    assert not any(torch.equal(a, b) for a in train[0] for b in choosing[0])
    assert train[0].mean((0, 2, 3)).abs().max() < 1e-5
    assert train[0].std((0, 2, 3)).tolist() == pytest.approx([1.0] * 3, abs=1e-4)
    numbers = range(50_000)
    trains, chooses = (set(numbers[one]) for one in (resnet18.TRAIN, resnet18.CHOOSE))
    assert (len(trains), len(chooses), trains & chooses) == (12_500, 5_000, set())


def test_an_epoch_has_each_image_at_most_once():
    split = torch.zeros(10, 3, 32, 32), torch.arange(10)
    first, second = (
        [
            labels.tolist()
            for _, labels in resnet18.epoch(split, 4, torch.Generator().manual_seed(s))
        ]
        for s in (0, 1)
    )
    assert [len(labels) for labels in first] == [4, 4]
    assert len({label for labels in first for label in labels}) == 8
    assert first != second


# ---- trainings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_begins_alike_and_a_seed_gives_the_same_again(small, name):
    job = {**SETTINGS[name], "batch": BATCH, "seed": 0}
    first, again = resnet18.run(job), resnet18.run(job)
    assert first == again
    assert [point[0] for point in first["curve"]] == [0, 2, 4]
    assert first["value"] == first["curve"][-1][1]
    assert first["data"] == "CIFAR-10"
    refreshes = [point[2] for point in first["curve"]]
    ours = {"sgd": [], "thor-muon": ["ThorMuon"]}.get(name, ["THOR"])
    assert refreshes[0] == 0
    assert (refreshes[-1] > 0) == bool(ours)
    assert resnet18.optimizers(job) == ours
    trial = resnet18.run({**job, "seed": resnet18.TUNING_SEED})
    assert [point[0] for point in trial["curve"]] == [2]


def test_optimizers_have_the_settings_that_are_told():
    model = resnet18.resnet18()
    made = {name: resnet18.make(model, job).defaults for name, job in SETTINGS.items()}
    assert [made["sgd"][key] for key in ("lr", "momentum", "weight_decay")] == [0.05, 0.9, 1e-4]
    usual = resnet18.THOR(model, lr=0.05).defaults
    assert made["thor"] == usual
    paper = {"lr": 0.01, "damping": 0.3, "max_update_ratio": None}
    assert made["thor-paper"] == {**usual, **paper}
    assert made["thor-muon"] == resnet18.ThorMuon(model).defaults


def test_trials_are_judged_by_the_images_that_choose_and_others_by_the_test(small, monkeypatch):
    judged = []
    monkeypatch.setattr(resnet18, "accuracy", lambda model, split: judged.append(split) or 0.5)
    _, _, choosing, test = resnet18.data()
    for seed, splits in ((resnet18.TUNING_SEED, [choosing]), (0, [test] * 3)):
        judged.clear()
        resnet18.run({**SETTINGS["sgd"], "batch": BATCH, "seed": seed})
        assert all(a is b for a, b in zip(judged, splits, strict=True))


def test_accuracy_is_that_of_the_evaluated_network(monkeypatch):
    monkeypatch.setattr(resnet18, "HELD_OUT_BATCH", 2)

    class Model(nn.Module):
        def forward(self, x):
            return x if not self.training else -x

    split = torch.eye(5), torch.tensor([0, 1, 2, 0, 0])
    model = Model().train()
    assert resnet18.accuracy(model, split) == 0.6
    assert model.training


def test_rates_grow_then_fall_to_nothing(small, monkeypatch):
    seen = []

    class Spied(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])

    monkeypatch.setattr(resnet18, "make", lambda model, job: Spied(model.parameters(), 2.0))
    monkeypatch.setattr(resnet18, "WARM_UP", 0.5)
    resnet18.run({**SETTINGS["sgd"], "batch": BATCH, "seed": 0})
    assert seen == [1.0, 2.0, 2.0, 1.0]  # 2 · min(1, (s + 1) / 2, (4 - s) / 2)


@pytest.mark.parametrize(("name", "said"), [("sgd", "loss"), ("thor-paper", "")])
def test_one_that_diverges_is_a_row_without_a_value(small, monkeypatch, name, said):
    def make(model, job):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e30)
        if name == "thor-paper":  # as THOR refuses gradients
            monkeypatch.setattr(optimizer, "step", refuse)
        return optimizer

    def refuse():
        raise FloatingPointError("gradients are not finite")

    monkeypatch.setattr(resnet18, "make", make)
    row = resnet18.run({**SETTINGS[name], "batch": BATCH, "seed": 0})
    assert row["value"] is None
    assert row["failure"].startswith(said or "gradients are not finite in step 1")


def test_steps_of_all_are_timed(small):
    job = resnet18.timing(BATCH)
    row = resnet18.run(job)
    refreshes = {f"{name} refresh" for name in ("thor", "thor-paper", "thor-muon")}
    assert row["milliseconds"].keys() == SETTINGS.keys() | refreshes
    assert all(len(own) == 1 and own[0] > 0 for own in row["milliseconds"].values())
    assert row["state_bytes"]["sgd"] == pytest.approx(4.0)
    assert row["state_bytes"]["thor"] > 4.0
    assert resnet18.optimizers(job) == ["THOR", "ThorMuon"]


# ---- what is run ---------------------------------------------------------------------------------


def told(best, end=lambda job: 0.8):
    """Rows of all jobs: the best rate of each optimizer is given, and the end of the others."""
    rows = {}
    while todo := [job for job in resnet18.jobs(rows) if key_of(job) not in rows]:
        for job in todo:
            one = {"data": "JPEG copies of CIFAR-10"}
            if job.get("alone"):
                one["milliseconds"] = {name: [20.0, 40.0] for name in SETTINGS}
                one["milliseconds"] |= {"thor": [40.0, 80.0], "thor refresh": [200.0, 400.0]}
                one["state_bytes"] = dict.fromkeys(SETTINGS, 4.0)
            elif job["seed"] == 10:
                away = abs(math.log2(job["lr"] / best[job["optimizer"]]))
                one["value"] = 0.9 - away / 100 + 0.001 * (job.get("damping") == 0.1)
            else:
                last = end(job)
                one |= {"value": last, "curve": [[0, 0.1, 0], [50, 0.6, 2], [100, last, 4]]}
            rows[key_of(job)] = {"job": job, **one}
    return rows


def test_each_has_five_trials_and_three_other_seeds_with_each_batch():
    rows = told({"sgd": 0.8, "thor": 0.1, "thor-paper": 0.1})
    tried = {
        name: [(job["lr"], job.get("damping")) for job in resnet18.tuning(rows, 128, name)]
        for name in resnet18.TUNED
    }
    assert tried["sgd"] == [(lr, None) for lr in (0.05, 0.1, 0.2, 0.4, 0.8)]
    assert sorted(tried["thor"]) == [(lr, None) for lr in (0.025, 0.05, 0.1, 0.2, 0.4)][-5:]
    rates = [(lr, None) for lr in (0.025, 0.05, 0.1)]
    assert tried["thor-paper"] == [*rates, (0.1, 0.1), (0.1, 0.3)]
    for batch in (128, 1024):
        settings = resnet18.chosen(rows, batch)
        assert settings["thor-paper"]["damping"] == 0.1
        assert settings["sgd"] == {"optimizer": "sgd", "batch": batch, "lr": 0.8}
        for setting in (*settings.values(), {"optimizer": "thor-muon", "batch": batch}):
            assert all(key_of({**setting, "seed": seed}) in rows for seed in COUNTED)
    keys = [key_of(job) for job in resnet18.jobs(rows)]
    assert len(keys) == len(set(keys)) == 2 * (3 * 5 + 4 * 3 + 1)


def test_table_and_picture_say_when_each_is_where_sgd_ends(monkeypatch):
    """SGD ends at 0.7; THOR is there between the steps 50 (0.6) and 100 (0.8): after 75.

    A step of SGD takes 30 ms, one of THOR twice that and a refresh ten times: 98 steps and 2
    refreshes, of which half of the second 50 steps count.
    """
    ends = {"sgd": 0.7, "thor": 0.8, "thor-paper": 0.65, "thor-muon": 0.8}
    rows = told(
        {"sgd": 0.1, "thor": 0.1, "thor-paper": 0.1},
        lambda job: ends[job["optimizer"]] + (job["seed"] - 1) / 100,
    )
    setting = {**resnet18.chosen(rows, 1024)["thor-paper"], "seed": 1}
    rows[key_of(setting)] = {"job": setting, "value": None, "data": "JPEG copies of CIFAR-10"}
    lines = resnet18.table(rows).splitlines()
    first, last = 48 * 0.06 + 2 * 0.3, 96 * 0.06 + 4 * 0.3
    seconds = (first + last) / 2 / 3.0
    copies = "4.0 | JPEG copies of CIFAR-10 |"
    assert f"| 128 | SGD, tuned | 0.1 | 0.7000 ± 0.0058 | 1.00 | 1.00 | {copies}" in lines
    assert (
        f"| 128 | THOR, lr tuned | 0.1 | 0.8000 ± 0.0058 | 0.75 | {seconds:.2f} | {copies}" in lines
    )
    assert (
        "| 128 | the paper's step, tuned | 0.1 / 0.1 | 0.6500 ± 0.0058 | not reached | not reached "
        f"| {copies}" in lines
    )
    assert (
        "| 1024 | the paper's step, tuned | 0.1 / 0.1 | 1 of 3 seeds diverged | not reached | not "
        f"reached | {copies}" in lines
    )
    assert f"| 128 | ThorMuon | none given | 0.8000 ± 0.0058 | 0.75 | 0.75 | {copies}" in lines
    assert any("0.1: 0.900, 0.1 / 0.1: 0.901, 0.1 / 0.3: 0.900" in line for line in lines)
    drawn = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: drawn.append(figure))
    resnet18.draw(rows)
    panels = drawn[0].axes
    assert [len(panel.lines) for panel in panels] == [4, 4, 3, 3]
    (thor,) = (line for line in panels[1].lines if line.get_label() == "THOR, lr tuned")
    assert thor.get_xdata() == pytest.approx([0, first, last])
    assert thor.get_ydata() == pytest.approx([0.1, 0.6, 0.8])


def test_what_is_not_there_is_not_drawn(monkeypatch):
    drawn = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: drawn.append(figure))
    resnet18.draw({})
    assert drawn == []
    assert len(resnet18.table({}).splitlines()) == 2 + 1 + 2 + 6


def test_a_row_is_verified(small, tmp_path, monkeypatch, capsys):
    def here(name, store, jobs, workers):
        for job in jobs:
            store.keep(key_of(job), study.result_of(name, job))

    monkeypatch.setattr(study, "measure", here)
    store = Lines(tmp_path / "resnet18.jsonl")
    job = {"optimizer": "thor-muon", "batch": BATCH, "seed": 0}
    here("benchmarks.resnet18", store, [job], 1)
    assert store.rows[key_of(job)]["numbers"].keys() == {"ThorMuon"}
    assert store.rows[key_of(job)]["command"] == "python -m benchmarks resnet18"
    assert study.verify("benchmarks.resnet18", store, 1) == 0
    assert capsys.readouterr().out.endswith("agrees\n")
    store.rows[key_of(job)]["value"] += 0.1
    assert study.verify("benchmarks.resnet18", store, 1) == 1
