"""The study of WikiText-2: how the fetched example is read and trained, and what the table says."""

import math

import pytest
import torch
from torch import nn

from benchmarks import wikitext
from benchmarks.runner import drawing, study
from benchmarks.runner.stores import Lines, key_of
from torch_thor.errors import UserError

# what stands in build/word_language_model, as small as it can be
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class RNNModel(nn.Module):
    def __init__(self, rnn_type, ntoken, ninp, nhid, nlayers, dropout=0.5, tie_weights=False):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = getattr(nn, rnn_type)(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.shape = nlayers, nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return F.log_softmax(self.decoder(output).flatten(0, 1), dim=1), hidden

    def init_hidden(self, bsz):
        zeros = torch.zeros(self.shape[0], bsz, self.shape[1])
        return zeros, zeros

class TransformerModel(nn.Module):
    def __init__(self, ntoken, ninp, nhead, nhid, nlayers, dropout=0.5):
        super().__init__()
        self.input_emb = nn.Embedding(ntoken, ninp)
        self.inside = nn.Linear(ninp, ninp)
        self.decoder = nn.Linear(ninp, ntoken)

    def forward(self, src, has_mask=True):
        return F.log_softmax(self.decoder(torch.relu(self.inside(self.input_emb(src)))), dim=-1)
"""
DATA = """
import os
import torch

class Corpus(object):
    def __init__(self, path):
        self.dictionary = {}
        for name in ("train", "valid", "test"):
            with open(os.path.join(path, name + ".txt")) as file:
                words = file.read().split()
            numbers = [self.dictionary.setdefault(w, len(self.dictionary)) for w in words]
            setattr(self, name, torch.tensor(numbers))
"""
TEXTS = ("to be or not to be . " * 10, "to be or not to be . " * 4, "be . ")
SETTINGS = {
    "sgd": {"optimizer": "sgd", "lr": 1.0},
    "thor-muon": {"optimizer": "thor-muon"},
    "anytime": {"optimizer": "anytime"},
}
NETWORKS = ("LSTM", "Transformer")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The study in an empty folder with others' files, small: 6 steps of 2 columns an epoch."""
    monkeypatch.chdir(tmp_path)
    for name, text in zip(wikitext.FILES, (MODEL, DATA, *TEXTS), strict=True):
        file = wikitext.CODE / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    sizes = {"SIZE": 8, "HIDDEN": 8, "BATCH": 2, "HELD_OUT_BATCH": 2, "CONTEXT": 6}
    for name, value in {**sizes, "EPOCHS": 2, "EVALUATIONS": 2, "SPANS": 1}.items():
        monkeypatch.setattr(wikitext, name, value)
    wikitext.example.cache_clear()
    yield
    wikitext.example.cache_clear()


def a_job(network, name, **others):
    return {"network": network, **SETTINGS[name], "epochs": 2, "seed": 0, **others}


# ---- texts and networks --------------------------------------------------------------------------


def test_the_settings_are_those_of_their_main():
    """As the defaults of main.py and the commands of their README have them."""
    sizes = [wikitext.SIZE, wikitext.HIDDEN, wikitext.LAYERS, wikitext.HEADS, wikitext.DROPOUT]
    assert sizes == [200, 200, 2, 2, 0.2]
    assert [wikitext.BATCH, wikitext.HELD_OUT_BATCH, wikitext.CONTEXT] == [20, 10, 35]
    assert (wikitext.CLIP, wikitext.EPOCHS) == (0.25, 3)
    assert wikitext.THEIR_RATES == {"LSTM": 20.0, "Transformer": 5.0}


def test_a_text_is_read_in_columns_and_each_word_is_followed_by_the_next(monkeypatch):
    monkeypatch.setattr(wikitext, "CONTEXT", 3)
    text = wikitext.columns(torch.arange(11), 2)
    assert text.tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]
    pieces = list(wikitext.pieces(text))
    assert [words.tolist() for words, _ in pieces] == [[[0, 5], [1, 6], [2, 7]], [[3, 8]]]
    assert [following.tolist() for _, following in pieces] == [[1, 6, 2, 7, 3, 8], [4, 9]]


