"""The study of many devices: bytes of other schemes by hand, and the arithmetic of its tables."""

from pathlib import Path

import pytest
from torch import nn

from torch_thor.bench.study import Lines, load

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study():
    return load(str(ROOT / "benchmarks" / "many_devices.py"))


def test_bytes_that_are_sent(study):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    assert study.matrix_elements(model) == 20  # embeddings and the classifier are AdamW's
    sent = study.run({"part": "bytes", "model": "resnet18"})["sent"]
    for n, found in ((int(n), found) for n, found in sent.items()):
        assert found["gradients"] == pytest.approx(2 * 4 * 11_689_512 * (n - 1) / n, rel=0.01)
        assert found["shampoo"] == 4 * 11_689_512 * (n - 1) // n
        assert 0 < found["thor sharded"] <= found["thor"]


def test_a_step_with_a_refresh_in_every_hundredth(study):
    one = {name: [1.0] for name in study.FORMS} | {"thor ddp refresh": [3.0], "thor fsdp refresh": [1.0]}
    more = {name: [3 * seconds for seconds in times] for name, times in one.items()} | {"thor ddp refresh": [109.0]}
    found = study.scaling([{"1": one, "2": more, "4": more}])
    assert found["sgd ddp"] == {"1": [1.0], "2": [3.0], "4": [3.0]}
    assert found["thor ddp"]["2"] == [pytest.approx((3 + 1.06) / 1.02)]


def test_the_page_shows_the_raw_data(study):
    rows = Lines(ROOT / "benchmarks" / "results" / "many_devices.jsonl").rows
    text = (ROOT / "docs" / "measurements" / "many-devices.md").read_text()
    assert all(part in text for part in study.table(rows).split("\n\n"))
