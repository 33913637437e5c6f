"""`torch-thor eval`: data that moved, other data, the evaluation images alone, several processes, all digits."""

import functools
import json
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from command_line import IMAGES, assert_refused, call, command, lines
from image_tree import write_tree
from torch_thor.training import UserError, load_recipe, recipe_yaml
from torch_thor.training.data import CIFAR, EvaluationOrder, ImageTransform, Shard, WholeBatches
from torch_thor.training.evaluating import _recipe

WORDS = ("train", "digits", *IMAGES, "data.workers.count=0", "data.root=data", "model=small-resnet", "optimizer=sgd")
WORDS += ("batch_size=4", "epochs=1", "lr=0.05", "ema_decay=0.5", "--out", "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the small ImageNet, with batches of 4 of its 9 evaluation images."""
    folder = tmp_path_factory.mktemp("trained")
    write_tree(folder / "data")
    code, _, err = command(folder, *WORDS)
    assert code == 0, err
    return folder


@pytest.fixture
def run(monkeypatch, capsys, tmp_path, trained):
    """Call the command line in a folder with the trained run and its images in moved/."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained / "run", tmp_path / "run")
    shutil.copytree(trained / "data", tmp_path / "moved")
    return functools.partial(call, monkeypatch, capsys)


@pytest.mark.parametrize("names", [("val",), ("ilsvrc_eval",), ("train", "val")])
def test_a_moved_folder_whose_training_images_may_be_gone(run, tmp_path, names):
    if "train" not in names:
        shutil.rmtree(tmp_path / "moved/train")
        (tmp_path / "moved/val").rename(tmp_path / "moved" / names[0])
    assert_refused(run("eval", "run"), "data.root=data is not a folder: set it to the folder that contains val/")
    code, out, err = run("eval", "run", "data.root=moved", "--json")
    assert (code, err) == (0, "")
    own, averaged = json.loads(out)
    final = lines(tmp_path / "run", "sgd", "eval")[-1]
    assert [own[key] for key in ("optimizer", "averaged", "step", "images")] == ["sgd", False, 4, 9]
    assert [averaged[key] for key in ("optimizer", "averaged", "step", "images")] == ["sgd", True, 4, 9]
    assert own["path"] == "run/sgd/checkpoints/step-00000004"
    # what training measured, to the last bit: the batches are the same
    assert [own[key] for key in ("loss", "top1", "top5")] == [final[key] for key in ("loss", "top1", "top5")]
    assert averaged["loss"] == final["averaged_loss"]
    assert f'"loss": {final["loss"]!r}' in out
    code, out, err = run("eval", "run", "data.root=moved")
    assert (code, err) == (0, "")
    assert f"{final['top1']:.2%}" in out


def test_other_images(run, tmp_path):
    """Twice the images of one class, in a folder of their own."""
    for name in ("china", "flower", "digit"):
        shutil.copytree(tmp_path / f"moved/val/{name}", tmp_path / f"other/val/{name}")
    for path in list((tmp_path / "other/val/digit").iterdir()):
        shutil.copy(path, path.with_name(f"again_{path.name}"))
    first, other = (json.loads(run("eval", "run", f"data.root={root}", "--json")[1]) for root in ("moved", "other"))
    assert (first[0]["images"], other[0]["images"]) == (9, 12)
    assert first[0]["loss"] != other[0]["loss"]


def test_a_damaged_image_is_told_and_not_counted(run, tmp_path):
    (tmp_path / "moved/val/digit/digit_7.JPEG").write_bytes(b"no image")
    code, out, err = run("eval", "run", "data.root=moved", "--json")
    assert code == 0
    assert json.loads(out)[0]["images"] == 8
    assert "digit_7.JPEG cannot be read" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr=0.1"], "lr cannot be changed for an evaluation, only data, device, batch_size, threads"),
        (["model=small-cnn"], "model cannot be changed for an evaluation"),
        (["classes=5"], "classes cannot be changed for an evaluation"),
        (["data.rot=moved"], "there is no key data.rot (did you mean data.root?)"),
        (["data.root"], "'data.root' is not an override: write key=value"),
        (["data.name=digits", "data.transform=null"], "does not contain the weights of this network"),
        (
            ["data.name=cifar10", "data.root=nowhere", "data.download=false"],
            "cifar10 is missing or incomplete in nowhere",
        ),
        (
            ["data.root=run"],
            "data.root=run must contain val/ or ilsvrc_eval/, with a folder for each class; it contains sgd",
        ),
        (["data.root=null"], "image-folder needs the folder that contains val/"),
    ],
)
def test_mistakes_are_one_line(run, words, said):
    assert_refused(run("eval", "run", *words), said)


def test_classes_that_differ_from_those_of_training(run, tmp_path):
    (tmp_path / "moved/val/digit").rename(tmp_path / "moved/val/digits")
    assert_refused(run("eval", "run", "data.root=moved"), "digit only in train/; digits only in val/")
    shutil.rmtree(tmp_path / "moved/train")
    shutil.copytree(tmp_path / "moved/val/china", tmp_path / "moved/val/zebra")
    assert_refused(run("eval", "run", "data.root=moved"), "does not contain the weights of this network")


def test_fewer_classes_than_outputs_are_said(run, tmp_path):
    """Labels are the sorted order of the folders: a part of ImageNet would be numbered anew, in silence."""
    shutil.copytree(tmp_path / "moved", tmp_path / "data")
    assert run(*WORDS, "classes=5", "ema_decay=null", "--out", "more")[0] == 0
    assert run("eval", "more")[2] == ""
    code, _, err = run("eval", "more", "data.root=moved")
    assert code == 0
    assert (
        err.count("the data has 3 classes, and the network 5 outputs: classes are numbered in their sorted order") == 1
    )


def test_another_data_set_is_read_as_the_network_was_trained():
    """Not with the crops and means that are usual for it; the user's own word counts."""

    def data(words, *trained):
        text = recipe_yaml(load_recipe("digits", list(trained)))
        return _recipe(SimpleNamespace(recipe_text=text, path="here"), words).data

    cifar = ("data.name=cifar10", "model=cifar-resnet18")
    assert data(["data.name=image-folder", "data.root=x"], *cifar).transform == CIFAR
    assert data(["data.name=cifar100"], *cifar, "data.transform.size=40", "data.transform.resize=44").image_shape == (
        3, 40, 40,
    )  # fmt: skip
    assert data(["data.name=image-folder", "data.transform.size=64"], *cifar).transform == ImageTransform(size=64)
    with pytest.raises(UserError, match=r"data.name=fashion-mnist has images of 1 x 28 x 28, .* trained on 1 x 8 x 8"):
        data(["data.name=fashion-mnist"])
    with pytest.raises(UserError, match="has images of 1 x 8 x 8, the network was trained on 3 x 32 x 32"):
        data(["data.name=digits"], *cifar)


@pytest.mark.parametrize(("count", "batch_size", "ranks"), [(9, 4, 2), (9, 4, 3), (9, 4, 5), (8, 4, 2), (1, 4, 2)])
def test_the_ranks_share_the_batches_of_one_process(count, batch_size, ranks):
    alone = list(WholeBatches(count, batch_size).epoch(0))
    assert alone == list(EvaluationOrder(count, batch_size).epoch(0))
    orders = [WholeBatches(count, batch_size, Shard(rank, ranks)) for rank in range(ranks)]
    shares = [list(order.epoch(0)) for order in orders]
    assert sorted(batch for share in shares for batch in share) == alone
    assert [order.batches for order in orders] == [len(share) for share in shares]
    assert sum(order.images for order in orders) == count
    assert list(orders[0].epoch(0, start=1)) == shares[0][1:]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_print_what_one_prints(trained):
    """Three batches for two: to the last bit, once, and nothing else on stdout."""
    words = ("eval", "run", "--json")
    code, alone, err = command(trained, *words)
    assert code == 0, err
    code, out, err = command(trained, *words, ranks=2)
    assert code == 0, err
    assert re.sub(r"^\[Gloo\] Rank .*\n", "", out, flags=re.MULTILINE) == alone  # lines of torch 2.9's own
