"""README's first table: it is that of the raw data, and what it says of AdamW, by hand."""

from pathlib import Path

from benchmarks import front, suite_report
from benchmarks.runner.stores import key_of
from benchmarks.suite_problems import PROBLEMS

ROOT = Path(__file__).parents[2]


def test_readme_shows_the_raw_data():
    text = (ROOT / "README.md").read_text()
    table = front.table(*map(front.rows_of, front.STUDIES), front.of_gpu())
    assert table in text
    assert table.count("\n") == 7
    assert len(text.split()) <= 700
    assert suite_report.README.keys() <= PROBLEMS.keys()


def test_shares_of_adamws_steps_and_seconds_by_hand():
    """Tuned AdamW ends at 12 after 400 steps of 2 ms, where ThorMuon is after 150, of 3 ms."""
    curves = {
        "adamw": [[200, 20.0], [400, 12.0]], "muon": [[200, 9.0], [400, 8.0]],
        "soap": [[200, 9.0], [400, 9.0]], "thor-muon": [[100, 16.0], [200, 8.0]],
    }  # fmt: skip
    rows, settings = {}, {}
    for name, curve in curves.items():
        settings[name] = {"task": "autoencoder", "optimizer": name, "lr": 0.08}
        for seed in range(3):
            job = {**settings[name], "seed": seed}
            one = {"value": curve[-1][1] + 0.1 * seed, "curve": curve, "refreshes": 0}
            rows[key_of(job)] = {"job": job, **one}
    job = {"task": "autoencoder", "settings": {}, "alone": True}
    rows[key_of(job)] = {"job": job, "milliseconds": {"adamw": 2.0, "thor-muon": 3.0}}
    contest = suite_report.Contest("autoencoder", rows, settings, {})
    steps = (100 + 100 * (16 - 12.1) / 8) / 400
    assert front.shares(contest) == (f"{steps:.2f}", f"{1.5 * steps:.2f}")


def test_the_picture_needs_times_and_is_drawn_with_them(tmp_path, monkeypatch):
    from test_nanogpt_study import told

    monkeypatch.setattr(front, "PICTURE", tmp_path / "front.png")
    rows = told({"nanogpt-adamw": 0.004, "muon": 0.02, "soap": 0.004})
    times = rows.pop(key_of(front.nanogpt.TIMES))
    tuned = front.rows_of("finetuning")
    front.draw(rows, tuned)
    assert not front.PICTURE.exists()
    front.draw(rows | {key_of(front.nanogpt.TIMES): times}, tuned)
    assert front.PICTURE.exists()
    (line,) = front.of_nanogpt(rows)
    assert line[1:4] == ["2.0100 ± 0.0058", "2.0100 ± 0.0058", "1.5100 ± 0.0058"]
