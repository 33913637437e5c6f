"""What `nn.MultiheadAttention` computes is what it computes without THOR, on refresh steps and on ordinary ones."""

import copy

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from tiny import assert_same, listened_to, weights
from torch_thor import THOR

E, HEADS, N, L = 8, 2, 3, 4


class Model(nn.Module):
    """An attention between linear layers; gives the attention's weights too."""

    def __init__(self, call=None, **options):
        super().__init__()
        self.first, self.last = nn.Linear(E, E), nn.Linear(E, 3)
        self.attention = nn.MultiheadAttention(E, HEADS, **options)
        self.call = call or {}

    def forward(self, x):
        x = self.first(x)
        y, shares = self.attention(x, x, x, **self.call)
        return self.last(y), shares


CASES = {
    "plain": {"batch_first": True},
    "sequence_first": {},
    "no_bias": {"batch_first": True, "bias": False},
    "separate": {"batch_first": True, "kdim": E, "vdim": E, "add_bias_kv": True, "add_zero_attn": True},
    "no_weights": {"batch_first": True, "call": {"need_weights": False}},
    "a_head_each": {"batch_first": True, "call": {"average_attn_weights": False}},
    "mask": {"batch_first": True, "call": {"attn_mask": torch.ones(L, L, dtype=torch.bool).triu(1)}},
    "dropout": {"batch_first": True, "dropout": 0.4},
    "dropout_no_weights": {"dropout": 0.4, "call": {"need_weights": False}},
}


def step(model, optimizer, x):
    """One step on the cube of the output."""
    output = model(x)
    ((output[0] if isinstance(output, tuple) else output) ** 3).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def refreshes(optimizer):
    return {curvature.refreshes for curvature in optimizer.curvature.values()}


def assert_same_pass(model, bare, x, **tolerance):
    """Output, attention weights, and gradients by all parameters and by the input are equal."""
    both = []
    for one in (model, bare):
        torch.manual_seed(5)  # dropout draws the same numbers
        leaf = x.clone().requires_grad_()
        output, shares = one(leaf)
        grads = torch.autograd.grad((output**3).mean(), [leaf, *one.parameters()])
        both.append([output, *grads, *(() if shares is None else (shares,))])
    for one, other in zip(*both, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_refresh_step_computes_what_the_bare_model_computes(name):
    """On a refresh step, and when it is over, by the module's own code."""
    for dtype, tolerance in (
        (torch.float64, {"rtol": 1e-12, "atol": 1e-14}),
        (torch.float32, {"rtol": 1e-5, "atol": 1e-7}),
    ):
        for size in ((N, L, E), (L, E)):
            model = Model(**CASES[name]).to(dtype)
            bare = copy.deepcopy(model)
            x = torch.randn(size, dtype=dtype)
            if not model.attention.batch_first and len(size) > 2:
                x = x.transpose(0, 1)
            optimizer = THOR(model, lr=0.0, update_interval=1000)
            assert_same_pass(model, bare, x, **tolerance)
            step(model, optimizer, x)
            assert refreshes(optimizer) == {1}
            assert "attention" not in listened_to(model)
            assert_same_pass(model, bare, x, **tolerance)


def test_masks_inputs_hooks_and_functions_of_others():
    """Nothing is written to, hooks are there on refresh steps only, and the user's own mode sees every function."""

    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += func is torch.nn.functional.multi_head_attention_forward
            return func(*args, **(kwargs or {}))

    mask, x = torch.randn(L, L), torch.randn(N, L, E)
    model = Model(batch_first=True, call={"attn_mask": mask})
    before = mask.clone(), x.clone()
    optimizer = THOR(model, update_interval=3)
    for i in range(7):
        assert ("attention" in listened_to(model)) == (i % 3 == 0)
        with Counting() as mode:
            step(model, optimizer, x)
        assert mode.calls == 1
    assert torch.equal(mask, before[0])
    assert torch.equal(x, before[1])


@pytest.mark.parametrize("where", ["inside", "key", "another_hook", "interrupt"])
def test_error_in_the_forward_leaves_nothing_behind(where, monkeypatch):
    """Also Ctrl-C in a notebook: torch runs no hook then, and the cell is run again."""
    model = Model(batch_first=True)
    twin = copy.deepcopy(model)
    optimizers = THOR(model), THOR(twin)
    x = torch.randn(N, L, E)

    def fails(*args, **kwargs):
        raise KeyboardInterrupt if where == "interrupt" else RuntimeError

    calls = {
        "inside": lambda: model.attention(x, x, x, attn_mask=torch.zeros(L + 1, L)),
        "key": lambda: model.attention(x, x[..., 1:], x),
    }
    with monkeypatch.context() as patched:
        if where == "interrupt":
            patched.setattr(torch.nn.functional, "softmax", fails)
        handle = model.attention.register_forward_pre_hook(fails) if where == "another_hook" else None
        with pytest.raises((AssertionError, RuntimeError, KeyboardInterrupt)):
            calls.get(where, lambda: model(x))()
        if handle is not None:
            handle.remove()
    assert where == "interrupt" or not _get_current_function_mode_stack()
    for one, optimizer in zip((model, twin), optimizers, strict=True):
        step(one, optimizer, x)
    assert not _get_current_function_mode_stack()
    assert optimizers[0].curvature["attention.q_proj"].rows_per_term == L
    assert_same(weights(model), weights(twin))


def test_attention_inside_attention():
    """A module that calls attention in attention's own forward: a stack, not a flag."""

    model = nn.ModuleDict(
        {
            "outer": nn.MultiheadAttention(E, HEADS, batch_first=True),
            "inner": nn.MultiheadAttention(E, HEADS, batch_first=True),
        }
    )

    def call_inner(module, args):
        x = args[0]
        queries.append(x + model["inner"](x, x, x, need_weights=False)[0])
        return (queries[0], *args[1:])

    queries = []
    optimizer = THOR(model)
    model["outer"].register_forward_pre_hook(call_inner)  # after ours, so inside its window
    x = torch.randn(N, L, E)
    model["outer"](x, x, x)[0].square().mean().backward()
    optimizer.step()
    assert {(c.refreshes, c.rows_per_term) for c in optimizer.curvature.values()} == {(1, L)}
    assert len(optimizer.curvature) == 8
    for name, seen in (("outer.q_proj", queries[0]), ("outer.k_proj", x), ("inner.q_proj", x)):
        a = seen.detach().flatten(0, 1)
        torch.testing.assert_close(optimizer.curvature[name].factors()[0], a.T @ a / len(a))


@pytest.mark.parametrize("frozen", ["in_proj_weight", "out_proj.weight"])
def test_frozen_projections(frozen):
    model = Model(batch_first=True)
    model.attention.get_parameter(frozen).requires_grad_(False)
    before = weights(model)
    optimizer = THOR(model, update_interval=2)
    for _ in range(3):
        step(model, optimizer, torch.randn(N, L, E))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) == (name == f"attention.{frozen}"), name


