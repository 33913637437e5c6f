"""The studies beside the suite: what they compute from raw data, by hand, and their tables."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from benchmarks.figures import FIGURES
from benchmarks.runner import study as runner
from benchmarks.runner.golden import present_numbers
from benchmarks.runner.stores import Lines, key_of
from golden.runs import RUNS_OF

ROOT = Path(__file__).parents[2]
STUDIES = (
    "anytime", "cifar10", "defaults", "finetuning", "many_devices", "models", "nanogpt", "resnet18",
    "step_time", "untrained", "wikitext",
)  # fmt: skip


def study(name):
    return importlib.import_module(f"benchmarks.{name}")


def test_rows_have_the_numbers_of_the_optimizers_that_made_them():
    present, results = present_numbers(), ROOT / "benchmarks" / "results"
    assert present.keys() == RUNS_OF.keys()
    made_by = {f"{name}.jsonl": study(name) for name in (*STUDIES, "suite")}
    made_by |= {f"figures/{name}.jsonl": figure for name, figure in FIGURES.items()}
    files = {str(path.relative_to(results)) for path in results.rglob("*.jsonl")}
    # a run on a GPU (gpu.py) is stored as a whole
    assert {file for file in files if not file.startswith("gpu-")} == made_by.keys()
    seen = set()
    for file, module in made_by.items():
        for key, row in Lines(results / file).rows.items():
            assert row["numbers"].keys() == set(module.optimizers(row["job"])), (file, key)
            assert all(number <= present[name] for name, number in row["numbers"].items())
            seen |= row["numbers"].keys()
    assert seen == {"THOR", "ThorMuon", "LAMB"}


FIGURE_OPTIONS = {  # those of docs/measurements/paper.md
    "fisher-norm": [{"seeds": (0, 1, 2)}, {"seeds": (0, 1, 2), "data": "digits"}],
    "split-dim": [{}],
}


@pytest.mark.parametrize("name", FIGURES)
def test_the_raw_data_of_a_figure_are_those_of_its_command(name):
    results = Lines(ROOT / "benchmarks" / "results" / "figures" / f"{name}.jsonl")
    options = FIGURE_OPTIONS.get(name, [{"seeds": (0, 1, 2)}])
    jobs = [job for given in options for job in FIGURES[name].jobs(given, "cpu")]
    assert {key_of(job) for job in jobs} == results.rows.keys()


@pytest.mark.parametrize("name", [*STUDIES, "suite"])
def test_no_job_of_a_study_is_left(name):
    rows = Lines(ROOT / "benchmarks" / "results" / f"{name}.jsonl").rows
    assert [job for job in study(name).jobs(rows) if key_of(job) not in rows] == []


def test_the_order_of_options_is_no_part_of_a_job():
    job = {"seed": 0, "recipe": {"lr": 0.1, "schedule": {"kind": "cosine", "final": 0.0}}}
    other = {"recipe": {"schedule": {"final": 0.0, "kind": "cosine"}, "lr": 0.1}, "seed": 0}
    assert key_of(job) == key_of(other)
    other["recipe"]["schedule"]["final"] = 0.5
    assert key_of(job) != key_of(other)


def test_bytes_that_are_sent():
    many = study("many_devices")
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 2))
    assert many.matrix_elements(model) == 20  # embeddings and the classifier are AdamW's
    sent = many.run({"part": "bytes", "model": "resnet18"})["sent"]
    for n, found in ((int(n), found) for n, found in sent.items()):
        assert found["gradients"] == pytest.approx(2 * 4 * 11_689_512 * (n - 1) / n, rel=0.01)
        assert found["shampoo"] == 4 * 11_689_512 * (n - 1) // n
        assert 0 < found["thor sharded"] <= found["thor"]


def test_a_step_with_a_refresh_in_every_hundredth():
    many = study("many_devices")
    one = {name: [1.0] for name in many.FORMS} | {
        "thor ddp refresh": [3.0],
        "thor fsdp refresh": [1.0],
    }
    more = {name: [3 * seconds for seconds in times] for name, times in one.items()} | {
        "thor ddp refresh": [109.0]
    }
    found = many.scaling([{"1": one, "2": more, "4": more}])
    assert found["sgd ddp"] == {"1": [1.0], "2": [3.0], "4": [3.0]}
    assert found["thor ddp"]["2"] == [pytest.approx((3 + 1.06) / 1.02)]


def test_a_training_that_stopped_is_the_worst_of_its_case():
    defaults = study("defaults")
    rows = {
        key_of(job): {"job": job, "first": 9.0, "value": 1.0 + job["seed"]}
        for job in defaults.jobs({})
    }
    del rows["case DQN on CartPole: return, optimizer … bound 0.05, seed 2"]["value"]
    del rows["case LoRA, rank 4: loss, optimizer ThorMuon, defaults, seed 0"]["value"]
    rows.pop("case PPO on CartPole: return, optimizer AdamW(1e-3), seed 1")
    rows["case ResNet, 8 layers, 8 wide, 10 matrices, optimizer lr 0.16, seed 0"]["value"] = 0.5
    table = defaults.table(rows)
    assert (
        "| DQN on CartPole: return | 9 | 2 (1, 2, 3) | 2 (1, 2, 3) | 1 (1, 2, stopped) | 2 (1, 2, "
        "3) |" in table
    )
    assert "| 3.0000 (stopped, 2.0000, 3.0000) |" in table
    assert "PPO" not in table
    assert (
        "| ResNet, 8 layers, 8 wide, 10 matrices | 9.0000 | 1.0000 | 1.0000 | 0.5000 | 2.000 |"
        in table
    )


def by_data(rows):
    """The rows of a figure for each data set that it is made of."""
    found = {}
    for row in rows.values():
        data = row["job"].get("recipe", {}).get("data", {}).get("name")
        found.setdefault(data, []).append(row)
    return found


@pytest.mark.parametrize("name", [*STUDIES, "suite"])
def test_the_tables_beside_the_raw_data_are_theirs(name):
    results = ROOT / "benchmarks" / "results"
    tables = study(name).table(Lines(results / f"{name}.jsonl").rows)
    assert tables.count("\n") > 1
    assert (results / f"{name}.md").read_text() == runner.page(name, tables)


@pytest.mark.parametrize("name", FIGURES)
def test_the_tables_of_a_figure_are_those_of_its_raw_data(name):
    results = ROOT / "benchmarks" / "results" / "figures"
    page = (results / f"{name}.md").read_text()
    for rows in by_data(Lines(results / f"{name}.jsonl").rows).values():
        assert FIGURES[name].table(rows) in page


@pytest.mark.parametrize("name", ["cifar10", "finetuning", "nanogpt", "step_time", "suite"])
def test_each_row_that_readme_shows_can_be_run_again(name):
    one, rows = study(name), Lines(ROOT / "benchmarks" / "results" / f"{name}.jsonl").rows
    headlines = one.headlines(rows)
    assert headlines
    for job in headlines:
        assert rows[key_of(job)]["value"] is not None
        assert one.tolerance(rows, job) > 0


# ---- fine-tuning ---------------------------------------------------------------------------------


def test_the_learning_rate_of_adamw_is_chosen_by_the_other_half_and_other_seeds():
    tuned, rows = study("finetuning"), {}
    for lr, seed, value in (
        (2e-5, 10, 1.6), (5e-5, 10, 1.3), (1e-4, 10, 1.4), (1e-4, 0, 0.1), (2e-4, 10, 1.5),
        (5e-4, 10, 1.2), (1e-3, 10, 1.25),
    ):  # fmt: skip
        job = {"task": "gpt-adamw", "optimizer": "adamw", "lr": lr, "seed": seed}
        rows[key_of(job)] = {"job": job, "value": value}
    assert tuned.chosen_rate(rows, "gpt-adamw", tuned.ADAMW[False]) == 5e-5  # a loss
    assert tuned.chosen_rate(rows, "gpt-adamw", None) is None  # 2e-3 is missing
    job = {"task": "gpt-adamw", "optimizer": "adamw", "lr": 2e-3, "seed": 10}
    rows[key_of(job)] = {"job": job, "value": 1.7}
    assert tuned.chosen_rate(rows, "gpt-adamw", None) == 5e-4


def test_ways_to_scale_a_learning_rate():
    """By hand: small first weights, the share of signal, and a distance that gradients prove."""
    ways, model = study("finetuning_ways"), nn.Linear(4, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(0.1)
    found = ways.small(model, {})(0)
    # ‖W‖ = 0.1 √8; a step at lr 1 has the norm √2
    assert found[model.weight] == pytest.approx(math.sqrt(0.1 * math.sqrt(8 * 3) / math.sqrt(2)))
    assert found[model.bias] == 1.0

    noise, generator = ways.noise(model, {"least": 0.01}), torch.Generator().manual_seed(0)
    for step in range(200):
        model.weight.grad = torch.ones_like(model.weight)
        model.bias.grad = torch.randn(2, generator=generator, dtype=torch.float64)
        found = noise(step)
    assert found[model.weight] == pytest.approx(1.0)
    assert found[model.bias] < 0.6

    # the gradient of ‖W - 3‖_1, with steps of 0.01 to all entries: at most 2.9 away, in the norm
    # whose dual is the sum of singular values
    distance = ways.distance(model, {"first": 0.01, "rate": 0.08})
    for step in range(100):
        model.weight.grad = (model.weight.detach() - 3).sign()
        model.bias.grad = torch.zeros_like(model.bias)
        found = distance(step)[model.weight]
        with torch.no_grad():
            model.weight.sub_(0.01 * model.weight.grad)
    moved = 0.01 * 99 * math.sqrt(8)  # the largest singular value of what was added
    assert 0.01 < found <= min(1.0, moved / 0.08)


def test_every_problem_is_drawn_with_its_means_and_standard_errors():
    tuned = study("finetuning")
    rows = Lines(ROOT / "benchmarks" / "results" / "finetuning.jsonl").rows
    axes = Figure().subplots()
    tuned.compare(axes, rows, {"gpt-adamw": "a", "minilm-trec": "b"}, tuple(tuned.COLOURS))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert len(axes.containers) == 6
    adamw = axes.containers[2]  # the last of the first problem: 1.38817 ± 0.00062 in the table
    assert adamw.lines[0].get_xdata() == pytest.approx([1.38817], abs=5e-6)
    ends = adamw.lines[2][0].get_segments()[0][:, 0]
    assert (ends[1] - ends[0]) / 2 == pytest.approx(0.00062, abs=5e-6)
