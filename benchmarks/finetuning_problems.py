"""The problems of the study of fine-tuning: networks that are trained, and data to adapt to.

The data lie in ``corpora/fine-tuning``; benchmarks/results/tried.md says where they come from.
What is held out is cut in two halves: settings are chosen by the figure on the first, and the
second is read once. Two networks are trained here first, each by AdamW and by ThorMuon, and kept
beside the data.
"""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.optimizers import make
from benchmarks.suite_problems import PROBLEMS as SUITE
from benchmarks.suite_problems import Batch, Problem, classify, halves, images, is_right, shuffled

DATA = Path("corpora/fine-tuning")
CONTEXT = 64  # bytes
PRETRAINING = {"gpt": (900, 32, 2e-3), "resnet": (780, 128, 2e-3)}  # steps, batch, AdamW's rate


# ---- sentences for MiniLM ------------------------------------------------------------------------


def _sst2() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    def read(name: str) -> list[tuple[str, int]]:
        lines = (DATA / "sst2" / name).read_text().splitlines()
        return [(text, int(label)) for text, label in (line.split("\t") for line in lines)]

    return read("train.tsv"), read("test.tsv")


def _trec() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return questions and the class of their answer; 2,000 to train, the others are held out."""
    lines = (DATA / "trec/TREC.train").read_text(encoding="latin-1").splitlines()
    coarse = sorted({line.partition(":")[0] for line in lines})
    pairs = [
        (line.partition(" ")[2], coarse.index(line.partition(":")[0])) for line in _mixed(lines)
    ]
    return pairs[:2000], pairs[2000:]


def _subjectivity() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Return sentences of plots and of reviews; 1,500 to train, 3,000 are held out."""
    lines = [
        (line, label)
        for label, name in enumerate(("subj.objective", "subj.subjective"))
        for line in (DATA / "subjectivity" / name).read_text(encoding="latin-1").splitlines()
    ]
    pairs = _mixed(lines)
    return pairs[:1500], pairs[1500:4500]


def _mixed(items: list[Any]) -> list[Any]:
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(0))
    return [items[i] for i in order]


SENTENCES = {"sst2": _sst2, "trec": _trec, "subjectivity": _subjectivity}
CLASSES = {"sst2": 2, "trec": 6, "subjectivity": 2}


@cache
def sentences(name: str, train: bool) -> tuple[Tensor, Tensor]:
    """Return the tokens of sentences, padded to 64, and their classes; shorter held-out first."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DATA / "minilm")
    texts, labels = zip(*SENTENCES[name]()[not train], strict=True)
    tokens = tokenizer(
        list(texts), padding="max_length", truncation=True, max_length=64, return_tensors="pt"
    )
    codes, classes = tokens["input_ids"], torch.tensor(labels)
    if not train:
        order = (codes != 0).sum(1).argsort(stable=True)
        codes, classes = codes[order], classes[order]
    return codes, classes


def minilm(classes: int, lora: bool) -> nn.Module:
    """Return MiniLM (22.7 million parameters, Wang et al. 2020) with a new head."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(DATA / "minilm", num_labels=classes)
    if lora:
        from peft import LoraConfig, TaskType, get_peft_model

        config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, task_type=TaskType.SEQ_CLS)
        model = get_peft_model(model, config)
    return model


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits of sentences, without the padding that all of them have."""
    mask = tokens != 0
    longest = int(mask.sum(1).max())
    return model(input_ids=tokens[:, :longest], attention_mask=mask[:, :longest]).logits


def _minilm(name: str, lora: bool, title: str, steps: int) -> Problem:
    return Problem(
        f"MiniLM on {title}{', LoRA' if lora else ''}", "held-out accuracy", True, steps, 32,
        partial(minilm, CLASSES[name], lora),
        partial(shuffled, partial(sentences, name, True)),
        partial(halves, partial(sentences, name, False)),
        lambda model, batch: functional.cross_entropy(logits(model, batch[0]), batch[1]),
        lambda model, batch: (logits(model, batch[0]).argmax(1) == batch[1]).double(),
        evaluations=1,
    )  # fmt: skip


# ---- a GPT that learns another language ----------------------------------------------------------


@cache
def windows(language: str, train: bool) -> tuple[Tensor]:
    """Return windows of CONTEXT + 1 bytes of Debian's reference in a language."""
    text = (DATA / f"debian-reference.{language}.txt").read_bytes()
    codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = len(codes) * 9 // 10
    if train:
        return (codes[:cut].unfold(0, CONTEXT + 1, 16),)
    return (codes[cut:].unfold(0, CONTEXT + 1, CONTEXT),)


def gpt() -> nn.Module:
    """Return GPT-2 of transformers: 4 blocks of 256, 3.3 million parameters, on bytes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = {"n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 256}
    rest: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**size, n_positions=CONTEXT, **rest))


def next_bytes(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of the next bytes."""
    return per_window(model, batch).mean()


