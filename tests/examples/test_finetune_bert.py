"""The plain loop: a tiny encoder learns words, and what is saved loads."""

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import finetune_bert

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon")


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "thor-muon", "thor"])
def test_it_trains_and_saves(encoder, sentences, optimizer, tmp_path, capsys):
    words = ["--optimizer", optimizer, "--model", str(encoder), "--data", str(sentences)]
    words += ["--batch", "8", "--epochs", "4", "--out", str(tmp_path)]
    accuracy = finetune_bert.main(words)[optimizer]
    out = capsys.readouterr().out
    assert f"{optimizer}, step 32: loss " in out
    assert f"{optimizer:10} dev accuracy {accuracy:.4f} after " in out
    load, folder = AutoModelForSequenceClassification.from_pretrained, tmp_path / optimizer
    before, after = load(encoder).state_dict(), load(folder)
    changed = {name for name, new in after.named_parameters() if not before[name].equal(new)}
    assert {"classifier.weight", "bert.encoder.layer.0.output.dense.weight"} <= changed
    texts, labels = finetune_bert.read(sentences, "dev")
    tokens = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    assert (after(**tokens).logits.argmax(1) == labels).double().mean() == accuracy
    if optimizer == "thor-muon":
        assert accuracy == 1.0


def test_each_parameter_is_trained_once(encoder):
    _, model = finetune_bert.load(str(encoder))
    for name in ("adamw", "muon", "thor-muon", "thor"):
        groups = [g for o in finetune_bert.make_optimizers(name, model) for g in o.param_groups]
        trained = sorted(id(p) for group in groups for p in group["params"])
        assert trained == sorted(id(p) for p in model.parameters())


def test_the_rates_rise_and_fall_and_files_of_glue_have_heads(tmp_path):
    rates = [finetune_bert.rate(step, 100) for step in range(101)]
    assert (rates[0], rates[9], max(rates), rates[55], rates[100]) == (0.1, 1.0, 1.0, 0.5, 0.0)
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na film\t1\nno\ttabs\t0\n")
    sentences, labels = finetune_bert.read(tmp_path, "dev")
    assert (sentences, labels.tolist()) == (["a film", "no\ttabs"], [1, 0])


def test_what_is_missing_is_one_line(tmp_path, monkeypatch):
    def fail(url):
        raise OSError("no network")

    monkeypatch.setattr(finetune_bert.urllib.request, "urlopen", fail)
    said = r"no .*train.tsv: save https://.*train.tsv there \(.*{}"
    with pytest.raises(SystemExit, match=said.format("No such file")):
        finetune_bert.read(tmp_path / "new", "train")
    monkeypatch.setattr(finetune_bert, "DATA", tmp_path / "new")
    with pytest.raises(SystemExit, match=said.format("no network")):
        finetune_bert.read(tmp_path / "new", "train")
    with pytest.raises(SystemExit, match=r"no model .*: give a folder with --model") as failed:
        finetune_bert.load(str(tmp_path / "absent"))
    assert "\n" not in str(failed.value)
