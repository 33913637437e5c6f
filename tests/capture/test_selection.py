"""`skip` and `only`: which layers are preconditioned, in the user's words."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from comparing import compare
from reference import attention_by_hand, attention_layers
from tiny import assert_same, batches, cross_entropy, mlp, train, weights
from torch_thor import THOR


class Block(nn.Module):
    """A transformer block."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x):
        h = self.norm(x)
        return self.mlp(x + self.attn(h, h, h, need_weights=False)[0])


class Model(nn.Module):
    """A small transformer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 7)

    def forward(self, x):
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def names():
    blocks = {
        f"blocks.{i}.{part}"
        for i in range(2)
        for part in ("norm", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj", "mlp.0", "mlp.2")
    }
    return {"embedding", "head", *blocks}


NORMS = {"blocks.0.norm", "blocks.1.norm"}
ATTENTION = {name for name in names() if ".attn." in name}
# what the user writes: what it means
PATTERNS = {
    "name": ("head", {"head"}),
    "list": (["head", "embedding"], {"head", "embedding"}),
    "tuple": (("head", "blocks.1.mlp.0"), {"head", "blocks.1.mlp.0"}),
    "container": ("blocks.0", {name for name in names() if name.startswith("blocks.0.")}),
    "container_of_containers": ("blocks", {name for name in names() if name.startswith("blocks")}),
    "star": ("*.mlp.0", {"blocks.0.mlp.0", "blocks.1.mlp.0"}),
    "star_of_containers": ("*.attn", ATTENTION),
    "question_mark": ("blocks.?.mlp.2", {"blocks.0.mlp.2", "blocks.1.mlp.2"}),
    "range": ("blocks.[1-9].mlp", {"blocks.1.mlp.0", "blocks.1.mlp.2"}),
    "one_projection": ("blocks.0.attn.v_proj", {"blocks.0.attn.v_proj"}),
    "norms": ("*.norm", NORMS),
    "twice_the_same": (["head", "he*"], {"head"}),
    "by_name": (lambda name, module: name.endswith("0"), {"blocks.0.mlp.0", "blocks.1.mlp.0"}),
    "by_module": (lambda name, module: isinstance(module, nn.LayerNorm), NORMS),
    "by_size": (lambda name, module: getattr(module, "out_features", 0) == 7, {"head"}),
    "attention_by_module": (
        lambda name, module: isinstance(module, nn.MultiheadAttention),
        {name for name in ATTENTION if "out" not in name},
    ),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_skip(name):
    selection, meant = PATTERNS[name]
    optimizer = THOR(Model(), skip=selection)
    assert set(optimizer.curvature) == names() - NORMS - meant
    for entry in optimizer.coverage():
        module = entry.name.rpartition(".")[0]
        if module in meant:
            assert not entry.preconditioned
            assert entry.reason == "left out by skip="


@pytest.mark.parametrize("name", [name for name in PATTERNS if name not in ("norms", "by_module")])
def test_only(name):
    selection, meant = PATTERNS[name]
    optimizer = THOR(Model(), layers=selection)
    assert set(optimizer.curvature) == meant - NORMS
    for entry in optimizer.coverage():
        module = entry.name.rpartition(".")[0]
        if module in names() - meant:
            assert not entry.preconditioned
            assert entry.reason == "not among only="


@pytest.mark.parametrize("name", ["norms", "by_module"])
def test_only_norms_is_nothing_that_needs_thor(name):
    with pytest.raises(ValueError, match="SGD"):
        THOR(Model(), layers=PATTERNS[name][0])


def test_both_together():
    """Kept, but for what is left out."""
    optimizer = THOR(Model(), only="blocks", skip=["*.norm", "*.attn"])
    assert set(optimizer.curvature) == {f"blocks.{i}.mlp.{j}" for i in (0, 1) for j in (0, 2)}
    reasons = {entry.name: entry.reason for entry in optimizer.coverage()}
    assert reasons["blocks.0.norm.weight"] == "left out by skip="
    assert reasons["head.weight"] == "not among only="


@pytest.mark.parametrize("argument", ["skip", "only"])
@pytest.mark.parametrize("pattern", ["haed", "blocks.2", "attn", "Head", "*.weight", "", ["head", "tail"], "blocks."])
def test_pattern_that_matches_nothing_is_an_error(argument, pattern):
    wrong = pattern[-1] if isinstance(pattern, list) else pattern
    with pytest.raises(ValueError, match=f"{argument}: '{wrong}' matches no layer".replace("*", r"\*")) as caught:
        THOR(Model(), **{argument: pattern})
    assert "embedding, " in str(caught.value)
    assert "blocks.0.attn.q_proj" in str(caught.value)


def test_long_lists_of_layers_are_cut():
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(50)])
    with pytest.raises(ValueError, match=r"0, 1, 2.* 19 and 30 more"):
        THOR(model, layers="-head")


@pytest.mark.parametrize("argument", ["skip", "only"])
@pytest.mark.parametrize("wrong", [3, [3], ["head", None], nn.Linear, True, {"head": 1.5, 2: 3}])
def test_what_is_no_selection(argument, wrong):
    if wrong is nn.Linear:
        wrong = [nn.Linear]  # a class alone is a callable
    with pytest.raises(TypeError, match=f"{argument}=.*must be a name, a pattern, a list of them, or a callable"):
        THOR(Model(), **{argument: wrong})


@pytest.mark.parametrize("argument", ["skip", "only"])
def test_empty_list(argument):
    """Nothing to leave out is nothing left out; nothing to keep leaves nothing."""
    if argument == "skip":
        assert set(THOR(Model(), layers=[]).curvature) == names() - NORMS
    else:
        with pytest.raises(ValueError, match="SGD"):
            THOR(Model(), layers=[])


def test_skipped_layer_is_plain_sgd():
    model = mlp()
    compare(
        model,
        [(x, cross_entropy(labels)) for x, labels in batches(6)],
        thor_options={"skip": "2"},
        reference_options={"preconditioned": ["0", "4"]},
        update_interval=2,
        weight_decay=0.1,
    )


class OneAttention(nn.Module):
    """An attention alone."""

    def __init__(self):
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        return self.attn(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("left_out", [["q"], ["k"], ["v"], ["q", "v"], ["q", "k"], ["q", "k", "v"]])
@pytest.mark.parametrize("settings", [{}, {"nesterov": True, "kl_clip": 1e-3}, {"momentum": 0.0}])
def test_skipped_projection_is_plain_sgd(settings, left_out):
    """Rows of one parameter, some with a natural gradient, some without: none stands still."""

    def layers(model):
        skipped = {f"attn.{part}_proj" for part in left_out}
        return {name: layer for name, layer in attention_layers(model, "attn").items() if name not in skipped}

    def by_hand(model, x):
        output, _, seen = attention_by_hand(model.attn, "attn", x, x, x)
        return output, seen

    optimizer, _ = compare(
        OneAttention().double(),
        [(torch.randn(5, 3, 4).double(), cross_entropy(torch.randint(4, (5, 3)))) for _ in range(5)],
        forward=by_hand,
        thor_options={"skip": [f"attn.{part}_proj" for part in left_out]},
        reference_options={"layers": layers},
        update_interval=2,
        weight_decay=0.1,
        **settings,
    )
    entry = {entry.name: entry for entry in optimizer.coverage()}["attn.in_proj_weight"]
    if len(left_out) < 3:
        assert entry.preconditioned
        assert entry.groups == 3 - len(left_out)
        assert all(f"'attn.{part}_proj'" in entry.note for part in left_out)
    else:
        assert entry.reason == "left out by skip="


def heads_and_norms(name, module):
    return name == "head" or isinstance(module, nn.LayerNorm)


def tokens(count):
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(7, (5, 3), generator=generator) for _ in range(2)) for _ in range(count)]


@pytest.mark.parametrize(
    "selection", [{"skip": heads_and_norms}, {"only": ["blocks.*.mlp", "embedding"]}], ids=["skip", "only"]
)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_selection_is_copied_with_the_optimizer(how, selection):
    model = Model()
    optimizer = THOR(model, update_interval=2, **selection)
    train(model, optimizer, tokens(3))
    if how == "deepcopy":
        twin, twin_optimizer = copy.deepcopy((model, optimizer))
    else:
        twin, twin_optimizer = pickle.loads(pickle.dumps((model, optimizer)))
    assert set(twin_optimizer.curvature) == set(optimizer.curvature) < names()
    for one, its_optimizer in ((model, optimizer), (twin, twin_optimizer)):
        train(one, its_optimizer, tokens(6)[3:])
    assert_same(weights(twin), weights(model))


def test_selection_with_parameter_groups():
    model = Model()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1]},
    ]
    optimizer = THOR(groups, model=model, layers=["-head", "-*.norm"])
    assert set(optimizer.curvature) == names() - NORMS - {"head"}
    train(model, optimizer, tokens(2))


def test_selection_holds_for_a_group_that_comes_later():
    """Patterns are of the layers that are trained: one for a later group would match nothing at first."""
    model = Model()
    optimizer = THOR(model.blocks.parameters(), model=model, layers="-*.norm")
    optimizer.add_param_group({"params": [*model.embedding.parameters(), *model.head.parameters()]})
    assert set(optimizer.curvature) == names() - NORMS


def test_skip_makes_room_for_a_layer_used_in_a_way_of_its_own():
    """What the warning of missing statistics advises."""

    class Bypassed(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.bypassed = nn.Linear(5, 4), nn.Linear(4, 3)

        def forward(self, x):
            return nn.functional.linear(torch.tanh(self.used(x)), self.bypassed.weight, self.bypassed.bias)

    model = Bypassed().double()
    with pytest.warns(RuntimeWarning, match=r"bypassed.*skip="):
        train(model, THOR(model), batches(1))
    model = Bypassed().double()
    optimizer = THOR(model, layers="-bypassed")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, batches(2))
    assert optimizer.curvature["used"].refreshes == 1


def test_case_counts():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.Query, self.query = nn.Linear(3, 3), nn.Linear(3, 3)

    assert set(THOR(Model(), layers="-Q*").curvature) == {"query"}
