"""The study of CIFAR-10 with airbench94: which code runs, and what the table says."""

import pickle

import pytest
import torch

from benchmarks import cifar10
from benchmarks.gpu_airbench import OWN, THOR_MUON
from benchmarks.gpu_cifar10 import ORIGINAL
from benchmarks.runner.stores import key_of
from torch_thor.errors import UserError

# what stands in build/airbench, as small as it can be
AIRBENCH = """
from math import ceil
import os
import torch
from torch import nn
import torch.nn.functional as F

seen = []

@torch.compile
def halved(x):
    return x.bfloat16() / 2

class Muon(torch.optim.SGD):
    def __init__(self, params, lr=1e-3, momentum=0, nesterov=False):
        super().__init__(params, lr=lr, momentum=momentum, nesterov=nesterov)

class CifarNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.whiten = nn.Conv2d(3, 4, 2)
        self.whiten.weight.requires_grad = False
        self.conv = nn.Conv2d(4, 4, 2, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        self.half()

    def forward(self, x):
        return self.head(halved(self.conv(self.whiten(x).relu())).mean((2, 3)))

def print_training_details(variables, is_final_entry):
    print("a table")

def main(run, model):
    batch_size = 2000
    total_train_steps = ceil(8 * 2)
    whiten_bias_train_steps = ceil(3 * 2)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    data = torch.load(os.path.join("cifar10", "train.pt"), map_location=torch.device("cuda"))
    images, labels = (data["images"].half() / 255).permute(0, 3, 1, 2), data["labels"]
    model.conv.reset_parameters()
    filters = [model.conv.weight]
    rest = [dict(params=[model.whiten.bias], lr=0.1), dict(params=[model.head.weight], lr=0.1)]
    optimizers = [
        torch.optim.SGD(rest, momentum=0.85, nesterov=True), Muon(filters, 0.24, 0.6, True),
    ]
    seen.append((batch_size, total_train_steps, whiten_bias_train_steps, len(images), optimizers))
    for epoch in range(ceil(total_train_steps / 2)):
        start.record()
        for step in range(2):
            F.cross_entropy(model(images), labels).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
        end.record()
        torch.cuda.synchronize()
        time_seconds = start.elapsed_time(end) / 1000
        train_acc = val_acc = (model(images).argmax(1) == labels).float().mean().item()
        print_training_details(locals(), is_final_entry=False)
    print_training_details(locals(), is_final_entry=True)
    return val_acc
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """An empty folder with others' files, small."""
    monkeypatch.chdir(tmp_path)
    folder = cifar10.DATA / ORIGINAL
    folder.mkdir(parents=True)
    pixels = torch.randint(256, (3, 3 * 32 * 32), generator=torch.Generator().manual_seed(0))
    batch = {"data": pixels.byte().numpy(), "labels": [3, 1, 4]}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps(batch))
    cifar10.CODE.parent.mkdir(parents=True)
    cifar10.CODE.write_text(AIRBENCH)


def test_the_fetched_file_runs_as_it_is_with_its_optimizers_or_ours(small, capsys, monkeypatch):
    made = []

    class Kept(cifar10.Study):
        def __init__(self, *words):
            super().__init__(*words)
            made.append(self.module)

    monkeypatch.setattr(cifar10, "Study", Kept)
    for name, classes in ((OWN, ["SGD", "Muon"]), (THOR_MUON, ["ThorMuon", "Nothing"])):
        job = {"optimizer": name, "epochs": 4, "seed": 0}
        row = cifar10.run(job)
        batch, steps, bias_steps, images, optimizers = made[-1].seen[0]
        # 3/8 of the epochs for the whitening bias, of which 8 are its own number
        assert (batch, steps, bias_steps, images) == (2000, 8, 3, 15)
        assert [type(one).__name__ for one in optimizers] == classes
        assert len(row["val_acc"]) == 4
        assert (row["value"], row["data"]) == (row["tta_val_acc"], "CIFAR-10")
        assert cifar10.optimizers(job) == (["ThorMuon"] if name == THOR_MUON else [])
    assert capsys.readouterr().out == ""
    assert not torch.cuda.Event.__module__.startswith("benchmarks")


