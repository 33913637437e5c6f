"""ImageNet's recipe: a run that was stopped goes on to the same weights; two processes."""

from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import imagenet_resnet50
from command_line import command
from torch_thor import THOR, ThorMuon

SMALL = ("--network", "shufflenet_v2_x0_5", "--size", "32", "--batch", "12", "--workers", "0")


def small(images, out, *words):
    return [*SMALL, "--data", str(images), "--out", str(out), *words]


class Stopped(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "thor-muon", "thor"])
def test_a_run_that_was_stopped_goes_on(images, optimizer, tmp_path, monkeypatch):
    words = ("--epochs", "2", "--optimizer", optimizer)
    whole = imagenet_resnet50.main(small(images, tmp_path / "whole", *words))
    part, calls = imagenet_resnet50.train_epoch, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            dist.destroy_process_group()
            raise Stopped
        return part(*arguments)

    monkeypatch.setattr(imagenet_resnet50, "train_epoch", once)
    with pytest.raises(Stopped):
        imagenet_resnet50.main(small(images, tmp_path / "parts", *words))
    assert torch.load(tmp_path / "parts" / f"{optimizer}.pt")["epochs"] == 1
    assert imagenet_resnet50.main(small(images, tmp_path / "parts", *words)) == whole
    (weights, *_), (others, *_) = (
        torch.load(tmp_path / folder / f"{optimizer}.pt")["states"] for folder in ("whole", "parts")
    )
    assert all(weights[name].equal(others[name]) for name in weights)


@pytest.mark.slow
def test_two_processes(images, tmp_path):
    script = Path(imagenet_resnet50.__file__)
    words = small(images, tmp_path / "two", "--epochs", "1")
    code, out, err = command(tmp_path, *words, ranks=2, script=script)
    assert code == 0, err
    assert out.count("thor, epoch 1: loss ") == 1
    assert out.splitlines()[-1].startswith("thor       top-1 and top-5 [")
    assert torch.load(tmp_path / "two" / "thor.pt")["epochs"] == 1


def test_the_recipe_of_the_reference():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    thor = imagenet_resnet50.make_optimizer("thor", model)
    assert isinstance(thor, THOR)
    rate, damping = imagenet_resnet50.make_schedules(thor, 45, 5004)
    for _ in range(2):
        model(torch.randn(8, 4)).square().mean().backward()
        thor.step()
        rate.step()
        damping.step()
    [group] = thor.param_groups
    e = 3 / 5004  # with which the third step is taken
    assert group["lr"] == pytest.approx(0.05803 * (1 - e / 53) ** 4.0839, rel=1e-9)
    assert group["damping"] == pytest.approx(0.03 * 0.50036 ** (e / 10), rel=1e-9)
    assert group["max_update_ratio"] is None


def test_the_rate_of_the_others_rises_and_falls():
    optimizer = imagenet_resnet50.make_optimizer("thor-muon", torch.nn.Linear(4, 3))
    assert isinstance(optimizer, ThorMuon)
    [schedule] = imagenet_resnet50.make_schedules(optimizer, 10, 20)
    [rate] = schedule.lr_lambdas
    assert [rate(step) for step in (0, 9, 105, 200)] == pytest.approx([0.1, 1.0, 0.5, 0.0])


def test_missing_images_are_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"train'?: ImageNet is at https://image-net.org/download"):
        imagenet_resnet50.load(tmp_path, "train", size=32)
