"""nanoGPT's CPU example: its sizes, and that each optimizer lowers the loss."""

import math
import re
import urllib.request

import pytest
import torch

import nanogpt


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("to be or not to be. " * 20)
    return file


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(nanogpt, "LENGTH", 16)
    monkeypatch.setattr(nanogpt, "BATCH", 4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "thor-muon", "thor"])
def test_the_loss_falls(small, text, optimizer, capsys):
    words = ["--optimizer", optimizer, "--data", str(text), "--width", "16", "--steps", "20"]
    loss = nanogpt.main([*words, "--eval-every", "10"])[optimizer]
    what, first, _, last = capsys.readouterr().out.splitlines()
    assert what.endswith("text.txt, 400 characters: 20 steps of 64")
    assert first.startswith(f"{optimizer}, step 10: train loss ")
    assert re.fullmatch(rf"{optimizer} +val loss {loss:.4f} after \d+ s", last)
    assert loss < float(first.split()[-1]) < math.log(9)  # letters


def test_a_seed_gives_the_same_losses_again(small, text):
    words = ["--data", str(text), "--width", "8", "--steps", "2", "--seed"]
    first, again, other = (nanogpt.main([*words, seed]) for seed in ("1", "1", "2"))
    assert [*first] == ["adamw", "thor-muon"]
    assert first == again != other


def test_the_network_has_the_sizes_of_nanogpt():
    model = nanogpt.GPT(65, 128)
    parameters = sum(p.numel() for p in model.parameters()) - model.positions.weight.numel()
    assert f"{parameters / 1e6:.2f}M" == "0.80M"  # which nanoGPT prints
    x = torch.randint(65, (12, 65))
    assert abs(model(x[:, :-1], x[:, 1:]).item() - math.log(65)) < 0.1
    h = torch.randn(1, 6, 128)
    later = h.clone()
    later[:, 4:] = 0.0
    torch.testing.assert_close(model.blocks(h)[:, :4], model.blocks(later)[:, :4])
    assert not model.blocks(h)[:, 4:].allclose(model.blocks(later)[:, 4:])


def test_each_parameter_is_trained_once(text):
    model = nanogpt.GPT(9, 16)
    for name in ("adamw", "muon", "thor-muon", "thor"):
        groups = [g for o in nanogpt.make_optimizers(name, model) for g in o.param_groups]
        trained = sorted(id(p) for group in groups for p in group["params"])
        assert trained == sorted(id(p) for p in model.parameters())


def test_data_that_cannot_be_downloaded_are_one_line(tmp_path, monkeypatch):
    def fail(url):
        raise OSError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    file = tmp_path / "new" / "text.txt"
    with pytest.raises(SystemExit, match=rf"no {file}: save https://.*input.txt .*No such file"):
        nanogpt.main(["--data", str(file)])  # the example's text would be downloaded
    monkeypatch.setattr(nanogpt, "DATA", file)
    with pytest.raises(SystemExit, match=rf"no {file}: save https://.*input.txt .*no network"):
        nanogpt.main(["--data", str(file)])
    assert not file.exists()
