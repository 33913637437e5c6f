"""The study of WikiText-2: how the fetched example is read and trained, and what the table says."""

import math

import pytest
import torch
from torch import nn

import fetched
from benchmarks import wikitext
from benchmarks.runner.stores import key_of

NETWORKS = ("LSTM", "Transformer")


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """The study in an empty folder with others' files, small: 6 steps of 2 columns an epoch."""
    monkeypatch.chdir(tmp_path)
    fetched.write(fetched.WORDS)
    sizes = {"SIZE": 8, "HIDDEN": 8, "BATCH": 2, "HELD_OUT_BATCH": 2, "CONTEXT": 6, "SPANS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(wikitext, name, value)
    wikitext.example.cache_clear()
    yield
    wikitext.example.cache_clear()


@pytest.mark.parametrize("network", NETWORKS)
def test_the_loss_of_a_text_does_not_depend_on_the_length_of_its_pieces(monkeypatch, network):
    """For the LSTM too, whose state goes from a piece to the next."""
    model, losses = wikitext.network_of(network), []
    for length in (2, 3, 100):
        monkeypatch.setattr(wikitext, "CONTEXT", length)
        losses.append(wikitext.held_out_loss(model, None))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", wikitext.NAMES)
def test_a_training_gives_the_same_again_and_learns(network, name):
    job = {**wikitext.training(network, name), "epochs": 2}
    if name == "sgd":
        job["lr"] = 1.0
    first = wikitext.run(job)
    assert first == wikitext.run(job)
    assert [point[0] for point in first["curve"]] == [3, 6, 9, 12]
    assert first["value"] == min(point[1] for point in first["curve"][1::2])
    assert first["value"] < first["curve"][0][1]
    assert (first["curve"][-1][2] > 0) == (name != "sgd") == bool(wikitext.optimizers(job))


def test_their_sgd_takes_the_steps_of_their_main():
    """Clipped gradients times the rate are subtracted: main.py's loop, written out."""
    found = wikitext.run({**wikitext.training("Transformer", "sgd"), "lr": 20.0, "epochs": 1})
    torch.manual_seed(0)
    model, words_in_all = wikitext.network_of("Transformer"), wikitext.example()[1]
    for words, following in wikitext.pieces(wikitext.example()[2]):
        model.zero_grad()
        nn.NLLLoss()(model(words).view(-1, words_in_all), following).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-20.0)
    after = math.exp(wikitext.held_out_loss(model, None))
    assert found["value"] == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize(("name", "last"), [("thor-muon", 0.25), ("anytime", 1)])
def test_rates_are_divided_after_an_epoch_that_is_not_the_best(monkeypatch, name, last):
    """With `anytime` they stay."""
    seen, told = [], iter([2.0, 2.0, 2.5])

    def loss(model, optimizer):
        seen.append(optimizer.param_groups[0]["lr"])
        return next(told)

    monkeypatch.setattr(wikitext, "EVALUATIONS", 1)
    monkeypatch.setattr(wikitext, "held_out_loss", loss)
    row = wikitext.run(wikitext.training("LSTM", name))
    assert [lr / seen[0] for lr in seen] == [1, 1, last]
    assert row["value"] == pytest.approx(math.exp(2.0))


def test_the_average_is_evaluated_where_there_is_one():
    model = wikitext.network_of("LSTM")
    optimizer = wikitext.make(model, "anytime", 0.0)
    for piece in wikitext.pieces(wikitext.example()[2]):
        wikitext.take_step(wikitext.Reader(model, 2), optimizer, piece)
    plain, average = (wikitext.held_out_loss(model, own) for own in (None, optimizer))
    optimizer.eval()
    assert wikitext.held_out_loss(model, None) == average != plain


def test_a_training_that_diverges_is_a_row_without_a_value(monkeypatch):
    monkeypatch.setattr(wikitext, "held_out_loss", lambda model, optimizer: math.nan)
    row = wikitext.run(wikitext.training("LSTM", "sgd"))
    assert row == {"value": None, "failure": "loss nan after 3 steps"}


def test_a_training_may_be_missing_and_steps_not_timed_in_the_table():
    """A step of SGD takes 30 ms, of ThorMuon twice and a refresh ten times as long."""
    rows, curve = {}, [[25, 400.0, 1], [50, 300.0, 2], [75, 250.0, 3], [100, 200.0, 4]]
    for name in ("sgd", "thor-muon"):
        rows[key_of(wikitext.training("LSTM", name))] = {"value": 200.0, "curve": curve}
    assert "| LSTM | their SGD | 20 | 300.0, 200.0 | – |" in wikitext.table(rows)
    own = {"sgd": [20.0, 40.0], "thor-muon": [40.0, 80.0], "thor-muon refresh": [200.0, 400.0]}
    rows[key_of(wikitext.timing("LSTM"))] = {"milliseconds": own | {"anytime": [40.0, 80.0]}}
    lines = wikitext.table(rows).splitlines()
    slower = (96 * 0.06 + 4 * 0.3) / 3
    assert f"| LSTM | ThorMuon | none given | 300.0, 200.0 | {slower:.2f} |" in lines
    assert "| LSTM | ThorMuon(anytime=True) | none given | – | – |" in lines
