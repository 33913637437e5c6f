"""gpu_airbench.py and gpu_nanogpt.py: what they add to the fetched code."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import gpu, gpu_airbench, gpu_cifar10, gpu_nanogpt, gpu_summary


def test_texts_of_the_fetched_file_are_changed_and_it_reads_itself(tmp_path):
    file = tmp_path / "code.py"
    file.write_text("import sys\nown = open(sys.argv[0]).read()\nsteps = 8 * 3\n")
    module = gpu_airbench.read(file, {"8 *": "2 *"})
    assert (module.steps, module.own) == (6, file.read_text())
    with pytest.raises(ValueError, match=r"'9 \*' is not in .*code.py: take airbench94_muon.py"):
        gpu_airbench.read(file, {"9 *": "2 *"})


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.whiten, self.norm = nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)
        self.conv, self.head = nn.Conv2d(4, 4, 2, bias=False), nn.Linear(4, 2, bias=False)
        self.whiten.weight.requires_grad = self.norm.weight.requires_grad = False


def test_thor_muon_trains_everything_and_takes_no_negative_rate():
    model = Network()
    bias = model.whiten.bias
    made = gpu_airbench.thor_muon_of_all(model, [{"params": [bias]}], momentum=0.85)
    trained = {id(p) for group in made.param_groups for p in group["params"]}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}
    first, rest = made.param_groups
    assert [id(p) for p in first["params"]] == [id(bias)]
    first["lr"] = -0.01
    model.conv(model.norm(model.whiten(torch.randn(2, 3, 5, 5)))).sum().backward()
    made.step()
    assert (first["lr"], rest["lr"]) == (0.0, 0.08)


def test_an_airbench_table_has_means_over_seeds():
    rows = [
        {
            "job": {"optimizer": "ThorMuon", "epochs": 2, "seed": seed},
            "val_acc": [0.5, 0.7 + seed / 10],
            "tta_val_acc": 0.8 + seed / 10,
            "train_seconds": 1.0 + seed,
        }
        for seed in (0, 1)
    ]
    rows.append({"job": {"optimizer": "ThorMuon", "epochs": 2, "seed": 2}, "failure": "x"})
    line = gpu_airbench.table(rows).splitlines()[2]
    assert line == "| 2 | ThorMuon | 2 | .500, .750 | 0.850 ± 0.050 | 1.50 |"


def test_the_rate_warms_up_and_falls_as_in_train_py():
    config = {"warmup_iters": 100, "lr_decay_iters": 5000, "learning_rate": 1e-3, "min_lr": 1e-4}

    def of_train_py(step):
        if step < 100:
            return 1e-3 * (step + 1) / 101
        done = (step - 100) / 4900
        return 1e-4 + 0.5 * (1.0 + math.cos(math.pi * done)) * 9e-4

    for step in (0, 50, 99, 100, 2000, 5000):
        assert 1e-3 * gpu_nanogpt.share(step, config) == pytest.approx(of_train_py(step))


def test_a_nanogpt_table_says_where_each_is_at_adamws_best():
    curves = {
        "AdamW": [(0, 4.0, 0.0), (250, 2.0, 1.0), (500, 2.5, 2.0)],
        "ThorMuon": [(0, 4.0, 0.0), (250, 1.9, 1.5), (500, 1.5, 3.0)],
        "Muon 0.003": [(0, 4.0, 0.0), (250, 3.0, 1.5), (500, 2.1, 3.0)],
    }
    rows = [
        {"job": {"optimizer": name, "seed": 0}, "curve": curve} for name, curve in curves.items()
    ]
    lines = gpu_nanogpt.table(rows).splitlines()
    assert lines[2] == "| AdamW | 0 | 2.0000 | 250 | step 250, 1.0 s | 2.0 | 4.00 |"
    assert lines[3] == "| Muon 0.003 | 0 | 2.1000 | 500 | – | 3.0 | 6.00 |"
    assert lines[4] == "| ThorMuon | 0 | 1.5000 | 500 | step 250, 1.5 s | 3.0 | 6.00 |"


@pytest.mark.slow
def test_a_study_that_takes_too_long_is_ended_and_its_rows_are_kept(tmp_path, monkeypatch):
    (tmp_path / "gpu_slow.py").write_text(
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "def table(rows):\n    return f'{len(rows)} rows'\n"
        "if __name__ == '__main__':\n"
        "    file = Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "    file.write_text(json.dumps({'job': 1, 'failure': 'lost'}) + '\\n')\n"
        "    time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    report, start = gpu.Report(tmp_path / "out", 100.0), time.monotonic()
    rows = gpu.study(report, "gpu_slow", [], -4.0)
    assert time.monotonic() - start < 300
    assert rows == [{"job": 1, "failure": "lost"}]
    assert "1 rows" in report.lines
    assert report.failures == [
        "gpu_slow, 1: lost",
        "gpu_slow: ended with -9 after 1 trainings",
    ]


def test_the_miniature_data_of_torchvision_are_read(tmp_path):
    import pickle

    folder = tmp_path / gpu_cifar10.ORIGINAL
    folder.mkdir()
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    batch = {"data": images.flatten(1).numpy(), "labels": [3, 1]}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(pickle.dumps(batch))
    words, train, test = gpu_cifar10.load(tmp_path)
    assert words == "CIFAR-10"
    assert train[0].shape == (10, 32, 32, 3)
    assert torch.equal(test[0], images.permute(0, 2, 3, 1))
    assert test[1].tolist() == [3, 1]
    with pytest.raises(FileNotFoundError, match=r"has neither .* says how to make"):
        gpu_cifar10.load(tmp_path / "no folder")


def test_one_table_has_the_times_of_steps_and_the_better_of_muons_rates():
    profile = {"AdamW, fused": [1.0, 3.0], "ThorMuon": [2.0], "ThorMuon, refresh": [9.0]}
    airbench = [("Muon + SGD", 8, 1.0), ("Muon + SGD", 8, 2.0), ("ThorMuon", 4, 3.0)]
    texts = {"Muon 0.001": [4.0, 1.5, 1.6], "Muon 0.003": [4.0, 1.25]}
    found = {
        "Checks": [],
        "Profile of gpt2, batch 8": {name: {"step_ms": own} for name, own in profile.items()},
        gpu_summary.AIRBENCH: [
            {"job": {"optimizer": name, "epochs": n}, "tta_val_acc": 0.5, "train_seconds": seconds}
            for name, n, seconds in airbench
        ],
        gpu_summary.NANOGPT: [
            {"job": {"optimizer": name}, "curve": [(0, loss, 0.0) for loss in losses]}
            for name, losses in texts.items()
        ],
    }
    found[gpu_summary.NANOGPT].append({"job": {"optimizer": "AdamW"}, "failure": "no memory"})
    lines = [line[2:-2].split(" | ") for line in gpu_summary.table(found).splitlines()[2:]]
    assert lines[0] == ["gpt2, batch 8: ms a step", "2.0", "", "", "2.0 (9.0)"]
    assert [line[1:] for line in lines[1:]] == [
        ["", own, "", ""] for own in ("0.5000", "1.50", "1.2500")
    ]


def test_the_recorded_table_is_that_of_the_raw_data():
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    found = json.loads((results / "gpu-h200.json").read_text())
    assert gpu_summary.table(found) in (results / "gpu-h200.md").read_text()
