"""Projections in one weight: ThorMuon steps as if each had a weight of its own, wherever the
declaration comes from and whatever happens to the model. In shards:
tests/distributed/test_fully_sharded.py. Which classes are known: tests/optim/test_projections.py.
"""

import copy
import functools
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers.pytorch_utils import Conv1D

from tiny import assert_same, batches, told, train, weights
from torch_thor import LAMB, THOR, ThorMuon, split_rows

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon preconditions")

SIZES = (6, 2, 3)
STREAM = batches(5)
OPTIONS = {"lr": 0.1, "split_dim": 4, "weight_decay": 0.1, "update_interval": 2}


class Louder(nn.Linear):
    """A linear layer whose forward is not known, so that its matrix has no factors."""

    def forward(self, x):
        return 2 * super().forward(x)


# a layer with so many outputs, and the dimension of its weight that they are
LAYERS = {
    "linear": (lambda outputs: nn.Linear(5, outputs), 0),
    "no bias": (lambda outputs: nn.Linear(5, outputs, bias=False), 0),
    "inputs first": (lambda outputs: Conv1D(outputs, 5), 1),
    "without factors": (lambda outputs: Louder(5, outputs), 0),
    "convolution": (lambda outputs: nn.Conv1d(1, outputs, 5), 0),
    "transposed": (lambda outputs: nn.ConvTranspose1d(5, outputs, 2), 1),
}


class Joined(nn.Module):
    """One layer for all outputs, or a layer for some each; then a head."""

    def __init__(self, name, layers, seen):
        super().__init__()
        self.name, self.layers, self.head = name, nn.ModuleList(layers), nn.Linear(seen, 3)

    def forward(self, x):
        if self.name == "convolution":
            x = x[:, None]
        if self.name == "transposed":
            x = x[:, :, None]
        return self.head(torch.tanh(torch.cat([layer(x) for layer in self.layers], 1)).flatten(1))


def joined_and_apart(name):
    """(a model with a fused layer, one with the same weights in a layer for each projection)."""
    make, dim = LAYERS[name]
    fused, apart = make(sum(SIZES)), [make(size) for size in SIZES]
    with torch.no_grad():
        for own, part in zip(fused.weight.split(SIZES, dim), apart, strict=True):
            part.weight.copy_(own)
        if fused.bias is not None:
            for own, part in zip(fused.bias.split(SIZES), apart, strict=True):
                part.bias.copy_(own)
    seen = sum(SIZES) * (2 if name == "transposed" else 1)
    model, twin = Joined(name, [fused], seen), Joined(name, apart, seen)
    twin.head.load_state_dict(model.head.state_dict())
    return model.double(), twin.double(), dim


@pytest.mark.parametrize("ratio", [None, 0.02])
@pytest.mark.parametrize("name", LAYERS)
def test_a_split_layer_steps_as_a_layer_for_each_projection(name, ratio):
    model, twin, dim = joined_and_apart(name)
    split_rows(model.layers[0], SIZES)
    before = weights(model)
    for one in (model, twin):
        train(one, ThorMuon(one, max_update_ratio=ratio, **OPTIONS), STREAM)
    for kind in ("weight", "bias") if model.layers[0].bias is not None else ("weight",):
        wanted = torch.cat(
            [getattr(layer, kind) for layer in twin.layers], dim if kind == "weight" else 0
        )
        own = getattr(model.layers[0], kind)
        assert not own.equal(before[f"layers.0.{kind}"])
        torch.testing.assert_close(own, wanted, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(model.head.weight, twin.head.weight, rtol=1e-6, atol=1e-8)


def trained(model, split=None, method=ThorMuon, **options):
    """The weights after some steps, with the first layer declared to be split."""
    if split is not None:
        split_rows(model[0], split)
    train(model, method(model, **options), STREAM)
    return weights(model)


def twelve(**options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3)).double()


SAME = {
    "a number": 3,
    "a list": [4, 4, 4],
    "NumPy": np.array([4, 4, 4]),
    "a NumPy number": np.int32(3),
    "a tensor": torch.tensor([4, 4, 4]),
    "a tensor without dimensions": torch.tensor(3),
    "numbers of several kinds": (np.int64(4), torch.tensor(4), 4),
    "torch.Size": torch.Size((4, 4, 4)),
}


