"""Trainers that others wrote: what THOR covers in each, that the loss falls, resume, and so on.

`python tests/trainers/matrix.py` installs all and writes what these tests see into the docs.
"""

import inspect
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from test_hugging_face import gpt2, tokens
from tiny import assert_same, weights
from torch_thor import ThorMuon, coverage, model_is

pytestmark = pytest.mark.filterwarnings("ignore")  # many of the trainers' own

HALF, STEPS = 4, 8
SAMPLES = 16


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3))


def samples():
    x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :3].argmax(1))


def optimizer_of(model, **options):
    return ThorMuon(model, update_interval=3, **options)


def constant(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


def batches(steps, resume, accumulate=1):
    """The batches that are left of a training, a list of micro-batches for each step."""
    for _ in range(steps - HALF if resume else steps):
        yield list(DataLoader(samples(), batch_size=SAMPLES // accumulate))


def trained(losses, model, holder):
    losses = [float(loss) for loss in losses]
    return SimpleNamespace(losses=losses, weights=weights(model), coverage=coverage(holder))


# ---- each trains from the start, or from what `place` has, to a number of steps, and saves there -


def hugging_face(
    place, steps, resume, accumulate=1, bf16=False, trainer=None, config=None, model=None, **given
):
    """The Trainer of transformers, and those that inherit from it."""
    import transformers

    torch.manual_seed(0)
    model = gpt2() if model is None else model
    optimizer = optimizer_of(model)
    arguments = (config or transformers.TrainingArguments)(
        str(place), per_device_train_batch_size=8 // accumulate,
        gradient_accumulation_steps=accumulate, max_steps=steps, save_steps=HALF, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, bf16=bf16,
    )  # fmt: skip
    given.setdefault("train_dataset", [{"input_ids": x, "labels": x} for x in tokens(SAMPLES)])
    optimizers = (optimizer, constant(optimizer))
    own = (trainer or transformers.Trainer)(
        model=model, args=arguments, optimizers=optimizers, **given
    )
    own.train(resume_from_checkpoint=resume)
    return trained([line["loss"] for line in own.state.log_history if "loss" in line], model, own)


def vocabulary():
    import tokenizers
    import transformers

    words = {"[UNK]": 0, "[PAD]": 1, "[EOS]": 2, **{f"w{i}": i for i in range(3, 19)}}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, **names)


def texts():
    return [" ".join(f"w{i}" for i in words) for words in tokens(SAMPLES).tolist()]


def trl(place, steps, resume, **options):
    import datasets
    import trl

    data = datasets.Dataset.from_dict({"text": texts()})
    given = {"train_dataset": data, "processing_class": vocabulary(), **options}
    return hugging_face(place, steps, resume, trainer=trl.SFTTrainer, config=trl.SFTConfig, **given)


def sentence_transformers(place, steps, resume, **options):
    import datasets
    import sentence_transformers as own
    import transformers

    try:
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    except ModuleNotFoundError:  # before 6
        from sentence_transformers.losses import MultipleNegativesRankingLoss

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=19, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=12, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=1,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(place / "bert")
    vocabulary().save_pretrained(place / "bert")
    model = own.SentenceTransformer(str(place / "bert"), device="cpu")
    pairs = datasets.Dataset.from_dict({"anchor": texts(), "positive": texts()[::-1]})
    return hugging_face(
        place, steps, resume, trainer=own.SentenceTransformerTrainer, model=model,
        config=own.SentenceTransformerTrainingArguments, train_dataset=pairs,
        loss=MultipleNegativesRankingLoss(model), **options,
    )  # fmt: skip


def accelerate(place, steps, resume, accumulate=1, bf16=False):
    import accelerate

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # of the tests before
    own = accelerate.Accelerator(
        cpu=True, mixed_precision="bf16" if bf16 else "no", gradient_accumulation_steps=accumulate
    )
    model = net()
    data = DataLoader(samples(), batch_size=SAMPLES // accumulate)
    model, optimizer, data = own.prepare(model, optimizer_of(model), data)
    if resume:
        own.load_state(place / "state")
    losses = []
    for _ in range(steps - HALF if resume else steps):
        for x, y in data:
            with own.accumulate(model):
                losses.append(functional.cross_entropy(model(x), y))
                own.backward(losses[-1])
                if bf16:
                    own.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    own.save_state(place / "state")
    return trained(losses, own.unwrap_model(model), optimizer)


def lightning(place, steps, resume, accumulate=1, bf16=False):
    import lightning

    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net()

        def training_step(self, batch, _):
            losses.append(functional.cross_entropy(self.net(batch[0]), batch[1]))
            return losses[-1]

        def configure_optimizers(self):
            return optimizer_of(self)

    trainer = lightning.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False, accumulate_grad_batches=accumulate,
        default_root_dir=place, precision="bf16-mixed" if bf16 else "32-true",
        gradient_clip_val=1.0 if bf16 else None,
    )  # fmt: skip
    module, file = Module(), place / "half.ckpt"
    options = {"ckpt_path": file} if resume else {}
    if resume and "weights_only" in inspect.signature(trainer.fit).parameters:  # since 2.6
        options["weights_only"] = True
    trainer.fit(module, DataLoader(samples(), batch_size=SAMPLES // accumulate), **options)
    trainer.save_checkpoint(file)
    return trained(losses, module, trainer)


def fabric(place, steps, resume, accumulate=1, bf16=False):
    import lightning

    precision = "bf16-mixed" if bf16 else "32-true"
    own = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    model = net()
    model, optimizer = own.setup(model, optimizer_of(model))
    state = {"model": model, "optimizer": optimizer}
    if resume:
        own.load(place / "state.ckpt", state)
    losses = []
    for parts in batches(steps, resume, accumulate):
        for x, y in parts:
            losses.append(functional.cross_entropy(model(x), y))
            own.backward(losses[-1] / accumulate)
        if bf16:
            own.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    own.save(place / "state.ckpt", state)
    return trained(losses, model.module, optimizer)


def timm(place, steps, resume, accumulate=1, bf16=False):
    from timm.optim import OptimInfo, create_optimizer_v2
    from timm.optim._optim_factory import default_registry

    default_registry.register(OptimInfo("thor-muon", ThorMuon, has_eps=False))
    model = net()
    with model_is(model):
        optimizer = create_optimizer_v2(model, "thor-muon", weight_decay=0.01, update_interval=3)
    assert {(group["lr"], group["momentum"]) for group in optimizer.param_groups} == {(0.08, 0.8)}
    assert all(group["auto_lr"] for group in optimizer.param_groups)
    # timm's groups
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0, 0.01}
    if resume:
        saved = torch.load(place / "state.pt", weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    losses = []
    for parts in batches(steps, resume, accumulate):
        for x, y in parts:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                losses.append(functional.cross_entropy(model(x), y))
            (losses[-1] / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, place / "state.pt")
    return trained(losses, model, optimizer)


def fastai(place, steps, resume, bf16=False):
    from functools import partial

    from fastai.basics import CrossEntropyLossFlat, DataLoaders, Learner, OptimWrapper
    from fastai.callback import fp16, progress  # noqa: F401  # they give a Learner methods
    from fastai.data.load import DataLoader as Loader

    model = net()
    loader = Loader(samples(), bs=SAMPLES, shuffle=False)
    learner = Learner(
        DataLoaders(loader, loader), model, loss_func=CrossEntropyLossFlat(), path=place, lr=0.08,
        opt_func=partial(OptimWrapper, opt=partial(ThorMuon, model=model, update_interval=3)),
    )  # fmt: skip
    if bf16:
        learner.to_bf16()
    if resume:
        learner.create_opt()
        learner.load("half", with_opt=True, device="cpu")
    with learner.no_bar(), learner.no_logging():
        learner.fit(steps - HALF if resume else steps)
    learner.save("half", with_opt=True)
    return trained(learner.recorder.losses, model, learner)


def stable_baselines3(place, steps, resume):
    import gymnasium
    from stable_baselines3 import PPO

    torch.manual_seed(0)
    environment = gymnasium.make("CartPole-v1")
    agent = PPO("MlpPolicy", environment, learning_rate=0.08, n_steps=64, n_epochs=2, seed=0)
    agent.policy.optimizer = optimizer_of(agent.policy, lr=0.08)
    before = weights(agent.policy)
    agent.learn(64 * steps)
    assert not any(before[name].equal(value) for name, value in weights(agent.policy).items())
    return trained([], agent.policy, agent)  # each loss is of other data


def deepspeed(place, steps, resume, accumulate=1):
    import deepspeed

    os.environ.setdefault("LOCAL_RANK", "0")
    deepspeed.init_distributed(
        "gloo", auto_mpi_discovery=False, init_method=f"file://{place}/meet", rank=0, world_size=1
    )
    model = net()
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES // accumulate,
        "gradient_accumulation_steps": accumulate,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    if resume:
        engine.load_checkpoint(place / "state")
    losses = []
    for parts in batches(steps, resume, accumulate):
        for x, y in parts:
            losses.append(functional.cross_entropy(engine(x), y))
            engine.backward(losses[-1])
            engine.step()
    engine.save_checkpoint(place / "state")
    return trained(losses, model, engine)


# trainer: (what to install, how it trains, what it can do beside training)
EVERY = ("resume", "accumulation", "bf16")
CLIENTS = {
    "transformers": (hugging_face, EVERY),
    "trl": (trl, EVERY),
    "sentence-transformers": (sentence_transformers, ("resume", "bf16")),
    "accelerate": (accelerate, EVERY),
    "lightning": (lightning, EVERY),
    "lightning (Fabric)": (fabric, EVERY),
    "timm": (timm, EVERY),
    "fastai": (fastai, ("resume", "bf16")),
    "stable-baselines3": (stable_baselines3, ()),
    "deepspeed": (deepspeed, ("resume", "accumulation")),
}


@pytest.mark.parametrize(
    ("client", "check"), [(c, k) for c, (_, can) in CLIENTS.items() for k in ("trains", *can)]
)
def test_client(client, check, tmp_path):
    pytest.importorskip(client.partition(" ")[0].replace("-", "_"))
    fit = CLIENTS[client][0]
    for name in ("whole", "cut", "other"):
        (tmp_path / name).mkdir()
    whole = fit(tmp_path / "whole", STEPS, None)
    assert sum(entry.preconditioned for entry in whole.coverage) >= 2
    if check == "trains":
        assert sum(whole.losses[-2:]) < sum(whole.losses[:2]) or client == "stable-baselines3"
    elif check == "resume":
        fit(tmp_path / "cut", HALF, None)
        assert_same(fit(tmp_path / "cut", STEPS, True).weights, whole.weights)
    elif check == "accumulation":
        other = fit(tmp_path / "other", STEPS, None, accumulate=2).weights
        for name, value in whole.weights.items():
            assert torch.allclose(other[name], value, atol=2e-4), name
    else:
        other = fit(tmp_path / "other", STEPS, None, bf16=True)
        assert {value.dtype for value in other.weights.values()} == {torch.float32}
        assert sum(other.losses[-2:]) < sum(other.losses[:2])
