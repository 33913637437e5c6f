"""The Trainer of Hugging Face: all weights, or adapters."""

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:ThorMuon")]


def run(optimizer, *words):
    import finetune_trainer

    words = ["--optimizer", optimizer, *map(str, words)]
    return finetune_trainer.main(words)[optimizer]


@pytest.mark.parametrize("optimizer", ["adamw", "thor-muon", "thor"])
def test_all_weights(encoder, sentences, optimizer, tmp_path):
    words = ("--data", sentences, "--out", tmp_path, "--model", encoder)
    before = run(optimizer, *words, "--epochs", 0)
    found = run(optimizer, *words, "--batch", 8, "--epochs", 3)
    assert found["epoch"] == 3.0
    assert found["eval_loss"] < before["eval_loss"]
    again = run(optimizer, *words[:-1], tmp_path / optimizer, "--epochs", 0)
    assert again["eval_loss"] == pytest.approx(found["eval_loss"])
    if optimizer == "thor-muon":
        assert found["eval_accuracy"] == 1.0


@pytest.mark.parametrize("optimizer", ["adamw", "thor-muon", "thor"])
def test_adapters_are_few(encoder, sentences, optimizer, tmp_path):
    words = ("--data", sentences, "--out", tmp_path, "--model", encoder)
    before = run(optimizer, *words, "--lora", "--epochs", 0)
    found = run(optimizer, *words, "--lora", "--batch", 8, "--epochs", 4)
    assert found["eval_loss"] < before["eval_loss"]
    saved = load_file(tmp_path / optimizer / "adapter_model.safetensors")
    base = AutoModelForSequenceClassification.from_pretrained(encoder)
    # two projections of 16 x 16, each with two matrices of rank 8, and a head with its bias
    assert sum(t.numel() for t in saved.values()) == 2 * 2 * 8 * 16 + 34
    assert sum(p.numel() for p in base.parameters()) / 4 > 546
    assert all(t.any() for name, t in saved.items() if "lora_B" in name)  # which were 0