def test_the_network_and_its_batch_are_not_made_smaller():
    assert cifar10.STRIDE == 1
    assert all(new == ".float()" for new in cifar10.CHANGES.values())


def test_what_is_missing_is_named_with_where_it_comes_from(small):
    cifar10.CODE.unlink()
    with pytest.raises(
        UserError, match=r"airbench94_muon.py is missing: save it from KellerJordan"
    ):
        cifar10.run(cifar10.jobs({})[0])


def test_the_table_has_means_over_seeds_and_says_where_they_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "PICTURE", tmp_path / "cifar10.png")
    rows = {}
    for job in cifar10.jobs({}):
        if job["epochs"] == 2 and job != {"optimizer": OWN, "epochs": 2, "seed": 2}:
            ours, seed = job["optimizer"] == THOR_MUON, job["seed"]
            rows[key_of(job)] = {
                "job": job,
                "val_acc": [0.5, 0.6 + seed / 10],
                "value": 0.7 + seed / 10,
                "train_seconds": 10.0 * (seed + 1),
                "data": "JPEG copies of CIFAR-10",
                "device": "NVIDIA H200" if ours and seed else "cpu",
            }
    own, ours = cifar10.table(rows).splitlines()[2:]
    words = "JPEG copies of CIFAR-10 |"
    assert own == f"| 2 | Muon + SGD | 2 | .500, .650 | 0.750 ± 0.050 | 15.00 | {words} cpu |"
    # seconds of two devices have no mean, and no axis of a picture
    cifar10.draw(rows)
    assert not cifar10.PICTURE.exists()
    after = ".500, .700 | 0.800 ± 0.058 |  |"
    assert ours == f"| 2 | ThorMuon | 3 | {after} {words} NVIDIA H200, cpu |"


def test_what_is_drawn_is_the_accuracy_after_each_epoch():
    rows = [{"val_acc": [0.5, 0.6 + seed / 10], "train_seconds": 1.0 + seed} for seed in (0, 1)]
    found = cifar10.drawn(OWN, 2, rows)
    assert (found.label, found.steps, found.seconds) == (OWN, [25, 50], [0.75, 1.5])
    assert found.values == [[0.5, 0.6], [0.5, 0.7]]


def test_a_picture_needs_more_than_two_points(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar10, "PICTURE", tmp_path / "cifar10.png")
    for epochs in (2, 4):
        job = {"optimizer": OWN, "epochs": epochs, "seed": 0}
        row = {"val_acc": [0.5] * epochs, "train_seconds": 1.0, "device": "cpu"}
        cifar10.draw({key_of(job): row})
        assert cifar10.PICTURE.exists() == (epochs == 4)


def test_what_readme_shows_comes_after_what_takes_minutes():
    jobs = cifar10.headlines({})
    assert [job["epochs"] for job in jobs] == [2, 2, 8, 8]
    assert {job["optimizer"] for job in jobs} == {OWN, THOR_MUON}
    assert all(job in cifar10.jobs({}) for job in jobs)


def test_on_a_gpu_the_file_is_as_it_is_and_the_network_is_compiled_first(small, monkeypatch):
    trained = []

    class Told:
        def __init__(self, code, data, device, changes):
            assert (device.type, changes) == ("cuda", {})

        def train(self, name, epochs, seed):
            trained.append((name, epochs, seed))
            return {"tta_val_acc": 0.5}

    monkeypatch.setattr(cifar10, "DEVICE", torch.device("cuda"))
    monkeypatch.setattr(cifar10, "Study", Told)
    assert cifar10.run(cifar10.jobs({})[0])["value"] == 0.5
    assert trained == [(OWN, 2, "warmup"), (OWN, 2, 0)]
