"""CIFAR-10: airbench94's network, its augmentation, and that images are told apart."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cifar10


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "thor-muon", "thor"])
def test_colours_are_told_apart(images, optimizer, capsys):
    words = ["--optimizer", optimizer, "--data", str(images), "--width", "4", "--batch", "8"]
    accuracy = cifar10.main([*words, "--epochs", "4"])[optimizer]
    assert f"{optimizer:10} test accuracy {accuracy:.4f} after " in capsys.readouterr().out
    assert accuracy > 0.5  # chance has a sixth


@pytest.mark.slow
def test_a_resnet_learns(images):
    words = ["--network", "resnet18", "--data", str(images), "--batch", "8", "--epochs", "2"]
    assert cifar10.main([*words, "--optimizer", "thor-muon"])["thor-muon"] > 0.9


def test_the_first_layer_whitens():
    images = torch.rand(50, 3, 8, 8).cumsum(3)
    model = cifar10.Airbench(images, 10, 64)
    white = F.conv2d(images, model.whiten.weight).movedim(1, -1).reshape(-1, 24)
    torch.testing.assert_close(white[:, :12], -white[:, 12:])
    second_moment = white[:, :12].T @ white[:, :12] / len(white)
    torch.testing.assert_close(second_moment, torch.eye(12), atol=0.05, rtol=0.0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert "whiten.bias" in trained
    assert "whiten.weight" not in trained
    shapes = [tuple(m.weight.shape) for m in model.modules() if isinstance(m, nn.Conv2d)]
    widths = [(64, 24), (64, 64), (256, 64), (256, 256), (256, 256), (256, 256)]
    assert shapes == [(24, 3, 2, 2), *((n, m, 3, 3) for n, m in widths)]


def test_muon_trains_filters_as_matrices():
    filters = nn.Parameter(torch.randn(4, 3, 3, 3))
    matrix = nn.Parameter(filters.detach().flatten(1) * 2.0 / filters.detach().norm())
    filters.grad = torch.randn_like(filters)
    matrix.grad = filters.grad.flatten(1)
    torch.optim.Muon([matrix], lr=0.1, weight_decay=0.0).step()
    cifar10.FilterMuon([filters], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(filters.flatten(1), matrix)


def test_images_are_mirrored_and_moved():
    x = torch.randn(60, 3, 32, 32)
    flip = torch.arange(60) < 30
    padded = F.pad(torch.cat([x[:30].flip(-1), x[30:]]), (2, 2, 2, 2), "reflect")
    seen = set()
    for moved, wide in zip(cifar10.augment(x, flip), padded, strict=True):
        moves = [(i, j) for i in range(5) for j in range(5)]
        seen |= {(i, j) for i, j in moves if moved.equal(wide[:, i : i + 32, j : j + 32])}
    assert len(seen) > 15
    assert {0, 4} <= {i for i, _ in seen} & {j for _, j in seen}


def test_missing_data_are_one_line(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(cifar10, "CIFAR10", fail)
    with pytest.raises(SystemExit, match=r"no CIFAR-10 \(no network\): clone https://.* into"):
        cifar10.main(["--data", str(tmp_path)])
