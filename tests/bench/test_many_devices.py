"""The benchmarks of many devices: bytes of other schemes by hand, and tables that come out of the raw data again."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_thor import THOR

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "plan"


@pytest.fixture
def opened(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_whole_blocks(opened):
    """Four blocks of 4 rows on two processes: each sends half of 64 numbers, for sums, for factors and for inverses."""
    layers = list(THOR(nn.Linear(8, 8, bias=False), split_dim=4).curvature.values())
    assert opened("many_devices").unpacked_bytes(layers, 2) == 3 * 4 * 32


def test_few_large_blocks_are_reduced_whole(opened):
    """Two blocks on eight processes: padding would take four times as much, so all of it is sent twice."""
    layers = list(THOR(nn.Linear(8, 8, bias=False), split_dim=None).curvature.values())
    assert opened("many_devices").unpacked_bytes(layers, 8) == 3 * 4 * 2 * 128 * 7 // 8


def test_elements_of_muon(opened):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    assert opened("many_devices").matrix_elements(model) == 20


def test_a_step_with_a_refresh_in_every_hundredth(opened):
    rounds = [{"1": {name: [1.0] for name in ("sgd ddp", "adamw fsdp")}, "2": {}}]
    rounds[0]["1"] |= {"thor ddp": [1.0], "thor ddp refresh": [3.0], "thor fsdp": [1.0], "thor fsdp refresh": [1.0]}
    rounds[0]["2"] = {name: [3 * seconds for seconds in times] for name, times in rounds[0]["1"].items()}
    rounds[0]["2"]["thor ddp refresh"] = [109.0]
    found = opened("many_devices").scaling_ratios({"rounds": rounds})
    assert found["sgd ddp"] == {"1": [1.0], "2": [3.0]}
    assert found["thor ddp"]["2"] == [pytest.approx((3 + 1.06) / 1.02)]


def test_collectives_of_a_step_are_counted(opened, monkeypatch):
    check, counted = opened("plan_check"), []
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda output, given: None)
    with check.counting(counted, 4):
        torch.distributed.all_gather_into_tensor(torch.zeros(40), torch.zeros(10))
    assert counted == [120]


@pytest.mark.skipif(not RESULTS.exists(), reason="recorded results are in the repository alone")
@pytest.mark.parametrize(
    ("module", "function", "file"),
    [
        ("many_devices", "bytes_table", "bytes"),
        ("many_devices", "scaling_table", "scaling"),
        ("plan_check", "tables", "check"),
    ],
)
def test_tables_of_the_report_come_out_of_the_raw_data(opened, module, function, file):
    text = getattr(opened(module), function)(json.loads((RESULTS / f"{file}.json").read_text()))
    assert text in (ROOT / "docs" / "measurements" / "many-devices.md").read_text()


@pytest.mark.skipif(not RESULTS.exists(), reason="recorded results are in the repository alone")
def test_all_predicted_bytes_are_those_that_were_sent():
    raw = json.loads((RESULTS / "check.json").read_text())
    ranks = [one for worlds in raw["models"].values() for ranks in worlds.values() for one in ranks]
    assert len(ranks) == 2 * (1 + 2 + 4)
    for one in ranks:
        assert all(one[form]["bytes predicted"] == one[form]["bytes measured"] for form in ("DDP", "FSDP2"))
