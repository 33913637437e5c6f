"""Tiny models of transformers and peft: what they get, that they train, and the Trainer."""

from types import SimpleNamespace

import peft
import pytest
import torch
import transformers

from tiny import assert_same, weights
from torch_thor import THOR, ThorMuon, coverage, follow_labels, model_is
from torch_thor.trainers.hugging_face import CurvatureCallback

SIZES = {"vocab_size": 19, "attn_implementation": "eager"}


def gpt2():
    config = transformers.GPT2Config(
        **SIZES, n_positions=8, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
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
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, **options)
    return peft.get_peft_model(model, config)


def tokens(batch=4, length=6):
    return torch.randint(3, 19, (batch, length), generator=torch.Generator().manual_seed(2))


ATTENTION = "base_model.model.model.layers.0.self_attn"
ADAPTED = {
    "gpt2": (
        lambda: lora(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True),
        {f"base_model.model.transformer.h.0.attn.c_attn.lora_{part}.default" for part in "AB"},
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
def test_only_adapters_are_preconditioned(name, whole):
    """The base is frozen: no statistics, no step; peft's copy of a module trained whole runs."""
    build, adapted = ADAPTED[name]
    model, x = build(), tokens()
    params = [p for p in model.parameters() if whole or p.requires_grad]
    optimizer = THOR(params, model=model, update_interval=3, lr=0.05)
    before, losses = weights(model), []
    for _ in range(10):
        losses.append(model(input_ids=x, labels=x).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert {name for name, layer in optimizer.curvature.items() if layer.refreshes} == adapted
    for n, parameter in model.named_parameters():
        assert torch.equal(parameter, before[n]) == ("default" not in n), n


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
                given = {"input_ids": tokens()[part], "labels": labels[part]}
                given["attention_mask"] = mask[part].long()
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


def trainer_of(folder, model, *, callbacks=(), given=None, **arguments):
    """The Trainer on sixteen sequences, with more of its arguments in `given`."""
    arguments = {"save_strategy": "no", "logging_strategy": "no", "report_to": [], **arguments}
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, use_cpu=True, disable_tqdm=True, **arguments
    )
    data = [{"input_ids": words, "labels": words} for words in tokens(16)]
    given = {"train_dataset": data, **(given or {})}
    return transformers.Trainer(model, arguments, callbacks=list(callbacks), **given)


def test_the_callback_leaves_out_labels_of_minus_100(tmp_path):
    model, sentences = gpt2(), []
    for i, words in enumerate(tokens(16)):
        labels = words.clone().index_fill(0, torch.arange(i % 4), -100)
        sentences.append({"input_ids": words, "labels": labels})
    optimizer, callback = THOR(model, lr=0.02, update_interval=1), CurvatureCallback()
    given = {"train_dataset": sentences, "optimizers": (optimizer, None)}
    arguments = {"max_steps": 2, "gradient_accumulation_steps": 2}
    trainer = trainer_of(tmp_path, model, callbacks=[callback], given=given, **arguments)
    trainer.train()
    assert coverage(trainer) == optimizer.coverage()
    assert optimizer.param_groups[0]["last_loss_terms"] < 8 * 6 - 8
    model(input_ids=tokens(), labels=tokens(), attention_mask=torch.ones_like(tokens()))
    assert (optimizer.loss_terms, optimizer.row_mask) == (None, None)


@pytest.mark.parametrize("form", ["optimizer", "class"])
def test_the_trainer_takes_an_optimizer_or_a_class_with_its_arguments(tmp_path, form):
    """The learning rate of the arguments has no effect; a class gets the groups of the Trainer."""
    model, rates = gpt2(), []
    given = {"optimizer_cls_and_kwargs": (ThorMuon, {"lr": 0.04})}
    if form == "optimizer":
        given = {"optimizers": (ThorMuon(model, lr=0.04), None)}

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, *others, optimizer, **rest):
            rates.append({group["lr"] for group in optimizer.param_groups})

    arguments = {"max_steps": 4, "learning_rate": 0.3, "weight_decay": 0.1}
    trainer = trainer_of(tmp_path, model, callbacks=[Watch()], given=given, **arguments)
    with model_is(model):
        trainer.train()
    for step, found in enumerate(rates):  # the Trainer lowers them to 0
        assert list(found) == [pytest.approx(0.04 * (4 - step) / 4)]
    groups = trainer.optimizer.param_groups
    decays = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    names = {name for name, _ in model.named_parameters()}
    without = {name for name, p in model.named_parameters() if decays[id(p)] == 0}
    vectors = {name for name in names if "ln_" in name or "bias" in name}
    assert without == (vectors if form == "class" else names)


def test_the_trainer_evaluates_an_average_and_resumes(tmp_path):
    data = [{"input_ids": words, "labels": words} for words in tokens(16)]

    class Watch(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, optimizer=None, **given):
            seen.append((state.global_step, optimizer.param_groups[0]["shows_average"]))

    def fit(folder, steps, **given):
        torch.manual_seed(0)
        model = gpt2()
        optimizer = ThorMuon(model, anytime=True, update_interval=2)
        trainer = trainer_of(
            tmp_path / folder, model, callbacks=[Watch()], max_steps=steps, eval_strategy="steps",
            eval_steps=2, save_strategy="steps", save_steps=2, lr_scheduler_type="constant",
            given={"optimizers": (optimizer, None), "eval_dataset": data},
        )  # fmt: skip
        trainer.train(**given)
        return model, optimizer

    seen = []
    model, optimizer = fit("whole", 4)
    assert seen == [(2, True), (4, True)]
    assert optimizer.param_groups[0]["step"] == 4
    fit("half", 2)
    again, _ = fit("half", 4, resume_from_checkpoint=str(tmp_path / "half/checkpoint-2"))
    assert_same(weights(again), weights(model))


def test_coverage_takes_an_optimizer_that_a_trainer_has_wrapped():
    optimizer = ThorMuon(gpt2())
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(_optimizer=optimizer))
    assert coverage(wrapped) == coverage(optimizer) == optimizer.coverage()
    with pytest.raises(TypeError, match=r"coverage\(SGD\): must be THOR"):
        coverage(torch.optim.SGD(gpt2().parameters()))
