"""Models of transformers and peft, tiny and with random weights: what they get, and that it trains."""

import warnings

import peft
import pytest
import torch
import transformers
from torch import nn

from comparing import assert_same_weights, compare, having
from reference import ReferenceTHOR
from tiny import assert_same, cross_entropy, mlp, weights
from torch_thor import THOR, ThorMuon

SIZES = {"vocab_size": 19, "attn_implementation": "eager"}


def gpt2(**options):
    config = transformers.GPT2Config(
        **SIZES, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=1, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    config = transformers.BertConfig(
        **SIZES, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def llama():
    config = transformers.LlamaConfig(
        **SIZES, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=12, max_position_embeddings=8, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def lora(model, **options):
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, **options))


# name: (model, its preconditioned layers)
GPT2_LAYERS = {
    "transformer.wte", "transformer.wpe", "transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj",
    "transformer.h.0.mlp.c_fc", "transformer.h.0.mlp.c_proj",
}  # fmt: skip
BERT_LAYERS = {
    "bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings",
    "bert.encoder.layer.0.attention.self.query", "bert.encoder.layer.0.attention.self.key",
    "bert.encoder.layer.0.attention.self.value", "bert.encoder.layer.0.attention.output.dense",
    "bert.encoder.layer.0.intermediate.dense", "bert.encoder.layer.0.output.dense", "cls.predictions.transform.dense",
}  # fmt: skip
LLAMA_LAYERS = {"model.embed_tokens", "lm_head"} | {
    f"model.layers.0.{part}_proj"
    for part in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
}
MODELS = {"gpt2": (gpt2, GPT2_LAYERS), "bert": (bert, BERT_LAYERS), "llama": (llama, LLAMA_LAYERS)}


def tokens(batch=4, length=6):
    return torch.randint(3, 19, (batch, length), generator=torch.Generator().manual_seed(2))


def train(model, optimizer, steps=10):
    """Learn one batch by heart; return the losses."""
    x, losses = tokens(), []
    for _ in range(steps):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_learns(model, optimizer):
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_is_covered_and_learns(name):
    build, layers = MODELS[name]
    model = build()
    optimizer = having(THOR(model, lr=0.05, damping=0.1, update_interval=3), loss_terms=lambda: 4 * 5)
    assert set(optimizer.curvature) == layers
    plain = {entry.name for entry in optimizer.coverage() if not entry.preconditioned}
    norms = {entry.name for entry in optimizer.coverage() if "norm" in entry.name.lower() or "ln_" in entry.name}
    assert plain == norms | ({"cls.predictions.bias"} if name == "bert" else set())
    assert all("normalisation" in entry.reason for entry in optimizer.coverage() if entry.name in norms)
    assert_learns(model, optimizer)
    assert all(curvature.refreshes >= 1 for curvature in optimizer.curvature.values())


@pytest.mark.parametrize(
    ("name", "embedding"), [("gpt2", "transformer.wte"), ("bert", "bert.embeddings.word_embeddings")]
)
def test_tied_decoder_is_the_embedding_and_takes_one_step(name, embedding):
    model = MODELS[name][0]()
    optimizer = THOR(model, lr=0.05 * 1e12, damping=1e12, momentum=0.0, max_update_ratio=None)
    weight = model.get_parameter(f"{embedding}.weight")
    assert model.get_output_embeddings().weight is weight
    [entry] = [entry for entry in optimizer.coverage() if entry.name == f"{embedding}.weight"]
    assert entry.kind == "Embedding"
    assert "shared with" in entry.note
    before = weight.detach().clone()
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    grad = weight.grad.clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 0.05 * grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_padding_is_left_out(kind):
    """`row_mask` is the attention mask; rows of padding are in no factor."""
    model = gpt2()
    model.set_attn_implementation(kind)
    optimizer = having(THOR(model, lr=0.0), loss_terms=13)
    x, mask = tokens(), torch.ones(4, 6, dtype=torch.long)
    mask[0, 4:] = mask[2, 1:] = 0
    optimizer.row_mask = mask.bool()
    model(input_ids=x, attention_mask=mask, labels=x.masked_fill(mask == 0, -100)).loss.backward()
    optimizer.step()
    rows = {name: c.rows_per_term * 13 for name, c in optimizer.curvature.items()}
    # position ids are (1, L): one row each, since they are the same for every sentence
    assert rows.pop("transformer.wpe") == pytest.approx(6)
    assert rows == pytest.approx(dict.fromkeys(rows, 17.0))


class Equivalent(nn.Module):
    """GPT-2's feed-forward block, with either kind of linear layer."""

    def __init__(self, linear):
        super().__init__()
        self.norm, self.c_fc, self.c_proj = nn.LayerNorm(5), linear(5, 9), linear(9, 4)

    def forward(self, x):
        return self.parts(x)[0]

    def parts(self, x):
        h = self.norm(x)
        y = self.c_fc(h)
        t = torch.tanh(y)
        z = self.c_proj(t)
        return z, [("c_fc", h, y), ("c_proj", t, z)]


@pytest.mark.parametrize("options", [{}, {"split_dim": 4, "nesterov": True, "weight_decay": 0.1, "kl_clip": 1e-3}])
def test_conv1d_steps_as_the_linear_layer_it_is(options):
    """Same weights, transposed: ten steps are the linear model's, and the reference's."""
    Conv1D = transformers.pytorch_utils.Conv1D
    linear, conv = Equivalent(nn.Linear).double(), Equivalent(lambda i, o: Conv1D(o, i)).double()
    with torch.no_grad():
        for part in ("c_fc", "c_proj"):
            conv.get_submodule(part).weight.copy_(linear.get_submodule(part).weight.T)
            conv.get_submodule(part).bias.copy_(linear.get_submodule(part).bias)
    reference = ReferenceTHOR(conv, forward=lambda model, x: model.parts(x), update_interval=3, **options)
    optimizers = [THOR(model, update_interval=3, **options) for model in (linear, conv)]
    for step in range(10):
        x, labels = torch.randn(4, 3, 5).double(), torch.randint(4, (12,))

        def loss(output, labels=labels):
            return nn.functional.cross_entropy(output.flatten(0, 1), labels)

        for model, optimizer in zip((linear, conv), optimizers, strict=True):
            loss(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        reference.step((x, loss))
        assert_same_weights(conv, reference, step)
        for part in ("c_fc", "c_proj"):
            torch.testing.assert_close(conv.get_submodule(part).weight.T, linear.get_submodule(part).weight)


# ------------------------------------------------------------------------------------------- LoRA


@pytest.mark.parametrize("make", [THOR, ThorMuon])
def test_adapters_made_after_thor_are_named_once_with_the_order(make):
    """peft freezes all that the optimizer has, so that no step changes anything."""
    model = mlp(dtype=torch.float32)
    optimizer = make(model, update_interval=1)
    adapted = lora(model, target_modules=["0", "2"])
    before = weights(model)

    def take_steps():
        for _ in range(3):
            adapted(torch.randn(4, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        take_steps()
    (message,) = [str(w.message) for w in caught if w.category is RuntimeWarning]
    adapters = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(adapters) == 4
    assert f"In no parameter group, and so not trained, are {', '.join(adapters)}" in message
    assert "get_peft_model(model, ...), then the optimizer" in message
    assert_same(weights(model), before)
    optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})  # the other remedy
    take_steps()
    assert all(not torch.equal(model.get_parameter(name), before[name]) for name in adapters)


ADAPTED = {
    "gpt2": (lambda: lora(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True), {"h.0.attn.c_attn"}),
    "llama": (
        lambda: lora(llama(), target_modules=["q_proj", "v_proj"]),
        {"layers.0.self_attn.q_proj", "layers.0.self_attn.v_proj"},
    ),
}


class Small(nn.Module):
    """What peft puts an adapter into."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))


def adapted_by_hand(model, x):
    """The adapted layer is base(x) + α / r · B A x."""
    A, B = model.body.lora_A["default"], model.body.lora_B["default"]
    narrow = A(x)
    wide = B(narrow)
    h = torch.tanh(model.body.base_layer(x) + 2.0 * wide)
    y = model.head(h)
    return y, [("body.lora_A.default", x, narrow), ("body.lora_B.default", narrow, wide), ("head", h, y)]


def test_adapters_against_the_reference():
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["body"], init_lora_weights=False)
    model = peft.inject_adapter_in_model(config, Small()).double()
    model.head.requires_grad_(True)
    optimizer, reference = compare(
        model,
        [(torch.randn(6, 5).double(), cross_entropy(torch.randint(3, (6,)))) for _ in range(10)],
        forward=adapted_by_hand,
        update_interval=3,
        weight_decay=0.1,
        nesterov=True,
    )
    ran = {name for name, curvature in optimizer.curvature.items() if curvature.refreshes}
    assert ran == set(reference.curvature) == {"body.lora_A.default", "body.lora_B.default", "head"}


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_alone_are_preconditioned(name):
    """The base is frozen: no statistics, no step; A and B of every adapter are linear layers."""
    build, adapted = ADAPTED[name]
    model = build()
    optimizer = THOR([p for p in model.parameters() if p.requires_grad], model=model, update_interval=3, lr=0.05)
    found = {layer.partition("model.")[2].partition("model.")[2] or layer for layer in optimizer.curvature}
    assert {layer.removeprefix("transformer.").removeprefix("model.") for layer in found} == {
        f"{layer}.lora_{part}.default" for layer in adapted for part in "AB"
    }
    before = weights(model)
    assert_learns(model, optimizer)
    assert all(curvature.refreshes >= 1 for curvature in optimizer.curvature.values())
    for n, parameter in model.named_parameters():
        assert torch.equal(parameter, before[n]) == ("lora" not in n), n


def test_whole_model_with_a_frozen_base():
    """`THOR(model)`: what is frozen is left alone, and does not keep anything from running."""
    model = ADAPTED["llama"][0]()
    optimizer = THOR(model, update_interval=3)
    assert_learns(model, optimizer)
    ran = {layer for layer, curvature in optimizer.curvature.items() if curvature.refreshes}
    assert len(ran) == 4
    assert all("lora" in layer for layer in ran)


def test_modules_to_save_are_trained_whole():
    """peft copies a module that is to be trained beside its adapters; the copy is the one that runs."""
    model = lora(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    optimizer = THOR([p for p in model.parameters() if p.requires_grad], model=model, lr=0.05)
    assert any(layer.endswith("lm_head.modules_to_save.default") for layer in optimizer.curvature)
    assert_learns(model, optimizer)
    assert all(curvature.refreshes == 1 for curvature in optimizer.curvature.values())