@pytest.mark.parametrize("network", NETWORKS)
def test_the_loss_of_a_text_does_not_depend_on_the_length_of_its_pieces(
    small, monkeypatch, network
):
    """For the LSTM too, whose state goes from a piece to the next."""
    own = wikitext.example()
    torch.manual_seed(0)
    model = own.network(network).double()
    if network == "LSTM":
        zeros = torch.zeros(2, 2, 8).double()
        monkeypatch.setattr(model, "init_hidden", lambda count: (zeros, zeros))
    losses = []
    for length in (2, 3, 100):
        monkeypatch.setattr(wikitext, "CONTEXT", length)
        losses.append(wikitext.held_out_loss(model, own.held_out))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-12)
    assert model.training


def test_pieces_are_read_with_a_state_that_has_no_gradient(small):
    own = wikitext.example()
    reader = wikitext.Reader(own.network("LSTM"), 2)
    before = reader.hidden
    reader.loss(next(wikitext.pieces(own.train))).backward()
    assert not any(part.requires_grad for part in reader.hidden)
    assert not torch.equal(before[0], reader.hidden[0])
    assert wikitext.Reader(own.network("Transformer"), 2).hidden is None


# ---- trainings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_training_gives_the_same_again_and_learns(small, network, name):
    job = a_job(network, name)
    first = wikitext.run(job)
    assert first == wikitext.run(job)
    assert [point[0] for point in first["curve"]] == [3, 6, 9, 12]
    assert first["value"] == min(point[1] for point in first["curve"][1::2])
    assert first["value"] < first["curve"][0][1]
    ours = name != "sgd"
    assert (first["curve"][-1][2] > 0) == ours == bool(wikitext.optimizers(job))


@pytest.mark.parametrize("name", SETTINGS)
def test_one_that_was_cut_off_ends_as_if_it_had_not_been(small, monkeypatch, name):
    job = a_job("LSTM", name, epochs=3)
    whole, taken = wikitext.run(job), wikitext.take_step

    def run(steps):
        def take_step(*words):
            done.append(words)
            if len(done) == steps:
                raise KeyboardInterrupt
            taken(*words)

        done = []
        monkeypatch.setattr(wikitext, "take_step", take_step)
        return wikitext.run(job), len(done)

    with pytest.raises(KeyboardInterrupt):
        run(15)  # in the last of three epochs of 6 steps
    assert run(100) == (whole, 6)
    assert run(100) == (whole, 18)  # nothing is left of it


def test_their_sgd_takes_the_steps_of_their_main(small):
    """Clipped gradients times the rate are subtracted: main.py's loop, written out."""
    own = wikitext.example()
    found = wikitext.run(a_job("Transformer", "sgd", lr=20.0, epochs=1))
    torch.manual_seed(0)
    model = own.network("Transformer")
    for words, following in wikitext.pieces(own.train):
        model.zero_grad()
        nn.NLLLoss()(model(words).view(-1, own.words), following).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-20.0)
    after = math.exp(wikitext.held_out_loss(model, own.held_out))
    assert found["value"] == pytest.approx(after, rel=1e-5)


@pytest.mark.parametrize(
    ("losses", "rates", "value"),
    [([3.0, 2.0, 1.0], [1, 1, 1], 1.0), ([2.0, 2.0, 2.5], [1, 1, 0.25], 2.0)],
)
def test_rates_are_divided_after_an_epoch_that_is_not_the_best(
    small, monkeypatch, losses, rates, value
):
    seen, told = [], iter(losses)

    class Spied(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])

    monkeypatch.setattr(wikitext, "EVALUATIONS", 1)
    monkeypatch.setattr(wikitext, "make", lambda model, job: Spied(model.parameters(), 1.0))
    monkeypatch.setattr(wikitext, "held_out_loss", lambda model, text: next(told))
    row = wikitext.run(a_job("LSTM", "sgd", epochs=3))
    assert seen == [rate for rate in rates for _ in range(6)]
    assert row["value"] == pytest.approx(math.exp(value))


