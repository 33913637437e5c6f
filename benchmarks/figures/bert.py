"""Accuracy on masked tokens against epochs and seconds, with five optimizers.

These are LAMB, AdamW, THOR, THOR without a bound, and ThorMuon.
"""

from collections.abc import Sequence

from benchmarks.figures import curves
from benchmarks.figures.training import Options, Row, jobs_of, measured, words_of

ABOUT = (
    "accuracy on masked tokens of a small BERT against epochs and seconds: LAMB, AdamW, THOR, "
    "unbounded, ThorMuon"
)
TAKES = ("epochs", "eval_interval", "seeds")
RECIPE, QUICK = "bert-tiny", ("epochs=14", "eval_interval=28")
# without a bound the recipe's lr and damping diverge after 26 steps; these are the best of five
# short trainings
UNBOUNDED = [*curves.UNBOUNDED, "lr=0.01", "damping=0.1"]
SETTINGS = {"lamb": (), "adamw": (), "thor": (), "thor, unbounded": UNBOUNDED, "thor-muon": ()}
MINUTES = {"thor, unbounded": "14, to 71.3 % of the masked tokens"}
THEIRS = (
    "Theirs, not ours, and another task: BERT-large on the data of MLPerf 0.7, 8 Ascend 910 "
    "(README of MindSpore's bert_thor)."
)


def jobs(options: Options, device: str) -> list[Row]:
    """List the trainings."""
    settings = [
        ({"setting": name}, name.partition(",")[0], words) for name, words in SETTINGS.items()
    ]
    return jobs_of(words_of(options, RECIPE, QUICK), options, device, settings)


def table(rows: Sequence[Row]) -> str:
    """Return final accuracies, and what it took to reach LAMB's."""
    return curves.comparison(rows, MINUTES, THEIRS)


run, optimizers, draw = measured, curves.optimizers, curves.draw
