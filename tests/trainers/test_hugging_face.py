"""Models of transformers and peft, tiny and with random weights: what they get, and that it
trains.
"""

import warnings

import peft
import pytest
import torch
import transformers

from comparing import having
from tiny import assert_same, mlp, weights
from torch_thor import THOR, ThorMuon, coverage, follow_labels, model_is
from torch_thor.trainers.hugging_face import CurvatureCallback

SIZES = {"vocab_size": 19, "attn_implementation": "eager"}


def gpt2(**options):
    config = transformers.GPT2Config(
        **SIZES, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=1, **options,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        **SIZES, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=12, max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
        pad_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def lora(model, **options):
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, **options)
    )


def tokens(batch=4, length=6):
    return torch.randint(3, 19, (batch, length), generator=torch.Generator().manual_seed(2))


def assert_learns(model, optimizer):
    """One batch by heart."""
    x, losses = tokens(), []
    for _ in range(10):
        losses.append(model(input_ids=x, labels=x).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("build", [gpt2, llama])
def test_every_layer_is_covered_and_learns(build):
    """All but the norms is preconditioned; the embedding is GPT-2's decoder too."""
    model = build()
    optimizer = having(
        THOR(model, lr=0.05, damping=0.1, update_interval=3), loss_terms=lambda: 4 * 5
    )
    entries = {entry.name: entry for entry in optimizer.coverage()}
    norms = {name for name in entries if "norm" in name.lower() or "ln_" in name}
    assert {name for name, entry in entries.items() if not entry.preconditioned} == norms
    assert all("normalisation" in entries[name].reason for name in norms)
    if build is gpt2:
        assert model.get_output_embeddings().weight is model.transformer.wte.weight
        assert entries["transformer.wte.weight"].kind == "Embedding"
        assert "shared with" in entries["transformer.wte.weight"].note
    assert_learns(model, optimizer)
    assert all(curvature.refreshes >= 1 for curvature in optimizer.curvature.values())


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
    # the other remedy
    optimizer.add_param_group({"params": [p for p in model.parameters() if p.requires_grad]})
    take_steps()
    assert all(not torch.equal(model.get_parameter(name), before[name]) for name in adapters)


ATTENTION = "base_model.model.model.layers.0.self_attn"
ADAPTED = {
    "gpt2": (
        lambda: lora(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True),
        {f"base_model.model.transformer.h.0.attn.c_attn.lora_{part}.default" for part in "AB"},
    ),
    "llama": (
        lambda: lora(llama(), target_modules=["q_proj", "v_proj"]),
        {f"{ATTENTION}.{name}_proj.lora_{part}.default" for part in "AB" for name in "qv"},
    ),
    "trained whole": (
        lambda: lora(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"]),
        {
            *(f"{ATTENTION}.q_proj.lora_{part}.default" for part in "AB"),
            "base_model.model.lm_head.modules_to_save.default",
        },
    ),
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_alone_are_preconditioned(name, whole):
    """The base is frozen: no statistics, no step. Of a module to be trained beside them peft's copy
    is what runs.
    """
    build, adapted = ADAPTED[name]
    model = build()
    params = (
        list(model.parameters()) if whole else [p for p in model.parameters() if p.requires_grad]
    )
    optimizer = THOR(params, model=model, update_interval=3, lr=0.05)
    before = weights(model)
    assert_learns(model, optimizer)
    assert {
        layer for layer, curvature in optimizer.curvature.items() if curvature.refreshes
    } == adapted
    assert whole or set(optimizer.curvature) == adapted
    for n, parameter in model.named_parameters():
        assert torch.equal(parameter, before[n]) == ("default" not in n), n


# ------------------------------------------------------------------------------------------- labels


def bert():
    config = transformers.BertConfig(
        **SIZES, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


@pytest.mark.parametrize(("build", "terms"), [(gpt2, 11), (bert, 14)])
def test_labels_are_followed_as_if_terms_and_mask_were_set_by_hand(build, terms):
    """Two micro-batches; the causal model shifts, so the first label of a row is no term."""
    mask = torch.arange(6) < torch.tensor([[6], [3], [4], [5]])
    labels = tokens().masked_fill(~mask, -100)
    labels[0, :2], labels[3, 1:3] = -100, -100
    assert terms == int((labels[:, 1:] if build is gpt2 else labels).ne(-100).sum())

    def trained(follow):
        torch.manual_seed(0)
        model = build()
        optimizer = THOR(model, lr=0.05, update_interval=2, trace_thresholds=(0.0, 0.0))
        end = follow_labels(optimizer) if follow else None
        for _ in range(4):
            for part in (slice(0, 2), slice(2, 4)):
                if not follow:
                    optimizer.row_mask, optimizer.loss_terms = mask[part], terms
                given = {
                    "input_ids": tokens()[part],
                    "attention_mask": mask[part].long(),
                    "labels": labels[part],
                }
                model(**given).loss.backward()
                with torch.no_grad():
                    model(**given)  # an evaluation counts nothing
            optimizer.step()
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["last_loss_terms"] == terms
        if end is not None:
            end()
            assert (optimizer.row_mask, optimizer.loss_terms) == (None, None)
        return weights(model)

    assert_same(trained(follow=True), trained(follow=False))


@pytest.mark.parametrize(
    ("make", "freeze", "counted"),
    [
        (THOR, False, [True, None, None, True]),
        (THOR, True, [True, None, None, True]),  # a frozen layer is never due
        (ThorMuon, False, [None] * 4),  # which needs no number
    ],
)
def test_labels_are_counted_where_a_refresh_needs_them(make, freeze, counted):
    model, found = gpt2(), []
    if freeze:
        model.transformer.h[0].requires_grad_(False)
    labels = tokens().index_fill(1, torch.tensor([1]), -100)
    optimizer = make(model, update_interval=3)
    follow_labels(optimizer)
    terms = int(labels[:, 1:].ne(-100).sum())
    for _ in counted:
        optimizer.loss_terms = None
        model(input_ids=tokens(), labels=labels).loss.backward()
        found.append(optimizer.loss_terms)
        optimizer.step()
        optimizer.zero_grad()
    assert found == [None if number is None else terms for number in counted]


def test_the_callback_follows_labels_and_names_arguments_without_effect(tmp_path):
    sentences = [{"input_ids": one, "labels": one.clone().index_fill(0, torch.arange(i % 4), -100)}
                 for i, one in enumerate(tokens(16))]  # fmt: skip

    def fit(optimizer_lr, **given):
        model = gpt2()
        optimizer = THOR(model, lr=optimizer_lr, update_interval=1)
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            max_steps=2, report_to=[],
            use_cpu=True, disable_tqdm=True, logging_strategy="no", save_strategy="no", **given,
        )  # fmt: skip
        trainer = transformers.Trainer(
            model,
            arguments,
            train_dataset=sentences,
            optimizers=(optimizer, None),
            callbacks=[CurvatureCallback()],
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        assert coverage(trainer) == optimizer.coverage()
        said = [str(one.message) for one in caught if "TrainingArguments." in str(one.message)]
        return optimizer.param_groups[0]["last_loss_terms"], said

    terms, said = fit(0.02)
    assert terms < 8 * 6 - 8  # labels of -100 are left out
    assert said == []
    assert fit(0.02, learning_rate=0.02)[1] == []
    _, said = fit(0.02, learning_rate=2e-5, weight_decay=0.1)
    assert "learning_rate=2e-05 has no effect: THOR has lr=0.02; give lr to THOR" in said[0]
    assert "weight_decay=0.1 has no effect" in said[1]


def given(form, model, lr=None):
    """What a Trainer is given in each form of the trainers' page, and the Trainer."""
    kind = transformers.Trainer
    if form == "optimizer":
        optimizer = ThorMuon(model) if lr is None else ThorMuon(model, lr=lr)
        return {"optimizers": (optimizer, None), "callbacks": [CurvatureCallback()]}, kind
    if form == "class":
        return {"optimizer_cls_and_kwargs": (ThorMuon, {} if lr is None else {"lr": lr})}, kind

    class Own(transformers.Trainer):
        def create_optimizer(self, *others):
            self.optimizer = ThorMuon(self.model, lr=lr or self.args.learning_rate)
            return self.optimizer

    return {}, Own


@pytest.mark.parametrize(
    "form", ["optimizer", "class", pytest.param("own", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("asked", "lr", "expected", "automatic"),
    [
        ({}, None, 0.08, True),
        ({"learning_rate": 5e-5}, None, 0.08, True),
        ({"learning_rate": 0.02}, None, 0.02, False),
        ({"learning_rate": 0.02}, 0.04, 0.04, False),
        ({}, 0.04, 0.04, False),
    ],
)
def test_the_learning_rate_of_the_arguments_counts_unless_it_is_the_default(
    tmp_path, form, asked, lr, expected, automatic
):
    model = gpt2()
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=4, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", per_device_train_batch_size=2, **asked,
    )  # fmt: skip
    more, kind = given(form, model, lr)
    sentences = [{"input_ids": one, "labels": one} for one in tokens(8)]
    trainer, rates = None, []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *others, optimizer, **rest):
            rates.append({group["lr"] for group in optimizer.param_groups})

    more["callbacks"] = [*more.get("callbacks", []), Watch()]
    trainer = kind(model, arguments, train_dataset=sentences, **more)
    with model_is(model), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train()
    for step, found in enumerate(rates):  # the Trainer lowers them to 0
        assert list(found) == [pytest.approx(expected * (4 - step) / 4)]
    groups = trainer.optimizer.param_groups
    assert {group["initial_lr"] for group in groups} == {expected}
    assert {group["auto_lr"] for group in groups} == {automatic}
    said = [str(one.message) for one in caught if "the default of Training" in str(one.message)]
    assert len(said) == automatic
    assert all("learning_rate=5e-05" in one and "give TrainingArguments(" in one for one in said)


def test_a_training_that_an_error_ended_is_not_followed_twice(tmp_path):
    class Breaks(transformers.TrainerCallback):
        left = 1

        def on_step_end(self, *others, **given):
            self.left -= 1
            if self.left == 0:
                raise KeyError("once")

    model = gpt2()
    optimizer = THOR(model, update_interval=1)
    arguments = transformers.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, max_steps=3, report_to=[], use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )  # fmt: skip
    data, calls = (
        [{"input_ids": one, "labels": one} for one in tokens(16)],
        [CurvatureCallback(), Breaks()],
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, optimizers=(optimizer, None), callbacks=calls
    )
    with pytest.raises(KeyError, match="once"):
        trainer.train()
    trainer.train()
    assert optimizer.param_groups[0]["last_loss_terms"] == 4 * 5
    model(input_ids=tokens(), labels=tokens(), attention_mask=torch.ones_like(tokens()))
    assert (optimizer.loss_terms, optimizer.row_mask) == (None, None)


def test_a_class_and_its_arguments_keep_the_groups_of_the_trainer(tmp_path):
    """As `optimizer_cls_and_kwargs` takes them; without the model, the error says what to write."""
    sentences, model = [{"input_ids": one, "labels": one} for one in tokens(8)], gpt2()
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=2,
        weight_decay=0.1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    given = {"train_dataset": sentences, "optimizer_cls_and_kwargs": (ThorMuon, {"lr": 0.08})}
    with pytest.raises(
        TypeError, match=r"in transformers: .*optimizers=\(ThorMuon\(model\), None\)"
    ):
        transformers.Trainer(model, arguments, **given).train()
    trainer = transformers.Trainer(model, arguments, **given)
    with model_is(model):
        trainer.train()
    decays = {
        id(p): group["weight_decay"]
        for group in trainer.optimizer.param_groups
        for p in group["params"]
    }
    decay = {name: decays[id(p)] for name, p in model.named_parameters()}
    assert {name for name, value in decay.items() if value == 0} == {
        n for n in decay if "ln_" in n or "bias" in n
    }
