"""The study of WikiText-2: how the fetched example is read and trained, and what the table says."""

import math

import pytest
import torch
from torch import nn

import fetched
from benchmarks import wikitext
from benchmarks.runner.stores import key_of
from torch_thor.errors import UserError

TEXTS = ("to be or not to be . " * 10, "to be or not to be . " * 4, "be . ")
NETWORKS = ("LSTM", "Transformer")


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """The study in an empty folder with others' files, small: 6 steps of 2 columns an epoch."""
    monkeypatch.chdir(tmp_path)
    texts = (fetched.WORD_MODEL, fetched.WORD_DATA, *TEXTS)
    fetched.write(dict(zip(map(wikitext.CODE.joinpath, wikitext.FILES), texts, strict=True)))
    sizes = {"SIZE": 8, "HIDDEN": 8, "BATCH": 2, "HELD_OUT_BATCH": 2, "CONTEXT": 6, "SPANS": 1}
    for name, value in sizes.items():
        monkeypatch.setattr(wikitext, name, value)
    wikitext.example.cache_clear()
    yield
    wikitext.example.cache_clear()


def test_a_text_is_read_in_columns_and_each_word_is_followed_by_the_next(monkeypatch):
    monkeypatch.setattr(wikitext, "CONTEXT", 3)
    text = wikitext.columns(torch.arange(11), 2)
    assert text.tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    pieces = list(wikitext.pieces(text))
    assert [words.tolist() for words, _ in pieces] == [[[0, 5], [1, 6], [2, 7]], [[3, 8]]]
    assert [following.tolist() for _, following in pieces] == [[1, 6, 2, 7, 3, 8], [4, 9]]


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


@pytest.mark.parametrize(
    ("losses", "rates"),
    [([3.0, 2.0, 1.0], [1, 1, 1]), ([2.0, 2.0, 2.5], [1, 1, 0.25])],
)
@pytest.mark.parametrize("name", ["thor-muon", "anytime"])
def test_rates_are_divided_after_an_epoch_that_is_not_the_best(monkeypatch, losses, rates, name):
    """With `anytime` they stay, and evaluations are of the average."""
    seen, told = [], iter(losses)

    def loss(model, optimizer):
        seen.append(optimizer.param_groups[0]["lr"])
        return next(told)

    monkeypatch.setattr(wikitext, "EVALUATIONS", 1)
    monkeypatch.setattr(wikitext, "held_out_loss", loss)
    row = wikitext.run(wikitext.training("LSTM", name))
    assert [lr / seen[0] for lr in seen] == (rates if name == "thor-muon" else [1, 1, 1])
    assert row["value"] == pytest.approx(math.exp(min(losses)))


def test_the_average_is_evaluated_where_there_is_one():
    model = wikitext.network_of("LSTM")
    optimizer = wikitext.make(model, "anytime", 0.0)
    for piece in wikitext.pieces(wikitext.example()[2]):
        wikitext.take_step(wikitext.Reader(model, 2), optimizer, piece)
    plain, average = (wikitext.held_out_loss(model, own) for own in (None, optimizer))
    optimizer.eval()
    assert wikitext.held_out_loss(model, None) == average != plain


@pytest.mark.parametrize("loss", [math.nan, 1000.0])
def test_a_training_that_diverges_is_a_row_without_a_value(monkeypatch, loss):
    monkeypatch.setattr(wikitext, "held_out_loss", lambda model, optimizer: loss)
    row = wikitext.run(wikitext.training("LSTM", "sgd"))
    assert row == {"value": None, "failure": f"loss {loss} after 3 steps"}


def test_steps_of_all_are_timed():
    row = wikitext.run(wikitext.timing("LSTM"))
    assert row["milliseconds"].keys() == {
        *wikitext.NAMES, "thor-muon refresh", "anytime refresh",
    }  # fmt: skip
    assert row["state_bytes"]["sgd"] == 0
    assert wikitext.optimizers(wikitext.timing("LSTM")) == ["ThorMuon"]


def test_what_is_missing_is_named_with_where_it_comes_from():
    (wikitext.CODE / "data/wikitext-2/train.txt").unlink()
    said = r"train.txt is missing: save word_language_model/data/wikitext-2/train.txt of pytorch/ex"
    with pytest.raises(UserError, match=said):
        wikitext.run(wikitext.training("LSTM", "sgd"))


def test_table_and_picture_have_the_epochs_ends_and_the_time(monkeypatch):
    """A step of SGD takes 30 ms, of ThorMuon twice and a refresh ten times as long."""
    rows = {}
    for network in NETWORKS:
        job = wikitext.training(network, "thor-muon")
        curve = [[25, 400.0, 1], [50, 300.0, 2], [75, 250.0, 3], [100, 200.0, 4]]
        rows[key_of(job)] = {"job": job, "value": 200.0, "curve": curve}
        job = wikitext.training(network, "sgd")
        rows[key_of(job)] = {"job": job, "value": 150.0, "curve": [*curve[:3], [100, 150.0, 0]]}
    assert "| LSTM | ThorMuon | none given | 300.0, 200.0 | – |" in wikitext.table(rows)
    own = {"sgd": [20.0, 40.0], "thor-muon": [40.0, 80.0], "thor-muon refresh": [200.0, 400.0]}
    for network in NETWORKS:
        job = wikitext.timing(network)
        rows[key_of(job)] = {"job": job, "milliseconds": {**own, "anytime": [40.0, 80.0]}}
    slower = (96 * 0.06 + 4 * 0.3) / 3
    lines = wikitext.table(rows).splitlines()
    assert f"| LSTM | ThorMuon | none given | 300.0, 200.0 | {slower:.2f} |" in lines
    assert "| Transformer | their SGD | 5 | 300.0, 150.0 | 1.00 |" in lines
    assert "| LSTM | ThorMuon(anytime=True) | none given | – | – |" in lines
    drawn = []
    monkeypatch.setattr(wikitext, "save", lambda figure, path: drawn.append(figure))
    wikitext.draw(rows)
    assert [len(panel.lines) for panel in drawn[0].axes] == [2] * 4