def per_window(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy of each window."""
    scores = model(input_ids=batch[0][:, :-1]).logits
    return functional.cross_entropy(scores.mT, batch[0][:, 1:], reduction="none").mean(1)


# ---- a ResNet that learns other images -----------------------------------------------------------


def resnet() -> nn.Module:
    """Return torchvision's ResNet of four blocks, 4.9 million parameters, for 32 x 32 pixels."""
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    return model


@cache
def cifar10() -> tuple[Tensor, Tensor]:
    """Return 2,000 images of each class of CIFAR-10."""
    from torchvision.io import decode_image

    folders = sorted((DATA / "cifar10").iterdir())
    some = ((sorted(folder.iterdir())[:2000], label) for label, folder in enumerate(folders))
    files = [(file, label) for own, label in some for file in own]
    pixels = torch.stack([decode_image(str(file)) for file, _ in files]).float() / 255
    return (pixels - 0.47) / 0.25, torch.tensor([label for _, label in files])


@cache
def clothes(train: bool) -> tuple[Tensor, Tensor]:
    """Return Fashion-MNIST at 32 x 32 pixels in three channels; 2,000 images to train."""
    x, y = images(train, 28)
    some = slice(2000 if train else 4000)
    return functional.pad(x[some], (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous(), y[some]


def with_new_head(model: nn.Module) -> nn.Module:
    """Give the network a new head."""
    outputs, inputs = model.get_parameter("fc.weight").shape
    model.fc = nn.Linear(inputs, outputs)
    return model


# ---- what is trained here first ------------------------------------------------------------------

NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], Callable[..., Tensor]]] = {
    "gpt": (gpt, partial(windows, "en", True), next_bytes),
    "resnet": (resnet, cifar10, classify),
}


def trained(network: str, optimizer: str) -> dict[str, Tensor]:
    """Return the weights that an optimizer has trained; kept beside the data."""
    file = DATA / f"{network}-{optimizer}.pt"
    if not file.exists():
        torch.manual_seed(0)
        build, data, loss_of = NETWORKS[network]
        steps, batch, lr = PRETRAINING[network]
        model = build().train()
        name, rate = ("torch-adamw", lr) if optimizer == "adamw" else ("thor-muon", 0.08)
        opt = make(name, model, lr=rate)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            opt, lambda step: min(1.0, (step + 1) / (0.05 * steps), (steps - step) / (0.95 * steps))
        )
        batches = shuffled(data, batch, 0)
        for _ in range(steps):
            opt.zero_grad()
            loss = loss_of(model, next(batches))
            loss.backward()
            opt.step()
            schedule.step()
        print(f"{network} by {optimizer}: training loss {loss.item():.4f}", flush=True)
        torch.save(model.state_dict(), file)
    return torch.load(file)


def pretrained(network: str, optimizer: str) -> nn.Module:
    """Return the trained network, with a new head where it classifies."""
    initial = torch.get_rng_state()
    weights = trained(network, optimizer)
    torch.set_rng_state(initial)
    model = NETWORKS[network][0]()
    model.load_state_dict(weights)
    return with_new_head(model) if network == "resnet" else model


def _gpt(optimizer: str) -> Problem:
    return Problem(
        f"GPT-2 (4 blocks of 256), trained on English by {optimizer}, on German", "held-out loss",
        False, 120, 32, partial(pretrained, "gpt", optimizer),
        partial(shuffled, partial(windows, "de", True)),
        partial(halves, partial(windows, "de", False)),
        next_bytes, lambda model, batch: per_window(model, batch).double(),
    )  # fmt: skip


def _resnet(optimizer: str) -> Problem:
    return Problem(
        f"ResNet (4 blocks), trained on CIFAR-10 by {optimizer}, on 2,000 images of Fashion-MNIST",
        "held-out accuracy", True, 100, 64, partial(pretrained, "resnet", optimizer),
        partial(shuffled, partial(clothes, True)), partial(halves, partial(clothes, False)),
        classify, is_right,
    )  # fmt: skip


PROBLEMS = {
    "minilm-sst2": _minilm("sst2", False, "6,920 sentences of SST-2, half an epoch", 108),
    "minilm-trec": _minilm("trec", False, "2,000 questions of TREC, two epochs", 124),
    "minilm-sst2-lora": _minilm("sst2", True, "6,920 sentences of SST-2, half an epoch", 108),
    "minilm-trec-lora": _minilm("trec", True, "2,000 questions of TREC, two epochs", 124),
    "gpt-adamw": _gpt("adamw"),
    "gpt-thor-muon": _gpt("thor-muon"),
    "resnet-adamw": _resnet("adamw"),
    "resnet-thor-muon": _resnet("thor-muon"),
    "fine-tuning": SUITE["fine-tuning"],  # of a ViT
}
# two that served to choose nothing
UNSEEN = {
    "minilm-subj": _minilm("subjectivity", False, "1,500 sentences of films, two epochs", 94),
    "minilm-subj-lora": _minilm("subjectivity", True, "1,500 sentences of films, two epochs", 94),
}
