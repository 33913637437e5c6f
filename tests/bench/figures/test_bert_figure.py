"""The table of masked-language-model pretraining, computed by hand from runs that nobody trained."""

from torch_thor.bench.figures import RawData
from torch_thor.bench.figures.bert import BERT

METRICS = ("loss", "mlm_accuracy", "perplexity", "nsp_accuracy")


def run(optimizer, seed, seconds, accuracies):
    """A run of four steps, the first of which refreshes; evaluated after two and after four."""
    clock = [seconds * step for step in (2, 3, 4, 5)]  # the first step takes twice as long
    steps = {"seconds": clock, "refresh": [True, False, False, False]}
    values = ([5.0] * 2, accuracies, [200.0, 400.0], [0.5] * 2)
    evaluations = {"step": [2, 4], **dict(zip(METRICS, values, strict=True)), "averaged_mlm_accuracy": [None] * 2}
    columns = {"steps": steps, "evaluations": {**evaluations, "primary": ["mlm_accuracy"], "higher_is_better": [True]}}
    return {"job": {"optimizer": optimizer, "seed": seed}, **columns, "processor_seconds": clock, "steps_per_epoch": 8}


def test_accuracy_and_what_it_took_to_reach_that_of_lamb():
    runs = [
        run("lamb", 0, 0.5, (0.25, 0.5)),
        run("lamb", 1, 0.5, (0.125, 0.375)),
        run("thor", 0, 1.0, (0.5, 0.75)),  # there after two steps
        run("thor", 1, 1.0, (0.25, 0.375)),  # after four
        run("thor-muon", 0, 2.0, (0.375, 0.4375)),  # never
        run("thor-muon", 1, 2.0, (0.4375, 0.25)),  # after two, and lost again
    ]
    settings = {"device": "cpu", "seeds": [0, 1], "optimizers": ["lamb", "thor", "thor-muon"]}
    text = BERT.table(RawData("bert", settings, {"threads": 1}, runs))
    cells = {row[0]: row[1:] for line in text.splitlines() if (row := line.strip("| ").split(" | "))}
    same = ["400 ± 0 (400, 400)", "0.500 ± 0.000 (0.500, 0.500)"]
    assert cells["lamb"] == [
        "0.4375 ± 0.0884 (0.5000, 0.3750)", *same, "4 ± 0 (4, 4)", "2.5 ± 0 (2.5, 2.5)", "500 ms"
    ]  # fmt: skip
    assert cells["thor"] == [
        "0.5625 ± 0.2652 (0.7500, 0.3750)", *same, "3 ± 1 (2, 4)", "4 ± 1.41 (3, 5)", "1000 ms"
    ]  # fmt: skip
    assert cells["thor-muon"] == [
        "0.3438 ± 0.1326 (0.4375, 0.2500)", *same, "never, 2", "never, 6", "2000 ms"
    ]  # fmt: skip
    assert "Times are processor seconds of training steps (one thread), without evaluations." in text
    assert "Theirs, not ours" in text
    assert "71.30%" in text
