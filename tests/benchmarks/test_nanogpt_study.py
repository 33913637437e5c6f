"""The study of nanoGPT's example: what is tuned, what is trained, and what the tables say."""

import math

import pytest
import torch

from benchmarks import nanogpt
from benchmarks.runner.stores import key_of
from torch_thor.errors import UserError

# what stands in build/nanogpt, as small as it can be
MODEL = """
import torch
from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F

@dataclass
class GPTConfig:
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    bias: bool
    dropout: float

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.n_embd)
        self.inside = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x, y):
        logits = self.head(torch.relu(self.inside(self.table(x))))
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        print("what is said is not shown")
        return torch.optim.AdamW(
            self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay
        )
"""
CONFIG = "learning_rate, min_lr, beta2, warmup_iters, n_embd = 1e-3, 1e-4, 0.99, 100, 384\n"
SMALL = {"block_size": 8, "batch_size": 2, "n_embd": 8, "max_iters": 6, "lr_decay_iters": 6}
SMALL |= {"warmup_iters": 2, "eval_interval": 3, "eval_iters": 2}
SETTINGS = {
    "adamw": {"optimizer": "adamw", "lr": 0.004},
    "muon": {"optimizer": "muon", "lr": 0.02},
    "soap": {"optimizer": "soap", "lr": 0.004},
    "thor-muon": nanogpt.OURS,
}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The study in an empty folder with others' files, small."""
    monkeypatch.chdir(tmp_path)
    for file, text in zip(nanogpt.WHERE, (MODEL, CONFIG, "to be or not to be. " * 20), strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(nanogpt, "SIZES", nanogpt.SIZES | SMALL)
    monkeypatch.setattr(nanogpt, "SPANS", 2)
    nanogpt.example.cache_clear()
    yield
    nanogpt.example.cache_clear()


def values(lr, best):
    """A loss that grows with the distance of a rate from the best."""
    return 2.0 + abs(math.log2(lr / best))


def told(best):
    """Rows of all jobs: the best rate of each optimizer is given."""
    rows = {}
    while todo := [job for job in nanogpt.jobs(rows) if key_of(job) not in rows]:
        for job in todo:
            if job.get("alone"):
                settings = (*nanogpt.TUNED, "thor-muon")
                one = {"milliseconds": {name: [2.0, 4.0, 3.0] for name in settings}}
                one["milliseconds"] |= {"thor-muon": [4.0, 8.0, 9.0]}
                one["milliseconds"] |= {"thor-muon refresh": [20.0, 40.0, 30.0]}
                one["state_bytes"] = dict.fromkeys(settings, 8.0)
            else:
                name = job["optimizer"]
                end = values(job["lr"], best[name]) if "lr" in job else 1.5
                end += 0.01 * (job["seed"] % 10)
                one = {"value": end, "curve": [[0, 4.0, 0], [1000, 3.0, 9], [2000, end, 10]]}
            rows[key_of(job)] = {"job": job, **one}
    return rows


@pytest.mark.parametrize(
    ("best", "rates"),
    [
        (0.004, [0.001, 0.002, 0.004, 0.008, 0.016]),
        (0.0001, [0.002, 0.004, 0.008, 0.001, 0.0005]),
        (1.0, [0.002, 0.004, 0.008, 0.016, 0.032]),
    ],
)
def test_each_has_five_trials_around_the_best_and_three_other_seeds(best, rates):
    rows = told({"adamw": best, "muon": 0.02, "soap": 0.004})
    for name in nanogpt.TUNED:
        tried = list(nanogpt.tuning(rows, name))
        assert len(tried) == 5
        assert {job["seed"] for job in tried} == {10}
    assert sorted(job["lr"] for job in nanogpt.tuning(rows, "adamw")) == sorted(rates)
    setting = nanogpt.chosen(rows)["adamw"]
    assert setting == {"optimizer": "adamw", "lr": min(rates, key=lambda lr: values(lr, best))}
    assert all(key_of({**setting, "seed": seed}) in rows for seed in (0, 1, 2))
    assert all(key_of({**nanogpt.THEIRS, "seed": seed}) in rows for seed in (0, 1, 2))
    keys = [key_of(job) for job in nanogpt.jobs(rows)]
    assert len(keys) == len(set(keys))


def test_shares_of_steps_and_seconds_by_hand():
    """ThorMuon ends at 1.51, AdamW at its own rate at 4.01: ThorMuon is there at once; SOAP, tuned,
    ends at 2.01, between the steps 1000 (3.0) and 2000.

    A step of AdamW takes 3 ms, one of ThorMuon 2 × 3 ms and a refresh 10 × 3 ms.
    """
    rows = told({"adamw": 0.004, "muon": 0.02, "soap": 0.004})
    times = rows[key_of(nanogpt.ALONE)]
    assert nanogpt.seconds(rows, times, nanogpt.OURS) == pytest.approx(
        [0.0, (991 * 6 + 9 * 30) / 1000, (1990 * 6 + 10 * 30) / 1000]
    )
    assert nanogpt.seconds(rows, times, nanogpt.THEIRS)[-1] == pytest.approx(6.0)
    lines = {line.split(" | ")[0]: line for line in nanogpt.table(rows).splitlines()}
    share = (1000 + 1000 * (3 - 2.01) / (3 - 1.51)) / 2000
    first, last = (991 * 6 + 9 * 30) / 1000, (1990 * 6 + 10 * 30) / 1000
    seconds = (first + (2 * share - 1) * (last - first)) / 6
    assert lines["| SOAP, tuned"] == (
        f"| SOAP, tuned | 0.004 | 2.0100 ± 0.0058 | {share:.2f} | {seconds:.2f} | 1.00 | 8.0 |"
    )
    assert lines["| nanoGPT's AdamW"].split(" | ")[3:5] == ["0.00", "0.00"]
    assert lines["| ThorMuon"].endswith(
        f"| none given | 1.5100 ± 0.0058 |  |  | {last / 6:.2f} | 8.0 |"
    )
    assert "0.001: 4.000, 0.002: 3.000, 0.004: 2.000" in lines["| AdamW"]


def test_one_that_is_ahead_is_not_reached():
    rows = told({"adamw": 0.004, "muon": 0.02, "soap": 0.004})
    for seed in nanogpt.SEEDS:
        row = rows[key_of({**nanogpt.chosen(rows)["muon"], "seed": seed})]
        row["curve"] = [[0, 4.0, 0], [2000, 1.0, 0]]
    (line,) = [one for one in nanogpt.table(rows).splitlines() if one.startswith("| Muon, tuned")]
    assert line.split(" | ")[3:5] == ["not reached", "not reached"]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_begins_alike_and_a_seed_gives_the_same_again(small, name, capsys):
    if name == "soap":
        pytest.importorskip("pytorch_optimizer", reason="the extra bench has it")
    job = {**SETTINGS[name], "seed": 0}
    first, again = nanogpt.run(job), nanogpt.run(job)
    other = nanogpt.run({**job, "seed": 1})
    assert first == again
    assert first["curve"][0] != other["curve"][0]
    assert capsys.readouterr().out == ""
    assert [point[0] for point in first["curve"]] == [0, 3, 6]
    assert first["value"] == first["curve"][-1][1] < first["curve"][0][1]
    refreshes = [point[2] for point in first["curve"]]
    assert refreshes[0] == 0
    assert (refreshes[-1] > 0) == (name == "thor-muon") == bool(nanogpt.optimizers(job))
    theirs = nanogpt.run({**nanogpt.THEIRS, "seed": 0})
    assert first["curve"][0] == theirs["curve"][0]


def test_rates_are_those_of_the_schedule(small, monkeypatch):
    seen = []

    class Spied(torch.optim.SGD):
        def step(self, closure=None):
            seen.append([group["lr"] for group in self.param_groups])

    monkeypatch.setattr(
        nanogpt,
        "make",
        lambda model, job: Spied([{"params": [p]} for p in model.parameters()], 2.0),
    )
    nanogpt.run({"optimizer": "adamw", "lr": 1.0, "seed": 0})
    third = 0.1 + 0.45 * (1 + math.cos(math.pi / 4))  # of the four steps after the warm-up
    assert [rates[0] for rates in seen[:4]] == pytest.approx([2 / 3, 4 / 3, 2.0, 2 * third])
    assert all(len(set(rates)) == 1 for rates in seen)


def test_steps_of_all_are_timed(small, monkeypatch):
    monkeypatch.delitem(nanogpt.TUNED, "soap")  # which is not installed everywhere
    row = nanogpt.run(nanogpt.ALONE)
    names = {"adamw", "muon", "thor-muon"}
    assert row["milliseconds"].keys() == {*names, "thor-muon refresh"}
    assert all(len(own) == 2 and min(own) > 0 for own in row["milliseconds"].values())
    assert row["state_bytes"].keys() == names
    assert row["state_bytes"]["adamw"] == pytest.approx(8.0, abs=0.2)
    assert nanogpt.optimizers(nanogpt.ALONE) == ["ThorMuon"]


def test_what_is_missing_is_named_with_where_it_comes_from(small):
    nanogpt.TEXT.unlink()
    with pytest.raises(UserError, match=r"input.txt is missing: save .*karpathy/char-rnn there"):
        nanogpt.run({**nanogpt.OURS, "seed": 0})
