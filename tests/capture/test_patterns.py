"""`layers=`: which layers are preconditioned, in the user's words."""

import pytest
import torch
from torch import nn

from comparing import compare
from reference import attention_by_hand, attention_layers
from tiny import cross_entropy, mlp
from torch_thor import THOR, coverage

LEFT_OUT = "left out by layers="
OPTIONS = {"update_interval": 2, "weight_decay": 0.1}


def block():
    layers = nn.ModuleList([nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)])
    attention = nn.MultiheadAttention(4, 2)
    return nn.ModuleDict({"norm": nn.LayerNorm(4), "attn": attention, "mlp": layers})


def transformer():
    blocks, head = nn.ModuleList([block(), block()]), nn.Linear(4, 7)
    return nn.ModuleDict({"embedding": nn.Embedding(7, 4), "blocks": blocks, "head": head})


PARTS = ("norm", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.0", "mlp.2")
NAMES = {"embedding", "head", *(f"blocks.{i}.{part}" for i in range(2) for part in PARTS)}
NORMS = {"blocks.0.norm", "blocks.1.norm"}
ATTENTION = {name for name in NAMES if ".attn." in name}
FUSED = {name for name in ATTENTION if "out" not in name}
# what the user writes: what it means
PATTERNS = [
    ("head", {"head"}),
    (("head", "blocks.1.mlp.0"), {"head", "blocks.1.mlp.0"}),
    ("blocks.0", {name for name in NAMES if name.startswith("blocks.0.")}),
    ("*.mlp.0", {"blocks.0.mlp.0", "blocks.1.mlp.0"}),
    ("*.attn", ATTENTION),
    ("blocks.?.mlp.2", {"blocks.0.mlp.2", "blocks.1.mlp.2"}),
    ("blocks.[1-9].mlp", {"blocks.1.mlp.0", "blocks.1.mlp.2"}),
    ("blocks.0.attn.v_proj", {"blocks.0.attn.v_proj"}),
    (["*.norm", "head"], {*NORMS, "head"}),
    # as DDP and torch.compile name them
    ("module.blocks.0.mlp", {"blocks.0.mlp.0", "blocks.0.mlp.2"}),
    (["_orig_mod.module.head", "blocks._orig_mod.1.mlp.0"], {"head", "blocks.1.mlp.0"}),
]
CALLABLES = [
    (lambda name, module: name.endswith("0"), {"blocks.0.mlp.0", "blocks.1.mlp.0"}),
    (lambda name, module: isinstance(module, nn.MultiheadAttention), FUSED),
]


def assert_chosen(patterns, meant):
    """Norms are named too, and have no factors."""
    optimizer = THOR(transformer(), layers=patterns)
    assert set(optimizer.curvature) == meant - NORMS, patterns
    reasons = {entry.name.rpartition(".")[0]: entry.reason for entry in coverage(optimizer)}
    for name in reasons.keys() & (NAMES - meant):
        assert reasons[name] == LEFT_OUT, (patterns, name)


def test_what_is_chosen_and_what_is_left_out():
    for patterns, meant in PATTERNS:
        assert_chosen(patterns, meant)
        given = [patterns] if isinstance(patterns, str) else patterns
        assert_chosen([f"-{pattern}" for pattern in given], NAMES - meant)
    for function, meant in CALLABLES:
        assert_chosen(function, meant)
    of_mlp = {name for name in NAMES if ".mlp." in name}
    assert_chosen(["blocks", "-*.norm", "-*.attn"], of_mlp)
    assert_chosen(None, NAMES)
    assert_chosen([], NAMES)


@pytest.mark.parametrize("wrong", ["haed", "blocks.2", "attn", "Head", "*.weight", "", "blocks."])
def test_what_matches_no_layer(wrong):
    for given in (wrong, f"-{wrong}", ["head", wrong]):
        with pytest.raises(ValueError, match="matches no layer") as caught:
            THOR(transformer(), layers=given)
        for said in (f"{wrong}'", "layers", "embedding, ", "blocks.0.attn.q_proj"):
            assert said in str(caught.value)


def test_what_is_no_pattern_or_leaves_nothing():
    for wrong in (3, ["head", None]):
        with pytest.raises(TypeError, match=r"layers=.*must be a name, a pattern, a list of them"):
            THOR(transformer(), layers=wrong)
    with pytest.raises(ValueError, match="SGD"):
        THOR(transformer(), layers="*.norm")


class OneAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


SETTINGS = [{}, {"nesterov": True, "kl_clip": 1e-3}, {"momentum": 0.0}]


@pytest.mark.parametrize("left_out", ["q", "qk", "qkv"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_projection_that_is_left_out_is_plain_sgd(settings, left_out):
    """Rows of one parameter, some with a natural gradient, some without: none stands still."""
    without = [f"attn.{part}_proj" for part in left_out]

    def layers(model):
        named = attention_layers(model, "attn").items()
        return {name: layer for name, layer in named if name not in without}

    def by_hand(model, x):
        output, _, seen = attention_by_hand(model.attn, "attn", x, x, x)
        return output, seen

    losses = [cross_entropy(torch.randint(4, (5, 3))) for _ in range(5)]
    optimizer, _ = compare(
        OneAttention().double(),
        [(torch.randn(5, 3, 4).double(), loss) for loss in losses],
        forward=by_hand,
        thor_options={"layers": [f"-{name}" for name in without]},
        reference_options={"layers": layers},
        **OPTIONS,
        **settings,
    )
    entry = {entry.name: entry for entry in coverage(optimizer)}["attn.in_proj_weight"]
    if len(left_out) < 3:
        assert entry.groups == 3 - len(left_out)
        assert all(f"{name!r}: {LEFT_OUT}" in entry.note for name in without)
    else:
        assert entry.reason == LEFT_OUT


def test_a_compiled_model_has_the_names_of_its_module():
    model = torch.compile(mlp(dtype=torch.float32))
    for pattern in ("2", "_orig_mod.2"):
        assert set(THOR(model, layers=pattern).curvature) == {"_orig_mod.2"}