def test_without_a_schedule_the_average_is_evaluated_and_the_rate_stays(small, monkeypatch):
    seen = []

    def loss(model, text):
        seen.append((made[0].param_groups[0]["shows_average"], made[0].param_groups[0]["lr"]))
        return 2.0

    made, make = [], wikitext.make
    monkeypatch.setattr(
        wikitext, "make", lambda model, job: made.append(make(model, job)) or made[0]
    )
    monkeypatch.setattr(wikitext, "held_out_loss", loss)
    wikitext.run(a_job("LSTM", "anytime", epochs=3))
    assert seen == [(True, 0.12)] * 6


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1000.0])
def test_one_that_diverges_is_a_row_without_a_value(small, monkeypatch, loss):
    monkeypatch.setattr(wikitext, "held_out_loss", lambda model, text: loss)
    row = wikitext.run(a_job("LSTM", "sgd"))
    assert row == {"value": None, "failure": f"loss {loss} after 3 steps"}
    told = iter([1.0, 1.0, loss])
    monkeypatch.setattr(wikitext, "held_out_loss", lambda model, text: next(told))
    row = wikitext.run(a_job("LSTM", "sgd"))
    assert row["failure"] == f"loss {loss} after 9 steps"
    assert not list(wikitext.UNFINISHED.iterdir())


def test_steps_of_all_are_timed(small):
    job = wikitext.timing("LSTM")
    row = wikitext.run(job)
    assert row["milliseconds"].keys() == {
        *SETTINGS,
        "thor-muon refresh",
        "anytime refresh",
    }
    assert all(len(own) == 1 and own[0] > 0 for own in row["milliseconds"].values())
    assert row["state_bytes"]["sgd"] == 0
    assert row["state_bytes"]["thor-muon"] > 4
    assert wikitext.optimizers(job) == ["ThorMuon"]


def test_what_is_missing_is_named_with_where_it_comes_from(small):
    (wikitext.CODE / "data/wikitext-2/train.txt").unlink()
    said = r"train.txt is missing: save word_language_model/data/wikitext-2/train.txt of pytorch/ex"
    with pytest.raises(UserError, match=said):
        wikitext.run(a_job("LSTM", "sgd"))


# ---- what is run and shown -----------------------------------------------------------------------


def told(ends):
    """Rows of all jobs: the perplexities at which each ends, or None where it diverged."""
    rows = {}
    for job in wikitext.jobs({}):
        if job.get("alone"):
            one = {"milliseconds": {"sgd": [20.0, 40.0], "thor-muon": [40.0, 80.0]}}
            one["milliseconds"]["anytime"] = [40.0, 80.0]
            one["milliseconds"]["thor-muon refresh"] = [200.0, 400.0]
            one["milliseconds"]["anytime refresh"] = [200.0, 400.0]
            one["state_bytes"] = {"sgd": 0.0, "thor-muon": 6.0, "anytime": 10.0}
        else:
            end = ends.get(job["optimizer"], 150.0)
            one = {"value": end, "curve": [[50, 300.0, 2], [100, end, 4]]}
        rows[key_of(job)] = {"job": job, **one}
    return rows


def test_each_network_is_trained_by_all_and_the_steps_of_all_are_timed():
    jobs = wikitext.jobs({})
    assert [job for job in jobs if job.get("optimizer") == "sgd"] == [
        {"network": network, "optimizer": "sgd", "lr": lr, "epochs": 3, "seed": 0}
        for network, lr in (("LSTM", 20.0), ("Transformer", 5.0))
    ]
    for name in ("thor-muon", "anytime"):
        assert [job for job in jobs if job.get("optimizer") == name] == [
            {"network": network, "optimizer": name, "epochs": 3, "seed": 0} for network in NETWORKS
        ]
    assert len({key_of(job) for job in jobs}) == len(jobs) == 8


