"""gpu.py, in miniature on the CPU: every part runs, and what is wrong is told while the other parts
go on.
"""

import json
import sys
from pathlib import Path

import pytest
import torch

from torch_thor.bench.study import load

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(tmp_path, monkeypatch):
    """`python gpu.py --device cpu --tiny`: what it wrote."""
    gpu = load(str(ROOT / "benchmarks" / "gpu.py"))
    monkeypatch.setattr(
        sys, "argv", ["gpu.py", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    )

    def called(failing=()):
        if failing:
            with pytest.raises(SystemExit, match="failed:"):
                gpu.main()
        else:
            gpu.main()
        return json.loads((tmp_path / "gpu.json").read_text()), (tmp_path / "gpu.md").read_text()

    return gpu, called


@pytest.mark.filterwarnings("ignore")
def test_a_miniature_of_everything(call):
    found, text = call[1]()
    checks = found["Checks"]
    assert len(checks) == 11
    assert all(one["error"] < one["limit"] for one in checks)
    exact = {one["check"]: one["error"] for one in checks}
    assert exact["THOR, float64, against the reference"] < 1e-12
    assert list(found["Step times"]) == ["resnet18", "bert-tiny"]
    assert found["Step times"]["resnet18"]["state_bytes"]["AdamW"] == pytest.approx(8, abs=0.01)
    trained = found["Trainings"]
    assert {row["job"]["optimizer"] for row in trained} >= {"thor-muon", "sgd", "adamw", "muon"}
    assert all(row["value"] is not None or "missing" in row["failure"] for row in trained)
    assert "| THOR, float64, against the reference |" in text
    assert found["failures"] == []


def test_what_is_wrong_is_told_and_the_other_parts_go_on(call, monkeypatch):
    gpu, called = call
    monkeypatch.setattr(
        gpu, "errors", lambda device: iter([("good", 0.1, 0.2), ("bad", float("nan"), 0.2)])
    )
    monkeypatch.setattr(gpu, "times", lambda *words: 1 / 0)
    monkeypatch.setattr(gpu, "train", lambda *words: [str(torch.device("cpu"))])
    found, text = called(failing=("bad",))
    assert found["failures"] == [
        "bad: nan is not below 2e-01",
        "Step times: ZeroDivisionError: division by zero",
    ]
    assert found["Trainings"] == ["cpu"]
    assert "FAILED: bad" in text
