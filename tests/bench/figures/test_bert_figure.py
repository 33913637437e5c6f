"""The figure of masked-language-model pretraining: measured on a small corpus, its table computed by hand."""

import io

import pytest
from rich.console import Console
from small_bert import use_small_recipe

from torch_thor.bench.figures import Options, bert, make_figures, read


@pytest.fixture
def small(tmp_path, monkeypatch):
    use_small_recipe(tmp_path, monkeypatch)


def test_accuracy_by_steps_and_seconds(small, tmp_path):
    console = Console(file=io.StringIO(), width=200)
    make_figures("bert", tmp_path, console, Options(seeds=(0,)), device="cpu")
    raw = read(tmp_path / "bert.json", "bert")
    assert [run["job"] for run in raw.runs] == [{"optimizer": name, "seed": 0} for name in bert.OPTIMIZERS]
    for run in raw.runs:
        assert run["steps"]["step"] == [1, 2, 3, 4]
        assert run["evaluations"]["step"] == [2, 4]
    text = (tmp_path / "bert.md").read_text()
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines() if " | " in line}
    target = raw.runs[0]["evaluations"]["mlm_accuracy"][-1]
    for run in raw.runs:
        values = run["evaluations"]["mlm_accuracy"]
        steps = next((step for step, value in zip((2, 4), values, strict=True) if value >= target), None)
        row = rows[run["job"]["optimizer"]]
        assert row[1].startswith(f"{values[-1]:.4f}")
        assert row[4].startswith("-" if steps is None else str(steps)) or (steps is None and "not" in row[4])
    assert "Theirs, not ours" in text
    assert "71.30%" in text
    assert (tmp_path / "bert.png").exists()