def test_table_and_picture_say_when_ours_is_where_theirs_ends(monkeypatch):
    """ThorMuon is at 200 between the steps 50 (300) and 100 (100): after 75.

    A step of SGD takes 30 ms, one of ThorMuon twice that and a refresh ten times.
    """
    rows = told({"sgd": 200.0, "thor-muon": 100.0})
    lines = wikitext.table(rows).splitlines()
    first, last = 48 * 0.06 + 2 * 0.3, 96 * 0.06 + 4 * 0.3
    spent = f"{(first + last) / 2 / 3:.2f}"
    assert f"| LSTM | their SGD | 20 | 200.0 | 0.75 | {spent} | 1.00 | 0.0 |" in lines
    ours = f"| ThorMuon | none given | 100.0 |  |  | {last / 3:.2f} | 6.0 |"
    assert f"| Transformer {ours}" in lines
    behind = wikitext.table(told({"sgd": 50.0, "thor-muon": 100.0}))
    assert "| LSTM | their SGD | 20 | 50.0 | not reached | not reached | 1.00 | 0.0 |" in behind
    drawn = []
    monkeypatch.setattr(drawing, "save", lambda figure, path: drawn.append(figure))
    wikitext.draw(rows)
    assert [len(panel.lines) for panel in drawn[0].axes] == [3] * 4
    wikitext.draw({})
    assert len(drawn) == 1


def test_the_perplexities_are_those_after_each_epoch():
    rows = told({"sgd": 200.0, "thor-muon": 100.0})
    values = (900.0, 500.0, 400.0, 300.0, 250.0, 200.0)
    curve = [[50 * (number + 1), value, 0] for number, value in enumerate(values)]
    rows[key_of(wikitext.training("LSTM", "sgd"))]["curve"] = curve
    assert "| LSTM | their SGD | 20 | 500.0, 300.0, 200.0 |" in wikitext.table(rows)


def test_a_part_of_the_rows_is_shown_as_far_as_it_goes():
    rows = told({"sgd": 200.0, "thor-muon": None})
    del rows[key_of(wikitext.timing("LSTM"))]
    lines = wikitext.table(rows).splitlines()
    assert "| LSTM | their SGD | 20 | 200.0 |  |  |  |  |" in lines
    assert "| LSTM | ThorMuon | none given | diverged |  |  |  |  |" in lines
    assert "| Transformer | their SGD | 5 | 200.0 |  |  | 1.00 | 0.0 |" in lines
    rows[key_of(wikitext.training("LSTM", "thor-muon"))] |= {"value": 100.0}
    rows[key_of(wikitext.training("LSTM", "thor-muon"))]["curve"][-1][1] = 100.0
    assert "| LSTM | their SGD | 20 | 200.0 | 0.75 |  |  |  |" in wikitext.table(rows)
    assert len(wikitext.table({}).splitlines()) == 2


def test_a_row_is_verified(small, tmp_path, monkeypatch, capsys):
    def here(name, store, jobs, workers):
        for job in jobs:
            store.keep(key_of(job), study.result_of(name, job))

    monkeypatch.setattr(study, "measure", here)
    store = Lines(tmp_path / "wikitext.jsonl")
    here("benchmarks.wikitext", store, wikitext.headlines({}), 1)
    assert [row["numbers"].keys() for row in store.rows.values()] == [
        set(),
        {"ThorMuon"},
        {"ThorMuon"},
    ]
    assert study.verify("benchmarks.wikitext", store, 1) == 0
    assert capsys.readouterr().out.count("agrees\n") == 3
    next(iter(store.rows.values()))["value"] *= 1.05
    assert study.verify("benchmarks.wikitext", store, 1) == 1
