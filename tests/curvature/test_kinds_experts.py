"""Fused experts: E layers in one 3-d weight, against E layers of the reference."""

import math

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  # registers its grouped product
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode
from transformers import AutoConfig, AutoModelForCausalLM

from comparing import compare, having
from reference import expert_by_hand, expert_layers
from tiny import cross_entropy
from torch_thor import THOR, ThorMuon

HIDDEN, INNER, EXPERTS = 4, 2, 5
WEIGHTS = ("gate_up_proj", "down_proj")


def each(product):
    """A product for each expert, with the rows that are its own."""
    return lambda x, w, chosen: torch.cat([product(x[chosen == e], w, e) for e in range(EXPERTS)])


def grouped(x, w, chosen):
    ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).int()
    return torch.ops.transformers.grouped_mm_fallback(x, w.mT, ends)  # F.grouped_mm has no float64


PRODUCTS = {
    "linear": each(lambda x, w, e: F.linear(x, w[e])),
    "matmul": each(lambda x, w, e: x @ w[e]),
    "transposed_view": each(lambda x, w, e: torch.mm(x, w.mT[e])),
    "grouped": grouped,
    "gathered": lambda x, w, chosen: torch.bmm(x[:, None], w[chosen])[:, 0],
    "gathered_columns": lambda x, w, chosen: torch.bmm(w[chosen], x[..., None])[..., 0],
}


class MoeExperts(nn.Module):
    """Gated experts, multiplied in the ways that are met."""

    def __init__(self, style, *, bias=False):
        super().__init__()
        self.style = style
        self.is_transposed = style in ("matmul", "gathered")
        sizes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
        for name, (outputs, inputs) in zip(WEIGHTS, sizes, strict=True):
            size = (inputs, outputs) if self.is_transposed else (outputs, inputs)
            self.register_parameter(name, nn.Parameter(torch.randn(EXPERTS, *size)))
            offsets = nn.Parameter(torch.randn(EXPERTS, outputs)) if bias else None
            self.register_parameter(f"{name}_bias", offsets)

    def forward(self, x, chosen):
        order = chosen.argsort(stable=True)
        gate, up = self.product("gate_up_proj", x[order], chosen[order]).chunk(2, dim=-1)
        y = self.product("down_proj", torch.tanh(gate) * up, chosen[order])
        return y[order.argsort()]

    def product(self, name, x, chosen):
        weight, bias = getattr(self, name), getattr(self, f"{name}_bias")
        y = PRODUCTS[self.style](x, weight, chosen)
        return y if bias is None else y + bias[chosen]


class Weights(nn.Module):
    """Experts of one weight, multiplied as a test wants."""

    def __init__(self, product, *size):
        super().__init__()
        self.num_experts, self.product = size[0], product
        self.weight = nn.Parameter(torch.randn(size).double())

    def forward(self, x):
        return self.product(x, self.weight)


class Model(nn.Module):
    """Experts between two ordinary layers."""

    def __init__(self, style, **options):
        super().__init__()
        self.body = nn.Linear(3, HIDDEN)
        self.experts = MoeExperts(style, **options)
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x, chosen):
        tokens = self.experts(self.body(x).flatten(0, 1), chosen.flatten())
        return self.head(tokens.view(*x.shape[:2], HIDDEN))


def by_hand(model, x):
    x, chosen = x[0], x[1].flatten()
    h = model.body(x)
    tokens = h.flatten(0, 1)
    seen, z = [("body", x, h)], torch.zeros_like(tokens)

    def product(name, e, rows):
        flipped = model.experts.is_transposed
        y, more = expert_by_hand(model.experts, "experts", name, e, rows, inputs_first=flipped)
        seen.extend(more)
        return y

    for e in chosen.unique().tolist():
        gate, up = product("gate_up_proj", e, tokens[chosen == e]).chunk(2, dim=-1)
        z[chosen == e] = product("down_proj", e, torch.tanh(gate) * up)
    z = z.view(*x.shape[:2], HIDDEN)
    y = model.head(z)
    return y, [*seen, ("head", z, y)]


def stream(count):
    """Expert 4 has no tokens in the first three batches, expert 0 in late even ones."""
    for step in range(count):
        none_of_the_first = step >= 6 and step % 2 == 0
        experts = torch.randint(int(none_of_the_first), EXPERTS - (step < 3), (3, 4))
        yield (torch.randn(3, 4, 3).double(), experts), cross_entropy(torch.randint(3, (3, 4)))


def separate(model):
    flipped = model.experts.is_transposed
    return expert_layers(model, "experts", WEIGHTS, inputs_first=flipped)


COMPARED = {
    "forward": by_hand,
    "reference_options": {"layers": separate},
    "update_interval": 2,
    "trace_thresholds": (0.0, 0.0),
}


