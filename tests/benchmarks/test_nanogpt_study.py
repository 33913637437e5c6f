"""nanoGPT's CPU example: others' files, small; what is tuned, and what tables and README say."""

import math

import pytest
import torch

import fetched
from benchmarks import front, nanogpt, nanogpt_problem, training
from benchmarks.runner.stores import key_of
from torch_thor.errors import UserError

SMALL = {"block_size": 8, "batch_size": 2, "n_embd": 8, "eval_iters": 2}
BEST = {"nanogpt-adamw": 0.004, "muon": 0.02, "soap": 0.004}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The example in an empty folder with others' files."""
    monkeypatch.chdir(tmp_path)
    fetched.write(fetched.NANOGPT)
    monkeypatch.setattr(nanogpt_problem, "SIZES", nanogpt_problem.SIZES | SMALL)
    nanogpt_problem.example.cache_clear()
    yield nanogpt_problem.NANOGPT
    nanogpt_problem.example.cache_clear()


def test_the_problem_is_their_example(small, capsys):
    model = small.model()
    first, again = (next(small.batches(2, 0)) for _ in range(2))
    assert torch.equal(first[0], again[0])
    assert first[0].shape == (2, 8)
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    held_out = torch.cat([small.score(model, batch) for batch in small.held_out(1)])
    assert held_out.mean().item() == pytest.approx(nanogpt_problem.example().loss(model))
    assert nanogpt_problem.adamw(model, 0.004).param_groups[0]["betas"] == (0.9, 0.99)
    (100 * small.loss(model, first)).backward()
    small.prepare(model)
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm <= 1.0 + 1e-5
    rates = [training.share_of_lr(step, 2000, "nanogpt") for step in (0, 99, 100, 1050, 2000)]
    assert rates == pytest.approx([1 / 101, 100 / 101, 1.0, 0.1 + 0.45, 0.1])
    assert capsys.readouterr().out == ""


def test_what_is_missing_is_named_with_where_it_comes_from(small):
    nanogpt_problem.TEXT.unlink()
    with pytest.raises(UserError, match=r"input.txt is missing: save .*karpathy/char-rnn there"):
        small.model()


def loss_at(lr, best):
    """A loss that grows with the distance of a rate from the best."""
    return 2.0 + abs(math.log2(lr / best))


def told(best):
    """Rows of all jobs: the best rate of each optimizer is given."""
    rows = {}
    while todo := [job for job in nanogpt.jobs(rows) if key_of(job) not in rows]:
        for job in todo:
            if job.get("alone"):
                times = {name: [2.0, 4.0, 3.0] for name in job["settings"]}
                times |= {"thor-muon": [4.0, 8.0, 9.0], "thor-muon refresh": [20.0, 40.0, 30.0]}
                row = {"milliseconds": times, "state_bytes": dict.fromkeys(times, 8.0)}
            else:
                end = loss_at(job["lr"], best[job["optimizer"]]) if "lr" in job else 1.5
                end += 0.01 * (job["seed"] % 10)
                row = {"value": end, "curve": [[0, 4.0, 0], [1000, 3.0, 9], [2000, end, 10]]}
            rows[key_of(job)] = {"job": job, **row}
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
    rows = told(BEST | {"nanogpt-adamw": best})
    tried = nanogpt.tuning(rows, "nanogpt-adamw")
    assert sorted(job["lr"] for job in tried) == sorted(rates)
    assert {job["seed"] for job in tried} == {10}
    setting = nanogpt.chosen(rows)["nanogpt-adamw"]
    assert setting["lr"] == min(rates, key=lambda lr: loss_at(lr, best))
    for own in (setting, nanogpt.THEIRS, nanogpt.OURS):
        assert all(key_of({**own, "seed": seed}) in rows for seed in (0, 1, 2))


def test_shares_of_steps_and_seconds_by_hand():
    """SOAP, tuned, ends at 2.01, where ThorMuon is between the steps 1000 (3.0) and 2000 (1.51).

    A step of AdamW takes 3 ms, one of ThorMuon 2 × 3 ms and a refresh 10 × 3 ms.
    """
    rows = told(BEST)
    first, last = (991 * 6 + 9 * 30) / 1000, (1990 * 6 + 10 * 30) / 1000
    assert nanogpt.seconds(rows, nanogpt.OURS) == pytest.approx([0.0, first, last])
    share = (1000 + 1000 * (3 - 2.01) / (3 - 1.51)) / 2000
    seconds = (first + (2 * share - 1) * (last - first)) / 6
    lines = nanogpt.table(rows).splitlines()
    reached = f"{share:.2f} | {seconds:.2f}"
    assert f"| SOAP, tuned | 0.004 | 2.0100 ± 0.0058 | {reached} | 1.00 | 8.0 |" in lines
    assert f"| ThorMuon | none given | 1.5100 ± 0.0058 |  |  | {last / 6:.2f} | 8.0 |" in lines
    (line,) = front.of_nanogpt(rows)
    assert line[1:] == ["2.0100 ± 0.0058"] * 2 + ["1.5100 ± 0.0058", *reached.split(" | ")]
    for seed in nanogpt.SEEDS:
        row = rows[key_of({**nanogpt.chosen(rows)["muon"], "seed": seed})]
        row["curve"] = [[0, 4.0, 0], [2000, 1.0, 0]]
    assert "| 1.0000 ± 0.0000 | not reached | not reached |" in nanogpt.table(rows)
