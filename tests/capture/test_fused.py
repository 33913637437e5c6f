"""Fused weights: each projection takes the step that it takes in a layer of its own."""

import copy
import gc
import io
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from tiny import assert_same, weights
from torch_thor import ThorMuon, split_rows

pytestmark = pytest.mark.filterwarnings("ignore:ThorMuon preconditions")
OPTIONS = {"update_interval": 2, "weight_decay": 0.1, "lr": 0.05}


def conv1d(outputs, inputs):
    """The linear layer of GPT-2, whose weight has the inputs first."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D(outputs, inputs)


LAYERS = {  # a layer of so many outputs, the dimension of its outputs in the weight, and its input
    "Linear": (lambda n: nn.Linear(6, n), 0, (9, 6)),
    "Conv1D": (lambda n: conv1d(n, 6), 1, (9, 6)),
    "Conv2d": (lambda n: nn.Conv2d(3, n, 2), 0, (2, 3, 4, 4)),
    "ConvTranspose1d": (lambda n: nn.ConvTranspose1d(3, n, 2), 1, (2, 3, 5)),
    "without a kind": (lambda n: Louder(6, n), 0, (9, 6)),
}
SIZES = (4, 2, 6)


class Louder(nn.Linear):
    """A layer whose forward is not known: a matrix without factors."""

    def forward(self, x):
        return 2 * super().forward(x)


def fused_and_parts(make, dim):
    """A fused layer, and one layer for each projection with the same weights."""
    torch.manual_seed(0)
    fused = make(sum(SIZES)).double()
    parts = [make(size).double() for size in SIZES]
    with torch.no_grad():
        for part, weight, bias in zip(
            parts, fused.weight.split(SIZES, dim), fused.bias.split(SIZES), strict=True
        ):
            part.weight.copy_(weight)
            part.bias.copy_(bias)
    return fused, nn.ModuleList(parts)


def steps(model, outputs, shape, **options):
    """Train for four steps with the same inputs, and return the optimizer."""
    optimizer = ThorMuon(model, **{**OPTIONS, **options})
    for i in range(4):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(i)).double()
        y = outputs(x).flatten(2) if len(shape) > 2 else outputs(x)[..., None]
        scale = torch.arange(1.0, 1 + y.shape[1])[:, None]
        (scale * y).sin().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def apart(layers):
    return lambda x: torch.cat([layer(x) for layer in layers], dim=1)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("split_dim", [None, 3])
def test_projections_take_the_steps_of_separate_layers(kind, split_dim):
    make, dim, shape = LAYERS[kind]
    fused, parts = fused_and_parts(make, dim)
    split_rows(fused, SIZES)
    optimizer = steps(fused, fused, shape, split_dim=split_dim)
    steps(parts, apart(parts), shape, split_dim=split_dim)
    for name in ("weight", "bias"):
        of_parts = torch.cat(
            [getattr(part, name) for part in parts], dim if name == "weight" else 0
        )
        torch.testing.assert_close(getattr(fused, name), of_parts, rtol=1e-7, atol=1e-9)
    columns = fused.weight.numel() // sum(SIZES)
    assert optimizer.coverage()[0].matrices == tuple((size, columns) for size in SIZES)


def test_a_number_of_equal_projections():
    results = []
    for sizes in (3, (4, 4, 4), [4, 4, 4], np.int64(3), torch.tensor(3), np.array([4, 4, 4])):
        fused, _ = fused_and_parts(*LAYERS["Linear"][:2])
        split_rows(fused, sizes)
        steps(fused, fused, (9, 6))
        results.append(weights(fused))
    for other in results[1:]:
        assert_same(results[0], other)


def copied(model):
    return copy.deepcopy(model)


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def compiled(model):
    model.compile(backend="eager")
    return model


def traced(model):
    return torch.fx.symbolic_trace(model)


@pytest.mark.parametrize("change", [copied, pickled, compiled, traced])
def test_it_stays_with_the_module(change):
    results = []
    for changed in (False, True):
        model = nn.Sequential(fused_and_parts(*LAYERS["Linear"][:2])[0])
        split_rows(model[0], SIZES)
        model = change(model) if changed else model
        optimizer = steps(model, model, (9, 6))
        results.append(weights(model))
        assert optimizer.coverage()[0].matrices == tuple((size, 6) for size in SIZES)
    assert_same(*results)


def test_a_checkpoint_resumes_bit_for_bit():
    model = nn.Sequential(fused_and_parts(*LAYERS["Linear"][:2])[0])
    split_rows(model[0], SIZES)
    optimizer = steps(model, model, (9, 6))
    other = copy.deepcopy(model)
    resumed = ThorMuon(other, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, which in ((model, optimizer), (other, resumed)):
        one(torch.ones(5, 6).double()).sin().sum().backward()
        which.step()
    assert_same(weights(model), weights(other))


# ---- what is refused -----------------------------------------------------------------------------

REFUSED = {
    "an embedding": (lambda: nn.Embedding(6, 4), "a table"),
    "a normalisation": (lambda: nn.LayerNorm(6), "no matrix"),
    "groups": (lambda: nn.Conv2d(4, 6, 1, groups=2), "2 matrices"),
    "several": (lambda: nn.MultiheadAttention(8, 2), "name the layer inside it"),
    "a block": (lambda: nn.Sequential(nn.Linear(2, 2)), "name the layer inside it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_layer_that_has_not_one_matrix_is_refused(name):
    make, why = REFUSED[name]
    module = make()
    said = f"split_rows of a {type(module).__name__}: must be a layer whose weight is one .*{why}"
    with pytest.raises(ValueError, match=said):
        split_rows(module, 2)


@pytest.mark.parametrize("sizes", [0, -1, (), (2, 0), (2, -2), 1.5, (2.0, 4.0), True, "3", None])
def test_sizes_that_are_no_numbers_are_refused(sizes):
    with pytest.raises(ValueError, match=r"sizes=.*: must be whole numbers ≥ 1, .*; give \(d, d"):
        split_rows(nn.Linear(4, 6), sizes)


def test_what_is_no_layer_is_refused():
    with pytest.raises(TypeError, match=r"split_rows\(Parameter\): must be a layer, such as"):
        split_rows(nn.Linear(4, 6).weight, 2)


@pytest.mark.parametrize(("sizes", "verb"), [((2, 3), "add up to"), (4, "divide"), (7, "divide")])
def test_sizes_that_do_not_fit_are_refused_by_the_next_optimizer(sizes, verb):
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    split_rows(model[0], sizes)
    with pytest.raises(ValueError, match=f"layer '0': .* must {verb} its 6 outputs; correct"):
        ThorMuon(model)


def test_a_weight_that_is_computed_is_refused():
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    split_rows(model[0], 2)
    nn.utils.parametrizations.weight_norm(model[0])
    with pytest.raises(ValueError, match=r"layer '0': its weight is computed .*; leave one out"):
        ThorMuon(model)


def test_tied_layers_must_agree():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    split_rows(model[2], 3)
    assert ThorMuon(model).coverage()[0].matrices == ((2, 6),) * 3
    split_rows(model[0], 2)
    with pytest.raises(ValueError, match=r"layer '2': \(2, 2, 2\) must be \(3, 3\), which another"):
        ThorMuon(model)


def test_declared_too_late_it_is_told_and_counts_for_the_next_optimizer():
    model = nn.Sequential(fused_and_parts(*LAYERS["Linear"][:2])[0])
    twin = copy.deepcopy(model)
    optimizer = ThorMuon(model, **OPTIONS)
    with pytest.warns(UserWarning, match=r"split_rows\(Linear, 3\) after an .*first, then make"):
        split_rows(model[0], 3)
    other = ThorMuon(twin, **OPTIONS)
    for one, which in ((model, optimizer), (twin, other)):
        one(torch.ones(5, 6).double()).sin().sum().backward()
        which.step()
    assert_same(weights(model), weights(twin))
    assert len(ThorMuon(model).coverage()[0].matrices) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        split_rows(model[0], 3)  # as it is
        del optimizer, other, which
        gc.collect()
        split_rows(model[0], 2)


def test_a_layer_that_is_added_later_keeps_its_declaration():
    model = nn.Sequential(nn.Linear(4, 6))
    optimizer = ThorMuon(model)
    model.append(nn.Linear(6, 6))
    split_rows(model[1], 2)
    optimizer.add_param_group({"params": model[1].parameters()})
    assert optimizer.coverage()[2].matrices == ((3, 6),) * 2
    model.append(nn.Linear(6, 5))
    split_rows(model[2], 2)
    with pytest.raises(ValueError, match="must divide its 5 outputs"):
        optimizer.add_param_group({"params": model[2].parameters()})
    assert len(optimizer.param_groups) == 2
    model(torch.randn(3, 4)[:, :4]).sum().backward()
    optimizer.step()


# ---- known classes -------------------------------------------------------------------------------


def gpt2():
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=9, n_positions=4))


def encoder_decoder():
    from transformers import GPT2Config, GPT2Model

    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 4}
    return GPT2Model(GPT2Config(**sizes, add_cross_attention=True))


def timm_attention():
    from timm.layers import Attention

    return Attention(8, num_heads=2)


def timm_subclass():
    from timm.layers import Attention

    return type("Mine", (Attention,), {})(8, num_heads=2)


def beit():
    from timm.models.beit import Attention

    return Attention(8, num_heads=2)


def swin():
    from timm.models.swin_transformer import WindowAttention

    return WindowAttention(8, num_heads=2, window_size=2)


def mpt():
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention

    return MptAttention(MptConfig(d_model=8, n_heads=2), layer_idx=0)


KNOWN = {
    gpt2: {"h.0.attn.c_attn.weight": 3},
    encoder_decoder: {"h.0.attn.c_attn.weight": 3, "h.0.crossattention.c_attn.weight": 2},
    timm_attention: {"qkv.weight": 3},
    timm_subclass: {"qkv.weight": 3},
    beit: {"qkv.weight": 3},
    swin: {"qkv.weight": 3},
    mpt: {"Wqkv.weight": 3},
}


@pytest.mark.parametrize("make", KNOWN, ids=lambda make: make.__name__)
def test_fused_weights_of_known_classes_are_taken_apart(make):
    model = make()
    matrices = {entry.name: entry.matrices for entry in ThorMuon(model).coverage()}
    for name, count in KNOWN[make].items():
        assert matrices[name] == ((8, 8),) * count, name
        split_rows(model.get_submodule(name.rpartition(".")[0]), 1)
    gc.collect()
    matrices = {entry.name: entry.matrices for entry in ThorMuon(model).coverage()}
    for name, count in KNOWN[make].items():
        assert matrices[name] == ((8 * count, 8),)


@pytest.mark.parametrize("make", [timm_attention, beit, gpt2])
def test_the_last_third_of_a_known_class_is_the_value(make):
    """Without it the attention of all heads is 0."""
    model = make().eval()
    layer = model.qkv if make is not gpt2 else model.h[0].attn.c_attn
    attention = model if make is not gpt2 else model.h[0].attn
    with torch.no_grad():
        values = layer.weight[16:] if make is not gpt2 else layer.weight[:, 16:]
        values.zero_()
        if layer.bias is not None:
            layer.bias.zero_()
    x = torch.randn(1, 4, 8)
    found = attention(x)[0] if make is gpt2 else attention(x)
    rest = attention.c_proj.bias if make is gpt2 else attention.proj.bias
    torch.testing.assert_close(found, rest.expand_as(found))


def test_names_alone_give_a_hint():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.fused_in_proj = nn.Linear(8, 24), nn.Linear(8, 12)
            self.wide, self.c_attn = nn.Linear(8, 24), nn.Linear(8, 20)

    model = nn.ModuleList([Block()])
    notes = {e.name: e.note for e in ThorMuon(model).coverage() if e.note}
    assert notes.keys() == {"0.qkv.weight", "0.fused_in_proj.weight"}
    assert "declare torch_thor.split_rows(model.0.qkv, 3) before the" in notes["0.qkv.weight"]
    assert "split_rows(model.0.fused_in_proj, (8, 2, 2))" in notes["0.fused_in_proj.weight"]
    assert notes["0.qkv.weight"] in repr(ThorMuon(model))
    gc.collect()
    for name in ("qkv", "fused_in_proj"):
        split_rows(model[0].get_submodule(name), 1)
    assert not [e.note for e in ThorMuon(model).coverage() if e.note]


def test_heads_that_are_interleaved_are_named():
    from transformers import GPTNeoXConfig, GPTNeoXModel

    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    model = GPTNeoXModel(GPTNeoXConfig(**sizes, intermediate_size=8))
    [entry] = [e for e in ThorMuon(model).coverage() if e.name.endswith("query_key_value.weight")]
    assert entry.matrices == ((24, 8),)
    assert "query, key and value in turn for each head" in entry.note