# ------------------------------------------------------------------------- the transformer's fast path


def encoder(norm_first=False):
    return nn.TransformerEncoderLayer(E, HEADS, 16, dropout=0.0, batch_first=True, norm_first=norm_first)


LAYERS = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "linear1", "linear2",
}  # fmt: skip


def uses_fast_path(layer, x, monkeypatch):
    """Whether evaluation goes through the fused kernel."""
    calls = []
    fused = torch._transformer_encoder_layer_fwd
    with monkeypatch.context() as patched:
        patched.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: calls.append(1) or fused(*args))
        layer(x)
    return bool(calls)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_evaluates_alike_with_and_without(norm_first, monkeypatch):
    """The fused kernel also on refresh steps: torch takes the slow way where a module has hooks, and it has none."""
    layer = encoder(norm_first)
    bare = copy.deepcopy(layer)
    optimizer = THOR(layer, lr=0.0, update_interval=2, trace_thresholds=(0.0, 0.0))
    for i in range(3):
        x = torch.randn(N, L, E)
        for one in (layer, bare):
            one.eval()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(layer(x), bare(x), rtol=1e-5, atol=1e-6)
                assert uses_fast_path(layer, x, monkeypatch)
                assert uses_fast_path(bare, x, monkeypatch)
        for one in (layer, bare):
            one.train()
        torch.testing.assert_close(layer(x), bare(x), rtol=1e-5, atol=1e-6)
        step(layer, optimizer, x)
        assert refreshes(optimizer) == {1 + i // 2}
    assert set(optimizer.curvature) == LAYERS
    assert optimizer.curvature["linear1"].rows_per_term == optimizer.curvature["self_attn.q_proj"].rows_per_term == L


def test_evaluation_mode_with_gradients():
    """Fine-tuning with `model.eval()`: gradients are wanted, so are statistics; evaluation gives none."""
    layer = encoder().eval()
    twin = copy.deepcopy(layer)
    x = torch.randn(N, L, E)
    for one in (layer, twin):
        optimizer = THOR(one)
        loss = (one(x) ** 3).mean()
        if one is layer:
            with torch.no_grad():
                one(100 * x)
        loss.backward()
        optimizer.step()
        assert refreshes(optimizer) == {1}
    assert_same(weights(layer), weights(twin))


def test_whole_transformer_trains():
    """Encoder and decoder, self and cross attention, norms: nothing is silent, everything moves."""
    model = nn.Transformer(E, HEADS, 1, 1, 16, dropout=0.0, batch_first=True)
    optimizer = THOR(model, update_interval=2, lr=0.01)
    assert all(entry.preconditioned for entry in optimizer.coverage() if "norm" not in entry.name)
    source, target = torch.randn(N, 5, E), torch.randn(N, L, E)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    losses = []
    for _ in range(10):
        loss = (model(source, target, tgt_mask=mask, tgt_is_causal=True) - target).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(curvature.refreshes >= 1 for curvature in optimizer.curvature.values())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["plain", "separate", "no_weights", "sequence_first"])
def test_bfloat16(name):
    """By autocast, where outputs have the bare model's dtype, or of the whole model: factors are float32."""
    for whole in (False, True):
        model = Model(**CASES[name]).to(torch.bfloat16 if whole else torch.float32)
        bare = copy.deepcopy(model)
        optimizer = THOR(model, lr=0.01, update_interval=2)
        x = torch.randn(N, L, E, dtype=torch.bfloat16 if whole else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
            output, plain = model(x)[0], bare(x)[0]
            assert output.dtype == plain.dtype == torch.bfloat16
            torch.testing.assert_close(output, plain, rtol=0.1, atol=0.05)
        for _ in range(4):
            with torch.autocast("cpu", torch.bfloat16, enabled=not whole):
                loss = model(x)[0].float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for curvature in optimizer.curvature.values():
            assert curvature.refreshes >= 1
            assert all(f.dtype == torch.float32 and f.isfinite().all() for f in curvature.factors())
        assert all(p.isfinite().all() and p.dtype == x.dtype for p in model.parameters())
