"""`parallel=fsdp` and `parallel=hsdp`: what is divided, what equals one process, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from command_line import IMAGES, assert_refused, call, command, lines, succeed
from image_tree import write_tree
from torch_thor.training import UserError, load_recipe
from torch_thor.training.engine.sharding import blocks
from torch_thor.training.models import CharTransformer, SmallResNet, build_model

GLOO = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")


def names(model):
    by_module = {module: name for name, module in model.named_modules()}
    return [by_module[block] for block in blocks(model)]


def test_blocks_are_the_layers_of_a_transformer_and_the_residual_blocks():
    assert names(CharTransformer(5, 8)) == [f"blocks.{i}" for i in range(len(CharTransformer(5, 8).blocks))]
    assert all(name.startswith("stages.") for name in names(SmallResNet(1, 10)))
    found = names(build_model("torchvision:resnet18", 3, 10))
    assert found == [f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)]


def test_blocks_of_a_list_of_layers_are_the_layers_with_parameters():
    assert names(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3)))) == ["0", "2.0"]


def test_a_block_that_shares_a_parameter_with_the_rest_belongs_to_the_network():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    assert names(model) == ["1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel=tensor"], "parallel=tensor must be one of ddp, fsdp, hsdp"),
        (["shards=2"], "shards=2 must be 2 or more, and needs parallel=hsdp"),
        (["parallel=hsdp", "shards=1"], "shards=1 must be 2 or more"),
        (["parallel=fsdp", "optimizer=sgd,muon"], "optimizer=muon cannot train divided parameters"),
    ],
)
def test_what_cannot_be_divided_is_refused(words, said):
    with pytest.raises(UserError, match=said):
        load_recipe("digits", words)


def test_one_process_holds_the_whole_network(monkeypatch, capsys, tmp_path):
    words = ("train", "digits", "optimizer=sgd", "steps=3", "eval_interval=3", "device=cpu", "targets=[]")
    for way in ("ddp", "fsdp"):
        code, _, err = call(monkeypatch, capsys, *words, f"parallel={way}", "--out", tmp_path / way)
        assert code == 0, err
    assert lines(tmp_path / "fsdp", "sgd") == lines(tmp_path / "ddp", "sgd")


@GLOO
@pytest.mark.slow
def test_groups_that_do_not_fit_are_refused(tmp_path):
    words = ("train", "digits", "batch_size=60", "parallel=hsdp", "shards=2", "device=cpu")
    code, _, err = command(tmp_path, *words, ranks=3)
    assert code != 0
    said = [line for line in err.splitlines() if line.startswith("torch-thor")]
    assert len(said) == 1
    assert "divides 3 processes into groups of shards=2, which leaves some over" in said[0]
    assert not (tmp_path / "runs").exists()


# an optimizer that depends on no boundary between shards, with every setting of a step; 359 images to evaluate, of
# which the fourth process has fewer batches
SGD = ("train", "digits", "optimizer=sgd,adam,lamb", "epochs=1", "batch_size=96", "eval_interval=7", "device=cpu")
SGD += ("accumulation=3", "clip_norm=0.5", "ema_decay=0.9", "label_smoothing=0.1", "targets=[]", "threads=1")


@GLOO
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "way"), [(3, ["parallel=fsdp"]), (4, ["parallel=hsdp", "shards=2"])])
def test_first_order_steps_equal_one_process(tmp_path, ranks, way):
    succeed(tmp_path, *SGD, "--out", tmp_path / "one")
    succeed(tmp_path, *SGD, *way, "--out", tmp_path / "many", ranks=ranks)
    for optimizer in ("sgd", "adam", "lamb"):
        for kind, keys in (("step", ("loss",)), ("eval", ("loss", "averaged_loss"))):
            left, right = (lines(tmp_path / run, optimizer, kind) for run in ("one", "many"))
            for key in keys:
                found = [[line[key] for line in side] for side in (left, right)]
                np.testing.assert_allclose(*found, rtol=2e-3, err_msg=f"{optimizer} {kind} {key}")


@GLOO
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["char-lm", "autoencoder", "fashion-mnist", "bert-tiny"])
def test_recipes_train_divided_in_bfloat16(tmp_path, recipe):
    data = [] if recipe in ("char-lm", "bert-tiny") else ["data.name=digits"]
    words = ("train", recipe, "optimizer=thor", "steps=2", "eval_interval=2", "device=cpu", "batch_size=8")
    succeed(
        tmp_path, *words, *data, "targets=[]", "precision=bf16", "parallel=fsdp", "--out", tmp_path / "run", ranks=2
    )
    succeed(tmp_path, "eval", tmp_path / "run", "device=cpu")


@GLOO
@pytest.mark.slow
def test_image_folders_train_divided(tmp_path):
    write_tree(tmp_path / "data")
    words = ("train", "fashion-mnist", *IMAGES, "data.root=data", "data.transform.size=8", "data.transform.resize=9")
    words += ("batch_size=6", "steps=2", "eval_interval=2", "targets=[]", "optimizer=thor", "parallel=fsdp")
    succeed(tmp_path, *words, "--out", "run", ranks=2)
    succeed(tmp_path, "eval", "run", "device=cpu")


# with this loss scale most steps overflow and some do not; all processes must skip the same ones
@GLOO
@pytest.mark.slow
@pytest.mark.parametrize("words", [["compile=true"], ["precision=fp16", "loss_scale=8e5"]])
def test_divided_networks_train_compiled_and_with_a_loss_scale_as_one_process(tmp_path, words):
    words = ("train", "digits", "optimizer=sgd", "steps=6", "eval_interval=6", "batch_size=64", "device=cpu", *words)
    succeed(tmp_path, *words, "targets=[]", "--out", tmp_path / "one")
    succeed(tmp_path, *words, "targets=[]", "parallel=fsdp", "--out", tmp_path / "two", ranks=2)
    one, two = (lines(tmp_path / run, "sgd", "step") for run in ("one", "two"))
    np.testing.assert_allclose([line["loss"] for line in two], [line["loss"] for line in one], rtol=2e-2)
    assert [line["step"] for line in two] == list(range(1, 7))


@GLOO
@pytest.mark.slow
def test_the_block_size_must_be_a_number_where_parameters_are_divided(tmp_path):
    words = ("train", "digits", "optimizer=thor", "split_dim=auto", "parallel=fsdp", "device=cpu", "batch_size=64")
    code, _, err = command(tmp_path, *words, ranks=2)
    assert code != 0
    assert "split_dim" in err
    assert "Traceback" not in err
    assert_refused((2, "", "\n".join([line for line in err.splitlines() if line.startswith("torch-thor:")]) + "\n"))