@pytest.mark.parametrize("name", SAME)
def test_sizes_as_torch_takes_them(name):
    assert_same(trained(twelve(), SAME[name]), trained(twelve(), (4, 4, 4)))


def test_one_projection_is_the_whole_and_the_last_declaration_counts():
    whole, thirds = trained(twelve()), trained(twelve(), 3)
    assert not thirds["0.weight"].equal(whole["0.weight"])
    for sizes in (1, (12,)):
        assert_same(trained(twelve(), sizes), whole)
    model = twelve()
    split_rows(model[0], (2, 10))
    assert_same(trained(model, 3), thirds)


def loaded(model, save, load):
    file = io.BytesIO()
    save(model, file)
    file.seek(0)
    return load(file)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: loaded(model, pickle.dump, pickle.load),
    "torch.save": lambda model: loaded(
        model, torch.save, functools.partial(torch.load, weights_only=False)
    ),
    "fx": torch.fx.symbolic_trace,
    "a part of a model": lambda model: nn.Sequential(*copy.deepcopy(model)),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_declaration_goes_with_its_module(name):
    model = twelve()
    split_rows(model[0], 3)
    twin = COPIES[name](model)
    names = dict.fromkeys(["0.weight", "0.bias", "2.weight", "2.bias"])
    assert {e.name: e.matrices for e in ThorMuon(twin).coverage()} == names | {
        "0.weight": ((4, 5),) * 3,
        "0.bias": (),
        "2.weight": ((3, 12),),
        "2.bias": (),
    }
    assert_same(trained(twin), trained(twelve(), 3))
    assert model.state_dict().keys() == names.keys()


def test_compiled_models_and_layers():
    model = twelve()
    split_rows(torch.compile(model[0]), 3)
    compiled = torch.compile(model, backend="eager")
    train(compiled, ThorMuon(compiled), STREAM)
    assert_same(weights(model), trained(twelve(), 3))


def test_a_state_dict_fits_a_model_with_other_projections():
    """The state is that of the whole weight, so the steps after loading are those of the new
    declaration.
    """
    model, twin = twelve(), twelve()
    split_rows(model[0], 3)
    optimizer = ThorMuon(model)
    train(model, optimizer, STREAM[:3])
    twin.load_state_dict(model.state_dict())
    other = ThorMuon(twin)
    other.load_state_dict(optimizer.state_dict())
    assert_same(other.state_dict()["state"], optimizer.state_dict()["state"])
    del optimizer
    split_rows(model[0], 1)
    optimizer = ThorMuon(model)
    optimizer.load_state_dict(other.state_dict())
    for one, of_one in ((model, optimizer), (twin, other)):
        train(one, of_one, STREAM[3:])
    assert_same(weights(model), weights(twin))


def test_each_projection_counts_as_a_matrix_in_the_depth():
    """Of more than ten matrices each takes a shorter step."""

    def deep():
        torch.manual_seed(0)
        layers = [nn.Linear(5, 5, bias=False) for _ in range(9)]
        return nn.Sequential(nn.Linear(5, 12), nn.Linear(12, 5), *layers, nn.Linear(5, 3)).double()

    steps = []
    for sizes in (1, 3):
        model = deep()
        split_rows(model[0], sizes)
        before = weights(model)
        train(model, ThorMuon(model, max_update_ratio=None), STREAM[:1])
        steps.append((weights(model)["5.weight"] - before["5.weight"]).norm())
    torch.testing.assert_close(steps[0] / steps[1], torch.tensor((14 / 12) ** 0.5).double())


def test_other_optimizers_have_no_projections():
    for method in (THOR, LAMB):
        assert_same(trained(twelve(), 3, method=method), trained(twelve(), method=method))


# ---- layers that are no plain modules ------------------------------------------------------------


def matrices(model):
    return {e.name: e.matrices for e in ThorMuon(model).coverage() if e.matrices}


THIRDS = ((4, 5),) * 3


def test_weights_that_are_computed_from_parameters():
    for compute, name in (
        (parametrizations.spectral_norm, "parametrizations.weight.original"),
        (parametrizations.weight_norm, "parametrizations.weight.original1"),
        (functools.partial(prune.l1_unstructured, name="weight", amount=3), "weight_orig"),
        (torch.nn.utils.spectral_norm, "weight_orig"),
    ):
        for declared_first in (True, False):
            model = twelve()
            if declared_first:
                split_rows(model[0], 3)
            compute(model[0])
            if not declared_first:
                split_rows(model[0], 3)
            assert matrices(model)[f"0.{name}"] == THIRDS