@pytest.mark.parametrize("style", PRODUCTS)
def test_steps_are_those_of_separate_layers(style):
    """The reference has a layer an expert, which keeps what it has where it gets no rows."""
    split = {"momentum": 0.0, "split_dim": 3, "damping": 0.3}
    everything = {"nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3}
    for bias, options in ((False, split), (True, everything)):
        model = Model(style, bias=bias).double()
        optimizer, reference = compare(model, stream(10), **COMPARED, **options)
        assert set(optimizer.curvature) == {"body", "head", *(f"experts.{n}" for n in WEIGHTS)}
        refreshes = [
            reference.curvature[f"experts.down_proj.{e}"].refreshes for e in range(EXPERTS)
        ]
        assert 1 < max(refreshes[0], refreshes[4]) < min(refreshes[1:4])


def test_every_expert_sees_every_token():
    """Dense experts: one product of the whole weight."""
    x, coefficients = torch.randn(6, 2).double(), torch.randn(3, 6, 4).double()
    for product in (
        lambda x, w: torch.bmm(x[None].expand(3, -1, -1), w.mT),
        lambda x, w: x @ w.mT,
        lambda x, w: (w @ x.mT).mT,
    ):
        model = Weights(product, 3, 4, 2)
        optimizer = having(THOR(model, lr=0.0, split_dim=None), loss_terms=6)
        (model(x) * coefficients).sum().div(6).backward()
        optimizer.step()
        factors = optimizer.curvature["weight"].factors()
        for a, g, gradient in zip(*factors, coefficients, strict=True):
            torch.testing.assert_close(a, x.T @ x / 6)
            torch.testing.assert_close(g, gradient.T @ gradient / 6)


def test_a_product_that_is_not_understood_is_said_and_trained_plainly():
    experts = Weights(lambda x, w: torch.einsum("ni,eoi->no", x, w), 3, 4, 4)
    model = nn.Sequential(nn.Linear(4, 4).double(), experts)
    optimizer, before = THOR(model), experts.weight.detach().clone()
    model(torch.randn(5, 4).double()).square().mean().backward()
    with pytest.warns(RuntimeWarning, match=r"layer '1\.weight'"):
        optimizer.step()
    assert (optimizer.curvature["0"].refreshes, optimizer.curvature["1.weight"].refreshes) == (1, 0)
    assert not torch.equal(experts.weight, before)
    assert not next(e for e in optimizer.coverage() if e.name == "1.weight").preconditioned


SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
WORDS = {"vocab_size": 32, "pad_token_id": 0}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
CHOICE = {"num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
MODELS = {
    "mixtral": {},
    "qwen2_moe": {"num_experts": 6, **SHARED},
    "gpt_oss": {"head_dim": 8},  # inputs first, biases
    # every expert sees every token
    "llama4_text": {"intermediate_size_mlp": 32, "moe_layers": [0, 1], "head_dim": 8},
}


def trained(name, implementation, method=THOR, **options):
    """The optimizer of a model after three steps; the same start for every implementation."""
    torch.manual_seed(3)
    chosen = {} if implementation is None else {"experts_implementation": implementation}
    sizes = {**SIZES, **WORDS, **HEADS, **CHOICE, **MODELS[name]}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), **chosen)
    optimizer = method(model, **options)
    tokens = torch.randint(1, 32, (4, 6), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name):
    """All experts have factors, the same whatever multiplies; nearly everything is covered."""
    found, with_choice = [], name in ("mixtral", "qwen2_moe")
    for implementation in ("eager", "grouped_mm", "batched_mm") if with_choice else (None,):
        optimizer = trained(name, implementation, kl_clip=1e-3)
        entries = optimizer.coverage()
        covered = [entry for entry in entries if entry.preconditioned]
        numbers, theirs = (sum(math.prod(e.shape) for e in part) for part in (entries, covered))
        assert theirs > 0.95 * numbers
        experts = [e.name for e in covered if e.kind == "Experts" and len(e.shape) == 3]
        experts = [optimizer.curvature[name] for name in experts]
        assert {layer.refreshes for layer in experts} == {1}
        found.append([layer.factors() for layer in experts])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-7)
    if with_choice:
        trained(name, "grouped_mm", ThorMuon)


def test_a_training_goes_on_after_an_interrupt_inside_the_experts():
    """torch calls no hook after an error that is no Exception, so the next call tidies up."""

    def product(x, w):
        if len(x) == 1:
            raise KeyboardInterrupt
        return x @ w[1].T

    model = Weights(product, 3, 4, 4)
    optimizer = THOR(model)
    with pytest.raises(KeyboardInterrupt):
        model(torch.randn(1, 4).double())
    model(torch.randn(5, 4).double()).square().sum().backward()
    optimizer.step()
    assert _get_current_function_mode() is None
    assert optimizer.curvature["weight"].refreshes == 1
