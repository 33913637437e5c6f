"""The recorded results: each benchmark's table comes out of its raw data again, word for word."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"

pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="recorded results are in the repository alone")


@pytest.fixture
def opened(monkeypatch, tmp_path):
    """Gives a benchmark with links to its raw data in another folder, where its tables go."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def open_one(name):
        module = importlib.import_module(name)
        for path in (RESULTS / name).glob("*.json"):
            if path.name != "table.json":
                (tmp_path / path.name).symlink_to(path)
        monkeypatch.setattr(module.STORE, "folder", tmp_path)
        return module

    return open_one


@pytest.mark.parametrize("name", ["fashion_mnist", "norms", "trace_rule"])
def test_tables_are_those_that_were_recorded(opened, tmp_path, name):
    text = opened(name).table()
    assert text + "\n" == (RESULTS / name / "table.md").read_text()
    for kind in ("table.md", "table.json"):
        assert (tmp_path / kind).read_bytes() == (RESULTS / name / kind).read_bytes()


def test_nothing_is_missing_where_all_was_recorded(opened, tmp_path):
    fashion = opened("fashion_mnist")
    runs = [run for search in fashion.searches() for run in (*search.tries, *search.chosen())]
    assert len(runs) == 5 * 5 + 5 * 3
    assert all(fashion.STORE.holds(run.key) for run in runs)
    best = fashion.search("muon").best()
    fashion.STORE.file(best.key).unlink()
    assert [run for run in runs if not fashion.STORE.holds(run.key)] == [best]


def test_steps_and_settings_of_the_scale_free_comparison(opened):
    """All but the times: the step times were taken anew after the table was."""
    opened("scale_free")
    report = importlib.import_module("scale_free_report")
    recorded = (RESULTS / "scale_free" / "table.md").read_text().splitlines()
    found = report.tables().splitlines()
    assert [line.rpartition(" | ")[0] for line in found] == [line.rpartition(" | ")[0] for line in recorded]
    assert len(found) > 50


def test_raw_data_of_other_options_are_refused(opened):
    module = opened("normalizer_free")
    options = {"free": "test_nfnet", "norm": "test_resnet", "images": 30_000, "size": 28, "seeds": 2, "device": "cpu"}
    planned = module.runs(module.argparse.Namespace(**options))
    text = module.table(planned, range(1, 3))
    assert text + "\n" == (RESULTS / "normalizer_free" / "table.md").read_text()
    planned = module.runs(module.argparse.Namespace(**{**options, "images": 500}))
    with pytest.raises(SystemExit, match=r"was measured with \{'images': 30000\}: give these options"):
        module.table(planned, range(1, 3))


def test_the_table_of_sharded_orthogonalisation_is_that_of_its_raw_data(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("sharded_orthogonalisation")
    page = BENCHMARKS.parent / "docs" / "how-to" / "fsdp.md"
    assert module.table(module.raw_data()["runs"]) in page.read_text()