def test_shared_weights():
    def shared():
        model = nn.Sequential(nn.Linear(5, 12), nn.Linear(5, 12), nn.Linear(12, 3))
        model[1].weight = model[0].weight
        return model

    for of in (0, 1):
        model = shared()
        split_rows(model[of], 3)
        assert matrices(model)["0.weight"] == THIRDS
    model = shared()
    split_rows(model[0], 3)
    split_rows(model[1], (2, 10))
    with pytest.raises(
        ValueError,
        match=r"layer '1': \(2, 10\) must be those of layer '0', \(4, 4, 4\), which shares its "
        "weight; declare the same of both",
    ):
        ThorMuon(model)


def test_a_frozen_layer_is_split_when_it_is_trained():
    model = twelve()
    split_rows(model[0], 3)
    model[0].requires_grad_(False)
    optimizer = ThorMuon(model)
    train(model, optimizer, STREAM[:2])
    assert model[0].weight.equal(twelve()[0].weight)
    model[0].requires_grad_(True)
    assert {e.name: e.matrices for e in optimizer.coverage()}["0.weight"] == THIRDS


def test_an_adapter_around_a_split_layer():
    peft = pytest.importorskip("peft")
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 3))
    split_rows(model[0], 3)
    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    adapted = peft.get_peft_model(model, config)
    assert not any("base_layer" in name for name in matrices(adapted))
    layer = adapted.base_model.model[0]
    with pytest.raises(ValueError, match=r"give a linear layer.* itself and no module around it"):
        split_rows(layer, 3)
    split_rows(layer.lora_B["default"], 3)
    assert ((4, 2),) * 3 in matrices(adapted).values()
    merged = adapted.merge_and_unload().requires_grad_(True)
    assert THIRDS in matrices(merged).values()


def test_a_lazy_layer():
    model = nn.Sequential(nn.LazyLinear(12), nn.Tanh(), nn.Linear(12, 3))
    split_rows(model[0], 3)
    model(torch.zeros(2, 5))
    assert matrices(model)["0.weight"] == THIRDS


def test_rows_that_are_left_out_are_adamws():
    model = twelve()
    split_rows(model[0], 3)
    assert "0.weight" not in {e.name for e in ThorMuon(model, layers="-0").coverage() if e.matrices}


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [0, -3, True, 3.0, None, "3", (), (4, 0, 8), (4, -4, 12), (True, 11), (4.0, 8), "ab", {},
     torch.tensor(True), torch.tensor([[4, 8]]), torch.tensor([4.0, 8.0]), np.bool_(True),
     torch.tensor([True, True]), float("nan")],
)  # fmt: skip
def test_what_is_no_size_is_refused_at_the_declaration(sizes):
    model = twelve()
    with pytest.raises(
        ValueError, match=r"sizes=.*: must be whole numbers ≥ 1.*give \(d, d, d\), or 3 for thirds"
    ):
        split_rows(model[0], sizes)
    assert matrices(model)["0.weight"] == ((12, 5),)


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        (5, "5 must divide its 12 outputs; give the size of each"),
        (24, "24 must divide its 12 outputs"),
        ((4, 4), r"\(4, 4\) must add up to its 12 outputs; correct the sizes"),
        ((13,), r"\(13,\) must add up to its 12 outputs"),
    ],
)
@pytest.mark.parametrize("method", [THOR, ThorMuon])
def test_sizes_that_do_not_fit_are_refused_when_an_optimizer_is_made(sizes, rule, method):
    model = twelve()
    split_rows(model[0], sizes)
    with pytest.raises(ValueError, match=f"split_rows of layer '0': {rule}"):
        method(model)
    split_rows(model[0], 3)
    method(model)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (nn.Embedding(12, 5), "Embedding"),
        (nn.LayerNorm(12), "LayerNorm"),
        (nn.BatchNorm1d(12), "BatchNorm1d"),
        (nn.Conv2d(4, 12, 3, groups=2), "Conv2d"),
        (nn.ConvTranspose1d(4, 12, 3, groups=2), "ConvTranspose1d"),
        (nn.Bilinear(4, 5, 12), "Bilinear"),
        (nn.MultiheadAttention(12, 2), "MultiheadAttention"),
        (nn.LSTM(5, 3), "LSTM"),
        (nn.Sequential(nn.Linear(5, 12)), "Sequential"),
        (nn.Tanh(), "Tanh"),
    ],
)
def test_a_layer_that_is_not_one_matrix_is_refused(layer, name):
    with pytest.raises(
        ValueError,
        match=rf"split_rows\(module={name}\): must be a layer whose weight is one matrix, .*; give "
        "a linear layer, or a convolution with groups=1",
    ):
        split_rows(layer, 3)
    with pytest.raises(TypeError, match=r"split_rows\(module='0'\): must be .*Module; give"):
        split_rows("0", 3)


def test_a_weight_that_is_trained_as_no_matrix_is_refused_when_the_optimizer_is_made():
    tied = nn.Sequential(nn.Embedding(12, 5), nn.Linear(5, 12))
    tied[1].weight = tied[0].weight
    split_rows(tied[1], 3)
    norm = nn.Sequential(nn.Linear(5, 12), nn.LayerNorm((3, 4)))
    split_rows(norm[1], 3)
    for model, name in ((tied, "'1': its weight '0.weight'"), (norm, "'1': its weight '1.weight'")):
        with pytest.raises(
            ValueError, match=f"layer {name} must be trained as a matrix.*split_rows.*, 1"
        ):
            ThorMuon(model)
        split_rows(model[1], 1)
        ThorMuon(model)


def test_a_declaration_that_an_optimizer_would_not_follow_is_refused():
    model, twin = twelve(), twelve()
    optimizer, other = ThorMuon(model), ThorMuon(twin)
    train(model, optimizer, STREAM[:2])
    for sizes, has in ((3, r"\(12,\)"), ((2, 10), r"\(12,\)")):
        with pytest.raises(
            RuntimeError,
            match="must be declared before the optimizer is made.*trains this layer with "
            f"{has}; call split_rows before it is made, or delete that optimizer first",
        ):
            split_rows(model[0], sizes)
    split_rows(model[0], 1)  # as it is
    train(model, optimizer, STREAM[2:])
    train(twin, other, STREAM)
    assert_same(weights(model), weights(twin))
    del optimizer
    split_rows(model[0], 3)
    assert matrices(model)["0.weight"] == THIRDS
    natural = THOR(model)
    split_rows(model[0], 1)
    train(model, natural, STREAM)


@pytest.mark.filterwarnings("ignore:ThorMuon, step")
def test_sizes_that_do_not_fit_change_no_step_of_an_optimizer_that_exists():
    """Not even where the optimizer looks at the model anew."""
    model, twin = twelve(), twelve()
    for one in (model, twin):
        split_rows(one[0], 3)
        optimizer = ThorMuon(one)
        train(one, optimizer, STREAM[:2])
        if one is model:
            split_rows(model[0], (4, 4))
        one[2] = nn.Linear(12, 3).double()
        one[2].load_state_dict(twelve()[2].state_dict())
        assert told(train, one, optimizer, STREAM[2:])
    assert_same(weights(model), weights(twin))
    with pytest.raises(ValueError, match="must add up to its 12 outputs"):
        ThorMuon(model)


def test_a_layer_that_is_replaced_brings_its_declaration():
    """If its sizes do not fit, the next step is taken all the same, and says so."""
    for sizes, found in ((3, THIRDS), ((3, 4), ((12, 5),))):
        model = twelve()
        optimizer = ThorMuon(model)
        train(model, optimizer, STREAM[:2])
        model[0] = nn.Linear(5, 12).double()
        split_rows(model[0], sizes)
        optimizer.add_param_group({"params": model[0].parameters()})
        before = model[0].weight.detach().clone()
        said = [m for m in told(train, model, optimizer, STREAM[2:]) if "split_rows" in m]
        assert not model[0].weight.equal(before)
        assert {e.name: e.matrices for e in optimizer.coverage()}["0.weight"] == found
        assert said == (
            []
            if sizes == 3
            else [
                "ThorMuon: split_rows of layer '0': (3, 4) must add up to its 12 outputs; correct "
                "the sizes. It is orthogonalised as one matrix"
            ]
        )
